"""A training in a sandbox that faults are put into: how far it is, and how it comes back."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..json_lines import read_lines
from ..sandbox.jobs import JobSandbox, Run, User
from ..waiting import eventually

SITE = Path(__file__).parent / "site"
STEPS = 200
INTERVAL = 10
"""Steps between two checkpoints, as the recipe says."""
# The workers' own command line: torchrun's has no -u before the script.
WORKER = "^[^ ]+ -u code/jobs/"
_LOOK_S = 0.05
DEFAULT_WAITS = bool(os.environ.get("TRNSLURM_FAULT_DEFAULT_WAITS"))
"""Whether Slurm's waits are not cut short."""
WAITS_S = 600 if DEFAULT_WAITS else 0
"""How much longer a recovery may take then."""
_RECOVERY_S = 300 + WAITS_S


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From a fault to the first new step: seconds of each part, and the steps done again."""

    attempt: int
    """The one that went on."""
    lost: int
    detection: float
    """Until the attempt has ended, as its script or the controller says."""
    requeue: float
    """Until the next one's script starts."""
    start: float
    """Until its workers have found each other."""
    load: float
    """Until the first new step is done."""

    @property
    def total(self) -> float:
        return self.detection + self.requeue + self.start + self.load


@dataclass
class Training(Run):
    """One submitted training, and what is seen of it while it runs."""

    kept: dict[str, bytes] = field(default_factory=dict)
    """The logs as they were at each fault."""

    @property
    def sandbox(self) -> JobSandbox:
        return self.user.sandbox

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        return read_lines(self.path / "metrics.jsonl")

    def steps(self, attempt: int) -> list[int]:
        """The steps that an attempt has reported."""
        return [line["step"] for line in self.lines if line["attempt"] == attempt]

    @property
    def attempts(self) -> list[int]:
        """The attempts that have begun."""
        found = (re.fullmatch(r"train-(\d+)", f.stem) for f in self.path.glob("state/*.json"))
        return sorted(int(match[1]) for match in found if match)

    def said(self, attempt: int) -> dict[str, Any]:
        """What the batch script says of an attempt."""
        return dict(json.loads((self.path / f"state/train-{attempt}.json").read_text()))

    def hosts(self, attempt: int = 1) -> list[int]:
        """The numbers of an attempt's nodes, in the order of ranks."""
        return [int(name.rpartition("-")[2]) for name in self.said(attempt)["hosts"].split(",")]

    def order(self, what: str, words: object) -> None:
        """Say what shall happen, see drill.py."""
        file = self.path / "drill" / what
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_suffix(".new")
        temporary.write_text(f"{words}\n")
        temporary.replace(file)

    def release(self) -> None:
        """Let the workers that are held go on."""
        (self.path / "drill/hold").unlink()

    def reach(self, step: int, *, attempt: int = 1, timeout_s: float = 300) -> None:
        """Wait until an attempt has done a step."""
        eventually(lambda: max(self.steps(attempt), default=0) >= step, timeout_s, said=self.story)

    def held(self, point: str, *, attempt: int = 1, rank: int = 0) -> None:
        """Wait until a worker is at a point."""
        mark = self.path / f"drill/held-{point}-{attempt}-{rank}"
        eventually(mark.exists, 300, said=self.story)

    def recorded_jobs(self) -> dict[str, str]:
        """The jobs as run.json has them, for a run that was submitted again."""
        return dict(json.loads((self.path / "run.json").read_text())["jobs"])

    def control(self, verb: str, phase: str = "train") -> None:
        """Let scontrol do something with a phase's job."""
        done = self.sandbox.slurm("scontrol", verb, self.jobs[phase])
        assert done.code == 0, done

    def kill(self, rank: int, signal: str = "KILL") -> None:
        """Signal the worker of a rank, from outside; not one that was started ahead."""
        node = self.hosts(self.attempts[-1])[rank]
        done = self.sandbox.on_node(node, "pkill", f"-{signal}", "--oldest", "--full", WORKER)
        assert done.code == 0, done

    def workers(self) -> int:
        """How many workers there are, also those that were started ahead."""
        return sum(" -u code/jobs/" in line for line in self.sandbox.processes_of(self))

    def keep_logs(self) -> None:
        """Remember the logs as they are, for I6."""
        # A step that was started ahead has its name only once it trains.
        files = self.path.glob("logs/[!s]*.log")
        self.kept |= {str(file): file.read_bytes() for file in files}

    def recover(self, fault: Callable[[], object]) -> Recovery:
        """Put a fault in, and watch the training come back by itself."""
        self.keep_logs()
        before = self.attempts[-1]
        begin = time.time()
        fault()
        return self.watch(before, begin)

    def watch(self, before: int, begin: float) -> Recovery:
        """Wait for the first new step after an attempt, and tell the parts of the wait."""
        ended: float | None = None
        started: dict[int, float] = {}
        asked = 0.0
        deadline = begin + _RECOVERY_S
        while not (new := [line for line in self.lines if line["attempt"] > before]):
            now = time.time()
            assert now < deadline, self.story()
            for attempt in self.attempts:
                started.setdefault(attempt, now)
            if self.said(before)["state"] not in ("STARTING", "RUNNING"):
                ended = ended or (self.path / f"state/train-{before}.json").stat().st_mtime
            if now > asked + 0.5:
                asked, state = now, self.state
                assert state not in ("FAILED", "CANCELLED"), self.story()
                ended = ended or (now if state != "RUNNING" else None)
            time.sleep(_LOOK_S)
        attempt = new[0]["attempt"]
        ended = min(ended or now, started[attempt])
        there = (self.path / f"drill/began-{attempt}").stat().st_mtime
        return Recovery(
            attempt=attempt,
            lost=max(self.steps(before), default=0) - (new[0]["step"] - 1),
            detection=ended - begin,
            requeue=started[attempt] - ended,
            start=there - started[attempt],
            load=new[0]["time"] - there,
        )

    def finish(self, state: str = "COMPLETED", timeout_s: float = 600) -> None:
        """Let it run at full speed to its end."""
        self.order("pace", 0)
        self.until(state, timeout_s)


def submit(
    user: User, *sets: str, nodes: int = 2, more: tuple[str, ...] = (), recipe: str = "endurance"
) -> Training:
    """Submit the small training."""
    run = user.submit("device=cpu", *sets, nodes=nodes, recipe=recipe, more=more)
    return Training(run.user, run.path, run.jobs)
