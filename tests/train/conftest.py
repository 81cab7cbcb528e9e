"""Plans, and jobs run for real: torchrun on every node of a plan, on this machine."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from trnslurm.config import Strategy
from trnslurm.plan.sharding import strategy_file
from trnslurm.train.plan import Batch, Plan

from ..free_port import free_port

REPO = Path(__file__).parents[2]
JOBS = REPO / "jobs"
JOB = JOBS / "gpt2_zero1"
# Half a minute alone on two cores; a busy machine may take several times that.
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run left behind."""

    directory: Path
    exit_codes: list[int]
    output: str
    metrics: list[dict[str, Any]]

    def column(self, key: str) -> list[float]:
        return [line[key] for line in self.metrics]


def tiny_plan(
    device: str, nodes: int, workers_per_node: int, *, job: Path = JOB, **changes: Any
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
    accumulation = -(-units // workers)
    padding = accumulation * workers - units
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
        "batch": {**batch, "units": units, "accumulation": accumulation, "padding_units": padding},
    }


def strategy_of(plan: dict[str, Any], job: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Work out strategy.json of such a plan, as the launcher does."""
    said = yaml.safe_load((job / "recipe.yaml").read_text())["strategy"]
    name = plan["train"]["strategy"]
    merge(said[name], changes)
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


def run_plan(plan: dict[str, Any], run_dir: Path, phase: str, workers_per_node: int) -> Run:
    """Run the job with one torchrun per node of the plan and wait for all."""
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_text(json.dumps(plan))
    port = free_port()
    nodes = []
    for node in range(plan["nodes"]):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={plan['nodes']}"]
        command += [f"--node_rank={node}", f"--nproc_per_node={workers_per_node}"]
        command += ["--master_addr=127.0.0.1", f"--master_port={port}"]
        command += [str(JOB / "train.py"), "plan.json"]
        with (run_dir / f"node{node}.log").open("w") as log:
            nodes.append(
                subprocess.Popen(
                    command,
                    cwd=run_dir,
                    env=make_environment(plan["device"], phase, run_dir),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        exit_codes = [node.wait(TIMEOUT_S) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return Run(
        directory=run_dir,
        exit_codes=exit_codes,
        output="".join(log.read_text() for log in sorted(run_dir.glob("node*.log"))),
        metrics=[json.loads(line) for line in lines],
    )


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


@pytest.fixture(scope="session")
def run_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run the preset tiny: run_tiny("xla-cpu", 2, 1, steps=4, train__lr=0.1)."""

    def run(
        device: str,
        nodes: int,
        workers_per_node: int,
        *,
        phase: str = "train",
        really_per_node: int | None = None,
        **changes: Any,
    ) -> Run:
        plan = tiny_plan(device, nodes, workers_per_node, **changes)
        run_dir = tmp_path_factory.mktemp("job") / "a run's dir"
        return run_plan(plan, run_dir, phase, really_per_node or workers_per_node)

    return run


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Make a plan of units over the workers of one node, for whatever job."""

    def make(*, units: int, workers: int, micro_batch: int = 2) -> Plan:
        accumulation = -(-units // workers)
        return Plan(
            format=1,
            recipe="any",
            preset="any",
            cluster="any",
            instance_type="any",
            peak_tflops=0.0,
            device="cpu",
            nodes=1,
            workers_per_node=workers,
            workers=workers,
            batch=Batch(
                mode="fixed",
                global_batch=units * micro_batch,
                micro_batch=micro_batch,
                units=units,
                accumulation=accumulation,
                padding_units=accumulation * workers - units,
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
