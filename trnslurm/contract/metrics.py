"""Who wrote a line of metrics.jsonl: the script, or a program that read the script's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READ = "read"
"""The source from which trnslurm.node.numbers read a line's numbers. A script's own lines lack
it."""
LOG, TENSORBOARD, CSV, TRAINER, WANDB = "log", "tensorboard", "csv", "trainer", "wandb"
EPOCHS = "epochs"
_PLACES = {
    LOG: "its log",
    EPOCHS: "its log, one step per epoch",
    TENSORBOARD: "its files for TensorBoard",
    CSV: "its metrics.csv",
    TRAINER: "Trainer's checkpoints",
    WANDB: "its log for Weights & Biases",
}


def is_reported(line: Mapping[str, Any]) -> bool:
    """Check whether the script itself has written a line, which it does for each reported step."""
    return bool(line) and READ not in line


def read_from(line: Mapping[str, Any]) -> str:
    """Return a description of where a line's numbers were read; empty if they were reported."""
    return _PLACES.get(str(line.get(READ, "")), "")
