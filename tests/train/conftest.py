"""Plans, and jobs run for real: torchrun on every node of a plan, on this machine."""

import copy
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from trnslurm.config.schema import Strategy
from trnslurm.contract.plan import BatchPlan
from trnslurm.devices import CPU
from trnslurm.plan.sharding import strategy_file
from trnslurm.train.devices.device import Timer
from trnslurm.train.devices.plain import TorchDevice
from trnslurm.train.loop import job as job_room
from trnslurm.train.plan import JobPlan

from ..free_port import free_port
from ..warm import torchrun

REPO = Path(__file__).parents[2]
JOBS = REPO / "jobs"
JOB = JOBS / "gpt2_zero1"
# Half a minute alone on two cores; a busy machine may take several times that.
TIMEOUT_S = 600


def tiny_plan(
    device: str,
    nodes: int,
    workers_per_node: int,
    *,
    job: Path = JOB,
    group: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """Work out plan.json of a job's preset tiny; changes name keys as train__lr."""
    recipe = yaml.safe_load((job / "recipe.yaml").read_text())
    values = {key: recipe[key] for key in ("seq_len", "steps", "seed", "precision")}
    values |= {key: copy.deepcopy(recipe[key]) for key in ("batch", "model", "train")}
    merge(values, {k: v for k, v in recipe["presets"]["tiny"].items() if k in values})
    values["data"] = ""
    for name, value in changes.items():
        *path, key = name.split("__")
        section = values
        for part in path:
            section = section[part]
        section[key] = value
    workers = nodes * workers_per_node
    batch = {key: values["batch"][key] for key in ("mode", "global_batch", "micro_batch")}
    units = batch["global_batch"] // batch["micro_batch"]
    groups = workers // group
    accumulation = -(-units // groups)
    padding = accumulation * groups - units
    return values | {
        "format": 1,
        "recipe": job.name,
        "preset": "tiny",
        "cluster": "local",
        "instance_type": "local",
        "peak_tflops": 1.0,
        "device": device,
        "nodes": nodes,
        "workers_per_node": workers_per_node,
        "workers": workers,
        "batch": {
            **batch,
            "units": units,
            "groups": groups,
            "accumulation": accumulation,
            "padding_units": padding,
        },
    }


def strategy_of(plan: dict[str, Any], job: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Work out strategy.json of such a plan, as the launcher does."""
    said = yaml.safe_load((job / "recipe.yaml").read_text())["strategy"]
    name = plan["train"]["strategy"]
    merge(said[name], changes)
    if name == "tensor":
        said[name]["workers"] = plan["workers"] // plan["batch"]["groups"]
    batch = SimpleNamespace(**plan["batch"], workers=plan["workers"])
    recipe = SimpleNamespace(
        strategy=Strategy(**said | {"name": name}),
        precision=plan["precision"],
        train=plan["train"],
    )
    return strategy_file(recipe, batch)


def merge(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    """Lay a partial tree over a tree."""
    for key, value in changes.items():
        if isinstance(value, dict):
            merge(tree[key], value)
        else:
            tree[key] = value


def make_environment(device: str, phase: str, run_dir: Path) -> dict[str, str]:
    """Set what node.sh sets, over the environment of the tests."""
    # Libraries need not load torch_xla where nothing computes on it: seconds for each worker.
    no_xla = {"USE_TORCH_XLA": "0"} if device == "cpu" else {}
    return (
        os.environ
        | no_xla
        | {
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            # Compiling is most of the work here, and what is compiled runs for seconds.
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
            "GLOO_SOCKET_IFNAME": "lo",
            "TRNSLURM_PHASE": phase,
            "TRNSLURM_ATTEMPT": "1",
            "TRNSLURM_RUN_DIR": str(run_dir),
            "TRNSLURM_DEVICE": device,
        }
    )


def torchrun_arguments(workers: int, script: Path, *words: object) -> list[str]:
    """What torchrun is given to run a script on one node."""
    rendezvous = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    return [
        "--nnodes=1", f"--nproc_per_node={workers}", *rendezvous, str(script), *map(str, words)
    ]  # fmt: skip


def launcher_words(workers: int, script: Path, *words: object) -> list[str]:
    """What Python is given to run a script on one node, as node.sh does."""
    own = ["-m", "trnslurm.node.launcher", f"--workers={workers}", "--", script, *words]
    return [*map(str, own)]


def node_environment() -> dict[str, str]:
    """Set what the launcher reads, on the only node."""
    own = {"SLURM_NODEID": "0", "TRNSLURM_HOSTS": "here"}
    return own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def run_workers(
    workers: int, script: Path, *words: object, cwd: Path, device: str = "cpu", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on so many workers of one node; all that they print is in stdout."""
    return torchrun(
        torchrun_arguments(workers, script, *words), cwd=cwd, timeout_s=TIMEOUT_S,
        env=make_environment(device, "train", cwd) | environ, xla=device.startswith("xla"),
    )  # fmt: skip


def prepare_data(output: Path, *words: object) -> Path:
    """Prepare data as a user does."""
    command = [sys.executable, "-m", "trnslurm.prepare", *map(str, words), f"--output={output}"]
    environment = os.environ | {"PYTHONPATH": str(REPO), "USE_TORCH_XLA": "0"}
    subprocess.run(command, env=environment, capture_output=True, timeout=600, check=True)
    return output


def lone_device() -> TorchDevice:
    """The CPU of one worker that has met no others."""
    device = object.__new__(TorchDevice)
    device.kind, device.rank, device.world, device.local_world = CPU, 0, 1, 1
    device.torch_device, device.timer = torch.device("cpu"), Timer()
    device.barrier, device.total = lambda name: None, list
    return device


@pytest.fixture
def run_export(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[str, str]]]:
    """Call a job's export script in this process; give what it printed."""
    monkeypatch.setattr(job_room, "run_job", lambda main: main())
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # A thread that another test has left waits for TERM, and would end this process.
    wakes = signal.set_wakeup_fd(-1)

    def call(job: Path, run_dir: Path, *options: object) -> tuple[str, str]:
        words = ["export.py", run_dir / "plan.json", *options]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        capfd.readouterr()
        runpy.run_path(str(job / "export.py"), run_name="__main__")
        return capfd.readouterr()

    yield call
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., JobPlan]:
    """Make a plan of units over the workers of one node, for whatever job."""

    def make(*, units: int, workers: int, micro_batch: int = 2, group: int = 1) -> JobPlan:
        groups = workers // group
        accumulation = -(-units // groups)
        return JobPlan(
            format=1,
            recipe="any",
            preset="any",
            cluster="any",
            instance_type="any",
            peak_tflops=0.0,
            device="cpu",
            batch=BatchPlan(
                nodes=1,
                workers_per_node=workers,
                workers=workers,
                mode="fixed",
                global_batch=units * micro_batch,
                micro_batch=micro_batch,
                units=units,
                groups=groups,
                accumulation=accumulation,
                padding_units=accumulation * groups - units,
            ),
            seq_len=8,
            steps=10,
            precision="fp32",
            seed=7,
            data="",
            model={},
            train={},
        )

    return make
