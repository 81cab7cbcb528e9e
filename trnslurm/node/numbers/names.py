"""The names of metrics in files: which is the loss, and which are about held-out data."""

from __future__ import annotations

import re
from collections.abc import Mapping

HELD_OUT = "eval_"
"""The prefix for metrics on held-out data, as in trnslurm's own recipes."""
_NO_WORD = re.compile(r"[^a-z0-9]+")
_HELD_OUT = re.compile(r"(?:val|valid|validation|eval|evaluation|dev|heldout|held_out)_(.+)")
_HELD_OUT_LAST = re.compile(r"(.+)_(?:val|valid|validation|eval|evaluation|dev)")
# Durations, and what Trainer reports about the whole training run.
_LEFT_OUT = re.compile(
    r"(?:eval|test|train)_(?:runtime|(?:samples|steps)_per_second)|train_train_\w+|train_total_flos"
)
_MOST_CHARACTERS = 60
# PyTorch Ignite's examples write training/batch loss.
_LOSS = (
    *("train_loss", "training_loss", "loss_train", "train_loss_step", "total_loss", "lm_loss"),
    *("batch_loss", "train_batch_loss", "training_batch_loss"),
)
"""Names for a step's loss if no value is named loss. The first one that is present counts."""
_TOTAL = re.compile(r"(?:train(?:ing)?_)?total_\w+_loss")
"""The name of a sum of losses, such as torchmd-net's train_total_mse_loss. It counts if no other
name is like it."""
_SAME = {"learning_rate": "lr", "train_learning_rate": "lr", "train_lr": "lr"}
_SAME |= {"gnorm": "grad_norm", "gradient_norm": "grad_norm", "train_grad_norm": "grad_norm"}


def canonical(name: str) -> str:
    """Return a value's name in metrics.jsonl, or "" if it has none."""
    word = _NO_WORD.sub("_", name.lower()).strip("_")[:_MOST_CHARACTERS]
    if _LEFT_OUT.fullmatch(word):
        return ""
    if held := _HELD_OUT.fullmatch(word) or _HELD_OUT_LAST.fullmatch(word):
        word = f"{HELD_OUT}{held[1]}"
    return _SAME.get(word, word)


def with_loss(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with one of them named loss, if one is the training loss."""
    found = {name: value for name, value in numbers.items() if name}
    totals = [n for n in found if _TOTAL.fullmatch(n)]
    names = ("loss", *_LOSS, *(totals if len(totals) == 1 else ()))
    name = next((n for n in names if n in found), None)
    return {"loss": found.pop(name)} | found if name else found
