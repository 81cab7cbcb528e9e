"""The rendered train.sbatch, run by bash with stand-ins of scontrol and srun.

What its last line becomes, trnslurm.node.attempt, has tests of its own in tests/node.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trnslurm.node.triage.causes import cause_of

from ..packaged import change_source
from ..waiting import eventually

SCONTROL = """\
#!/bin/bash
if [ -e "{here}/busy" ]; then rm "{here}/busy"; exit 1; fi
case "$2" in
  hostnames) printf 'node-1\\nnode-2\\n' ;;
  node) echo "NodeName=$4 Arch=x86_64 NodeAddr=$(cat "{here}/address") NodeHostName=$4 " ;;
esac
"""

OF_THE_CLUSTER = (
    *("--partition", "--qos", "--account", "--constraint", "--reservation"),
    *("--mail-type", "--comment"),
)


class Script:
    """A rendered bundle, and the directory of stand-ins that its PATH begins with."""

    def __init__(self, bundle: Path, commands: Path) -> None:
        self.bundle, self.commands = bundle, commands

    def command(self, name: str, text: str) -> None:
        (self.commands / name).write_text(text.replace("{here}", str(self.commands)))
        (self.commands / name).chmod(0o755)

    def start(self, nodes: int = 2, *, by_sbatch: bool = True) -> subprocess.Popen[bytes]:
        environment = {
            "SLURM_SUBMIT_DIR": str(self.bundle), "SLURM_JOB_ID": "4711", "LEAK": "secret",
            "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "node-[1-2]",
            "PATH": "/usr/bin:/bin", "TMPDIR": "/tmp",
        }  # fmt: skip
        if not by_sbatch:
            environment = {k: v for k, v in environment.items() if not k.startswith("SLURM_")}
        return subprocess.Popen(
            ["bash", str(self.bundle / "train.sbatch")], env=environment, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, nodes: int = 2) -> int:
        with self.start(nodes) as process:
            self.said = process.communicate(timeout=600)[0].decode()
        return process.returncode

    def state(self, attempt: int = 1) -> dict[str, object]:
        state: dict[str, object] = json.loads(
            (self.bundle / f"state/train-{attempt}.json").read_text()
        )
        return state

    def reason(self) -> str:
        assert self.state()["state"] == "FAILED", self.said
        return str(self.state()["reason"])

    def change(self, beginning: str, instead: str) -> None:
        """Put another text in the place of the beginning of a line."""
        train = self.bundle / "train.sbatch"
        text = train.read_text()
        assert text.count(f"\n{beginning}") == 1
        train.write_text(text.replace(f"\n{beginning}", f"\n{instead}"))


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
    (commands / "address").write_text("10.1.2.3")
    made.command("srun", '#!/bin/bash\nenv > "{here}/env"; touch logs/train-1-node0.log\n')
    return made


def test_bash_cannot_start_it_in_place_of_sbatch(script: Script) -> None:
    with script.start(by_sbatch=False) as process:
        said = process.communicate(timeout=600)[0].decode()
    assert said.endswith(": SLURM_SUBMIT_DIR: start this script with sbatch, in its directory\n")
    assert (process.returncode, [*script.bundle.glob("state/*.json")]) == (1, [])


def test_completes_in_a_closed_environment(script: Script) -> None:
    assert script.run() == 0, script.said
    state = script.state()
    assert (state["state"], state["exit_code"], state["hosts"]) == ("COMPLETED", 0, "node-1,node-2")
    assert (state["job_id"], state["restarts"]) == ("4711", 0)
    assert state["started"] <= str(state["ended"])
    seen = dict(line.split("=", 1) for line in (script.commands / "env").read_text().splitlines())
    assert "LEAK" not in seen
    assert seen["MASTER_ADDR"] == "10.1.2.3"
    assert seen["HOME"] != "" and seen["SLURM_EXPORT_ENV"] == "ALL"


def test_two_starts_at_once_are_two_attempts(script: Script) -> None:
    for process in [script.start() for _ in range(4)]:
        with process:
            process.communicate(timeout=600)
    pids = {script.state(number)["pid"] for number in (1, 2, 3, 4)}
    assert len(pids) == 4
    assert not (script.bundle / "state/train-5.json").exists()


def test_busy_controller_is_asked_again(script: Script) -> None:
    train = script.bundle / "train.sbatch"
    asks = 'hosts "$SLURM_JOB_NODELIST"'
    train.write_text(train.read_text().replace(asks, f"{asks} --retry-s 0"))
    (script.commands / "busy").touch()
    assert script.run() == 0, script.said


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_address_that_other_nodes_cannot_reach(script: Script, address: str) -> None:
    (script.commands / "address").write_text(address)
    assert script.run() == 1
    assert "error: no usable address for node-1" in script.said
    assert script.reason() == "exit code 1 while choosing the master address and ports"


def test_state_that_cannot_be_written(script: Script) -> None:
    (script.bundle / "state").rename(script.bundle / "elsewhere")
    assert script.run() == 1
    assert "check its owner, its mode and the disk" in script.said


def test_no_python_is_recorded(script: Script) -> None:
    script.change("export TRNSLURM_PYTHON=", "export TRNSLURM_PYTHON=/nowhere")
    assert script.run() == 127
    host = os.uname().nodename
    python = f"/nowhere{sys.executable}"
    what = f"starting {python} on {host}: is python: right, and code/ there?"
    assert script.reason() == f"exit code 127 while {what}"
    (line,) = [line for line in script.said.splitlines() if f"{python}: No such file" in line]
    cause = cause_of([line])
    assert cause is not None and cause.name == "no-python"
    assert script.state()["job_id"] == "4711"


def test_a_python_that_cannot_run_it_is_recorded(script: Script) -> None:
    change_source(
        script.bundle, "trnslurm/node/attempt/__main__.py", lambda _: "raise SystemExit(3)\n"
    )
    assert script.run() == 3
    assert script.reason().startswith(f"exit code 3 while starting {sys.executable} on ")


@pytest.mark.parametrize(("line", "code"), [("exit 0", 1), ("exit 7", 7), ("false", 1)])
def test_a_line_that_fails_is_recorded(script: Script, line: str, code: int) -> None:
    """Even one that ends the script as if all were well."""
    script.change("# --- Environment: ", f"{line}\n# --- Environment: ")
    assert script.run() == code
    assert script.reason() == f"exit code {code} while setting up the environment"
    assert "train attempt 1: FAILED" in script.said


def test_term_before_the_last_line_is_recorded(script: Script) -> None:
    """And the early signal does nothing there: nothing has been done that could be saved."""
    lines = 'touch "$PWD/here"; /bin/sleep 0.5; false\n# --- Environment: '
    script.change("# --- Environment: ", lines)
    with script.start() as process:
        eventually((script.bundle / "here").exists)
        os.kill(process.pid, signal.SIGUSR1)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=600)
    assert process.returncode == 143
    assert script.state()["state"] == "CANCELLED"
    assert script.state()["exit_code"] == 143


def test_fewer_nodes_than_asked_for(site, cli: Callable[..., object], script: Script) -> None:
    """Then the script of that count is run, with its plan; a third node waits if two do not fit."""
    site.profile(
        python=sys.executable,
        env={},
        slurm={"partition": "compute", "bin_dir": str(script.commands)},
    )
    site.recipe(
        "batch: {global_batch: 128, padding: refuse}\nprecompile: never\nslurm: {time_min: 60}\n"
    )
    assert cli("render", "toy", "--cluster", "pc", "--nodes", "1-4", "-o", "range").ok
    bundle = script.bundle = Path("range").absolute()
    assert sorted(f.name for f in bundle.glob("nodes-*")) == ["nodes-1", "nodes-2"]
    header = (bundle / "train.sbatch").read_text()
    assert "#SBATCH --nodes=1-4\n" in header and "#SBATCH --no-kill " in header
    assert "#SBATCH --ntasks-per-node" not in header
    for file in bundle.rglob("train.sbatch"):
        text = file.read_text()
        file.write_text(text.replace("export PATH=", f"export PATH={script.commands}:", 1))
    record = (
        '#!/bin/bash\necho "$TRNSLURM_FILES|$*" > "{here}/words"; touch logs/train-1-node0.log\n'
    )
    script.command("srun", record)
    script.command("scontrol", SCONTROL.replace("node-2", "node-2\\nnode-3"))
    assert script.run(nodes=3) == 0, script.said
    files, words = (script.commands / "words").read_text().split("|")
    assert files == "nodes-2/" and "--nodelist=node-1,node-2 " in words
    assert words.endswith("bash nodes-2/node.sh train\n")
    assert script.state()["hosts"] == "node-1,node-2"
    assert json.loads((bundle / "nodes-2/plan.json").read_text())["batch"]["global_batch"] == 128


def test_who_set_an_option_of_the_cluster(site, cli, monkeypatch, tmp_path) -> None:
    site.profile(slurm={"partition": "compute", "qos": "high", "sbatch": ["--mail-type=FAIL"]})
    site.recipe(
        "batch: {global_batch: 64}\nslurm: {constraint: rack1, time_min: 60}\n"
        "presets: {big: {slurm: {reservation: august}}}\n"
    )
    (tmp_path / "locks.yaml").write_text("lock: {slurm: {account: research}}\n")
    monkeypatch.setenv("TRNSLURM_SITE", str(tmp_path / "locks.yaml"))
    words = ("render", "toy", "--cluster", "pc", "--preset", "big", "--set", "slurm.qos=low")
    assert cli(*words, "--sbatch=--comment=x", "-o", "out").ok
    text = Path("out/train.sbatch").read_text()
    found = dict(re.findall(r"(?m)^#SBATCH (--\S+) +# (.*)", text))
    assert {name: found[name] for name in found if name.split("=")[0] in OF_THE_CLUSTER} == {
        "--partition=compute": "from pc's profile",
        "--qos=low": "from the command line",
        "--account=research": "locked by locks.yaml",
        "--constraint=rack1": "from the recipe toy",
        "--reservation=august": "from the preset big",
        "--mail-type=FAIL": "from pc's profile or the command line",
        "--comment=x": "from pc's profile or the command line",
    }
