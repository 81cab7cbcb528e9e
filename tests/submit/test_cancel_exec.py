"""cancel and exec: what scancel and srun are asked to do."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trnslurm.contract.files import write_json
from trnslurm.node.stacks import in_parts
from trnslurm.records.run import process_start
from trnslurm.runs.status import run_status

from ..toy_site import write_attempt

DONE = {"state": "COMPLETED", "exit_code": 0}
RUNNING = {"state": "RUNNING"}
PENDING = ("1001|PENDING|Resources|N/A|", "1002|PENDING|Dependency|N/A|")


def test_cancel_takes_the_last_phase_first(fake_slurm, make_run, cli) -> None:
    run = make_run()
    fake_slurm.queue(*PENDING)
    done = cli("cancel", run.name)
    assert (done.code, done.out) == (0, f"Cancelled {run.name}\n")
    (call,) = fake_slurm.calls("scancel")
    assert call.arguments == ["1002", "1001"]
    assert json.loads(run.cancelled_file.read_text())["by"]


def test_cancel_names_the_jobs_of_a_damaged_run(fake_slurm, make_run, cli) -> None:
    run = make_run()
    run.record_file.write_text("{}")
    fake_slurm.answer("places", f"1001|gpt|{run.path}", "1002|gpt|/elsewhere")
    assert cli("cancel", run.path).error == (
        f"{run.record_file}: damaged or unreadable (missing run, name, recipe, preset, cluster, "
        "scheduler, nodes, phases, created, user, host): scancel 1001"
    )
    assert fake_slurm.calls("scancel") == []


def test_a_newer_run_is_refused(fake_slurm, make_run, cli) -> None:
    run = make_run()
    record = json.loads(run.record_file.read_text())
    assert record["format"] == 1
    fake_slurm.queue(*PENDING)
    write_json(run.record_file, {k: v for k, v in record.items() if k != "format"})
    assert cli("status", run.name).code == 0  # it was made before there were formats
    write_json(run.record_file, record | {"format": 2, "versions": {"trnslurm": "2.0.0"}})
    for command in ("status", "cancel", "resume"):
        said = cli(command, run.name).error
        assert said.startswith(f"{run.name} is a run of trnslurm 2.0.0, which version ")


GOLDEN = Path(__file__).parents[1] / "goldens/trn1-2-nodes/train.sbatch"
RENDERED = GOLDEN.read_text(encoding="utf-8").replace("trap ", "# trap ")


def training(fake_slurm, make_run, script: str = "trap on_stop USR1\n", **fields):
    """A run whose training runs as job 1002."""
    run = make_run(states={"precompile": [DONE], "train": [RUNNING | {"job_id": "1002"}]}, **fields)
    (run.path / "train.sbatch").write_text(script)
    fake_slurm.queue("1002|RUNNING|None|x|node-[1-2]")
    return run


@pytest.mark.parametrize("script", ["trap on_stop USR1\n", RENDERED], ids=["old", "rendered"])
def test_training_that_runs_is_asked_to_save(
    fake_slurm, make_run, cli, script: str, stable
) -> None:
    """It ends by itself: what waits for it is cancelled at once."""
    run = training(fake_slurm, make_run, script, then="20260101-000001-next")
    after = make_run(
        "20260101-000001-next", jobs={"precompile": "1003", "train": "1004"}, after=run.name
    )
    fake_slurm.queue(
        "1002|RUNNING|None|x|node-[1-2]", "1003|PENDING|Dependency|N/A|",
        "1004|PENDING|Dependency|N/A|",
    )  # fmt: skip
    done = cli("cancel", run.name)
    assert (done.code, done.out) == (0, (
        f"Cancelling {run.name}: saving a checkpoint first (use --now to skip it)\n"
        f"Cancelled {after.name}\n"
    ))  # fmt: skip
    assert [call.arguments for call in fake_slurm.calls("scancel")] == [
        ["1004", "1003", "1001"], ["--batch", "--signal=USR1", "1002"],
    ]  # fmt: skip
    assert run.cancelled_file.exists() and after.cancelled_file.exists()
    status = run_status(run)
    assert status.state == "RUNNING"
    assert status.reason == "cancelled: saving a checkpoint first; use cancel --now to skip it"
    assert json.loads(cli("cancel", run.name, "--json").out)[0] == {"run": run.name, "saves": True}
    done = cli("cancel", run.name, "--now", "--json")
    stable.json("cancel", json.loads(done.out))
    assert json.loads(done.out)[0] == {"run": run.name, "saves": False}
    assert "1002" in fake_slurm.calls("scancel")[-1].arguments
    (run.checkpoints / "step-00000020").mkdir(parents=True)
    assert (
        cli("cancel", run.name).out
        == f"{run.name} has already ended: CANCELLED (by trnslurm cancel; step 20 is saved)\n"
    )
    fake_slurm.queue("1002|RUNNING|None|x|node-[1-2]")
    saved = f"Cancelled {run.name}; step 20 is saved: trnslurm resume {run.name}\n"
    assert cli("cancel", run.name, "--now").out.startswith(saved)


@pytest.mark.parametrize(
    ("script", "queue", "attempt"),
    [
        ("trap on_term TERM\n", "RUNNING", {}),  # it has no such trap: the signal would kill it
        ("trap on_stop USR1\n", "COMPLETING", {}),
        ("trap on_stop USR1\n", "RUNNING", {"state": "STARTING"}),
        ("trap on_stop USR1\n", "RUNNING", {"job_id": "990"}),  # of the job before
    ],
)
def test_no_signal_for_a_script_without_a_trap(
    fake_slurm, make_run, cli, script: str, queue: str, attempt: dict
) -> None:
    run = training(fake_slurm, make_run, script)
    write_attempt(run, "train", 1, **RUNNING | {"job_id": "1002"} | attempt)
    fake_slurm.queue(f"1002|{queue}|None|x|node-[1-2]")
    assert cli("cancel", run.name).out == f"Cancelled {run.name}\n"
    (call,) = fake_slurm.calls("scancel")
    assert call.arguments == ["1002", "1001"]


def test_a_script_that_tells_nothing_is_not_asked_to_save(fake_slurm, make_run, cli) -> None:
    """It would not look, and train on."""
    run = training(fake_slurm, make_run, RENDERED)
    run.code.mkdir()
    run.project_file.write_text("{}")
    run.metrics_file.write_text('{"attempt": 1, "step": 3}\n')
    assert cli("cancel", run.name).out.startswith(
        f"Cancelling {run.name}: saving a checkpoint first"
    )
    run.metrics_file.write_text('{"attempt": 1, "step": 3, "read": "log"}\n')
    assert cli("cancel", run.name).out == f"Cancelled {run.name}\n"


def test_what_slurm_has_left_of_a_run_that_completed(fake_slurm, make_run, cli) -> None:
    """As a job that it holds after a restart of its own; the run stays what it is."""
    run = make_run(states={"precompile": [DONE], "train": [DONE]})
    fake_slurm.queue("1002|PENDING|launch failed requeued held|N/A|")
    status = json.loads(cli("status", run.name, "--json").out)
    assert (status["state"], status["mend"]) == ("COMPLETED", f"trnslurm cancel {run.name}")
    assert cli("cancel", run.name).out == f"Cancelled {run.name}\n"
    assert not run.cancelled_file.exists()
    status = json.loads(cli("status", run.name, "--json").out)
    assert (status["state"], status["mend"]) == ("COMPLETED", "")


def test_cancelling_again_changes_nothing(fake_slurm, make_run, cli) -> None:
    run = make_run()
    fake_slurm.queue(*PENDING)
    assert cli("cancel", run.name).code == 0
    again = cli("cancel", run.name)
    assert (again.code, again.out) == (
        0,
        f"{run.name} has already ended: CANCELLED (by trnslurm cancel; in precompile)\n",
    )
    assert len(fake_slurm.calls("scancel")) == 1
    fake_slurm.queue()
    assert run_status(run).state == "CANCELLED"


def test_run_that_ended_stays_what_it_is(fake_slurm, make_run, cli) -> None:
    run = make_run(states={"precompile": [DONE], "train": [DONE]})
    done = cli("cancel", run.name)
    assert (done.code, done.out) == (0, f"{run.name} has already ended: COMPLETED\n")
    assert fake_slurm.calls("scancel") == []
    assert not run.cancelled_file.exists()


@pytest.mark.parametrize(
    "why", ["Invalid job id specified", "Job/step already completing or completed"]
)
def test_job_that_ended_in_between_is_no_error(fake_slurm, make_run, cli, why: str) -> None:
    """By itself, or by another cancel at the same time."""
    run = make_run()
    fake_slurm.queue(*PENDING)
    fake_slurm.refuse("scancel", f"scancel: error: Kill job error on job id 1001: {why}")
    assert cli("cancel", run.name).code == 0


def test_cancel_that_failed_is_not_taken_for_one(fake_slurm, make_run, cli) -> None:
    run = make_run()
    fake_slurm.queue(*PENDING)
    silent = "Unable to contact slurm controller (connect failure)"
    fake_slurm.refuse("scancel", f"scancel: error: {silent}")
    done = cli("cancel", run.name)
    assert done.code == 1
    assert silent in done.error
    fake_slurm.refuse("squeue", f"slurm_load_jobs error: {silent}")
    assert run_status(run).state == "PENDING"  # as far as anybody knows


def test_cancel_of_a_local_run_ends_its_processes(make_run, cli) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        word = f"{process.pid}@{process_start(process.pid)}"
        run = make_run(scheduler="local", jobs={"local": word}, states={"precompile": [RUNNING]})
        try:
            assert cli("cancel", run.name).out == f"Cancelled {run.name}\n"
            assert process.wait(timeout=600) == -15
        finally:
            process.kill()


def test_local_run_of_another_host_is_cancelled_there(make_run, cli) -> None:
    run = make_run(
        scheduler="local", host="elsewhere", jobs={"local": "1@1"},
        states={"precompile": [RUNNING]}, heartbeat_age_s=1,
    )  # fmt: skip
    done = cli("cancel", run.name)
    assert done.code == 1
    assert done.error == f"{run.name} is running on elsewhere: cancel it there"
    assert run_status(run).state == "PRECOMPILING"
    assert not run.cancelled_file.exists()


@pytest.fixture
def running(fake_slurm, make_run):
    """A run whose train phase runs on two nodes."""
    run = make_run(states={"precompile": [DONE], "train": [{"state": "REQUEUED"}, RUNNING]})
    fake_slurm.queue("1002|RUNNING|None|x|node-[1-2]")
    return run


def test_exec_steps_into_the_allocation(fake_slurm, running, run_cli, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = run_cli("exec", running.name, "--node", "1", "--", "printf", "%s|", "a b", "-n", "$x")
    assert (done.code, done.out) == (0, "a b|-n|$x|")
    (call,) = fake_slurm.calls("srun")
    assert call.arguments == [
        "--jobid=1002", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=node-2",
        f"--chdir={running.path}", "--export=ALL", "printf", "%s|", "a b", "-n", "$x",
    ]  # fmt: skip
    assert "SLURM_JOB_ID" not in call.environ
    assert run_cli("exec", running.name, "--", "sh", "-c", "exit 7").code == 7


def test_exec_while_precompiling_is_on_that_job(fake_slurm, make_run, run_cli) -> None:
    run = make_run(states={"precompile": [RUNNING]})
    fake_slurm.queue("1001|RUNNING|None|x|node-1", "1002|PENDING|Dependency|N/A|")
    assert run_cli("exec", run.name, "--", "true").code == 0
    assert "--jobid=1001" in fake_slurm.calls("srun")[0].arguments


def test_exec_refusals(fake_slurm, make_run, running, cli) -> None:
    error = cli("exec", running.name, "--node", "2", "--", "true").error
    assert error == f"{running.name} has only nodes 0 to 1, not node 2"
    ended = make_run("20260102-000000-ended", states={"precompile": [DONE], "train": [DONE]})
    error = cli("exec", ended.name, "--", "true").error
    assert error == f"{ended.name} is COMPLETED: exec requires a running job"
    starting = make_run("20260103-000000-starting", states={"precompile": [DONE]})
    error = cli("exec", starting.name, "--", "true").error
    assert "has not recorded its nodes yet: try again" in error
    assert fake_slurm.calls("srun") == []


def test_exec_on_a_local_run_is_here(make_run, run_cli) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        word = f"{process.pid}@{process_start(process.pid)}"
        run = make_run(scheduler="local", jobs={"local": word}, states={"precompile": [RUNNING]})
        done = run_cli("exec", run.name, "--", "pwd")
        missing = run_cli("exec", run.name, "--", "no-such-command")
        process.kill()
    assert (done.code, done.out) == (0, f"{run.path}\n")
    assert missing.code == 1
    assert missing.error == "no-such-command: No such file or directory"


WORKER = {
    "host": "node-1", "state": "S", "program": "python: state S, -", "pid": 9, "text": "Thread",
    "frames": [["/env/lib/site-packages/torch/a.py", 7, "wait"], ["RUN/code/train.py", 3, "f"]],
}  # fmt: skip


def test_stacks_are_asked_of_all_nodes(fake_slurm, running, cli, tmp_path, request, stable) -> None:
    """Workers at the same place are one group; the one elsewhere stands out."""
    frames = [[f.replace("RUN", str(running.path)), n, name] for f, n, name in WORKER["frames"]]
    alike = [WORKER | {"rank": rank, "frames": frames} for rank in (1, 0, 3)]
    other = WORKER | {"rank": 2, "host": "node-2", "frames": []}
    answers = tmp_path / "answers"
    each = [
        [*in_parts(f"h:{w['rank']}", json.dumps(w | {"padding": "x" * 3000}))]
        for w in (*alike, other)
    ]
    assert max(map(len, each[0])) < 1024  # else srun mixes the lines of nodes
    mixed = [line for lines in itertools.zip_longest(*each) for line in lines if line]
    answers.write_text("\n".join(["noise", *mixed]))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH $*" > {tmp_path}/asked; cat {answers}\n')
    python.chmod(0o755)
    there = {"TRNSLURM_RUN_DIR": str(running.path), "TRNSLURM_PYTHON": str(python)}
    worker = subprocess.Popen(["sleep", "600"], env=os.environ | there)
    request.addfinalizer(worker.kill)
    done = cli("stacks", running.name)
    assert done.out.splitlines() == [
        "3 workers: 0-1,3",
        "  torch/a.py:7 wait",
        "  code/train.py:3 f",
        "",
        "worker 2 on node-2, python: state S, -",
        "  no Python stack: the process is stopped, still loading a library, "
        "or not a Python program",
        "",
    ]
    (call,) = fake_slurm.calls("srun")
    assert {"--jobid=1002", "--nodes=2", "--nodelist=node-1,node-2"} <= {*call.arguments}
    words = f"{running.python_path} -m trnslurm.node.stacks {running.path} train 2\n"
    assert (tmp_path / "asked").read_text() == words
    workers = json.loads(cli("stacks", running.name, "--json").out)
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
    stable.json("stacks", [{k: v for k, v in w.items() if k != "padding"} for w in workers])
    assert (
        "worker 2 on node-2, python: state S, -\nThread\n"
        in cli("stacks", running.name, "--full").out
    )
    answers.write_text("")
    assert cli("stacks", running.name).error == f"{running.name}: there is no worker yet"
    worker.kill()
    worker.wait()
    assert "has no process of the run" in cli("stacks", running.name).error


def test_a_job_that_has_a_lost_one_s_number_is_left_alone(fake_slurm, make_run, cli) -> None:
    """A controller that was killed forgets its newest jobs, and gives their numbers to others."""
    run = training(fake_slurm, make_run)
    fake_slurm.queue(
        f"1001|RUNNING|None|x|node-1|{run.path}",
        "1002|RUNNING|None|x|node-[1-2]|/runs/20260101-000009-other",
    )
    assert cli("cancel", run.name).code == 0
    (call,) = fake_slurm.calls("scancel")
    assert call.arguments == ["1001"]
