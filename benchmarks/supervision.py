"""What the look for a stop and the watchdog cost: steps with both beside steps without.

    .venv/bin/python benchmarks/supervision.py --rounds 500

Workers on this machine take steps of a stand-in: multiplications on one core, and a sum over all
workers with gloo. Every second step ends with the call that every step of a training has, nearly
all of it a question to the workers' store, so that a busy machine slows both kinds alike. "call" is
its mean, and "share" that of the median step. The watchdog's thread runs beside both, with a turn
every second, five times as often as by default.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import reporting

try:
    import torch
    import torch.distributed as dist

    from trnslurm.train.devices.device import Device
    from trnslurm.train.devices.open import open_device
    from trnslurm.train.environment import Environment, read_environment
    from trnslurm.train.loop.supervision import Supervision
except ModuleNotFoundError as error:
    reporting.exit_without(error.name)

WIDTH = 256


def main() -> None:
    """Start the workers, and print what the first of them measured; or be one of them."""
    parser = reporting.make_parser("Measure what supervision costs a training.", rounds=500)
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="roughly, of one step (20)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    rows = json.loads(start_workers(options).splitlines()[-1])
    columns = {
        "name": ("", ""),
        "step_ms": ("step ms", ".2f"),
        "ratio": ("ratio", ".4f"),
        "call_us": ("call us", ".0f"),
        "share": ("share", ".2%"),
    }
    title = f"{options.workers} workers, medians of {options.rounds} pairs of steps"
    reporting.report(title, rows, columns, options.json)


def start_workers(options: argparse.Namespace) -> str:
    """Run this script in every worker and give what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nproc_per_node={options.workers}", "--master_addr=127.0.0.1"]
    command += [f"--master_port={port}", __file__, f"--rounds={options.rounds}"]
    command += [f"--step-ms={options.step_ms}"]
    repo = str(Path(__file__).parents[1])
    environ = {"PYTHONPATH": repo, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as run_dir:
        environ["TRNSLURM_RUN_DIR"] = run_dir
        done = subprocess.run(command, env=os.environ | environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: the workers failed: exit {done.returncode}")
    return done.stdout


def work(options: argparse.Namespace) -> None:
    """Run pairs of steps, one of each kind; print the rows as the first worker."""
    environment = read_environment()
    device = open_device("cpu", environment)
    products = calibrate(options.step_ms / 1000, device)
    supervision = supervise(device, environment, 2 * options.rounds)
    plain: list[float] = []
    supervised: list[float] = []
    calls: list[float] = []
    for number in range(options.rounds):
        for calling in (True, False) if number % 2 else (False, True):
            seconds = take_step(device, products)
            start = time.monotonic()
            if calling:
                supervision.step_done(number + 1)
                calls.append(time.monotonic() - start)
            (supervised if calling else plain).append(seconds + time.monotonic() - start)
    supervision.close()
    device.barrier("measured")
    if device.rank == 0:
        print(json.dumps([row("supervised", supervised, plain, calls), row("not", plain, plain)]))
    device.close()


def row(name: str, steps: list[float], plain: list[float], calls: Sequence[float] = ()) -> Any:
    """Return the medians of one kind of step."""
    return {
        "name": name,
        "step_ms": 1000 * statistics.median(steps),
        "ratio": statistics.median(steps) / statistics.median(plain),
        "call_us": 1e6 * statistics.fmean(calls) if calls else None,
        "share": statistics.fmean(calls) / statistics.median(plain) if calls else None,
    }


def calibrate(seconds: float, device: Device) -> int:
    """Return the number of products that take so long; the same on every worker."""
    matrix = torch.rand(WIDTH, WIDTH)
    start, count = time.monotonic(), 0
    while time.monotonic() - start < 1.0:
        torch.mm(matrix, matrix)
        count += 1
    [slowest] = device.largest([-float(count)])
    return max(1, int(-slowest * seconds))


def take_step(device: Device, products: int) -> float:
    """Run a step that all workers begin together; return the seconds that it took."""
    matrix, gradient = torch.rand(WIDTH, WIDTH), torch.rand(100_000)
    device.barrier("step")
    start = time.monotonic()
    for _ in range(products):
        torch.mm(matrix, matrix)
    device.sync()
    dist.all_reduce(gradient)
    device.sync()
    return time.monotonic() - start


def supervise(device: Device, environment: Environment, steps: int) -> Supervision:
    """Make what a training has, with one step more than there are, so that all look for a stop."""
    plan: Any = SimpleNamespace(batch=SimpleNamespace(accumulation=1))
    settings: Any = SimpleNamespace(watchdog=20.0, watchdog_min_s=20.0)
    watched = range(1, steps + 2)
    return Supervision(
        plan, settings, device, environment, watched, reported=lambda step: step % 10 == 0
    )


if __name__ == "__main__":
    main()
