"""Row 25: random faults, one after another, in a training that may have 2 to 4 nodes.

In the end the invariants hold, and the losses are those of an undisturbed training.
TRNSLURM_SOAK_FAULTS and TRNSLURM_SOAK_SEED set how many, and which.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from ..sandbox.jobs import JobSandbox
from . import invariants
from .conftest import mend
from .trainings import Training, submit

pytestmark = pytest.mark.soak

FAULTS = int(os.environ.get("TRNSLURM_SOAK_FAULTS", "100"))
SEED = int(os.environ.get("TRNSLURM_SOAK_SEED", "1"))
MEAN_S = 15.0
STEPS = 3000
TRNSLURM = (sys.executable, "-m", "trnslurm")
# A fault of a node, or of the controller, and what undoes it after a while.
UNDONE = {
    "slurmd-kill": "slurmd-start",
    "link-down": "link-up",
    "freeze": "thaw",
    "power-off": "power-on",
}
OF_WORKERS = {"kill a worker": "KILL", "stop a worker": "STOP", "terminate a worker": "TERM"}


@dataclass
class Storm:
    """Puts faults into a training, and takes back what does not pass by itself."""

    run: Training
    rng: random.Random
    undo: dict[str, tuple[float, tuple[Any, ...]]] = field(default_factory=dict)
    """What is out of order -> when it is mended, and by which fault."""

    @property
    def sandbox(self) -> JobSandbox:
        return self.run.sandbox

    def strike(self) -> str:
        """One fault that can be put in now."""
        makes: list[Callable[[], str]] = [
            self._worker, self._worker, self._node, self._node, self._controller, self._requeue,
            self._preempt, self._reboot,
        ]  # fmt: skip
        while not (what := self.rng.choice(makes)()):
            pass
        return what

    def mend_what_is_due(self, *, all_of_it: bool = False) -> None:
        for what, (when, words) in list(self.undo.items()):
            if all_of_it or time.monotonic() >= when:
                self.sandbox.fault(*words)
                del self.undo[what]

    def _worker(self) -> str:
        what = self.rng.choice(sorted(OF_WORKERS))
        node = self.rng.choice(range(1, 5))
        if str(node) in self.undo:
            return ""
        words = ("fault", "proc", node, "^[^ ]+ -u code/jobs/", OF_WORKERS[what])
        done = self.sandbox.trnslurm(*words)
        return "" if done.code or ": 0 " in done.out else f"{what} on node {node}"

    def _node(self) -> str:
        if len([key for key in self.undo if key != "controller"]) > 1:
            return ""  # two of four must be left
        node, what = self.rng.choice(range(1, 5)), self.rng.choice(sorted(UNDONE))
        if str(node) in self.undo or self.sandbox.trnslurm("fault", node, what).code:
            return ""
        self._later(str(node), node, UNDONE[what])
        return f"{what} of node {node}"

    def _controller(self) -> str:
        if "controller" in self.undo:
            return ""
        self.sandbox.fault("ctld", "kill")
        self._later("controller", "ctld", "start")
        return "kill slurmctld"

    def _requeue(self) -> str:
        if "controller" in self.undo:
            return ""
        job = self.run.recorded_jobs()["train"]
        done = self.sandbox.slurm("scontrol", "requeue", job)
        return "" if done.code else "scontrol requeue"

    def _preempt(self) -> str:
        if "controller" in self.undo:
            return ""
        urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
        done = self.sandbox.slurm("sbatch", *urgent, "--wrap=sleep 2")
        return "" if done.code else "an urgent job"

    def _reboot(self) -> str:
        node = self.rng.choice(range(1, 5))
        if str(node) in self.undo or self.sandbox.trnslurm("fault", node, "reboot").code:
            return ""
        return f"reboot of node {node}"

    def _later(self, what: str, *words: Any) -> None:
        self.undo[what] = (time.monotonic() + self.rng.uniform(3, 25), words)


def goodput(run: Training, seconds: float) -> float:
    """The share of the time in which steps were done that count, at the pace of most steps."""
    whole = pairwise(run.lines)
    step_s = [b["time"] - a["time"] for a, b in whole if a["attempt"] == b["attempt"]]
    return run.lines[-1]["step"] * statistics.median(step_s) / seconds


@pytest.mark.row(25, f"{FAULTS} random faults on 2 to 4 nodes, one every {MEAN_S:g} s on average")
def test_soak(user, control, row) -> None:
    """`trnslurm watch --resume` stands by, as for any long run that nobody looks at.

    No budget of crashes here: so many in a row may hit a start that nothing new is saved.
    """
    steps = (f"steps={STEPS}",)
    run = submit(user, *steps, "train.pause_s=0.5", "train.watchdog=10", "train.watchdog_min_s=5",
                 "slurm.max_crashes=100", "slurm.min_nodes=2", nodes=4)  # fmt: skip
    run.reach(15)
    storm = Storm(run, random.Random(SEED))
    watching = [*TRNSLURM, "watch", str(run.path), "--resume", "--every", "2s", "--max", "100"]
    with user.sandbox.running(watching, {"HOME": str(user.home)}) as watch:
        rage(storm)
        assert watch.poll() is None, watch.communicate()
        good = goodput(run, time.time() - run.lines[0]["time"])
        storm.mend_what_is_due(all_of_it=True)
        mend(run.sandbox)
        run.order("pace", 0)
        out, _ = watch.communicate(timeout=1800)
    print(out, flush=True)
    run.jobs = run.recorded_jobs()
    resumed = len(re.findall(r"Z (?:Resumed|Released job) ", out))
    hosts = [len(run.hosts(attempt)) for attempt in run.attempts if run.steps(attempt)]
    print(f"attempts on {hosts} nodes, resumed {resumed}, goodput {good:.0%}")
    # 2 and 4 nodes round differently.
    invariants.every_sample_once(run, STEPS)
    invariants.same_numbers(run, control(*steps), rel=1e-4)
    invariants.ended_well(run)
    invariants.logs_kept(run)
    row.holds("I1 I2 I3 I4 I6")
    inside = sum(run.said(attempt)["state"] == "RESTARTED" for attempt in run.attempts)
    by_watch = f"{inside} in the same job, {resumed} by `watch --resume`"
    row.notes = f"{len(run.attempts)} attempts, {by_watch}; goodput {good:.0%}"


def rage(storm: Storm) -> None:
    """Cause all the faults."""
    run, begin = storm.run, time.monotonic()
    for number in range(1, FAULTS + 1):
        strike_at = time.monotonic() + storm.rng.expovariate(1 / MEAN_S)
        while time.monotonic() < strike_at:
            storm.mend_what_is_due()
            time.sleep(0.2)
        run.keep_logs()
        invariants.a_checkpoint_is_there(run)
        what = storm.strike()
        at = f"{time.monotonic() - begin:6.0f} s  attempt {run.attempts[-1]:3}"
        print(f"{at}  step {run.lines[-1]['step']:4}  {number:2}: {what}", flush=True)
