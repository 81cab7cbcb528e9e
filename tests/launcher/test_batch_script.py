"""The rendered train.sbatch, run by bash with stand-ins of scontrol and srun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCONTROL = """\
#!/bin/bash
echo "$*" >> "{here}/asked"
if [ -e "{here}/busy" ]; then rm "{here}/busy"; exit 1; fi
case "$2" in
  hostnames) if [ "$3" = node-9 ]; then echo node-9; else printf 'node-1\\nnode-2\\n'; fi ;;
  node) echo "NodeName=$4 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=$4 " ;;
  job) cat "{here}/job" ;;
  config) echo 'KillWait                = 1 sec' ;;
  4711) [ ! -e "{here}/refuses" ] || { echo 'Requests are "not" accepted' >&2; exit 1; } ;;
esac
"""
SLEEP = """\
#!/bin/bash
case $1 in 30) exec /bin/sleep 30 ;; 0.2) exec /bin/sleep 0.2 ;; esac
"""
RUNNING = "JobState=RUNNING Reason=None Restarts=0 PreemptTime=None "
ENDING = "JobState=COMPLETING Reason={} Restarts={} PreemptTime={} ExcNodeList=(null) "
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"
WAITS = "#!/bin/bash\n/bin/sleep 0.3\ntouch logs/train-1-node0.log\nexec /bin/sleep 60\n"


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

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The script, once srun has started the node; then it must end."""
        with self.start() as process:
            deadline = time.monotonic() + 30
            while not (self.bundle / "logs/train-1-node0.log").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process
            self.said = process.communicate(timeout=60)[0].decode()

    def asked(self, word: str) -> list[str]:
        """The orders of a kind that the controller got."""
        lines = (self.commands / "asked").read_text().splitlines()
        return [line for line in lines if line.startswith(word)]

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
    """Not here: the job is requeued, until it has crashed too often without a new checkpoint."""
    (script.commands / "job").write_text(RUNNING)
    script.command(
        "srun",
        '#!/bin/bash\necho x >> "{here}/tries"\ntouch "logs/train-$(wc -l < "{here}/tries")'
        '-node1.log"\nexit 9\n',
    )
    assert [script.run() for _ in range(3)] == [9, 9, 9]
    assert (script.commands / "tries").read_text() == "x\nx\nx\n"
    why = "without a new checkpoint: exit code 9 while running on node-1,node-2"
    assert [
        (said["state"], said["cause"], said["reason"]) for said in map(script.state, (1, 2, 3))
    ] == [
        ("REQUEUED", "crash", f"crash 1 of 3 {why}"),
        ("REQUEUED", "crash", f"crash 2 of 3 {why}"),
        ("FAILED", "crash", f"given up after 3 crashes in a row {why}"),
    ]
    assert script.asked("requeue") == ["requeue 4711"] * 2
    # Slurm starts it all the same, as after a node failure.
    assert script.run() == 1
    assert "given up after 3 crashes in a row" in str(script.state(4)["reason"])
    assert len((script.commands / "tries").read_text()) == 6


def test_requeue_that_is_refused(script: Script) -> None:
    (script.commands / "job").write_text(RUNNING)
    (script.commands / "refuses").touch()
    script.command("srun", "#!/bin/bash\ntouch logs/train-1-node1.log\nexit 9\n")
    assert script.run() == 9
    state = script.state()
    assert state["state"] == "FAILED"
    assert str(state["reason"]).endswith("; it could not be requeued: Requests are not accepted")


def test_verdict_without_a_python_is_the_exit_code(script: Script) -> None:
    ending = script.bundle / "code/trnslurm/node/ending.py"
    ending.write_text("raise SystemExit(3)\n")
    script.command("srun", "#!/bin/bash\ntouch logs/train-1-node1.log\nexit 9\n")
    assert script.run() == 9
    assert script.state()["reason"] == "exit code 9 while running on node-1,node-2"
    assert script.state()["state"] == "FAILED"


def test_early_signal(script: Script) -> None:
    """The workers save, and say so; a bad node is left out of what follows."""
    (script.commands / "job").write_text(RUNNING + "ExcNodeList=node-9 ")
    saves = """\
        until [ -e state/stop-train-1.json ]; do /bin/sleep 0.05; done
        mkdir -p checkpoints/step-00000020
        echo '{"step": 20, "saved": true}' > state/stopped-train-1.json
        echo '{"node": 1, "host": "x", "line": "stuck"}' > state/stuck-train-1.json
        """
    script.command("srun", f"#!/bin/bash\ntouch logs/train-1-node0.log\n{saves}")
    with script.running() as process:
        os.kill(process.pid, signal.SIGUSR1)
    assert process.returncode == 143, script.said
    state = script.state()
    assert (state["state"], state["reason"]) == ("REQUEUED", "time limit; saved step 20")
    stop = json.loads((script.bundle / "state/stop-train-1.json").read_text())
    assert stop["cause"] == "time limit"
    assert script.asked("update") == ["update JobId=4711 ExcNodeList=node-2,node-9"]


def test_cancelled_as_it_ends(script: Script) -> None:
    """Slurm would start the job again."""
    (script.commands / "job").write_text(ENDING.format("None", 0, "None"))
    script.command("srun", "#!/bin/bash\ntouch logs/train-1-node1.log\nexit 9\n")
    script.run()
    assert script.state()["state"] == "CANCELLED"
    assert script.asked("requeue") == []


@pytest.mark.parametrize(
    ("job", "word", "requeued"),
    [
        (ENDING.format("None", 0, "None"), "CANCELLED", 0),
        (ENDING.format("TimeLimit", 0, "None"), "TIMEOUT", 0),
        (ENDING.format("None", 1, "None"), "REQUEUED", 0),
        (ENDING.format("None", 0, "2026-01-01T00:00"), "REQUEUED", 1),
        ("", "CANCELLED", 0),
        (UNKNOWN, "FAILED", 0),
        (RUNNING + "WorkDir=/runs/of-another ", "FAILED", 0),
    ],
)
def test_term_is_told_apart(script: Script, job: str, word: str, requeued: int) -> None:
    (script.commands / "job").write_text(job)
    script.command("srun", WAITS)
    with script.running() as process:
        os.kill(process.pid, signal.SIGTERM)
    assert process.returncode == (137 if word == "FAILED" else 143)  # srun's, if it is a crash
    assert script.state()["state"] == word, script.said
    assert len(script.asked("requeue")) == requeued
    assert (script.bundle / "state/stop-train-1.json").exists()


def test_cancelled_run_does_not_come_back(script: Script) -> None:
    (script.bundle / "state/cancelled.json").write_text("{}")
    assert script.run() == 1
    assert not (script.commands / "env").exists()
    assert script.state()["state"] == "CANCELLED"
