"""submit when sbatch says no, or says nothing: one line, nothing left running, the script kept."""

from __future__ import annotations

import os

import pytest

from trnslurm.runs.status import run_status
from trnslurm.submit import on_slurm

GPT2 = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")
SAID = "sbatch: error: Batch job submission failed: Invalid partition name specified"
WORDS = "sbatch: Batch job submission failed: Invalid partition name specified"


def error_line(done) -> str:
    """The line below the price and the graphs: the only other one."""
    price, graphs, error = done.err.splitlines()
    assert graphs.startswith("Graphs: ")
    assert "node-hours" in price
    assert done.out == ""
    return error


def test_first_phase_refused(site, fake_slurm, run_cli) -> None:
    fake_slurm.refuse("sbatch", SAID)
    done = run_cli(*GPT2)
    run = site.run()
    assert done.code == 1
    script = run.path / "precompile.sbatch"
    assert error_line(done) == f"error: {WORDS} (script kept: {script})"
    assert script.is_file()
    assert [c.command for c in fake_slurm.calls()] == ["sbatch"]
    status = run_cli("status", run.name)
    assert status.out.startswith(f"{run.name}: FAILED (refused at submission: {WORDS})")


def test_second_phase_refused_takes_the_first_back(site, fake_slurm, run_cli) -> None:
    fake_slurm.refuse("sbatch-2", SAID)
    done = run_cli(*GPT2)
    run = site.run()
    assert done.code == 1
    assert error_line(done) == f"error: {WORDS} (script kept: {run.path / 'train.sbatch'})"
    assert [c.command for c in fake_slurm.calls()] == ["sbatch", "sbatch", "scancel"]
    assert fake_slurm.calls("scancel")[0].arguments == ["1001"]
    assert run_cli("status", run.name).out.startswith(f"{run.name}: FAILED (refused at submission")


def test_job_that_cannot_be_taken_back_is_named(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch-2", SAID)
    fake_slurm.refuse("scancel", "scancel: error: Unable to contact slurm controller")
    done = cli(*GPT2)
    run = site.run()
    assert done.code == 1
    error = error_line(done)
    assert WORDS in error  # the cause, not only that of the second trouble
    assert f"trnslurm cancel {run.name}" in error  # what is left to a person
    assert run.record().refused


def test_script_kept_can_be_submitted_as_it_is(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch", SAID)
    assert cli(*GPT2).code == 1
    refused = site.run()
    fake_slurm.relent("sbatch")
    assert cli("submit", "--rendered", refused.path).code == 0


@pytest.mark.parametrize("call", ["sbatch", "sbatch-2"])
def test_silent_sbatch_times_out(site, fake_slurm, cli, monkeypatch, call: str) -> None:
    monkeypatch.setattr(on_slurm, "_TIMEOUT_S", 5)
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))
    fake_slurm.hang(call)
    done = cli(*GPT2)
    assert fake_slurm.hangs()
    assert done.code == 1
    error = error_line(done)
    assert "sbatch: no answer in 5 s" in error
    assert site.run().record().refused
    taken_back = [c.arguments for c in fake_slurm.calls("scancel")]
    assert taken_back == ([["1001"]] if call == "sbatch-2" else [])


@pytest.mark.parametrize("number", [1, 2])
def test_job_that_a_silent_controller_took_is_cancelled(
    site, fake_slurm, cli, monkeypatch, number: int
) -> None:
    monkeypatch.setattr(on_slurm, "_TIMEOUT_S", 5)
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))
    fake_slurm.answer_late(f"sbatch-{number}")
    assert cli(*GPT2).code == 1
    (call,) = fake_slurm.calls("scancel")
    assert sorted(call.arguments) == [str(1000 + n) for n in range(1, number + 1)]
    assert run_status(site.run()).state == "FAILED"


def test_sbatch_that_prints_no_job_id(site, fake_slurm, cli, tmp_path, monkeypatch) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "sbatch").write_text("#!/bin/sh\necho 'Thank you.'\necho 'Have a nice day.'\n")
    (odd / "sbatch").chmod(0o755)
    site.profile(slurm={"bin_dir": str(odd)})
    done = cli(*GPT2)
    assert done.code == 1
    assert "Thank you." in error_line(done)
    assert site.run().record().refused


def test_words_of_several_lines_become_one(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch", "sbatch: error: No space left\nsbatch: error:   Write failed")
    done = cli(*GPT2)
    assert "sbatch: No space left Write failed" in error_line(done)


def test_without_sbatch_nothing_is_made(site, cli) -> None:
    done = cli(*GPT2)
    assert done.code == 1
    assert error_line(done).startswith("error: sbatch not found: load your site's Slurm module")
    assert not site.run_root.exists()


def test_sbatch_is_found_in_the_profiles_directory(site, fake_slurm, cli, monkeypatch) -> None:
    commands, _, rest = os.environ["PATH"].partition(":")
    monkeypatch.setenv("PATH", rest)
    site.profile(slurm={"bin_dir": commands})
    assert cli(*GPT2).code == 0
    assert len(fake_slurm.calls("sbatch")) == 2
    assert (
        cli("status", "last")
        .out.splitlines()[0]
        .endswith("(precompile: waiting for jobs of higher priority)")
    )
