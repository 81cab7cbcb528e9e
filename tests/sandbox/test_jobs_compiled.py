"""Precompile and training coupled by the key of their graphs, on a real Slurm."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trnslurm.node.graphs.manifest import GraphCache, GraphManifest, NodeResult
from trnslurm.records.run import RunDir

from ..waiting import eventually

pytestmark = pytest.mark.rest


def phases(run) -> set[str]:
    return set(run.jobs)


def record_of(run) -> dict:
    return dict(RunDir(run.path).record().precompile)


def compile_all(cache: Path, run) -> None:
    """What the nodes write once all is compiled."""
    facts = record_of(run)
    ingredients = json.loads((run.path / "graphs.json").read_text())
    node = NodeResult(node=0, host="node", graphs=4, compiled=4, failed=0, seconds=30.0)
    made = {"by": "tests", "run": str(run.path)}
    GraphCache(cache).write(
        GraphManifest(
            key=facts["key"], ingredients=ingredients, versions=facts["versions"], made=made,
            nodes=(node,),
        ),
    )  # fmt: skip


def test_one_compilation_serves_all_runs_of_a_key(user) -> None:
    cache = user.home / "cache"
    base = ("device=neuron", "precompile=auto", "workers_per_node=2", f"compile_cache={cache}")

    # Two submissions of a cold key at the same moment: one compiles, the other waits for its job.
    # No job starts before both are submitted, or the first could have ended by then.
    sleeper = ("--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    _, _, job = user.sandbox.slurm("sbatch", *sleeper).out.strip().rpartition(" ")
    with ThreadPoolExecutor() as pool:
        submissions = [pool.submit(user.submit, *base, more=("--name", n)) for n in ("one", "two")]
        runs = sorted((s.result() for s in submissions), key=lambda run: len(run.jobs))
    joined, compiling = runs
    assert [phases(run) for run in runs] == [{"train"}, {"precompile", "train"}]
    assert record_of(joined)["waits_for"] == compiling.jobs["precompile"]
    assert record_of(joined)["key"] == record_of(compiling)["key"]
    user.sandbox.slurm("scancel", job)
    compile_all(cache, compiling)

    # Steps and learning rate shape no graph: nothing is compiled again.
    warm = user.submit(*base, "steps=7", "train.lr=0.5")
    assert phases(warm) == {"train"}
    left_out = f"its graphs are compiled (key {record_of(joined)['key']}, by {compiling.path.name})"
    assert record_of(warm)["left_out"] == left_out
    assert f"no precompile job: {left_out}" in warm.shown()

    # The micro-batch does.
    cold = user.submit(*base, "batch.micro_batch=2")
    assert phases(cold) == {"precompile", "train"}
    diff = ("compile", "key", "--cluster", user.sandbox.cluster, "--diff")
    assert user.differing(*diff, str(warm.path), str(cold.path)) == "micro_batch: 1 -> 2\n"

    # One command brings a run back whose training never began; its graphs are there by now.
    user.trnslurm("cancel", str(cold.path))
    eventually(lambda: cold.state == "CANCELLED")
    compile_all(cache, cold)
    again = json.loads(user.trnslurm("resume", str(cold.path), "--json"))
    assert set(again["jobs"]) == {"train"}
    for run in (*runs, warm, cold):
        run.until("COMPLETED")
