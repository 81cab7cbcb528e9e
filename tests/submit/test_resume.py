"""resume: a run that has not completed is submitted again, in its own directory."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from subprocess import PIPE

import pytest

from trnslurm.contract.files import write_json
from trnslurm.errors import NotYetError, RunError
from trnslurm.records.run import RunDir, own_process
from trnslurm.submission.lock import lock_run

from ..toy_site import write_attempt

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
    beginning = f"{failed.name} has no checkpoint, so it starts from the beginning\n"
    assert (done.code, done.err) == (0, beginning)
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


def begun(site, cli, **attempt) -> RunDir:
    """A run whose training has begun."""
    assert cli(*TOY).code == 0
    run = site.run()
    write_attempt(run, "precompile", 1, state="COMPLETED", job_id="1001")
    write_attempt(run, "train", 1, **{"state": "FAILED", "job_id": "1002"} | attempt)
    return run


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "PREEMPTED", "STOPPED", "CANCELLED"])
def test_training_that_has_begun_goes_on(graphs, site, fake_slurm, cli, state: str) -> None:
    """In its directory, its attempts counted on; a mark of cancel is taken away."""
    run = begun(site, cli, state=state, reason="why")
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "2"))
    fake_slurm.queue()
    fake_slurm.forget_calls()
    if state == "CANCELLED":
        write_json(run.cancelled_file, {})
    done = cli("resume", "last")
    beginning = f"{run.name} has no checkpoint, so it starts from the beginning\n"
    assert (done.code, done.err) == (0, beginning)
    assert done.out.startswith(f"Submitted {run.name}  train 1003\n")
    assert arguments(fake_slurm) == [[run.name]]
    assert not run.cancelled_file.exists()
    record = run.record()
    assert (record.earlier["train"], record.nodes, dict(record.jobs)) == (1, 2, {"train": "1003"})
    (before,) = record.history
    assert before["jobs"] == {"precompile": "1001", "train": "1002"}
    why = "by trnslurm cancel; why" if state == "CANCELLED" else "why"
    assert (before["nodes"], before["state"], before["reason"]) == (2, state, why)
    fake_slurm.queue("1003|RUNNING|None|N/A|")
    write_attempt(run, "train", 2, state="RUNNING", job_id="1003")
    shown = cli("status", "last").out
    assert f"attempts: 2: 1 {state} (why), 2 RUNNING" in shown
    assert f"when it was {state} on 2 nodes" in shown


@pytest.mark.parametrize(
    ("state", "queue", "words"),
    [
        ("COMPLETED", (), "is COMPLETED, so there is nothing to resume"),
        (
            "RUNNING",
            ("1002|RUNNING|None|N/A|",),
            "is RUNNING: let it run, or run `trnslurm cancel ",
        ),
        (
            "REQUEUED",
            ("1002|PENDING|BeginTime|N/A|",),
            "is REQUEUED (it will start again within minutes)",
        ),
        ("STARTING", ("1002|CONFIGURING|None|N/A|",), "is CONFIGURING (its nodes are booting)"),
        ("FAILED", ("1002|RUNNING|None|N/A|",), "is RUNNING: let it run"),
    ],
)
def test_refused_while_it_goes_on(
    graphs, site, fake_slurm, cli, state: str, queue: tuple[str, ...], words: str
) -> None:
    begun(site, cli, state=state)
    fake_slurm.queue(*queue)
    assert words in cli("resume", "last").error
    assert len(fake_slurm.calls("sbatch")) == 2


def test_refused_while_it_is_being_cancelled(graphs, site, fake_slurm, cli) -> None:
    run = begun(site, cli, state="RUNNING")
    fake_slurm.queue("1002|RUNNING|None|N/A|")
    write_json(run.cancelled_file, {})
    assert cli("resume", "last").error == (
        f"{run.name} is being cancelled: resume it once it has ended"
    )


def test_refused_while_the_controller_is_silent(graphs, site, fake_slurm, cli) -> None:
    begun(site, cli)
    fake_slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    assert "Unable to contact slurm controller" in cli("resume", "last").error
    assert len(fake_slurm.calls("sbatch")) == 2


def test_refused_while_a_script_that_slurm_forgot_shows_life(graphs, site, fake_slurm, cli) -> None:
    run = begun(site, cli, state="RUNNING")
    fake_slurm.queue()
    run.heartbeat_file.touch()
    error = cli("resume", "last").error
    assert re.search(r"is LOST, but its last heartbeat was \d+ s ago", error)
    then = time.time() - 70
    os.utime(run.heartbeat_file, (then, then))
    assert cli("resume", "last").code == 0


def test_a_job_that_was_never_recorded(graphs, site, fake_slurm, cli) -> None:
    """As after a submission that was killed: what waits is replaced, what runs is refused."""
    run = begun(site, cli)
    run.write_record(replace(run.record(), jobs={}))
    fake_slurm.queue("1002|RUNNING|None|N/A|")
    assert "still has job 1002: run `trnslurm cancel" in cli("resume", "last").error
    fake_slurm.queue("1002|PENDING|Priority|N/A|")
    assert cli("resume", "last").code == 0
    (call,) = fake_slurm.calls("scancel")
    assert call.arguments == ["1002"]
    assert "1003" in run.record().jobs.values()


def test_two_at_once_are_one(graphs, site, fake_slurm, cli) -> None:
    """Of many that resume a run at the same moment, one submits it; the others say who did."""
    run = begun(site, cli)
    fake_slurm.queue()
    fake_slurm.forget_calls()
    argv = [sys.executable, "-m", "trnslurm", "resume", run.name]
    with ExitStack() as stack:
        starts = [
            stack.enter_context(subprocess.Popen(argv, stdout=PIPE, stderr=PIPE, text=True))
            for _ in range(4)
        ]
        ends = [(p.communicate(timeout=600), p.returncode) for p in starts]
    assert sorted(code for _, code in ends) == [0, 1, 1, 1]
    for (_, err), code in ends:
        assert not code or re.search(r"is being submitted by|was submitted by|is PENDING", err), err
    assert [call.cwd for call in fake_slurm.calls("sbatch")] == [run.path, run.path]


def test_turn_of_who_died_is_over(graphs, site, fake_slurm, cli, monkeypatch) -> None:
    run = begun(site, cli)
    fake_slurm.queue()
    newest = max(int(file.stem) for file in run.turns.iterdir())
    here = {"user": "ada", "host": socket.gethostname()}
    write_json(run.turns / f"{newest + 1}.json", here | {"process": own_process()})
    assert f"is being submitted by ada on {socket.gethostname()} (process {os.getpid()})" in (
        cli("resume", "last").error
    )
    write_json(run.turns / f"{newest + 1}.json", here | {"process": "1@1"})
    assert cli("resume", "last").code == 0
    assert [file.name for file in run.turns.iterdir()] == [f"{newest + 2}.json"]
    # Of another host nobody can tell but by the time.
    write_json(run.turns / f"{newest + 3}.json", {"user": "ada", "host": "login2"})
    assert "by ada on login2" in cli("resume", "last").error
    # The clock of this host may be wrong: that of the files counts.
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    assert "by ada on login2" in cli("resume", "last").error


def test_turn_is_private_and_none_is_left_on_a_full_disk(graphs, site, fake_slurm, cli) -> None:
    """A limit of the kernel on what this process may write stands in for the full disk."""
    run = begun(site, cli)
    with lock_run(run):
        (turn,) = run.turns.iterdir()
        assert stat.S_IMODE(turn.stat().st_mode) == 0o600
    assert stat.S_IMODE(turn.stat().st_mode) == 0o600
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(RunError, match="cannot write"), lock_run(run):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert list(run.turns.iterdir()) == [turn]
    with lock_run(run):
        assert [file.name for file in run.turns.iterdir()] == [f"{int(turn.stem) + 1}.json"]


def test_empty_turn_that_an_older_version_left_is_over(graphs, site, fake_slurm, cli) -> None:
    run = begun(site, cli)
    newest = max(int(file.stem) for file in run.turns.iterdir())
    empty = run.turns / f"{newest + 1}.json"
    empty.touch()
    with pytest.raises(NotYetError, match="is being submitted by another process"), lock_run(run):
        pass
    os.utime(empty, times=2 * (time.time() - 60,))
    with lock_run(run):
        assert not empty.exists()


def test_refused_if_its_files_have_changed(failed, fake_slurm, cli) -> None:
    failed.script("train").write_text("#!/bin/bash\n")
    assert cli("resume", "last").error == (
        f"{failed.script('train')} was changed after the submission: submit the bundle as a new run"
    )
    assert fake_slurm.calls("sbatch") == []
