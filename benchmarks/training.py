"""Training speed of jobs/gpt2_zero1, beside two plain loops: accelerate's, and a GPT of one's own.

    .venv/bin/python benchmarks/training.py --rounds 5

All train the same GPT-2 from the same weights on the same samples, in fp32 on this machine's CPUs,
one thread per worker. They run in turn, each as processes of its own; start-up and the first steps
are not counted. A ratio is that of two runs of one round, and the table has the median over rounds.
The losses are those of the last steps: they must agree, or they did not do the same work.
The limit is what this machine would do if it did nothing but the model's matrix products, on a core
for each worker as far as there are cores; they are measured alone, in every round.
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
import timeit
from dataclasses import dataclass
from pathlib import Path

import reporting

from trnslurm.contract.rundir import PACKAGE

REPO = Path(__file__).parents[1]
PEERS = {
    "accelerate": Path(__file__).with_name("accelerate_loop.py"),
    "plain DDP": Path(__file__).with_name("ddp_loop.py"),
}
JOB = Path("jobs") / "gpt2_zero1"
LOG_EVERY = 10
# Summing in another order moves a loss by far less, another model or other data by far more.
SAME_LOSS = 1e-3
SEQ_LEN = 128
GLOBAL_BATCH = 16
MODEL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": SEQ_LEN, "vocab_size": 257}
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
TRAIN = {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0}
TRAIN |= {"log_every": LOG_EVERY, "eval_every": 0, "save_every": 0}


@dataclass(frozen=True, kw_only=True)
class Racer:
    """One way to train, on so many workers."""

    name: str
    workers: int
    bundle: Path

    @property
    def command(self) -> list[str]:
        """Return the script and its arguments."""
        plan = str(self.bundle / "plan.json")
        job = self.bundle / "code" / JOB
        if self.name in PEERS:
            return [str(PEERS[self.name]), plan, str(job / "text.txt"), "metrics.jsonl"]
        return [str(job / "train.py"), plan]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run."""

    tokens_per_s: float
    loss: float


def main() -> None:
    """Run all in turn, and print medians and ratios."""
    parser = reporting.make_parser("Compare the speed of training loops.", rounds=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="(1 2 4)")
    parser.add_argument("--steps", type=int, default=30, help="(30)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps not counted (10)")
    parser.add_argument("--dropout", type=float, default=0.0, help="(0: losses are compared)")
    parser.add_argument("--xla-cpu", action="store_true", help="also ZeRO-1 on torch_xla's CPU")
    options = parser.parse_args()
    if options.warm_up % LOG_EVERY or options.steps % LOG_EVERY:
        parser.error(f"--steps and --warm-up must be multiples of {LOG_EVERY}")
    if not 0 < options.warm_up < options.steps:
        parser.error("--warm-up must be more than 0 and less than --steps")
    reporting.require("torch", "transformers", "accelerate")
    with tempfile.TemporaryDirectory() as name:
        racers = make_racers(Path(name), options)
        runs: dict[Racer, list[Measured]] = {racer: [] for racer in racers}
        limits = []
        for number in range(options.rounds):
            limits.append(measure_limit())
            for index, racer in enumerate(racers):
                run_dir = Path(name) / f"run-{number}-{index}"
                runs[racer].append(run(racer, run_dir, options))
    report(runs, statistics.median(limits), options)


def make_racers(root: Path, options: argparse.Namespace) -> list[Racer]:
    """Render what is to run, once for each number of workers."""
    racers = []
    for workers in options.workers:
        ours = render(root / f"cpu-{workers}", "cpu", workers, options)
        racers.append(Racer(name="gpt2_zero1", workers=workers, bundle=ours))
        racers += [Racer(name=name, workers=workers, bundle=ours) for name in PEERS]
        if options.xla_cpu:
            xla = render(root / f"xla-{workers}", "xla-cpu", workers, options)
            racers.append(Racer(name="gpt2_zero1, xla-cpu", workers=workers, bundle=xla))
    return racers


def render(output: Path, device: str, workers: int, options: argparse.Namespace) -> Path:
    """Render a bundle: the plan, and the job's code as a run would have it."""
    settings: dict[str, object] = {"device": device, "steps": options.steps, "precision": "fp32"}
    settings |= {"seq_len": SEQ_LEN, "batch.global_batch": GLOBAL_BATCH, "batch.micro_batch": 2}
    settings |= {f"model.{key}": value for key, value in MODEL.items()}
    settings |= {f"model.{key}": options.dropout for key in DROPOUTS}
    settings |= {f"train.{key}": value for key, value in TRAIN.items()}
    command = [sys.executable, "-m", "trnslurm", "render", JOB.name, "--cluster", "local"]
    command += ["--preset", "tiny", "--nodes", "1", "--workers", str(workers)]
    command += ["--path", str(REPO), "--output", str(output)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    call(command, cwd=REPO, environ={})
    return output


def run(racer: Racer, run_dir: Path, options: argparse.Namespace) -> Measured:
    """Train once."""
    run_dir.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nproc_per_node={racer.workers}"]
    command += ["--master_addr=127.0.0.1", f"--master_port={port}", *racer.command]
    paths = [str(racer.bundle / PACKAGE), os.environ.get("PYTHONPATH", "")]
    environ = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if racer.name in PEERS:
        # Where torch_xla is installed, accelerate would take its devices.
        environ["USE_TORCH_XLA"] = "0"
    call(command, cwd=run_dir, environ=environ)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines}
    seconds = times[options.steps] - times[options.warm_up]
    tokens = (options.steps - options.warm_up) * GLOBAL_BATCH * SEQ_LEN
    last = [line["loss"] for line in lines if line["step"] > options.steps - LOG_EVERY]
    return Measured(tokens_per_s=tokens / seconds, loss=statistics.mean(last))


def call(command: list[str], cwd: Path, environ: dict[str, str]) -> None:
    """Run a command, and end with the last of what it said if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environ, capture_output=True, text=True
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        sys.exit("\n".join([*lines[-30:], f"error: {' '.join(command)}: exit {done.returncode}"]))


def measure_limit() -> float:
    """Return the tokens/s of one core that does nothing but the model's matrix products."""
    command = [sys.executable, __file__, "--products"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return float(done.stdout)


def time_products() -> float:
    """Time each product of a micro-batch, forwards and both ways backwards; the best of many."""
    import torch

    rows, width, vocabulary = 2 * SEQ_LEN, MODEL["n_embd"], MODEL["vocab_size"]
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    shapes = [*shapes * MODEL["n_layer"], (width, vocabulary)]
    seconds = 0.0
    for inside, outside in shapes:
        x, matrix = torch.rand(rows, inside), torch.rand(inside, outside)
        gradient = torch.rand(rows, outside)
        products = [(x, matrix), (gradient, matrix.T), (x.T, gradient)]
        for pair in products:
            seconds += min(timeit.repeat(lambda pair=pair: torch.mm(*pair), number=1, repeat=20))
    return rows / seconds


def report(runs: dict[Racer, list[Measured]], limit: float, options: argparse.Namespace) -> None:
    """Print the table; end with an error if the losses differ."""
    rows = []
    for racer, measured in runs.items():
        ratios = {}
        for name in PEERS:
            peers = runs[Racer(name=name, workers=racer.workers, bundle=racer.bundle)]
            pairs = zip(measured, peers, strict=True)
            ratios[name] = statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)
        speed = statistics.median(one.tokens_per_s for one in measured)
        row = {
            "name": racer.name,
            "workers": racer.workers,
            "tokens_per_s": speed,
            **ratios,
            "of_limit": speed / (limit * min(racer.workers, os.cpu_count() or 1)),
            "loss": measured[0].loss,
        }
        rows.append(row)
    columns = {
        "name": ("", ""),
        "workers": ("workers", ""),
        "tokens_per_s": ("tokens/s", ",.0f"),
        **{name: (f"to {name}", ".2f") for name in PEERS},
        "of_limit": ("of limit", ".0%"),
        "loss": ("loss", ".4f"),
    }
    counted = options.steps - options.warm_up
    title = f"{counted} steps, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)
    losses = [row["loss"] for row in rows]
    if not options.dropout and max(losses) - min(losses) > SAME_LOSS:
        sys.exit("error: the losses differ: this was no fair comparison")


if __name__ == "__main__":
    if sys.argv[1:] == ["--products"]:
        print(time_products())
    else:
        main()
