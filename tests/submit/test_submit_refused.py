"""submit when sbatch says no, or says nothing: one line, and nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trnslurm.runs.status import run_status
from trnslurm.submit import on_slurm

GPT2 = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")
SAID = "sbatch: error: Batch job submission failed: Invalid partition name specified"
HINT = "sinfo -o '%P %D %N %c %m %G %f' lists partitions and nodes"
WORDS = "sbatch: Batch job submission failed: Invalid partition name specified"


def error_line(done) -> str:
    """The line below the price and the graphs: the only other one."""
    price, graphs, error = done.err.splitlines()
    assert graphs.startswith("Graphs: ")
    assert "node-hours" in price
    assert done.out == ""
    return error


def test_first_phase_refused(site, fake_slurm, run_cli, cli) -> None:
    fake_slurm.refuse("sbatch", SAID)
    done = run_cli(*GPT2)
    assert done.code == 1
    assert error_line(done) == f"error: {WORDS} ({HINT})"
    assert [c.command for c in fake_slurm.calls()] == ["sbatch"]
    assert [*site.run_root.iterdir()] == []


def test_second_phase_refused_takes_the_first_back(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch-2", SAID)
    done = cli(*GPT2)
    run = site.run()
    assert done.code == 1
    assert error_line(done) == f"error: {WORDS} ({HINT})"
    assert [c.command for c in fake_slurm.calls()] == ["sbatch", "sbatch", "scancel"]
    assert fake_slurm.calls("scancel")[0].arguments == ["1001"]
    assert cli("status", run.name).out.startswith(f"{run.name}: FAILED (refused at submission")


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


# Ends a command when it hangs, and not a moment earlier, however busy the machine is.
TIMEOUT = """#!/bin/bash
shift
"$@" & pid=$!
while kill -0 $pid 2> /dev/null; do
  if compgen -G "$TRNSLURM_FAKE_SLURM/calls/*/hanging" > /dev/null; then
    kill $pid
    exit 124
  fi
  sleep 0.02
done
wait $pid
"""


@pytest.fixture
def no_patience(fake_slurm, tmp_path: Path, monkeypatch) -> None:
    """In the place of `timeout`, a stand-in that does not wait."""
    file = tmp_path / "impatient" / "timeout"
    file.parent.mkdir()
    file.write_text(TIMEOUT)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))


def test_silent_sbatch_times_out(site, fake_slurm, cli, monkeypatch) -> None:
    monkeypatch.setattr(on_slurm, "_TIMEOUT_S", 3)
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))
    fake_slurm.hang("sbatch")
    done = cli(*GPT2)
    assert fake_slurm.hangs()
    assert done.code == 1
    assert "sbatch: no answer in 3 s" in error_line(done)
    assert site.run().record().refused
    assert fake_slurm.calls("scancel") == []


def test_second_sbatch_that_is_silent_takes_the_first_back(
    site, fake_slurm, cli, no_patience
) -> None:
    fake_slurm.hang("sbatch-2")
    done = cli(*GPT2)
    assert done.code == 1
    assert "sbatch: no answer in 60 s" in error_line(done)
    assert site.run().record().refused
    assert [c.arguments for c in fake_slurm.calls("scancel")] == [["1001"]]


@pytest.mark.parametrize("number", [1, 2])
def test_job_that_a_silent_controller_took_is_cancelled(
    site, fake_slurm, cli, no_patience, number: int
) -> None:
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
    monkeypatch.setattr(on_slurm, "_LOOKS_S", (0,))
    done = cli(*GPT2)
    assert done.code == 1
    assert "Thank you." in error_line(done)
    assert site.run().record().refused


def test_words_of_several_lines_become_one(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch", "sbatch: error: No space left\nsbatch: error:   Write failed")
    done = cli(*GPT2)
    assert "sbatch: No space left; Write failed" in error_line(done)


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
    shown = cli("status", "last").out.splitlines()[0]
    assert shown.endswith("(precompile: waiting for jobs of higher priority)")
