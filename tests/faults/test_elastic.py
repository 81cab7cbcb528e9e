"""Rows in which a training goes on with another number of nodes: GPT-2 with ZeRO-1 on xla-cpu."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ..sandbox.jobs import User
from . import invariants
from .trainings import Training

pytestmark = pytest.mark.faults

STEPS = 40
SMALL = (
    f"steps={STEPS}", "model.n_layer=1", "train.lr=1e-3", "train.eval_every=0",
    "train.save_every=5", "train.keep_last=20",
)  # fmt: skip


@dataclass
class Trainer:
    """Submits the small GPT-2; what is compiled once is kept for all."""

    user: User
    cache: Path

    def submit(self, nodes: int) -> Training:
        sets = (*SMALL, f"compile_cache={self.cache}")
        run = self.user.submit(*sets, nodes=nodes, recipe="gpt2_zero1")
        return Training(run.user, run.path, run.jobs)


@pytest.fixture(scope="module")
def trainer(sandbox, tmp_path_factory) -> Trainer:
    user = User(sandbox, tmp_path_factory.mktemp("elastic"))
    return Trainer(user, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def uninterrupted(trainer) -> Training:
    run = trainer.submit(2)
    run.until("COMPLETED", 400)
    return run


def go_on(run: Training, nodes: int) -> None:
    """Let a running training save and end, and go on with another number of nodes."""
    attempt = run.attempts[-1]
    run.keep_logs()
    run.user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED", 120)
    invariants.ended_well(run, "CANCELLED")
    last = max(run.steps(attempt))
    assert invariants.a_checkpoint_is_there(run) == last < STEPS
    run.user.trnslurm("resume", str(run.path), "--nodes", str(nodes))
    run.jobs = run.recorded_jobs()


def check(run: Training, control: Training, row, counts: list[int]) -> None:
    """The workers that the lineage was computed by, and the invariants."""
    run.until("COMPLETED", 400)
    invariants.complete_lineage(run, STEPS)
    invariants.same_numbers(run, control, rel=1e-4)
    assert invariants.workers_of(run) == counts
    assert invariants.a_checkpoint_is_there(run) == STEPS
    invariants.ended_well(run, exit_code=("0:0",))
    invariants.logs_kept(run)
    row.holds("I1 I2 I3 I4 I6", lost=0, bound=0)


@pytest.mark.row(16, "from 4 to 2 to 1 node in the middle of an epoch, ZeRO-1")
def test_fewer_nodes(trainer, uninterrupted, row, user) -> None:
    run = trainer.submit(4)
    run.reach(4, timeout_s=400)
    go_on(run, 2)
    run.reach(10, attempt=2, timeout_s=400)
    go_on(run, 1)
    check(run, uninterrupted, row, [4, 2, 1])


@pytest.mark.row(17, "from 2 to 3 nodes, ZeRO-1")
def test_more_nodes(trainer, uninterrupted, row, user) -> None:
    run = trainer.submit(2)
    run.reach(5, timeout_s=400)
    go_on(run, 3)
    check(run, uninterrupted, row, [2, 3])
