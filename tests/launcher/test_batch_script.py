"""The rendered train.sbatch, run by bash with stand-ins of scontrol and srun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCONTROL = """\
#!/bin/bash
echo "$*" >> "{here}/asked"
if [ -e "{here}/busy" ]; then rm "{here}/busy"; exit 1; fi
case "$2" in
  hostnames) printf 'node-1\\nnode-2\\n' ;;
  node) echo "NodeName=$4 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=$4 " ;;
  job) cat "{here}/job" ;;
esac
"""
SLEEP = '#!/bin/bash\nif [ "$1" = 30 ]; then exec /bin/sleep 30; fi\n'


class Script:
    """A rendered bundle, and the directory of stand-ins that its PATH begins with."""

    def __init__(self, bundle: Path, commands: Path) -> None:
        self.bundle, self.commands = bundle, commands

    def command(self, name: str, text: str) -> None:
        (self.commands / name).write_text(text.replace("{here}", str(self.commands)))
        (self.commands / name).chmod(0o755)

    def start(self, nodes: int = 2) -> subprocess.Popen[bytes]:
        environment = {
            "SLURM_SUBMIT_DIR": str(self.bundle), "SLURM_JOB_ID": "4711", "LEAK": "secret",
            "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "node-[1-2]",
            "PATH": "/usr/bin:/bin", "TMPDIR": "/tmp",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", str(self.bundle / "train.sbatch")], env=environment, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, nodes: int = 2) -> int:
        with self.start(nodes) as process:
            self.said = process.communicate(timeout=60)[0].decode()
        return process.returncode

    def state(self, attempt: int = 1) -> dict[str, object]:
        state: dict[str, object] = json.loads(
            (self.bundle / f"state/train-{attempt}.json").read_text()
        )
        return state


@pytest.fixture
def script(site, cli: Callable[..., object], tmp_path: Path) -> Script:
    commands = tmp_path / "commands"
    commands.mkdir()
    site.profile(
        python=sys.executable, env={}, slurm={"partition": "compute", "bin_dir": str(commands)}
    )
    site.recipe("batch: {global_batch: 64}\nprecompile: never\nslurm: {time_min: 60}\n")
    cli("render", "toy", "--cluster", "pc", "--nodes", "2", "-o", "my bundle")
    made = Script(Path("my bundle").absolute(), commands)
    # Its directory is first on the script's PATH only if the interpreter's is not.
    train = made.bundle / "train.sbatch"
    text = train.read_text()
    train.write_text(text.replace("export PATH=", f"export PATH={commands}:", 1))
    made.command("scontrol", SCONTROL)
    made.command("sleep", SLEEP)
    made.command("srun", '#!/bin/bash\nenv > "{here}/env"; touch logs/train-1-node0.log\n')
    return made


def test_completes_in_a_closed_environment(script: Script) -> None:
    assert script.run() == 0, script.said
    state = script.state()
    assert (state["state"], state["exit_code"], state["hosts"]) == ("COMPLETED", 0, "node-1,node-2")
    seen = dict(line.split("=", 1) for line in (script.commands / "env").read_text().splitlines())
    assert "LEAK" not in seen
    assert seen["MASTER_ADDR"] == "10.1.2.3"
    assert seen["HOME"] != "" and seen["SLURM_EXPORT_ENV"] == "ALL"


def test_second_start_is_a_second_attempt(script: Script) -> None:
    assert [script.run(), script.run()] == [0, 0]
    assert script.state(2)["attempt"] == 2


def test_other_allocation_is_refused(script: Script) -> None:
    assert script.run(nodes=3) == 2
    assert "this script is for 2 nodes, the allocation has 3" in script.said
    assert script.state()["reason"] == "exit code 2 while checking the allocation"


def test_busy_controller_is_asked_again(script: Script) -> None:
    (script.commands / "busy").touch()
    assert script.run() == 0, script.said


def test_srun_that_started_nothing_is_tried_again(script: Script) -> None:
    script.command(
        "srun",
        '#!/bin/bash\necho x >> "{here}/tries"\n[ "$(wc -l < "{here}/tries")" -gt 1 ] || exit 1\n'
        "touch logs/train-1-node0.log\n",
    )
    assert script.run() == 0, script.said
    assert (script.commands / "tries").read_text() == "x\nx\n"


def test_failed_rank_is_not_tried_again(script: Script) -> None:
    script.command(
        "srun", '#!/bin/bash\necho x >> "{here}/tries"\ntouch logs/train-1-node1.log\nexit 9\n'
    )
    assert script.run() == 9
    assert (script.commands / "tries").read_text() == "x\n"
    assert script.state()["reason"] == "exit code 9 while running on node-1,node-2"


@pytest.mark.parametrize(
    ("job", "word"),
    [
        ("JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None ", "CANCELLED"),
        ("JobState=COMPLETING Reason=TimeLimit Restarts=0 PreemptTime=None ", "TIMEOUT"),
        ("JobState=COMPLETING Reason=None Restarts=1 PreemptTime=None ", "REQUEUED"),
        ("JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2026-01-01T00:00 ", "PREEMPTED"),
        ("", "CANCELLED"),
    ],
)
def test_term_is_told_apart(script: Script, job: str, word: str) -> None:
    (script.commands / "job").write_text(job)
    script.command("srun", "#!/bin/bash\ntouch logs/train-1-node0.log\nexec /bin/sleep 60\n")
    with script.start() as process:
        deadline = time.monotonic() + 30
        while not (script.bundle / "logs/train-1-node0.log").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert script.state()["state"] == word


def test_cancelled_run_does_not_come_back(script: Script) -> None:
    (script.bundle / "state/cancelled.json").write_text("{}")
    assert script.run() == 1
    assert not (script.commands / "env").exists()
    assert script.state()["state"] == "CANCELLED"
