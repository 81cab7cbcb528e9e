"""What Slurm does not fix by itself: status names the command, and resume fixes it."""

from __future__ import annotations

import json

import pytest

from trnslurm.contract.files import write_json
from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status

from ..toy_site import write_attempt

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")
HELD = "launch failed requeued held"
DONE = {"state": "COMPLETED", "exit_code": 0}


@pytest.fixture
def run(graphs, site, fake_slurm, cli) -> RunDir:
    """A run that was just submitted, as the jobs 1001 and 1002."""
    assert cli(*TOY).code == 0
    fake_slurm.forget_calls()
    return site.run()


def submitted(fake_slurm) -> list[list[str]]:
    return [call.arguments[:-1] for call in fake_slurm.calls("sbatch")]


def cancelled(fake_slurm) -> list[str]:
    return [job for call in fake_slurm.calls("scancel") for job in call.arguments]


AGAIN = [[], ["--dependency=afterok:1003", "--kill-on-invalid-dep=yes"]]
# What squeue says, the state that it makes, and the pending jobs that make place for new ones.
CASES = {
    "never launched": (("1001|FAILED|JobLaunchFailure|N/A|", "1002|CANCELLED|None|N/A|"),
                       "FAILED", []),
    "its parent failed": (("1001|FAILED|NonZeroExitCode|N/A|",
                           "1002|PENDING|DependencyNeverSatisfied|N/A|"), "FAILED", ["1002"]),
    "not noticed yet": (("1001|FAILED|NonZeroExitCode|N/A|", "1002|PENDING|Dependency|N/A|"),
                        "FAILED", ["1002"]),
    "lost by the controller": ((), "LOST", []),
    "half of it lost": (("1002|PENDING|DependencyNeverSatisfied|N/A|",), "LOST", ["1002"]),
    "a node failed": (("1001|NODE_FAIL|None|N/A|", "1002|CANCELLED|None|N/A|"), "NODE_FAIL", []),
    "held, and its child is dropped": ((f"1001|PENDING|{HELD}|N/A|", "1002|CANCELLED|None|N/A|"),
                                       "HELD", ["1001"]),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_resumed_with_one_live_job_per_phase(run, fake_slurm, cli, what: str) -> None:
    """One live job per phase: what still waits of the old ones is cancelled first."""
    queue, state, gone = CASES[what]
    fake_slurm.queue(*queue)
    status = run_status(run)
    assert (status.state, status.mend) == (state, f"trnslurm resume {run.name}")
    assert f"next: trnslurm resume {run.name}\n" in cli("status", "last").out
    assert cli("resume", "last").code == 0
    assert cancelled(fake_slurm) == gone
    assert submitted(fake_slurm) == AGAIN
    assert run_status(run).mend == ""


def test_held_after_its_launch_failed_is_released(run, fake_slurm, cli, stable) -> None:
    fake_slurm.queue(f"1001|PENDING|{HELD}|N/A|", "1002|PENDING|Dependency|N/A|")
    assert run_status(run).mend == f"trnslurm resume {run.name}"
    done = cli("resume", "last", "--json")
    said = json.loads(done.out)
    assert said["released"] == ["1001"]
    stable.json("resume", said)
    assert [call.arguments for call in fake_slurm.calls("scontrol")] == [["release", "1001"]]
    assert submitted(fake_slurm) == cancelled(fake_slurm) == []
    assert run_status(run).state == "PENDING"


def test_held_and_on_another_number_of_nodes(run, fake_slurm, cli) -> None:
    """The job is for the old number: it makes place for another."""
    write_attempt(run, "precompile", 1, **DONE)
    fake_slurm.queue(f"1002|PENDING|{HELD}|N/A|")
    assert cli("resume", "last", "--nodes", "1").code == 0
    assert cancelled(fake_slurm) == ["1002"]
    assert submitted(fake_slurm) == AGAIN


def test_held_by_a_person_stays_so(run, fake_slurm, cli) -> None:
    fake_slurm.queue("1001|PENDING|JobHeldUser|N/A|", "1002|PENDING|Dependency|N/A|")
    assert run_status(run).mend == ""
    assert "is HELD (precompile: held by its owner" in cli("resume", "last").error


def test_a_job_that_is_left_of_a_cancelled_run(run, fake_slurm, cli) -> None:
    write_json(run.cancelled_file, {"by": "ada"})
    assert run_status(run).mend == f"trnslurm cancel {run.name}"
    assert cli("cancel", "last").code == 0
    assert cancelled(fake_slurm) == ["1002", "1001"]
    status = run_status(run)
    assert (status.state, status.mend) == ("CANCELLED", "")


def test_what_goes_on_by_itself_needs_nothing(run, fake_slurm) -> None:
    assert run_status(run).mend == ""
    write_attempt(run, "precompile", 1, **DONE)
    write_attempt(run, "train", 1, state="RUNNING")
    for entry in ("RUNNING|None", "PENDING|BeginTime", "REQUEUED|None"):
        fake_slurm.queue(f"1002|{entry}|N/A|")
        assert run_status(run).mend == ""


def test_what_waits_for_a_run_names_that(graphs, site, fake_slurm, cli) -> None:
    site.recipe(
        "steps: 10\nbatch: {global_batch: 64}\ntrain: {init_from: '', save_every: 5}\n"
        "slurm: {time_min: 60}\npresets:\n  a: {then: b}\n  b: {seq_len: 32}\n"
    )
    assert cli("submit", "toy", "--cluster", "pc", "--preset", "a", "--chain").code == 0
    a, b = site.runs()
    write_attempt(a, "precompile", 1, state="FAILED", job_id="1001")
    fake_slurm.queue(
        "1001|FAILED|None|N/A|", "1002|CANCELLED|None|N/A|",
        "1003|PENDING|DependencyNeverSatisfied|N/A|", "1004|PENDING|Dependency|N/A|",
    )  # fmt: skip
    assert run_status(b).mend == run_status(a).mend == f"trnslurm resume {a.name}"
    both = f"which is FAILED: run trnslurm resume {a.name} to continue both"
    assert cli("resume", b.path).error.endswith(f"{b.name} continues {a.name}, {both}")
    fake_slurm.forget_calls()
    assert cli("resume", a.path).code == 0
    assert cancelled(fake_slurm) == ["1004", "1003"]
    assert submitted(fake_slurm)[2][0] == "--dependency=afterok:1006"
    assert [call.cwd for call in fake_slurm.calls("sbatch")] == [a.path, a.path, b.path, b.path]


@pytest.mark.parametrize(("cause", "again"), [("crash", True), ("error", False)])
def test_no_next_command_for_what_would_come_again(make_run, fake_slurm, cause, again) -> None:
    """So that `watch --resume` does not spend attempts on it either."""
    ended = {"state": "FAILED", "exit_code": 1, "reason": "KeyError: 'lr'", "cause": cause}
    run = make_run(states={"train": [ended]}, phases=("train",))
    assert run_status(run).mend == (f"trnslurm resume {run.name}" if again else "")


def test_the_cause_of_a_failed_precompile_is_said(make_run, fake_slurm) -> None:
    ended = {"state": "FAILED", "exit_code": 1, "reason": "KeyError: 'lr' at train.py, line 3"}
    run = make_run(states={"precompile": [ended]})
    problem = "the trial run failed (exit code 1): its error is above"
    write_json(run.graphs_file(1, 0), {"host": "node-1", "problem": problem})
    said = problem.replace("its error is above", ended["reason"])
    assert run_status(run).reason == f"precompile: node-1: {said}"
