"""What takes over on the second node, with stand-ins of srun and scontrol on PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trnslurm
from trnslurm.node.beats import Beats

from .test_attempt import AGAIN, RUNNING, Script

NODES = """\
#!/bin/bash
cd "$(dirname "$0")"
echo "$*" >> asked
case "$2" in
  node) for n in 1 2 3; do echo "NodeName=node-$n NodeAddr=127.0.0.$n Port=1 State=IDLE"; done ;;
  job) cat job ;;
  config) echo 'KillWait                = 5 sec' ;;
esac
"""
# The step that asks the other nodes, the one that ends orphans, its own successor, the training.
SRUN = """\
#!/bin/bash
echo "$*" >> sruns
case "$*" in
  *--sees*) exit "$(cat sees)" ;;
  *--end*) exit 0 ;;
  *attempt.successor*) exec sleep 600 ;;
esac
touch "logs/train-$TRNSLURM_ATTEMPT-node0.log"
env > trained
exit "$(cat code)"
"""
# Nobody reaches node-1 after the first time; all else is as it is, but soon.
PROGRAM = """\
import sys
from trnslurm.node import beats, controller
from trnslurm.node.attempt import successor
beats.PERIOD_S = 0.1
successor.SILENT_S = 0.5
asked = []
controller.answers = lambda address, *_: asked.append(address) or (
    address != "127.0.0.1" or asked.count(address) == 1
)
sys.exit(successor.main(sys.argv[1:]))
"""


@pytest.fixture
def beats() -> Any:
    made = Beats("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def second(bench: Any, beats: Beats) -> Script:
    """The second of three nodes, of which an attempt trains on two."""
    script = Script(bench)
    script.program = ["-c", PROGRAM]
    script.command("scontrol", NODES)
    script.command("scancel", '#!/bin/bash\necho "$*" > cancelled\n')
    script.command("srun", SRUN)
    for name, text in {"sees": "0", "code": "0", "sruns": ""}.items():
        bench.script(name, text)
    code = Path(trnslurm.__file__).parents[1]
    text = AGAIN.replace("$PWD/code", str(code)).replace("node-1,node-2", "$TRNSLURM_CHOSEN")
    words = "--nodes=2 --requeue --spares=1 -- srun -y"
    command = f"exec {sys.executable} -m trnslurm.node.attempt {words}"
    bench.script(
        "train.sbatch", f"#SBATCH --no-kill\n{text}export SLURM_JOB_NUM_NODES=3\n{command}\n"
    )
    script.options += ["--spares=1", "--script=/nowhere/slurm_script"]
    bench.environ |= {
        "TRNSLURM_ALLOCATION": "node-1,node-2,node-3", "TRNSLURM_BEATS": beats.place,
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_ID": "3",
        "SLURM_NTASKS": "1", "TRNSLURM_PYTHON": sys.executable, "OTHER": "x",
    }  # fmt: skip
    return script


def begin(script: Script, state: str = "RUNNING") -> subprocess.Popen[str]:
    process = script.start()
    record = script.state() | {"state": state, "hosts": "node-1,node-2"}
    script.bench.script("state/train-1.json", json.dumps(record))
    return process


def sruns(script: Script) -> list[str]:
    return script.bench.read("sruns").splitlines()


@pytest.mark.parametrize("state", ["RUNNING", "REQUEUED"])
def test_it_takes_over(second: Script, state: str) -> None:
    """A first node that is cut off may record a requeue of which Slurm does not hear."""
    assert second.end(begin(second, state)) == 0, second.said
    sees, *both, train = sruns(second)
    end, waits = sorted(both, key=lambda words: "--end" not in words)
    assert "--nodelist=node-3 " in sees and sees.endswith("--sees 127.0.0.1 1")
    assert "--nodes=2 " in end and "--nodelist=node-2,node-3 " in end
    assert train == "-y"
    assert "--nodelist=node-3 --output=logs/train-4711.log " in waits
    trained = dict(line.split("=", 1) for line in second.bench.read("trained").splitlines())
    assert trained["TRNSLURM_HOSTS"] == "node-2,node-3"
    assert "SLURM_NTASKS" not in trained  # it is that of this program's step
    assert second.ended() == ("RESTARTED", "crash 1 of 3 without a new checkpoint: node-1 failed")
    assert second.ended(2) == ("COMPLETED", "")
    # The batch script is gone: the job starts once more, to complete.
    assert second.asked("requeue") == ["requeue 4711"]


def test_a_job_that_failed_is_cancelled(second: Script) -> None:
    second.bench.script("code", "9")
    second.options += ["--max-crashes=1"]
    second.end(begin(second))
    assert second.ended()[0] == "FAILED"
    assert second.bench.read("cancelled") == "4711\n"


def test_a_first_node_that_had_finished(second: Script) -> None:
    assert second.end(begin(second, "COMPLETED")) == 0
    assert second.asked("requeue") == ["requeue 4711"]
    assert len(sruns(second)) == 1


@pytest.mark.parametrize("why", ["seen", "ended"])
def test_it_does_not(second: Script, why: str) -> None:
    """Another node reaches the first one, or Slurm ends the job."""
    second.bench.script("sees", "1" if why == "seen" else "0")
    if why == "ended":
        second.says(RUNNING.replace("RUNNING", "COMPLETING"))
    second.bench.script("bin/asked", "")
    process = begin(second)
    asked = "sruns" if why == "seen" else "bin/asked"
    word = "--sees" if why == "seen" else "show job"
    second.bench.await_true(lambda: second.bench.read(asked).count(word) > 1, asked)
    process.send_signal(signal.SIGTERM)
    assert second.end(process) == -signal.SIGTERM
    assert second.state()["state"] == "RUNNING"


def test_orphans(bench: Any) -> None:
    """What node.sh has started, and the step itself; no successor, no other run."""
    environ = os.environ | {"TRNSLURM_RUN_DIR": "/r", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    ends = [
        subprocess.Popen(["sleep", "600"], env=environ),
        subprocess.Popen(["sleep", "600"], env={"TRNSLURM_RUN_DIR": "/r", "TRNSLURM_NODE": "1"}),
    ]
    stays = [
        subprocess.Popen(["sleep", "600"], env=environ | {"TRNSLURM_RUN_DIR": "/other"}),
        subprocess.Popen(["sleep", "600"], env=environ | {"SLURM_JOB_ID": "2"}),
        subprocess.Popen([*waits, "trnslurm.node.attempt.successor"], env=environ),
    ]
    end = [sys.executable, "-m", "trnslurm.node.attempt.successor", "--end"]
    try:
        assert subprocess.run(end, env=environ, check=False).returncode == 0
        assert [process.wait(60) for process in ends] == [-signal.SIGKILL] * 2
        assert [process.poll() for process in stays] == [None] * 3
    finally:
        for process in [*ends, *stays]:
            process.kill()
            process.wait()
