"""resume: a run whose precompile failed is submitted again, in its own directory."""

from __future__ import annotations

import json

import pytest

from .conftest import write_attempt

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")


@pytest.fixture
def failed(graphs, site, fake_slurm, cli):
    """A run whose precompile failed; Slurm has dropped its training."""
    assert cli(*TOY).code == 0
    run = site.run()
    write_attempt(run, "precompile", 1, state="FAILED", reason="exit code 1", job_id="1001")
    fake_slurm.queue("1001|FAILED|NonZeroExitCode|N/A|", "1002|CANCELLED|Dependency|N/A|")
    assert json.loads(cli("status", "last", "--json").out)["state"] == "FAILED"
    fake_slurm.forget_calls()
    return run


def arguments(fake_slurm) -> list[list[str]]:
    return [[*call.arguments[:-1], call.cwd.name] for call in fake_slurm.calls("sbatch")]


def test_precompile_and_training_are_submitted_again(failed, graphs, fake_slurm, cli) -> None:
    done = cli("resume", "last")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Submitted {failed.name}  precompile 1003  train 1004\n")
    assert arguments(fake_slurm) == [
        [failed.name],
        ["--dependency=afterok:1003", "--kill-on-invalid-dep=yes", failed.name],
    ]
    status = json.loads(cli("status", "last", "--json").out)
    assert [(p["state"], p["attempt"]) for p in status["phases"]] == [("PENDING", 0)] * 2
    write_attempt(failed, "precompile", 2, state="COMPLETED", job_id="1003")
    fake_slurm.queue("1004|RUNNING|None|N/A|")
    write_attempt(failed, "train", 1, state="RUNNING", job_id="1004")
    status = json.loads(cli("status", "last", "--json").out)
    assert [(p["state"], p["attempt"]) for p in status["phases"]] == [
        ("COMPLETED", 2), ("RUNNING", 1),
    ]  # fmt: skip


def test_training_alone_where_the_graphs_are_there_by_now(failed, graphs, fake_slurm, cli) -> None:
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "2"))
    assert cli("resume", "last").out.startswith(f"Submitted {failed.name}  train 1003\n")
    assert arguments(fake_slurm) == [[failed.name]]
    assert failed.record().phases == ("train",)
    assert "no precompile job: its graphs are compiled" in cli("status", "last").out


def test_cancelled_run(graphs, site, fake_slurm, cli) -> None:
    assert cli(*TOY).code == 0
    assert cli("cancel", "last").code == 0
    assert cli("resume", "last").code == 0
    assert not site.run().cancelled_file.exists()
    assert json.loads(cli("status", "last", "--json").out)["state"] == "PENDING"


def test_run_that_waited_for_the_compilation_of_another(graphs, site, fake_slurm, cli) -> None:
    assert cli(*TOY, "--name", "first").code == 0
    assert cli(*TOY, "--name", "second").code == 0
    fake_slurm.queue("1001|FAILED|NonZeroExitCode|N/A|", "1003|CANCELLED|Dependency|N/A|")
    fake_slurm.forget_calls()
    second = site.runs()[-1]
    assert cli("resume", "second").out.startswith(
        f"Submitted {second.name}  precompile 1004  train 1005\n"
    )
    assert len(fake_slurm.calls("sbatch")) == 2


def test_runs_of_a_chain_that_wait(graphs, site, fake_slurm, cli) -> None:
    site.recipe(
        "steps: 10\nbatch: {global_batch: 64}\ntrain: {init_from: '', save_every: 5}\n"
        "slurm: {time_min: 60}\npresets:\n  a: {then: b}\n  b: {seq_len: 32}\n"
    )
    assert cli("submit", "toy", "--cluster", "pc", "--preset", "a", "--chain").code == 0
    a, b = site.runs()
    write_attempt(a, "precompile", 1, state="FAILED", job_id="1001")
    fake_slurm.queue("1001|FAILED|None|N/A|")
    refused = cli("resume", b.path)
    assert refused.error.endswith(f"{b.name} goes on from {a.name}, which is FAILED")
    fake_slurm.forget_calls()
    assert cli("resume", a.path).code == 0
    assert [call.cwd for call in fake_slurm.calls("sbatch")] == [a.path, a.path, b.path, b.path]
    assert arguments(fake_slurm)[2][0] == "--dependency=afterok:1006"


@pytest.mark.parametrize(
    ("state", "queue", "words"),
    [
        ("COMPLETED", (), "is COMPLETED: there is nothing to resume"),
        ("RUNNING", ("1002|RUNNING|None|N/A|",), "is RUNNING: cancel it first"),
        ("FAILED", (), "its training has begun: resume cannot do that yet"),
    ],
)
def test_refused_once_training_has_begun(
    graphs, site, fake_slurm, cli, state: str, queue: tuple[str, ...], words: str
) -> None:
    assert cli(*TOY).code == 0
    write_attempt(site.run(), "precompile", 1, state="COMPLETED", job_id="1001")
    write_attempt(site.run(), "train", 1, state=state, job_id="1002")
    fake_slurm.queue(*queue)
    assert words in cli("resume", "last").error
    assert len(fake_slurm.calls("sbatch")) == 2


def test_refused_while_anything_is_pending(graphs, fake_slurm, cli) -> None:
    assert cli(*TOY).code == 0
    assert "is PENDING: cancel it first, or let it go on" in cli("resume", "last").error
    # Refused when it was submitted, but a job of it was taken after all.
    fake_slurm.queue("1001|FAILED|None|N/A|", "1002|PENDING|Priority|N/A|")
    assert "cancel" in cli("resume", "last").error


def test_refused_if_its_files_have_changed(failed, fake_slurm, cli) -> None:
    failed.script("train").write_text("#!/bin/bash\n")
    assert cli("resume", "last").error == (
        f"{failed.script('train')} is not as it was submitted: submit it anew"
    )
    assert fake_slurm.calls("sbatch") == []
