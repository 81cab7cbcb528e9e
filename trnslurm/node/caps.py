"""Ends runs that reach a cap on what they, or their sweep, may use, or that need no more steps.

caps.json contains the caps. The state files show what was used: each attempt's times and its job's
nodes. enough.json says that the run needs no more steps.
"""

import glob
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trnslurm.contract.attempt import Attempt, read_attempt
from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import EndCause
from trnslurm.contract.times import seconds_of
from trnslurm.node.state import HEARTBEAT_S

_ATTEMPTS = "slurm.max_attempts"
_ALIVE_S = 4 * HEARTBEAT_S
_LOOK_S = 600.0
# As for a time limit: slurm.stop_before_s, and at most this share of all.
_SHARE = 0.2
_LEAST_GRACE_S = 20.0
_ENOUGH_GRACE_S = 300.0


class Caps:
    """A run's caps, and how much of them is used."""

    def __init__(self, run: RunFiles, caps: Mapping[str, Any]) -> None:
        """Store the run and the contents of its caps.json."""
        self._run = run
        self._attempts, self.node_hours, self._early_s = (
            value if isinstance(value := caps.get(name), (int, float)) else 0
            for name in ("attempts", "node_hours", "stop_before_s")
        )
        self.key = str(caps.get("key", ""))
        """The key of the cap on node-hours."""
        self._look_at = 0.0
        self.grace_s = 0.0
        """How long workers have for their last save."""

    def reached(self, phase: str, attempt: int) -> str:
        """Return the key of the cap that this attempt would exceed, or "" if it may start."""
        if phase == "train" and self._attempts and attempt > self._attempts:
            return _ATTEMPTS
        return self.key if self.node_hours and self._used()[0] >= self.node_hours else ""

    def words(self, key: str) -> str:
        """Return a sentence that says which cap is reached, or "" without a key."""
        if key == _ATTEMPTS:
            return f"it has used all its attempts ({key}: {self._attempts:g})"
        who = "its sweep" if _group(self._run) else "it"
        return f"{who} has used its {self.node_hours:g} node-hours ({key})" if key else ""

    def enough(self) -> str:
        """Return why the run needs no more steps, or an empty string if it does."""
        return str(read_json(self._run.enough_file).get("why", ""))

    def near(self) -> EndCause:
        """Return why it is time for the last save, if it is."""
        if self.enough():
            self.grace_s = max(self._early_s, _ENOUGH_GRACE_S)
            return EndCause.ENOUGH
        if not self.node_hours or time.monotonic() < self._look_at:
            return EndCause.NONE
        used, nodes = self._used()
        hour_s = 3600 / max(nodes, 1)
        early_s = min(self._early_s, _SHARE * self.node_hours * hour_s)
        wait_s = (self.node_hours - used) * hour_s - early_s
        self._look_at = time.monotonic() + min(wait_s, _LOOK_S)
        self.grace_s = max(early_s, _LEAST_GRACE_S)
        return EndCause.CAP if wait_s <= 0 else EndCause.NONE

    def _used(self) -> tuple[float, int]:
        """Return the node-hours used by all attempts, and how many nodes are running now."""
        now, seconds, running = time.time(), 0.0, 0
        for run in self._runs():
            names = run.all_attempts()
            for phase, number in names:
                state = read_attempt(run, phase, number)
                nodes = state.nodes or len(list(filter(None, state.hosts.split(","))))
                newest = (phase, number) == max(names)  # train follows precompile
                alive = newest and state.under_way and now - _changed(run.heartbeat_file) < _ALIVE_S
                end = seconds_of(state.ended or "") or (now if alive else _last_sign(run, state))
                seconds += nodes * max(0.0, end - (seconds_of(state.started) or end))
                running += nodes if alive else 0
        return seconds / 3600, running

    def _runs(self) -> Iterator[RunFiles]:
        """Yield the run and the other runs of its sweep."""
        yield self._run
        if group := _group(self._run):
            here = self._run.path.absolute()
            others = (RunFiles(path) for path in here.parent.glob(f"{glob.escape(group)}-*"))
            yield from (run for run in others if run.path != here and _group(run) == group)


def _group(run: RunFiles) -> str:
    return str(read_json(run.record_file).get("group") or "")


def _last_sign(run: RunFiles, state: Attempt) -> float:
    """Return the time of the last write by an attempt that was killed."""
    logs = run.node_logs(state.phase, state.attempt).values()
    return max(map(_changed, [run.state_file(state.phase, state.attempt), *logs]))


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
