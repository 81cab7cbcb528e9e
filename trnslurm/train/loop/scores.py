"""A model's scores, from counts of labels and predictions, or from the predictions themselves.

Both are summed over workers, so a score does not depend on the number of workers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from trnslurm.train.data.labelled import Labelled
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError

Numbers = NDArray[np.float64]


def count_pairs(predicted: Tensor, labels: Tensor, weights: Tensor, *, num_labels: int) -> Tensor:
    """Count, on the device, how often each label (row) was predicted as each label (column).

    Samples of weight 0 do not count. It uses no scatter, and no matrix product, which autocast
    would round. Sums in fp32 are exact up to 16 million samples.
    """
    names = torch.arange(num_labels, device=labels.device)
    wanted, taken = (
        (numbers.unsqueeze(-1) == names).to(weights.dtype) for numbers in (labels, predicted)
    )
    pairs = wanted.unsqueeze(-1) * taken.unsqueeze(-2)
    return (weights.view(-1, 1, 1) * pairs).sum(0)


def classification_scores(names: Sequence[str], counts: Sequence[float]) -> dict[str, float]:
    """Return scores by name, from the counts of all samples, row by row."""
    _require(names, _OF_COUNTS)
    size = round(len(counts) ** 0.5)
    table = np.array(counts, np.float64).reshape(size, size)
    return {name: _OF_COUNTS[name](table) for name in names}


def correlation_scores(
    names: Sequence[str], predicted: Sequence[float], wanted: Sequence[float]
) -> dict[str, float]:
    """Return scores by name, from predictions of numbers on a scale."""
    _require(names, _OF_NUMBERS)
    pair = (np.array(predicted, np.float64), np.array(wanted, np.float64))
    return {name: _OF_NUMBERS[name](*pair) for name in names}


def entity_scores(names: Sequence[str], counts: Sequence[float]) -> dict[str, float]:
    """Return scores by name, from the sums of count_words."""
    hits, there, taken, right, words = counts
    known = {
        "entity_f1": _ratio(2 * hits, there + taken),
        "entity_precision": _ratio(hits, taken),
        "entity_recall": _ratio(hits, there),
        "accuracy": _ratio(right, words),
    }
    _require(names, known)
    return {name: known[name] for name in names}


def count_words(predicted: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Count a text's entities (correct, labelled, predicted), then its correct labels and words.

    An entity is correct if its kind and all its words are.
    """
    there, taken = entities(wanted), entities(predicted)
    right = sum(one == other for one, other in zip(predicted, wanted, strict=True))
    return [len(there & taken), len(there), len(taken), right, len(wanted)]


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return the kind, the first word and the last word of each entity.

    The rules are those of seqeval's default, and of the CoNLL script before it
    (github.com/chakki-works/seqeval, metrics/sequence_labeling.py: start_of_chunk, end_of_chunk):
    I- or E- after O, or after another kind, also begins an entity.
    """
    found, first, last = set(), 0, "O"
    for place, tag in enumerate([*tags, "O"]):
        other = tag[2:] != last[2:]
        if last != "O" and (last[0] in "ES" or tag[0] in "BSO" or other):
            found.add((last[2:], first, place - 1))
        if tag[0] in "BS" or (tag != "O" and (last[0] in "OES" or other)):
            first = place
        last = tag
    return found


def _require(names: Sequence[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise TrainError(
                f"the data asks for the score {name}, but the known scores are {', '.join(known)}"
            )


def _accuracy(table: Numbers) -> float:
    return _ratio(np.trace(table), table.sum())


def _f1_of_each(table: Numbers) -> list[float | None]:
    """Return 2 TP / (2 TP + FP + FN) of each label, or None if no sample has or was given it."""
    hits, known = np.diag(table), table.sum(0) + table.sum(1)
    return [float(2 * h / k) if k else None for h, k in zip(hits, known, strict=True)]


def _f1(table: Numbers) -> float:
    if len(table) != 2:
        raise TrainError(f"the score f1 needs two labels, but there are {len(table)}: use macro_f1")
    return _f1_of_each(table)[1] or 0.0


def _macro_f1(table: Numbers) -> float:
    """Return the mean over all labels that a sample has or was given, as in scikit-learn."""
    found = [f1 for f1 in _f1_of_each(table) if f1 is not None]
    return float(np.mean(found)) if found else 0.0


def _matthews(table: Numbers) -> float:
    """Return Gorodkin's R_K for any number of labels; 0 if all are the same, as in scikit-learn."""
    total, taken, there = table.sum(), table.sum(0), table.sum(1)
    above = np.trace(table) * total - taken @ there
    below = (total**2 - taken @ taken) * (total**2 - there @ there)
    return _ratio(above, below**0.5)


def _pearson(predicted: Numbers, wanted: Numbers) -> float:
    a, b = predicted - predicted.mean(), wanted - wanted.mean()
    return _ratio(a @ b, ((a @ a) * (b @ b)) ** 0.5)


def _spearman(predicted: Numbers, wanted: Numbers) -> float:
    return _pearson(_ranks(predicted), _ranks(wanted))


def _ranks(numbers: Numbers) -> Numbers:
    """Return the rank of each number, from 1; equal numbers share the mean of their ranks."""
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Numbers = (last - (counts - 1) / 2)[places]
    return ranks


def _ratio(above: Any, below: Any) -> float:
    return float(above / below) if below else 0.0


_OF_COUNTS: dict[str, Callable[..., float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
}
_OF_NUMBERS: dict[str, Callable[..., float]] = {"pearson": _pearson, "spearman": _spearman}


# Always the same number of values, because it is part of the graph that sums them.
AT_ONCE = 1024


def sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses; with a single logit, labels are numbers on a scale."""
    if logits.shape[-1] == 1:
        return mse_loss(logits.flatten(), labels.float(), reduction="sum")
    return cross_entropy(logits, labels, reduction="sum")


def gather_rows(device: Device, rows: Tensor) -> Tensor:
    """Return all rows on the host; each row is zero on all workers but one.

    A sum collects them, because every device can sum, and adding zeros changes no number.
    """
    numbers = rows.flatten().tolist()
    whole: list[float] = []
    for first in range(0, len(numbers), AT_ONCE):
        part = numbers[first : first + AT_ONCE]
        whole += device.total([*part, *[0.0] * (AT_ONCE - len(part))])[: len(part)]
    return torch.tensor(whole).view(rows.shape)


def score(text: Labelled, logits: Tensor) -> dict[str, float]:
    """Return the mean loss and the data's scores on the first samples."""
    labels = text.fixed(0, len(logits)).labels
    if text.labels:
        pairs = labels * text.num_outputs + logits.argmax(-1)
        counts = torch.bincount(pairs, minlength=text.num_outputs**2)
        scores = classification_scores(text.metrics, counts.tolist())
    else:
        scores = correlation_scores(text.metrics, logits.flatten().tolist(), labels.tolist())
    return {"loss": sum_losses(logits, labels).item() / len(logits)} | scores
