"""submit --after: a run waits for any job of Slurm, and for no job that can never release it."""

from __future__ import annotations

import pytest

SUBMIT = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2", "--precompile", "never")


@pytest.mark.parametrize(
    ("states", "word", "dependency", "waits"),
    [
        (["RUNNING"], "7", "afterok:7", "job 7"),
        (["PENDING"], "7:any", "afterany:7", "the end of job 7"),
        (["COMPLETED", "RUNNING"], "7:failed", "afternotok:7", "a failure of job 7"),
        (["FAILED", "COMPLETED"], "7:any", None, ""),  # an array
        (["COMPLETED"], "7:ok", None, ""),
    ],
)
def test_it_waits(site, fake_slurm, cli, states, word, dependency, waits) -> None:
    fake_slurm.answer("show-job", *(f"JobId=7 JobState={state}" for state in states))
    done = cli(*SUBMIT, "--sweep", "seed=1,2", "--after", word)
    assert done.code == 0
    words = [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    for call in fake_slurm.calls("sbatch"):
        assert call.arguments[:-1] == (words if dependency else [])
    assert ("job 7 has already ended, so the run does not wait for it\n" in done.err) == (
        dependency is None
    )
    if dependency:
        fake_slurm.queue("1001|PENDING|Dependency|N/A|", "1002|PENDING|Dependency|N/A|")
        assert cli("runs").out.count(f"waiting for {waits}\n") == 2


@pytest.mark.parametrize(
    ("state", "word", "said"),
    [
        ("", "7", "Slurm has no job 7"),
        ("RUNNING", "7:fine", "expected 7 with one of :ok, :any, :failed"),
        (
            "TIMEOUT",
            "7",
            "job 7 has ended (TIMEOUT), so the run would never start: omit --after",
        ),
        (
            "COMPLETED",
            "7:failed",
            "job 7 has ended (COMPLETED), so the run would never start: omit --after",
        ),
    ],
)
def test_it_would_never_start(site, fake_slurm, cli, state, word, said) -> None:
    if state:
        fake_slurm.answer("show-job", f"JobId=7 JobState={state}")
    done = cli(*SUBMIT, "--after", word)
    assert (done.code, done.err.splitlines()[-1]) == (1, f"error: --after {word}: {said}")
    assert fake_slurm.calls("sbatch") == []


def test_after_a_run(site, fake_slurm, cli) -> None:
    assert cli(*SUBMIT, "--name", "first").code == 0
    fake_slurm.queue("1001|RUNNING|None|N/A|n")
    assert cli(*SUBMIT, "--after", "last:failed").code == 0
    assert "--dependency=afternotok:1001" in fake_slurm.calls("sbatch")[-1].arguments
    fake_slurm.queue("1001|TIMEOUT|None|N/A|n")
    refused = cli(*SUBMIT, "--after", "first").err
    assert "-first has ended (TIMEOUT), so the run would never start" in refused
