"""Preflight: real processes on this machine as the nodes of a job, each fault a real one."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from trnslurm.devices import CUDA, NEURON, XLA_CUDA
from trnslurm.node.accelerators import neuron
from trnslurm.node.preflight import checks as preflight_checks
from trnslurm.node.preflight import devices as preflight_devices
from trnslurm.node.preflight.checks import run_all
from trnslurm.node.preflight.needs import Checked, Needs
from trnslurm.node.preflight.program import CHECKS, parse
from trnslurm.node.preflight.verdict import NodeReport, judge
from trnslurm.sandbox import neuron_stand_ins

from ..free_port import free_port
from ..processes import run_process

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("node-1", "node-2", "node-3")


class Job:
    """A run directory, and preflights started for its nodes."""

    def __init__(self, run: Path) -> None:
        self.run, self.port = run, free_port()
        self.started: list[subprocess.Popen[str]] = []
        for name in ("state", "checkpoints", "code", "bin"):
            (run / name).mkdir(parents=True)
        (run / "code/trnslurm.zip").write_text("print()\n")
        (run / "plan.json").write_text("{}\n")

    def start(self, node: int, *options: str, num: int = 2, **environ: object) -> None:
        """Start one node's."""
        environment = {
            "PATH": f"{self.run}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "SLURM_NODEID": str(node), "TRNSLURM_HOSTS": ",".join(HOSTS[:num]),
            "TRNSLURM_RUN_DIR": str(self.run), "TRNSLURM_PHASE": "train", "TRNSLURM_ATTEMPT": "7",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
        } | {name: str(value) for name, value in environ.items()}  # fmt: skip
        command = [sys.executable, "-m", "trnslurm.node.preflight", *options]
        self.started.append(
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip

    def end(self) -> list[tuple[int, str, str]]:
        """Wait for all that were started: exit code, output, errors of each."""
        ended = []
        for process in self.started:
            out, err = process.communicate(timeout=600)
            ended.append((process.returncode, out, err))
        self.started.clear()
        return ended

    def verdict(self) -> dict[str, Any]:
        """What node 0 wrote down."""
        return dict(json.loads((self.run / "state/preflight-train-7.json").read_text()))

    def problems(self) -> list[list[str]]:
        """What is wrong with each node."""
        return [node["problems"] for node in self.verdict()["nodes"]]

    def left(self) -> list[str]:
        """Every file in state/, hidden ones too."""
        return sorted(file.name for file in (self.run / "state").iterdir())


@pytest.fixture
def job(weird_path: Path) -> Iterator[Job]:
    job = Job(weird_path / "run")
    yield job
    for process in job.started:
        process.kill()
        process.communicate()


def test_nodes_that_fit_and_leave_the_port_free(job: Job) -> None:
    """Time after time a store has the port at once, whatever lingers of the meeting."""
    from torch.distributed import TCPStore

    for _ in range(3):
        for node in (2, 1, 0):
            job.start(node, num=3)
        for code, out, err in job.end():
            assert (code, err) == (0, "")
            assert re.fullmatch(r"preflight: 3 nodes fit in \d\.\d s\n", out)
        store = TCPStore("127.0.0.1", job.port, is_master=True, timeout=timedelta(seconds=5))
        store.set("key", "value")
        client = TCPStore("127.0.0.1", job.port, timeout=timedelta(seconds=5))
        assert client.get("key") == b"value"
        del client, store
    verdict = job.verdict()
    assert [node["host"] for node in verdict["nodes"]] == list(HOSTS)
    assert all(node["ok"] and not node["problems"] for node in verdict["nodes"])
    assert (verdict["bad"], job.left()) == ([], ["preflight-train-7.json"])
    assert {"run directory", "memory", "open files"} <= verdict["nodes"][1]["facts"].keys()


def test_one_node_alone(job: Job) -> None:
    job.start(0, num=1)
    ((code, out, err),) = job.end()
    assert (code, err) == (0, "") and out.startswith("preflight: 1 node fits in ")


def test_the_port_is_taken(job: Job) -> None:
    """Nobody is to blame for that: the next attempt has another port. The rest ends with srun."""
    with socket.create_server(("", job.port)):
        job.start(0)
        ((code, out, err),) = job.end()
    assert (code, out) == (1, "")
    assert f"error: preflight: node-1: master port {job.port} is taken" in err
    assert job.verdict()["bad"] == []


def test_the_master_address_is_not_node_0s(job: Job) -> None:
    """192.0.2.1 is an address that documentation is written with."""
    job.start(0, num=1, MASTER_ADDR="192.0.2.1")
    ((code, _, err),) = job.end()
    assert code == 1 and "error: preflight: node-1: the master address 192.0.2.1" in err
    assert "NodeAddr" in err and job.verdict()["bad"] == ["node-1"]


def neuron_tools(job: Job, behaviour: str) -> None:
    """Put a stand-in of neuron-ls on PATH that plays a trn1.32xlarge."""
    home = job.run / "neuron"
    (home / "all").mkdir(parents=True, exist_ok=True)
    facts = {"instance_type": "trn1.32xlarge", "devices": 16, "cores_per_device": 2}
    (home / "instance.json").write_text(json.dumps(facts | {"device_gib": 32}))
    (home / "all/neuron-ls").write_text(behaviour)
    shutil.copy(neuron_stand_ins.__file__, home / "tools.py")
    tool = job.run / "bin/neuron-ls"
    tool.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -I "${{0%/*}}/../neuron/tools.py" '
        '--home "${0%/*}/../neuron" neuron-ls "$@"\n'
    )
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("missing-device", "neuron-ls shows 15 of 16 devices; replace the instance"),
        ("no-devices", "neuron-ls finds no devices"),
        (
            "busy",
            "0 of the 32 NeuronCores it needs are free; end the process that holds the others (pid",
        ),
    ],
)
def test_neuron_devices(job: Job, monkeypatch, behaviour: str, words: str) -> None:
    monkeypatch.setenv("PATH", f"{job.run}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(neuron, "_BUSY_S", 0.0)
    needs = Needs(run=job.run, phase="train", device=NEURON, devices=16, workers=32)
    neuron_tools(job, "ok")
    assert preflight_devices.devices(needs) == Checked(fact="16")
    neuron_tools(job, behaviour)
    assert words in preflight_devices.devices(needs).problem


def test_gpus(job: Job, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{job.run}/bin:/usr/bin:/bin")
    tool = job.run / "bin/nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    needs = Needs(run=job.run, phase="train", device=CUDA, workers=1)
    assert preflight_devices.devices(needs) == Checked(fact="1")
    eight = Needs(run=job.run, phase="train", device=CUDA, workers=8)
    assert preflight_devices.devices(eight).problem.startswith(
        "nvidia-smi shows 1 of 8 needed GPUs"
    )
    tool.write_text("#!/bin/sh\necho 'Unable to determine the device handle' >&2; exit 9\n")
    assert "Unable to determine" in preflight_devices.devices(needs).problem


def test_a_driver_that_has_to_start_is_waited_for(job: Job, monkeypatch) -> None:
    """Eight GPUs take up to 24 s; nothing that waits for the answer may be impatient."""
    asked: list[float] = []

    def smi(command, *, timeout, **_):
        asked.append(timeout)
        return subprocess.CompletedProcess(command, 0, 8 * "GPU 0: NVIDIA A100\n", "")

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", smi)
    eight = Needs(run=job.run, phase="train", device=CUDA, workers=8)
    assert preflight_devices.devices(eight) == Checked(fact="8")
    patience = [parse(["--device", device]).wait for device in ("cuda", "neuron", "cpu")]
    assert 24 < asked[0] < 0.6 * patience[0] and patience[1:] == [20, 20]


def test_efa(job: Job) -> None:
    needs = Needs(run=job.run, phase="train", efa=2)
    cards = job.run / "sys/class/infiniband"
    assert preflight_devices.efa(needs, job.run).problem.startswith("0 of 2 EFA interfaces")
    for name in ("rdmap16s27", "rdmap32s27"):
        (cards / name).mkdir(parents=True)
    assert preflight_devices.efa(needs, job.run) == Checked(fact="2")
    (driver := cards / "rdmap32s27/device/driver").parent.mkdir()
    driver.symlink_to(job.run)  # of no EFA: a controller of NVLink
    assert preflight_devices.efa(needs, job.run).problem.startswith("1 of 2 EFA interfaces")


@pytest.mark.parametrize(("late_s", "found"), [(0, "2"), (7, "2"), (15, "2"), (16, "1")])
def test_efa_that_comes_late_at_boot(job: Job, late_s: int, found: str) -> None:
    needs = Needs(run=job.run, phase="train", efa=2, device=CUDA)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        name = "rdmap32s27" if sum(slept) >= late_s else "rdmap16s27"
        (job.run / "sys/class/infiniband" / name).mkdir(parents=True, exist_ok=True)

    sleep(0)
    (job.run / "sys/class/infiniband/rdmap16s27").mkdir(exist_ok=True)
    checked = preflight_devices.efa(needs, job.run, sleep)
    assert (checked.fact, sum(slept)) == (found, min(late_s, 15))
    assert bool(checked.problem) == (found == "1")
    assert 0.6 * CUDA.preflight_wait_s > 15  # after which a check is cut short


def test_nccl_needs_its_plugin_for_efa(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(run=job.run, phase="train", efa=1, device=CUDA)
    plugins = job.run / "lib"
    for directory in (job.run / "sys/class/infiniband/efa_0", plugins):
        directory.mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{plugins}:")
    found = preflight_devices.efa(needs, job.run)
    assert (found.problem, found.fact) == ("", "1") and "NCCL would use TCP" in found.warning
    (plugins / "libnccl-net-ofi.so").touch()
    assert preflight_devices.efa(needs, job.run) == Checked(fact="1")


def test_what_all_nodes_share_is_nobodys_fault(job: Job) -> None:
    """Every node is unfit and says why; no node is to be avoided."""
    for node in (1, 0):
        job.start(node, "--data", str(job.run / "no data"), "--min-free-mib", "999999999")
    ended = job.end()
    for host, (code, out, err) in zip(("node-2", "node-1"), ended, strict=True):
        assert (code, out) == (1, "")
        assert f"error: preflight: {host}: dataset {job.run}/no data: No such file" in err
        assert f"{job.run} has " in err and "a job needs at least" in err
    assert job.verdict()["bad"] == []


def test_one_node_without_the_shared_files(job: Job, tmp_path: Path) -> None:
    """Its run directory cannot be written, its code is older, its dataset is not there."""
    other = tmp_path / "run"
    shutil.copytree(job.run, other)
    (other / "code/trnslurm.zip").write_text("print('older')\n")
    shutil.rmtree(other / "state")
    data = job.run / "data"
    data.mkdir()
    (data / "index.json").write_text("{}")
    for node, run in enumerate((job.run, other, job.run)):
        job.start(node, "--data", str(run / "data"), num=3, TRNSLURM_RUN_DIR=run)
    assert [code for code, _, _ in job.end()] == [1, 1, 1]
    first, second, third = job.problems()
    assert (first, third, job.verdict()["bad"]) == ([], [], ["node-2"])
    unwritable, no_data, older = second
    assert unwritable.startswith(f"cannot write in {other}/state: No such file")
    assert no_data.startswith(f"dataset {other}/data: No such file")
    assert re.match(r"code/ is [0-9a-f]{12}, but on most nodes [0-9a-f]{12}; use one", older)


def test_software_that_differs_and_a_wrong_clock(job: Job) -> None:
    package = job.run / "older/torch-2.8.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    job.start(0, num=3)
    job.start(1, num=3, PYTHONPATH=f"{package.parent}:{ROOT}")
    job.start(2, "--clock-offset=-60", num=3)
    (_, first, _), (_, _, older), (_, _, late) = job.end()
    assert "torch is 2.8.0, but on most nodes 2.9.1; use one Python" in older
    assert re.search(r"its clock is (5\d\.\d|60\.0) s behind the other nodes'; run chrony", late)
    assert first.startswith(
        "preflight: this node ends because of another node: node-2: torch is 2.8"
    )
    assert (len(first.splitlines()), job.verdict()["bad"]) == (2, ["node-2", "node-3"])


def test_a_node_that_does_not_come(job: Job) -> None:
    for node in (0, 1):
        job.start(node, "--wait=6", num=3)
    ended = job.end()
    assert [code for code, _, _ in ended] == [1, 1]
    assert "because of another node: node-3: did not report within 6 s" in ended[1][1]
    assert job.verdict()["bad"] == ["node-3"]
    assert [node["ok"] for node in job.verdict()["nodes"]] == [True, True, False]


def test_node_0_does_not_come(job: Job) -> None:
    """A stranger on its port answers nothing of ours. The node says so by itself."""
    with socket.create_server(("", job.port)):
        job.start(1, "--wait=0.5", num=3)
        ((code, _, err),) = job.end()
    assert code == 1 and "error: preflight: node-2: cannot reach node 0 at 127.0.0.1" in err
    assert job.left() == ["preflight-train-7-node1.json"]
    own = json.loads((job.run / "state/preflight-train-7-node1.json").read_text())
    assert (own["bad"], own["nodes"][0]["host"]) == (["node-1"], "node-2")


def test_a_node_that_cannot_reach_node_0_tells_it_by_file(job: Job) -> None:
    job.start(1, "--wait=2", MASTER_PORT=free_port())
    job.start(0, "--wait=8")
    (cut_off, first) = job.end()
    assert (cut_off[0], first[0]) == (1, 1)
    assert "node-2: cannot reach node 0 at 127.0.0.1" in first[1]
    assert (job.verdict()["bad"], job.left()) == (["node-2"], ["preflight-train-7.json"])


def test_started_by_hand_it_says_what_is_missing(job: Job) -> None:
    done = run_process(
        [sys.executable, "-m", "trnslurm.node.preflight"], env={"PYTHONPATH": str(ROOT)}
    )
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: preflight: environment: 'SLURM_NODEID'; only node.sh starts this\n"


def test_a_check_that_hangs_or_breaks_is_a_problem(job: Job) -> None:
    checks = {"slow": lambda _: time.sleep(60), "broken": lambda _: 1 / 0}
    found = run_all(Needs(run=job.run, phase="train"), checks, 1)
    assert found["slow"].problem.startswith("its check took over 1 s")
    assert "ZeroDivisionError" in found["broken"].problem


@pytest.mark.parametrize("name", ["step-00000020", "step-00000020/rank", "step-00000020/a/part"])
def test_room_for_a_checkpoint(job: Job, name: str) -> None:
    """A sparse file is as large as it says. A custom script's checkpoint may be a file."""
    needs = Needs(run=job.run, phase="train")
    assert preflight_checks.run_directory(needs).problem == ""
    checkpoint = job.run / "checkpoints" / name
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with checkpoint.open("wb") as file:
        file.truncate(2**43)
    said = preflight_checks.run_directory(needs).problem
    assert "the next checkpoint needs 8,192.0 GiB; make room" in said


def test_torch_xla_without_gpus_is_found_before_workers_start(tmp_path: Path, monkeypatch) -> None:
    """A package directory of each name, as pip leaves it, on the path of this Python."""
    check = CHECKS["torch_xla"]
    needs = Needs(run=tmp_path, phase="train", device=XLA_CUDA)
    assert "torch_xla needs one of them for GPUs; install" in check(needs).problem
    assert check(Needs(run=tmp_path, phase="train", device=CUDA)) == Checked()
    (tmp_path / "torchacc-0.0.7.dist-info").mkdir()
    (tmp_path / "torchacc-0.0.7.dist-info/METADATA").write_text("Name: torchacc\nVersion: 0.0.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert check(needs) == Checked(fact="torchacc 0.0.7")


def nodes(**problems: str) -> list[NodeReport]:
    """Three nodes, some with a problem of a check."""
    made = [NodeReport(node=n, host=host) for n, host in enumerate(HOSTS)]
    for word, check in problems.items():
        made[int(word[1:])].problems[check] = "x"
    return made


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        ({}, []),
        ({"n1": "devices"}, ["node-2"]),
        ({"n1": "dataset"}, ["node-2"]),
        ({"n0": "dataset", "n1": "dataset", "n2": "dataset"}, []),
        ({"n0": "devices", "n1": "devices", "n2": "devices"}, []),
        ({"n0": "master port"}, []),
        ({"n0": "memory", "n2": "EFA"}, ["node-1", "node-3"]),
    ],
)
def test_who_is_to_blame(found: dict[str, str], bad: list[str]) -> None:
    assert judge(nodes(**found), {}, 20) == bad


def test_alone_a_node_is_to_blame_for_its_own_problems() -> None:
    assert judge([NodeReport(node=0, host="a", problems={"devices": "x"})], {}, 20) == ["a"]
    assert judge([NodeReport(node=0, host="a", problems={"dataset": "x"})], {}, 20) == []


def test_if_nobody_reaches_node_0_it_is_node_0() -> None:
    three = nodes()
    three[1].heard = three[2].heard = False
    assert judge(three, {1: "cannot reach it"}, 20) == ["node-1"]
    assert three[1].problems["report"].startswith("cannot reach it; check")
