"""How long a save holds training up, beside torch.save of the same state on the same disk.

    .venv/bin/python benchmarks/checkpoint_stall.py --million-parameters 25 --rounds 7

One worker trains a stand-in (multiplications on one core) with AdamW's state. Every way of saving
has its turn in every round, so that a busy machine slows all alike; medians of the rounds. "stall"
is the time in which no step is done; "cost" is that and the time by which steps are slower until
the save has ended; "safe" is the time until the files are on the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from trnslurm.train.checkpoint import Checkpoints, directory
from trnslurm.train.clock import Clock
from trnslurm.train.optimizer import GlobalOptimizer, make_optimizer

WIDTH = 1024
# Starts a save of a step; what it returns tells whether the save has ended.
Save = Callable[[int], Callable[[], bool]]


class Saves:
    """One state, and every way to save it."""

    def __init__(self, root: Path, million_parameters: float) -> None:
        layers = max(1, round(million_parameters * 1e6 / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.root = root
        device: Any = SimpleNamespace(
            rank=0, world=1, name="cpu", clock=Clock(), torch_device=torch.device("cpu")
        )
        self.optimizer: GlobalOptimizer = make_optimizer(
            "adamw", device, self.model.named_parameters(), weight_decay=0.0, max_norm=1.0
        )
        self.optimizer.step(1e-3)
        plan: Any = SimpleNamespace(
            recipe="", batch=SimpleNamespace(global_batch=1, micro_batch=1), seq_len=1, seed=1,
            steps=1, precision="fp32", model={}, train={},
        )  # fmt: skip
        environment: Any = SimpleNamespace(run_dir=root, attempt=1, phase="train")
        self.checkpoints = Checkpoints(
            root / "ours", device, plan, environment, store=dist.HashStore()
        )
        self.num_bytes = 3 * 4 * layers * WIDTH**2

    def state(self) -> dict[str, Any]:
        """Give the state as training scripts do."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer._base.state_dict()}

    def ours(self, step: int) -> Callable[[], bool]:
        """Save as jobs do."""
        self.checkpoints.save(step=step, samples=step, optimizer=self.optimizer)
        return lambda: self.checkpoints.poll() is not None

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


def measure(save: Save, step: int, one_step: Callable[[], None], step_s: float) -> list[float]:
    """Save once while training; give stall, cost and safe in seconds."""
    start = time.perf_counter()
    ended = save(step)
    stall = time.perf_counter() - start
    steps = 0
    while not ended():
        one_step()
        steps += 1
    safe = time.perf_counter() - start
    return [stall, safe - steps * step_s, safe]


def main() -> None:
    """Measure every way in turn, and print medians."""
    parser = argparse.ArgumentParser(description="Measure how long a save holds training up.")
    parser.add_argument("--million-parameters", type=float, default=25)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "TypedStorage", UserWarning)  # dcp's
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        report(Saves(Path(name), options.million_parameters), options.rounds)
    dist.destroy_process_group()


def report(saves: Saves, rounds: int) -> None:
    """Do the rounds and print the table."""
    ways: dict[str, Save] = {
        "ours": saves.ours,
        "torch.save + fsync": saves.torch_save_durably,
        "torch.save": saves.torch_save,
        "dcp.async_save": saves.dcp_async,
    }
    left, right = torch.randn(256, 256), torch.randn(256, 256)

    def one_step() -> None:
        for _ in range(4):
            torch.mm(left, right)

    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(500):
            one_step()
        step_s = (time.perf_counter() - start) / 500
        for name, save in ways.items():
            times[name].append(measure(save, number + 1, one_step, step_s))
    print(f"{saves.num_bytes / 1e6:,.0f} MB of state, medians of {rounds} rounds, in ms")
    print(f"{'':20}{'stall':>9}{'cost':>9}{'safe':>9}")
    for name, rows in times.items():
        # The first round makes what is kept: memory, threads, directories.
        columns = zip(*rows[1:], strict=True)
        stall, cost, safe = (1000 * statistics.median(column) for column in columns)
        said = f"{safe:9.0f}" if name != "torch.save" else f"{'?':>9}"
        print(f"{name:20}{stall:9.0f}{cost:9.0f}{said}")


if __name__ == "__main__":
    main()
