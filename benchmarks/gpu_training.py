"""Training speed on a GPU: GPT-2 124 M and a Llama of 1.1 B, beside a plain loop with transformers.

    .venv/bin/python benchmarks/gpu_training.py --rounds 2

All make the model from its configuration, with the same first weights, and train on the same
samples in bf16 arithmetic with PyTorch's fused attention and AdamW, on one GPU. They run in turn,
each as a process of its own; start-up and the first steps are not counted. The losses at the end
must agree, or they did not do the same work. `--device cpu` tries all of it at a tiny size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reporting
from training import REPO, call

PEER = Path(__file__).with_name("transformers_loop.py")
LOG_EVERY = 10
# bf16 arithmetic in another order, after some dozens of steps; other data would be far more.
SAME_LOSS = 0.05
# Dense bf16 TFLOP/s of one GPU, as NVIDIA's data sheets have them without sparsity (of H100 and
# H200 the SXM part's), by a word of PyTorch's name for it; the first that fits counts.
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0}
COMMON = {"log_every": LOG_EVERY, "eval_every": 0, "save_every": 0, "lr": 1e-4, "warmup_steps": 0}
COMMON |= {"schedule": "constant"}
SIDES = ("ours", "ours, compiled", "transformers")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A recipe with a model of some size."""

    name: str
    recipe: str
    precision: str
    seq_len: int
    global_batch: int
    micro_batch: int
    keys: dict[str, Any]
    tiny: dict[str, Any]
    """What makes it small enough for a CPU."""


MODELS = {
    "gpt2": Model(
        name="GPT-2 124 M", recipe="gpt2_zero1", precision="mixed", seq_len=1024,
        global_batch=32, micro_batch=16,
        keys={"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
              "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
        tiny={"vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 2},
    ),
    # TinyLlama's shape: weights that are tied, as those of Llama 3.2 1B, cannot be sharded here.
    "llama": Model(
        name="Llama 1.1 B", recipe="llama3_clm", precision="bf16", seq_len=2048,
        global_batch=8, micro_batch=4,
        keys={"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
              "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4},
        tiny={"vocab_size": 257, "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
}  # fmt: skip


def main() -> None:
    """Run all sides of each model in turn; print a table, and write the figures down."""
    parser = reporting.make_parser("Compare the speed of training on a GPU.", rounds=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="(both)")
    parser.add_argument("--steps", type=int, default=50, help="(50)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps not counted (10)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(cuda)")
    parser.add_argument("--micro-batch", type=int, help="(16 of GPT-2, 4 of Llama)")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU, for MFU (by its name)")
    parser.add_argument("--output", type=Path, help="write the figures to this file too, as JSON")
    options = parser.parse_args()
    if options.warm_up % LOG_EVERY or options.steps % LOG_EVERY:
        parser.error(f"--steps and --warm-up must be multiples of {LOG_EVERY}")
    if not 0 < options.warm_up < options.steps:
        parser.error("--warm-up must be more than 0 and less than --steps")
    reporting.require("torch", "transformers")
    gpu = find_gpu(options.device)
    peak = options.peak_tflops or next((PEAKS[word] for word in PEAKS if word in gpu), 0.0)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for key in options.models:
            rows += race(MODELS[key], Path(name), peak, options)
    columns = {
        "name": ("", ""),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "ratio": ("ratio", ".3f"),
        "mfu": ("MFU", ".1%"),
        "memory_gb": ("GB", ".1f"),
        "loss": ("loss", ".4f"),
    }
    counted = options.steps - options.warm_up
    title = f"{gpu}: {counted} steps, medians of {options.rounds} rounds; ratio to transformers"
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        record = {"title": title, "peak_tflops": peak or None, "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    reporting.report(title, rows, columns, options.json)
    for at, row in enumerate(rows):
        peer = rows[at // len(SIDES) * len(SIDES) + len(SIDES) - 1]
        if abs(row["loss"] - peer["loss"]) > SAME_LOSS * peer["loss"]:
            sys.exit(f"error: {row['name']}: the losses differ: this was no fair comparison")


def find_gpu(device: str) -> str:
    """Return the device's name, or end with one line."""
    import torch

    if device == "cpu":
        return "CPU, tiny models"
    if not torch.cuda.is_available():
        sys.exit("error: no GPU was measured: PyTorch finds no CUDA device here")
    return torch.cuda.get_device_name(0)


def race(
    model: Model, root: Path, peak_tflops: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run the sides of a model in turn; return a row for each, the peer's last."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        where = root / f"{model.recipe}-{number}"
        ours = render(model, where, options)
        compiled = render(model, Path(f"{where}-compiled"), options, compiled=True)
        for side in SIDES:
            if side == "transformers":
                measured = run_peer(ours, Path(f"{where}-peer"), options)
            else:
                measured = run_ours(compiled if side == "ours, compiled" else ours, options)
            runs[side].append(measured)
            rate = measured["tokens_per_s"]
            print(f"{model.name}, {side}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    peers = runs["transformers"]
    flops = peers[0]["flops_per_token"]
    rows = []
    for side, rounds in runs.items():
        rate = statistics.median(one["tokens_per_s"] for one in rounds)
        ratios = (a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(rounds, peers, strict=True))
        row = {
            "name": f"{model.name}, {side}",
            "tokens_per_s": rate,
            "ratio": statistics.median(ratios),
            "mfu": rate * flops / (peak_tflops * 1e12) if peak_tflops else None,
            "memory_gb": rounds[0]["memory_gb"] or None,
            "loss": rounds[0]["loss"],
        }
        rows.append(row)
    return rows


def render(
    model: Model, output: Path, options: argparse.Namespace, *, compiled: bool = False
) -> Path:
    """Render the bundle that a user would run."""
    tiny = options.device == "cpu"
    seq_len = 64 if tiny else model.seq_len
    positions = "n_positions" if model.recipe == "gpt2_zero1" else "max_position_embeddings"
    micro_batch = options.micro_batch or (4 if tiny else model.micro_batch)
    settings: dict[str, object] = {"device": options.device, "steps": options.steps}
    settings |= {"precision": model.precision, "seq_len": seq_len}
    settings |= {"batch.global_batch": 8 if tiny else model.global_batch}
    settings |= {"batch.micro_batch": micro_batch, f"model.{positions}": seq_len}
    settings |= {f"model.{k}": v for k, v in (model.keys | (model.tiny if tiny else {})).items()}
    settings |= {f"train.{key}": value for key, value in COMMON.items()}
    settings["train.compile"] = compiled
    command = [sys.executable, "-m", "trnslurm", "render", model.recipe, "--cluster", "local"]
    command += ["--preset", "tiny", "--nodes", "1", "--workers", "1"]
    command += ["--path", str(REPO), "--output", str(output)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    call(command, cwd=REPO, environ={})
    return output


def run_ours(bundle: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train the bundle by its script."""
    call(["bash", "train.sh"], cwd=bundle, environ={"TRNSLURM_PYTHON": sys.executable})
    return measure(bundle, bundle / "metrics.jsonl", options)


def run_peer(bundle: Path, run_dir: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train what the bundle's plan says by the plain loop."""
    plan = json.loads((bundle / "plan.json").read_text())
    text = bundle / "code/jobs" / plan["recipe"] / "text.txt"
    command = [sys.executable, str(PEER), str(bundle / "plan.json"), str(text), "metrics.jsonl"]
    run_dir.mkdir()
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    call(command, cwd=run_dir, environ=environ | {"USE_TORCH_XLA": "0"})
    return measure(bundle, run_dir / "metrics.jsonl", options)


def measure(bundle: Path, metrics: Path, options: argparse.Namespace) -> dict[str, float]:
    """Read a run's speed and its last loss."""
    plan = json.loads((bundle / "plan.json").read_text())
    lines = {line["step"]: line for line in map(json.loads, metrics.read_text().splitlines())}
    last, first = lines[options.steps], lines[options.warm_up]
    tokens = (options.steps - options.warm_up) * plan["batch"]["global_batch"] * plan["seq_len"]
    return {
        "tokens_per_s": tokens / (last["time"] - first["time"]),
        "loss": last["loss"],
        "memory_gb": last.get("device_memory_mb", 0) / 1e3,
        "flops_per_token": last.get("flops_per_token", 0.0),
    }


if __name__ == "__main__":
    main()
