"""Count collectives and host work of a step on XLA devices, beside AWS's samples.

    .venv/bin/python benchmarks/collectives.py

At a tiny size the jobs train on torch_xla's CPU device, as worker 0 of so many (xla_workers.py),
and the samples' loops (neuron_samples.py) with the same models. At full size only the update is
traced, never run: bert_pretrain and gpt2_zero1 as they are by default on a node of 32 workers.
Collectives are those of the HLO that torch_xla gives to a compiler, which may join or split them.
Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bert_reader
import reporting
from xla_workers import WINDOW

REPO = Path(__file__).parents[1]
WORKERS = Path(__file__).with_name("xla_workers.py")
TINY = {"bert_pretrain": "tiny", "gpt2_zero1": "tiny", "llama3_clm": "tiny_xla_fsdp"}
PEERS = {"bert_pretrain": ["sample"], "gpt2_zero1": ["sample", "NxD"], "llama3_clm": ["sample"]}
# Workers and micro-batches of each.
OURS = [(2, 1), (2, 4), (4, 4)]
THEIRS = (2, 4)
FULL = ("bert_pretrain", "gpt2_zero1")
BERT = {"seq_len": bert_reader.SEQ_LEN, "train.max_pred": bert_reader.MAX_PRED,
        "model.vocab_size": bert_reader.VOCAB_SIZE,
        "model.max_position_embeddings": bert_reader.SEQ_LEN}  # fmt: skip
KINDS = ("all-reduce", "reduce-scatter", "all-gather")


def main() -> None:
    """Count all, and print them."""
    # A count has no rounds; all.py may name some for every benchmark.
    parser = reporting.make_parser("Count collectives and host work of a step.", rounds=1)
    parser.add_argument("--recipe", choices=TINY, action="append", help="repeatable (all)")
    parser.add_argument("--tiny", action="store_true", help="no full-size models, which take 10 GB")
    options = parser.parse_args()
    reporting.require("torch", "torch_xla", "transformers", "h5py")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        bert_reader.write_shards(root, argparse.Namespace(samples=64, shards=2))
        for recipe in options.recipe or TINY:
            for workers, units in OURS:
                rows.append(count(root, recipe, "ours", workers, units))
            rows += [count(root, recipe, way, *THEIRS) for way in PEERS[recipe]]
        for recipe in [] if options.tiny else options.recipe or FULL:
            if recipe in FULL:
                rows += [trace(root, recipe, way) for way in ["ours", *PEERS[recipe]]]
    columns = {
        "name": ("per step", ""),
        "workers": ("workers", ""),
        "units": ("units", ""),
        **{kind: (kind, "g") for kind in KINDS},
        "mb": ("MB", ",.2f"),
        "largest_mb": ("largest", ",.2f"),
        "syncs": ("syncs", "g"),
        "executions": ("graphs", "g"),
        "compiled": ("compiled", "g"),
        "to_device": ("to device", "g"),
        "from_device": ("from device", "g"),
    }
    title = f"What worker 0 asks for in a step, mean of {WINDOW}"
    reporting.report(title, rows, columns, options.json)
    if any(row["compiled"] for row in rows):
        sys.exit("error: a graph was compiled after the warm-up")


def count(root: Path, recipe: str, way: str, workers: int, units: int) -> dict[str, Any]:
    """Train a tiny model and count."""
    settings: dict[str, object] = {
        "batch.micro_batch": 2,
        "batch.global_batch": 2 * workers * units,
    }
    settings |= {"device": "xla-cpu", "train.log_every": WINDOW, "train.eval_every": 0}
    settings |= {"train.save_every": 0}
    if recipe == "bert_pretrain":
        settings |= BERT | {"data.path": root}
    bundle = root / f"{recipe}-{way}-{workers}-{units}"
    if not bundle.exists():
        render(bundle, recipe, "local", workers, settings, preset=TINY[recipe])
    counted = run(bundle, way, root / f"{bundle.name}.json")
    return row(f"{recipe}, {way}", workers, units, counted)


def trace(root: Path, recipe: str, way: str) -> dict[str, Any]:
    """Trace the update of a model of full size."""
    bundle = root / f"{recipe}-full"
    if not bundle.exists():
        render(bundle, recipe, "trn1", 32, {})
    counted = run(bundle, way, root / f"{bundle.name}-{way}.json", "--update")
    return row(f"{recipe} in full, {way}", 32, None, counted)


def row(name: str, workers: int, units: int | None, counted: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    kinds = counted.pop("collectives")
    assert kinds.keys() <= set(KINDS), kinds
    return {
        "name": name,
        "workers": workers,
        "units": units,
        **{kind: kinds[kind]["number"] if kind in kinds else 0 for kind in KINDS},
        "mb": sum(one["bytes"] for one in kinds.values()) / 1e6,
        "largest_mb": max(one["sizes"][0] for one in kinds.values()) / 1e6,
        "types": ", ".join(sorted({each for one in kinds.values() for each in one["types"]})),
        **counted,
        "sizes": {kind: one["sizes"] for kind, one in kinds.items()},
    }


def render(
    output: Path,
    recipe: str,
    cluster: str,
    workers: int,
    settings: dict[str, object],
    preset: str = "",
) -> None:
    """Render a bundle: the plan, and the job's code as a run would have it."""
    command = [sys.executable, "-m", "trnslurm", "render", recipe, "--cluster", cluster]
    command += ["--nodes", "1", "--workers", str(workers), "--path", str(REPO)]
    command += ["--output", str(output)]
    command += ["--preset", preset] if preset else []
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    call(command, {})


def run(bundle: Path, way: str, result: Path, *more: str) -> dict[str, Any]:
    """Count in a process of its own: torch_xla's collectives are replaced in it."""
    paths = [str(bundle / "code"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(WORKERS), str(bundle), way, str(result), *more]
    call(command, {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"})
    counted: dict[str, Any] = json.loads(result.read_text())
    return counted


def call(command: list[str], environ: dict[str, str]) -> None:
    """Run a command, and end with the last of what it said if it fails."""
    done = subprocess.run(
        command, cwd=REPO, env=os.environ | environ, capture_output=True, text=True
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        sys.exit("\n".join([*lines[-30:], f"error: {' '.join(command)}: exit {done.returncode}"]))


if __name__ == "__main__":
    main()
