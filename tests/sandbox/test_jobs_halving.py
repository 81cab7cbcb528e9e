"""submit --halving on a real Slurm: the arrays follow one another, and the best run is as alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trnslurm.contract.halving import read_ranking
from trnslurm.records.run import RunDir

from ..waiting import eventually
from .jobs import Run, User

pytestmark = pytest.mark.rest

ON_CPU = ("device=cpu", "devices=[cpu]", "workers_per_node=1", "steps=8", "model.n_layer=1")
TINY = ("--preset", "tiny", "--time", "10")


def losses(run: Run) -> dict[int, tuple[float, ...]]:
    """What the run reports of each step, but for how long it took."""
    names = ("loss", "grad_norm", "lr")
    return {s["step"]: tuple(s[name] for name in names) for s in RunDir(run.path).steps()}


def test_the_best_of_four_trains_as_if_it_were_alone(user: User) -> None:
    options = user.options(1, *ON_CPU)
    sweep = ("--sweep", "train.lr=1e-4,3e-4,1e-3,1e-2", "--halving", "2")
    said = json.loads(user.trnslurm("submit", "gpt2_zero1", *options, *TINY, *sweep, "--json"))
    runs = [Run(user, Path(run["directory"]), run["jobs"]) for run in said]
    assert [*said[0]["rungs"]] == ["2", "3"]
    best, group = runs[3], runs[0].path.name.removesuffix("-1")
    alone = user.submit(*ON_CPU, "train.lr=1e-2", recipe="gpt2_zero1", more=TINY)
    # A task that Slurm starts again takes the run that it had.
    taken = user.run_root / group / "rung-2/1"
    eventually(taken.is_symlink, said=best.story)
    assert taken.resolve() == best.path.resolve()
    eventually(lambda: best.state == "RUNNING", said=best.story)
    user.sandbox.slurm("scontrol", "requeue", RunDir(best.path).record().jobs["train"])
    best.until("COMPLETED")

    told = json.loads(user.trnslurm("status", group, "--json"))
    ranking = read_ranking(user.run_root / group, 1)
    assert ranking is not None and ranking.metric == "eval_loss" and not ranking.out
    rungs = {run["run"]: (run["rung"], run["state"], run["reason"]) for run in told["runs"]}
    assert sorted(rung for rung, _, _ in rungs.values()) == [1, 1, 2, 3]
    last = ranking.order[3][0]
    assert rungs[last] == (1, "COMPLETED", "stopped after rung 1 of 3: rank 4 of 4")
    assert rungs[told["best"]] == (3, "COMPLETED", "")
    assert told["best"] == best.path.name
    alone.until("COMPLETED")
    assert [*losses(alone)] == [*range(1, 9)]
    assert losses(best) == losses(alone)
