"""How long a save holds training up, beside torch.save of the same state on the same disk.

    .venv/bin/python benchmarks/checkpoint_stall.py --megabytes 50 500 --rounds 7

One worker trains a stand-in (multiplications on one core) with AdamW's state. Every way of saving
has its turn in every round, so that a busy machine slows all alike; medians of the rounds. "stall"
is the time in which no step is done, and the ratio compares it with that of torch.save and fsync in
the same round; "cost" is that and the time by which steps are slower until the save has ended;
"safe" is the time until the files are on the disk. "stall CPU" and "CPU" are processor time, which
other programs disturb less: of the training's thread while no step is done, and of all threads
until the save has ended, less that of the steps.

The limit of the stall is a bare copy of the same bytes to memory that is kept.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import reporting

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn

    from trnslurm.contract.rundir import RunFiles
    from trnslurm.devices import CPU
    from trnslurm.saves import directory
    from trnslurm.train.checkpoint.checkpoints import CheckpointPolicy, Checkpoints
    from trnslurm.train.devices.device import Timer
    from trnslurm.train.optim.make import make_optimizer
    from trnslurm.train.optim.optimizer import GlobalOptimizer
    from trnslurm.train.settings import OptimizerSettings
except ModuleNotFoundError as error:
    reporting.exit_without(error.name)

WIDTH = 1024
# A parameter and the two averages of AdamW, in single precision.
BYTES_PER_PARAMETER = 12
PEER = "torch.save, fsync"
LIMIT = "memcpy (limit)"
# Nothing says when these are on the disk, if they ever are.
NEVER_SAFE = ("torch.save", LIMIT)
# Starts a save of a step; what it returns tells whether the save has ended.
Save = Callable[[int], Callable[[], bool]]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one save, in milliseconds."""

    stall: float
    cost: float
    safe: float
    stall_cpu: float
    cpu: float


class Saves:
    """One state, and every way to save it."""

    def __init__(self, root: Path, megabytes: float) -> None:
        layers = max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.root = root
        device: Any = SimpleNamespace(
            rank=0,
            world=1,
            kind=CPU,
            name=CPU.name,
            timer=Timer(),
            torch_device=torch.device("cpu"),
        )
        settings = OptimizerSettings(
            optimizer="adamw", weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8, max_norm=1.0
        )
        self.optimizer: GlobalOptimizer = make_optimizer(
            settings, device, self.model.named_parameters()
        )
        # One worker: its part of a step alone makes the state, without a process group.
        self.optimizer._base.step()
        plan: Any = SimpleNamespace(
            recipe="", batch=SimpleNamespace(global_batch=1, micro_batch=1), seq_len=1, seed=1,
            steps=1, precision="fp32", model={}, train={},
        )  # fmt: skip
        files = RunFiles(root / "ours")
        environment: Any = SimpleNamespace(files=files, attempt=1, phase="train")
        self.checkpoints = Checkpoints(
            device, plan, environment, CheckpointPolicy(), store=dist.HashStore()
        )
        self.num_bytes = BYTES_PER_PARAMETER * layers * WIDTH**2
        self.kept = torch.zeros(self.num_bytes // 4)

    def state(self) -> dict[str, Any]:
        """Return the state as training scripts do."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer._base.state_dict()}

    def ours(self, step: int) -> Callable[[], bool]:
        """Save as jobs do."""
        self.checkpoints.save(step, self.optimizer)

        def is_saved() -> bool:
            self.checkpoints.poll()
            last = self.checkpoints.last
            return last is not None and last.step == step

        return is_saved

    def memcpy(self, step: int) -> Callable[[], bool]:
        """Copy the same bytes, and save nothing."""
        place = 0
        for shard in self.optimizer.shards():
            values = shard.tensor.reshape(-1)
            self.kept[place : place + len(values)].copy_(values)
            place += len(values)
        return lambda: True

    def torch_save(self, step: int) -> Callable[[], bool]:
        """Save as most scripts do: nothing says when the file is on the disk."""
        torch.save(self.state(), self.root / "state.pt")
        return lambda: True

    def torch_save_durably(self, step: int) -> Callable[[], bool]:
        """Save with torch.save, and as safely as a file can be."""
        temporary = self.root / "state.tmp"
        with temporary.open("wb") as file:
            torch.save(self.state(), file)
            directory.fsync_file(file)
        directory.rename_durably(temporary, self.root / "durable.pt")
        return lambda: True

    def dcp_async(self, step: int) -> Callable[[], bool]:
        """Save with PyTorch's own background checkpoints, which fsync by default."""
        shutil.rmtree(self.root / "dcp", ignore_errors=True)
        future: Any = dcp.async_save(self.state(), checkpoint_id=self.root / "dcp")
        return lambda: bool(future.done())


def main() -> None:
    """Measure every way in turn, and print medians."""
    parser = reporting.make_parser("Measure how long a save holds training up.", rounds=7)
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[50, 500], help="of state (50 500)"
    )
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # dcp's, of one process and of types
    torch.set_num_threads(1)
    rows: list[reporting.Row] = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            rows += compare(Saves(Path(name), megabytes), options.rounds)
    columns = {
        "name": ("ms, medians", ""),
        "megabytes": ("MB", ",.0f"),
        "stall": ("stall", ",.0f"),
        "ratio": ("ratio", ".2f"),
        "cost": ("cost", ",.0f"),
        "safe": ("safe", ",.0f"),
        "stall_cpu": ("stall CPU", ",.0f"),
        "cpu": ("CPU", ",.0f"),
    }
    title = f"Saves beside training, {options.rounds} rounds; ratio to {PEER}"
    reporting.report(title, rows, columns, options.json)


def compare(saves: Saves, rounds: int) -> list[reporting.Row]:
    """Run the rounds; return a row of medians for every way."""
    ways: dict[str, Save] = {
        "ours": saves.ours,
        PEER: saves.torch_save_durably,
        "torch.save": saves.torch_save,
        "dcp.async_save": saves.dcp_async,
        LIMIT: saves.memcpy,
    }
    times: dict[str, list[Times]] = {name: [] for name in ways}
    # The first round makes what is kept, memory, threads and directories, and does not count.
    for number in range(rounds + 1):
        step_s = time_of_steps(500) / 500
        for name, save in ways.items():
            measured = measure(save, number + 1, step_s)
            if number:
                times[name].append(measured)
    rows = []
    for name, mine in times.items():
        pairs = zip(mine, times[PEER], strict=True)
        row = {
            "name": name,
            "megabytes": saves.num_bytes / 1e6,
            "stall": statistics.median(one.stall for one in mine),
            "ratio": statistics.median(one.stall / peer.stall for one, peer in pairs),
            "cost": statistics.median(one.cost for one in mine),
            "safe": None if name in NEVER_SAFE else statistics.median(one.safe for one in mine),
            "stall_cpu": statistics.median(one.stall_cpu for one in mine),
            "cpu": statistics.median(one.cpu for one in mine),
        }
        rows.append(row)
    return rows


def measure(save: Save, step: int, step_s: float) -> Times:
    """Save once while training."""
    start, cpu, of_thread = time.perf_counter(), time.process_time(), time.thread_time()
    # Ours says on stdout what it saved.
    with contextlib.redirect_stdout(io.StringIO()):
        ended = save(step)
        stall, stall_cpu = time.perf_counter() - start, time.thread_time() - of_thread
        steps, of_steps = 0, 0.0
        while not ended():
            before = time.thread_time()
            time_of_steps(1)
            of_steps += time.thread_time() - before
            steps += 1
    safe = time.perf_counter() - start
    return Times(
        stall=1000 * stall,
        cost=1000 * (safe - steps * step_s),
        safe=1000 * safe,
        stall_cpu=1000 * stall_cpu,
        cpu=1000 * (time.process_time() - cpu - of_steps),
    )


def time_of_steps(count: int) -> float:
    """Do so many steps of the stand-in for training."""
    matrix = torch.ones(256, 256)
    start = time.perf_counter()
    for _ in range(4 * count):
        torch.mm(matrix, matrix)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
