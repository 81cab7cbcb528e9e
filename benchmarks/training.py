"""Training speed of jobs/gpt2_zero1, beside a plain loop with transformers and accelerate.

    .venv/bin/python benchmarks/training.py --rounds 5

Both train the same GPT-2 from the same weights on the same samples, in fp32 on this machine's CPUs,
one thread per worker. They run in turn, each as processes of its own; start-up and the first steps
are not counted. A ratio is that of two runs of one round, and the table has the median over rounds.
The losses are those of the last steps: they must agree, or the two did not do the same work.
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
from dataclasses import dataclass
from pathlib import Path

import reporting

REPO = Path(__file__).parents[1]
PEER = Path(__file__).with_name("accelerate_loop.py")
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
        if self.name == "accelerate":
            return [str(PEER), plan, str(job / "text.txt"), "metrics.jsonl"]
        return [str(job / "train.py"), plan]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run."""

    tokens_per_s: float
    loss: float


def main() -> None:
    """Run all in turn, and print medians and ratios."""
    parser = reporting.make_parser("Compare the speed of training loops.", rounds=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="(1 2)")
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
        for number in range(options.rounds):
            for index, racer in enumerate(racers):
                run_dir = Path(name) / f"run-{number}-{index}"
                runs[racer].append(run(racer, run_dir, options))
    report(runs, options)


def make_racers(root: Path, options: argparse.Namespace) -> list[Racer]:
    """Render what is to run, once for each number of workers."""
    racers = []
    for workers in options.workers:
        ours = render(root / f"cpu-{workers}", "cpu", workers, options)
        racers.append(Racer(name="gpt2_zero1", workers=workers, bundle=ours))
        racers.append(Racer(name="accelerate", workers=workers, bundle=ours))
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
    paths = [str(racer.bundle / "code"), os.environ.get("PYTHONPATH", "")]
    environ = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if racer.name == "accelerate":
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


def report(runs: dict[Racer, list[Measured]], options: argparse.Namespace) -> None:
    """Print the table; end with an error if the losses differ."""
    rows = []
    peers = {racer.workers: runs[racer] for racer in runs if racer.name == "accelerate"}
    for racer, measured in runs.items():
        pairs = zip(measured, peers[racer.workers], strict=True)
        row = {
            "name": racer.name,
            "workers": racer.workers,
            "tokens_per_s": statistics.median(one.tokens_per_s for one in measured),
            "ratio": statistics.median(one.tokens_per_s / peer.tokens_per_s for one, peer in pairs),
            "loss": measured[0].loss,
        }
        rows.append(row)
    columns = {
        "name": ("", ""),
        "workers": ("workers", ""),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "ratio": ("ratio", ".2f"),
        "loss": ("loss", ".4f"),
    }
    counted = options.steps - options.warm_up
    title = f"{counted} steps, medians of {options.rounds} rounds; ratio to accelerate"
    reporting.report(title, rows, columns, options.json)
    losses = [row["loss"] for row in rows]
    if not options.dropout and max(losses) - min(losses) > SAME_LOSS:
        sys.exit("error: the losses differ: this was no fair comparison")


if __name__ == "__main__":
    main()
