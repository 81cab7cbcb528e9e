"""watch: every change of a run, and resuming what does not go on by itself."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from trnslurm.contract.files import write_json
from trnslurm.records.run import RunDir

from ..toy_site import write_attempt
from ..waiting import eventually

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")
DONE = {"state": "COMPLETED", "exit_code": 0}


@pytest.fixture
def run(graphs, site, fake_slurm, cli) -> RunDir:
    """A run whose graphs are compiled, so it is one job."""
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "2"))
    assert cli(*TOY).code == 0
    return site.run()


def said(out: str) -> list[str]:
    """The lines without their times."""
    return [line.partition("Z ")[2] for line in out.splitlines() if "Z " in line]


@contextmanager
def meanwhile(*acts: tuple[Callable[[], bool], Callable[[], None]]) -> Iterator[None]:
    """Do each of these as soon as its condition is true, beside the command."""

    def play() -> None:
        try:
            for is_time, act in acts:
                eventually(is_time)
                act()
        except BaseException:
            _thread.interrupt_main()  # the command would wait for ever
            raise

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    yield
    thread.join(600)
    assert not thread.is_alive()


def test_a_run_that_completes(run, fake_slurm, cli) -> None:
    fake_slurm.queue("1001|RUNNING|None|N/A|")
    with meanwhile(
        (lambda: len(fake_slurm.calls("squeue")) > 2,
         lambda: write_attempt(run, "train", 1, **DONE)),
    ):  # fmt: skip
        done = cli("watch", "last", "--every", "0.05s")
    assert (done.code, done.err) == (0, "")
    assert said(done.out) == ["RUNNING", "COMPLETED"]


def test_without_resume_it_only_says_what_would_help(run, fake_slurm, cli) -> None:
    write_attempt(run, "train", 1, state="TIMEOUT", reason="time limit")
    fake_slurm.queue()
    done = cli("watch", "last", "--every", "0.05s")
    assert done.code == 1
    assert said(done.out) == ["TIMEOUT (time limit)"]
    assert done.out.endswith("next: submit it again with --time MORE\n")
    assert len(fake_slurm.calls("sbatch")) == 1


def test_it_is_resumed_until_it_completes(run, fake_slurm, cli) -> None:
    """A time limit, then a held job, which is released."""
    write_attempt(run, "train", 1, state="TIMEOUT", reason="time limit")
    fake_slurm.queue()
    with meanwhile(
        (lambda: "1002" in run.record().jobs.values(),
         lambda: fake_slurm.queue("1002|PENDING|launch failed requeued held|N/A|")),
        (lambda: ["release", "1002"] in [c.arguments for c in fake_slurm.calls("scontrol")],
         lambda: write_attempt(run, "train", 2, **DONE)),
    ):  # fmt: skip
        done = cli("watch", "last", "--resume", "--every", "0.2s")
    assert (done.code, done.err) == (0, "")
    lines = [line for line in said(done.out) if not line.startswith("PENDING")]
    assert lines == [
        "TIMEOUT (time limit)", f"{run.name} has no checkpoint, so it starts from the beginning",
        f"Resumed {run.name}", "HELD (held by Slurm, because its launch failed)",
        f"Released job 1002 of {run.name}", "COMPLETED, attempt 2",
    ]  # fmt: skip


@pytest.mark.parametrize(("most", "checkpoints"), [(1, 0), (2, 0), (2, 1)])
def test_given_up_without_a_newer_checkpoint(
    run, fake_slurm, cli, monkeypatch, most: int, checkpoints: int
) -> None:
    """Each job crashes at once; a newer checkpoint restarts the count."""
    write_attempt(run, "train", 1, state="FAILED", reason="exit code 1")
    fake_slurm.queue()
    add = RunDir.add_job

    def crash(self: RunDir, phase: str, job: str) -> None:
        add(self, phase, job)
        fake_slurm.queue()
        number = len(run.attempts("train")) + 1
        write_attempt(run, "train", number, state="FAILED", reason="exit code 1", job_id=job)
        if number <= checkpoints + 1:
            (run.checkpoints / f"step-{number:08}").mkdir(parents=True)

    monkeypatch.setattr(RunDir, "add_job", crash)
    done = cli("watch", "last", "--resume", "--every", "0.05s", "--max", str(most))
    assert done.code == 1
    assert f"given up: resumed {most} times without a newer checkpoint" in said(done.out)
    assert len(fake_slurm.calls("sbatch")) == 1 + most + checkpoints


def test_a_cancelled_run_is_left_alone(run, fake_slurm, cli) -> None:
    write_attempt(run, "train", 1, state="CANCELLED")
    write_json(run.cancelled_file, {})
    fake_slurm.queue()
    done = cli("watch", "last", "--resume", "--every", "0.05s")
    assert (done.code, said(done.out)) == (1, ["CANCELLED (by trnslurm cancel; no step is saved)"])
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_silent_controller_is_waited_for(run, fake_slurm, cli) -> None:
    write_attempt(run, "train", 1, state="TIMEOUT", reason="time limit")
    fake_slurm.queue()
    fake_slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    with meanwhile(
        (lambda: len(fake_slurm.calls("squeue")) > 5, lambda: fake_slurm.relent("squeue")),
        (lambda: len(fake_slurm.calls("sbatch")) > 1,
         lambda: write_attempt(run, "train", 2, **DONE)),
    ):  # fmt: skip
        done = cli("watch", "last", "--resume", "--every", "0.05s")
    assert done.code == 0
    assert [line for line in said(done.out) if "contact" in line] == [
        "waiting: squeue: slurm_load_jobs error: Unable to contact slurm controller"
    ]


@pytest.mark.parametrize("every", ["", "0", "x", "5d", "-1s"])
def test_bad_times(run, cli, every: str) -> None:
    assert cli("watch", "last", f"--every={every}").error == (
        f"--every {every}: expected a time such as 30s, 5m or 1h"
    )


def test_a_run_that_others_cancelled_is_not_resumed(run, fake_slurm, cli) -> None:
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    write_attempt(run, "train", 1, state="CANCELLED", reason="not by trnslurm cancel")
    fake_slurm.queue()
    submitted = len(fake_slurm.calls("sbatch"))
    done = cli("watch", "last", "--resume", "--every", "0.05s")
    assert done.code == 1 and f"next: trnslurm resume {run.name}" in done.out
    assert len(fake_slurm.calls("sbatch")) == submitted
