"""Runs on this machine, for real: submitit's controller, guard, batch script, node.sh, launcher."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..processes import Done, processes_with, run_process
from ..waiting import eventually
from ..webhook import SECRET, serving

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parent.parent.parent
MARK = "TRNSLURM_TEST_MARK"

RECIPE = """
description: a job that does what the test says
default_cluster: local
steps: 3
batch: {global_batch: 4}
precompile: never
train: {behaviour: "wait"}
"""

# Each rank says that it is there, then behaves. `wait` ignores TERM, as a hung collective would.
JOB = """
import json, os, pathlib, signal, sys, time
plan = json.load(open(sys.argv[1]))
rank = int(os.environ["RANK"])
assert int(os.environ["WORLD_SIZE"]) == plan["workers"]
run = pathlib.Path(os.environ["TRNSLURM_RUN_DIR"])
behaviour = plan["train"]["behaviour"]
if behaviour == "fail" and rank == 1:
    raise ValueError("rank 1 was told to fail")
if behaviour == "environment" and rank == 0:
    (run / "environment.json").write_text(json.dumps({**os.environ, "sys.prefix": sys.prefix}))
if behaviour == "wait":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run / f"there-{rank}").touch()
if behaviour in ("wait", "fail"):
    time.sleep(600)
"""


@dataclass
class Machine:
    """An isolated home, with a workspace that has the recipe above."""

    home: Path
    mark: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "TRNSLURM_PATH": str(self.home / "my recipes"),
            MARK: self.mark,
        }

    @property
    def run_root(self) -> Path:
        return self.home / "it's a run root"

    @property
    def runs(self) -> list[Path]:
        return sorted(self.run_root.glob("*"))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "trnslurm", *arguments]

    def submit(self, behaviour: str, *more: str) -> list[str]:
        return self.command(
            "submit", "obedient", "--cluster", "local", "--nodes", "2",
            "--set", f"run_root={self.run_root}",
            "--set", f"train.behaviour={behaviour}", *more,
        )  # fmt: skip

    def run(self, *command: str) -> Done:
        return run_process(command, env=self.environment, cwd=self.home)

    def status(self) -> dict[str, object]:
        done = self.run(*self.command("status", str(self.runs[-1]), "--json"))
        assert done.code == 0, done.err
        status: dict[str, object] = json.loads(done.out)
        return status

    def processes(self) -> list[str]:
        """Every process below this run: its command line or its environment names the home."""
        return processes_with(str(self.home))

    def both_ranks_are_there(self) -> bool:
        return bool(self.runs) and len(list(self.runs[-1].glob("there-*"))) == 2


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    job = tmp_path / "my recipes" / "jobs" / "obedient"
    job.mkdir(parents=True)
    (job / "recipe.yaml").write_text(RECIPE)
    (job / "train.py").write_text(JOB)
    machine = Machine(home=tmp_path, mark=str(tmp_path))
    yield machine
    assert machine.processes() == []


@pytest.fixture
def launcher(machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """A followed submission whose two ranks wait for ever, TERM or not."""
    log = (machine.home / "launcher.log").open("wb")
    with log, subprocess.Popen(
        machine.submit("wait"), env=machine.environment, cwd=machine.home,
        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    ) as process:  # fmt: skip
        try:
            eventually(machine.both_ranks_are_there)
            yield process
        finally:
            process.kill()


@pytest.mark.first
def test_a_run_completes_in_a_closed_environment(machine: Machine) -> None:
    """A secret of the submitting shell does not reach the job."""
    done = machine.run(*machine.submit("environment"))
    assert done.code == 0, done.err
    assert "COMPLETED" in done.out
    assert machine.status()["state"] == "COMPLETED"
    assert (machine.runs[0].stat().st_mode & 0o777) == 0o700
    seen = json.loads((machine.runs[0] / "environment.json").read_text())
    assert MARK not in seen
    assert seen["TRNSLURM_PHASE"] == "train"
    code = machine.runs[0] / "code"
    package = f"{code}/trnslurm.zip"
    assert seen["PYTHONPATH"] == f"{package}/trnslurm/node/startup:{package}:{code}"


def test_a_failing_rank_ends_the_run_on_all_nodes(machine: Machine) -> None:
    """And people are told, by a webhook and a command."""
    with serving(500, 200) as hook:
        file, told = hook.file(machine.home / "my hook"), machine.home / "what's told"
        command = f"cat > {shlex.quote(str(told))}"
        done = machine.run(*machine.submit("fail", "--notify", f"@{file}", "--notify", command))
        tried, sent = hook.got
    assert tried == sent == json.loads(told.read_text())
    assert [sent[k] for k in ("event", "run", "recipe", "cluster", "nodes", "state")] == [
        "failure", machine.runs[0].name, "obedient", "local", 2, "FAILED",
    ]  # fmt: skip
    assert sent["reason"].startswith("ValueError: rank 1 was told to fail at train.py, line ")
    said = (machine.runs[0] / "logs/train-local.log").read_text()
    assert said.count("notify: failure: ") == 2
    for name in machine.runs[0].rglob("*"):
        assert not name.is_file() or SECRET.encode() not in name.read_bytes(), name
    assert done.code == 1
    status = machine.status()
    assert status["state"] == "FAILED"
    assert str(status["reason"]).startswith(
        "ValueError: rank 1 was told to fail at train.py, line "
    )
    assert "ValueError: rank 1 was told to fail" in done.out
    shown = machine.run(*machine.command("status", str(machine.runs[-1])))
    assert "ValueError: rank 1 was told to fail" in shown.out


def test_ctrl_c_stops_the_run(machine: Machine, launcher: subprocess.Popen[bytes]) -> None:
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=600) == 130
    assert machine.processes() == []
    status = machine.status()
    assert status["state"] == "CANCELLED"
    assert status["mend"] == f"trnslurm resume {machine.runs[-1].name}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_orphan_when_the_launcher_dies(
    machine: Machine, launcher: subprocess.Popen[bytes], number: int
) -> None:
    launcher.send_signal(number)
    launcher.wait(timeout=600)
    eventually(lambda: not machine.processes())
    status = machine.status()
    assert status["state"] == "CANCELLED"
    assert f"process {launcher.pid}, which this run belongs to, has ended" in str(status["reason"])


def test_a_killed_guard_is_named(machine: Machine, launcher: subprocess.Popen[bytes]) -> None:
    job = json.loads((machine.runs[-1] / "run.json").read_text())["jobs"]["local"]
    os.kill(int(job.partition("@")[0]), signal.SIGKILL)
    assert launcher.wait(timeout=600) == 1
    eventually(lambda: not machine.processes())
    status = machine.status()
    assert status["state"] == "CANCELLED"
    assert str(status["reason"]).startswith("the process that guards the run was killed")


def test_cancel_from_elsewhere(machine: Machine, launcher: subprocess.Popen[bytes]) -> None:
    inside = machine.run(*machine.command("exec", str(machine.runs[-1]), "--", "pwd"))
    assert inside.out.strip() == str(machine.runs[-1])
    done = machine.run(*machine.command("cancel", str(machine.runs[-1])))
    assert done.code == 0, done.err
    assert launcher.wait(timeout=600) == 1
    assert machine.processes() == []
    assert machine.status()["state"] == "CANCELLED"
    again = machine.run(*machine.command("cancel", str(machine.runs[-1])))
    assert again.code == 0
    assert "has already ended" in again.out


def test_lost_when_everything_was_killed_at_once(
    machine: Machine, launcher: subprocess.Popen[bytes]
) -> None:
    """As after a power cut: nothing had the time to write anything down."""
    pids = [int(line.split(":")[0]) for line in machine.processes()]
    for _ in range(3):  # guard's two halves watch each other; stop all, then kill all
        for pid in pids:
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                pass
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    launcher.wait(timeout=600)
    eventually(lambda: not machine.processes())
    status = machine.status()
    assert status["state"] == "LOST"
    assert "no heartbeat since" in str(status["reason"])


@pytest.mark.first
def test_by_hand_with_plain_bash(machine: Machine) -> None:
    machine.run(
        *machine.command("render", "obedient", "--cluster", "local", "--nodes", "2",
                         "-o", "by hand", "--set", "train.behaviour=nothing")
    )  # fmt: skip
    environment = {**machine.environment, "TRNSLURM_PYTHON": sys.executable}
    done = run_process(["bash", "by hand/train.sh"], env=environment, cwd=machine.home)
    assert done.code == 0, done.err
    state = json.loads((machine.home / "by hand/state/train-1.json").read_text())
    assert state["state"] == "COMPLETED"
