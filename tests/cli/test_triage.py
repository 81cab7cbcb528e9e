"""Where triage is shown: its command, status, and the program that batch scripts run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import PACKAGE
from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.records.run import RunDir
from trnslurm.render.bundle import Bundle
from trnslurm.render.package import package_files

from ..processes import Done, run_process

ROOT = Path(__file__).parents[2]
DONE = {"state": "COMPLETED", "exit_code": 0}
FAILED = {"state": "FAILED", "exit_code": 1}


def record(run: RunDir, rank: int, error: str, attempt: int = 1) -> None:
    write_json(
        run.state / f"failed-train-{attempt}-rank{rank}.json",
        {"time": 5.0, "rank": rank, "node": 0, "host": "node-1", "error": error, "traceback": ""},
    )


def test_command(make_run, cli, fake_slurm, stable) -> None:
    run = make_run(states={"precompile": [FAILED], "train": [FAILED, FAILED]})
    for attempt in (1, 2):
        record(run, attempt, f"ValueError: in attempt {attempt}", attempt=attempt)
    done = cli("triage", run.name)
    assert (done.code, done.out) == (0, "\n".join(_report(run, 2)) + "\n")
    data = json.loads(cli("triage", run.name, "--attempt", "1", "--json").out)
    stable.json("triage", data)
    assert (data["rank"], data["attempt"], data["kind"]) == (1, 1, "cause")
    silent = cli("triage", run.name, "--phase", "precompile")
    assert silent.code == 1 and "no failure was found" in silent.out
    error = cli("triage", run.name, "--attempt", "7").error
    assert error == f"{run.name} has no attempt 7 of train, only 2"
    fresh = make_run("20260102-000000-fresh", jobs={})
    assert "has not started" in cli("triage", fresh.name).error
    waiting = make_run("20260103-000000-waiting", states={"precompile": [DONE]})
    fake_slurm.queue("1002|PENDING|Nodes required for job are DOWN, DRAINED|N/A|")
    done = cli("triage", waiting.name)
    why = "the nodes it needs are down, drained or reserved"
    assert done.code == 1 and done.out.startswith(f"{waiting.name}: PENDING ({why}): nothing has")


def test_the_attempts_program_was_killed(make_run, cli, fake_slurm) -> None:
    """srun, which ends with it, blames a task; as long as the job runs, so does the diagnosis."""
    killed = {"state": "RUNNING", "hosts": "node-1,node-2", "job_id": "1002"}
    run = make_run(states={"train": [killed]}, phases=("train",), jobs={"train": "1002"})
    run.batch_log("train", "1002").write_text(
        "srun: forcing job termination\nsrun: error: node-1: task 0: Killed\n"
    )
    for state, cause in (
        ("RUNNING", "a task was killed"),
        ("FAILED", "that program was killed on"),
    ):
        fake_slurm.queue(f"1002|{state}|JobLaunchFailure|x|node-[1-2]")
        assert cause in cli("triage", run.name).out
    assert "that program was killed on" in cli("status", run.name).out


def test_a_run_that_recovered_names_what_failed_before(make_run, cli, fake_slurm) -> None:
    crashed = {"state": "RESTARTED", "cause": "crash", "reason": "crash 1 of 3: KeyError: 'lr'"}
    limit = {"state": "REQUEUED", "cause": "time limit", "reason": "time limit"}
    run = make_run(
        states={"train": [crashed, limit, {"state": "RUNNING"}, DONE]},
        phases=("train",),
        jobs={"train": "1002"},
    )
    done = cli("triage", run.name)
    assert (done.code, done.out) == (
        1,
        "triage: train attempt 4: COMPLETED: nothing failed\n"
        f"attempt 1 failed (crash 1 of 3: KeyError: 'lr'): trnslurm triage {run.name} --attempt 1\n"
        f"attempt 3 failed: trnslurm triage {run.name} --attempt 3\n",
    )
    assert cli("triage", run.name, "--attempt", "1").out.count("\n") == 1


def test_status_shows_it_after_a_crash_but_not_after_a_stop(make_run, cli, fake_slurm) -> None:
    crashed = {"state": "REQUEUED", "reason": "crash 1 of 3"}
    run = make_run(states={"train": [crashed]}, phases=("train",), jobs={"train": "1002"})
    fake_slurm.queue("1002|PENDING|BeginTime|x|")
    record(run, 1, "ModuleNotFoundError: No module named 'h5py'")
    out = cli("status", run.name).out
    assert "\nfix: install it with the job's own Python" in out and f"{run.name}: REQUEUED" in out
    data: dict[str, Any] = json.loads(cli("status", run.name, "--json").out)
    assert data["failure"]["name"] == "module-missing"
    (run.state / "stop-train-1.json").write_text("{}")
    assert "fix:" not in cli("status", run.name).out


def test_as_a_program_with_the_nodes_python(make_run, tmp_path: Path) -> None:
    """From a bundle's code/, where nothing else of ours is."""
    run = make_run(states={"train": [FAILED]})
    Bundle(files=package_files(("node",))).write(tmp_path)
    record(run, 1, "ValueError: x")

    def program(*arguments: str) -> Done:
        code = (
            "import sys, runpy; sys.path.insert(0, sys.argv.pop(1));"
            "runpy.run_module('trnslurm.node.triage', run_name='__main__', alter_sys=True)"
        )
        command = [sys.executable, "-I", "-c", code, str(tmp_path / PACKAGE), *arguments]
        return run_process(command, cwd=run.path)

    done = program(".", "--phase", "train", "--attempt", "1")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == _report(run, 1)
    assert json.loads(program(".", "--json").out)["rank"] == 1
    assert program(str(tmp_path)).err.startswith("error: ")


def _report(run: RunDir, attempt: int) -> list[str]:
    finding = diagnose(run.path, "train", attempt)
    assert finding is not None
    return finding.report()
