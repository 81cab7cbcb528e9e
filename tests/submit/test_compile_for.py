"""submit --compile-for: graphs for other node counts are compiled next to the run."""

from __future__ import annotations

import json

import pytest

from ..toy_site import write_attempt

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")


def keys_of(runs) -> list[str]:
    return [run.record().precompile["key"] for run in runs]


def test_each_count_gets_a_run_that_only_precompiles(graphs, site, fake_slurm, cli) -> None:
    site.recipe("steps: 9\nbatch: {global_batch: 128}\nslurm: {time_min: 60}\n")
    dry = cli(*TOY, "--compile-for", "1,2,4", "--dry-run").out.splitlines()
    keys = {n: graphs.facts(cli, "toy", "--nodes", str(n))["key"] for n in (1, 2, 4)}
    assert dry[2:] == [
        f"Graphs on 1 node: not compiled (key {keys[1]}); precompile in a separate job, at most "
        "3.0 node-hours (its time limit)",
        f"Graphs on 4 nodes: not compiled (key {keys[4]}); precompile in a separate job, at most "
        "12.0 node-hours (its time limit)",
    ]
    assert fake_slurm.calls() == []
    done = cli(*TOY, "--compile-for", "1,2,4", "--json")
    assert done.code == 0
    said = json.loads(done.out)
    assert said["jobs"] == {"precompile": "1001", "train": "1002"}
    assert [each["jobs"] for each in said["elastic"]] == [
        {"precompile": "1003"}, {"precompile": "1004"},
    ]  # fmt: skip
    run, one, four = site.runs()
    assert [r.name.partition("-toy")[2] for r in (run, one, four)] == [
        "", "-precompile-1", "-precompile-4",
    ]  # fmt: skip
    # Nothing waits for them, nor they for anything.
    options = [call.arguments[:-1] for call in fake_slurm.calls("sbatch")]
    assert options == [[], ["--dependency=afterok:1001", "--kill-on-invalid-dep=yes"], [], []]
    assert keys_of([run, one, four]) == [keys[2], keys[1], keys[4]]
    assert one.record().phases == four.record().phases == ("precompile",)
    assert not list(four.path.glob("train*"))
    status = json.loads(cli("status", four.name, "--json").out)
    assert (status["state"], status["nodes"]) == ("PENDING", 4)
    # Others wait for them as for any other compilation.
    assert cli("submit", "toy", "--cluster", "pc", "--nodes", "4").code == 0
    assert fake_slurm.calls("sbatch")[-1].arguments[0] == "--dependency=afterok:1004"


def test_a_resume_there_finds_them(graphs, site, fake_slurm, cli) -> None:
    assert cli(*TOY, "--compile-for", "1").code == 0
    run, one = site.runs()
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "1"))
    write_attempt(one, "precompile", 1, state="COMPLETED", job_id="1003")
    write_attempt(run, "train", 1, state="TIMEOUT", job_id="1002")
    fake_slurm.queue()
    assert cli("resume", run.name, "--nodes", "1").out.startswith(
        f"Submitted {run.name}  train 1004\n"
    )
    assert (
        cli("resume", one.name).error == f"{one.name} is COMPLETED, so there is nothing to resume"
    )


def test_one_that_failed_is_resumed_as_what_it_is(graphs, site, fake_slurm, cli) -> None:
    done = cli(*TOY, "--elastic", "1")  # the old name
    assert done.code == 0
    assert "warning: --elastic has been renamed to --compile-for" in done.err
    _, one = site.runs()
    write_attempt(one, "precompile", 1, state="FAILED", job_id="1003")
    fake_slurm.queue()
    assert cli("resume", one.name).out.startswith(f"Submitted {one.name}  precompile 1004\n")


def test_warm_counts_need_none(graphs, site, fake_slurm, cli) -> None:
    key = graphs.fill(graphs.facts(cli, "toy", "--nodes", "1"))
    done = cli(*TOY, "--compile-for", "1")
    assert f"Graphs on 1 node: compiled (key {key}, by an-older-run)" in done.err
    assert len(site.runs()) == 1


def test_a_refused_one_does_not_take_the_run_with_it(graphs, site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch-3", "sbatch: error: Batch job submission failed: too many jobs")
    done = cli(*TOY, "--compile-for", "1")
    assert done.code == 0
    assert "warning: toy-precompile-1: sbatch: Batch job submission failed: too many" in done.err
    assert fake_slurm.calls("scancel") == []


@pytest.mark.parametrize(
    ("recipe", "words", "error"),
    [
        (
            "batch: {global_batch: 64}",
            ("--compile-for", "4"),
            "--compile-for 4: global batch 64 at",
        ),
        (
            "batch: {global_batch: 64}",
            ("--compile-for", "1,x"),
            "--compile-for 1,x: expected whole",
        ),
        (
            "batch: {mode: per_worker, per_worker: 1}",
            ("--compile-for", "1"),
            "the global batch grows",
        ),
        (
            "batch: {global_batch: 64}\nprecompile: never",
            ("--compile-for", "1"),
            "nothing is compiled",
        ),
    ],
)
def test_refused(graphs, site, fake_slurm, cli, recipe: str, words, error: str) -> None:
    site.recipe(f"steps: 9\n{recipe}\nslurm: {{time_min: 60}}\n")
    assert error in cli(*TOY, *words).error
    assert fake_slurm.calls() == [] and site.runs() == []
