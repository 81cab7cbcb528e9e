"""A classifier's logits: their loss, and from those of all workers the scores."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from trnslurm.train.data.labelled import Labelled
from trnslurm.train.devices.device import Device
from trnslurm.train.loop.scores import classification_scores, correlation_scores

# Always as many numbers at once: their count is part of the graph that sums them.
AT_ONCE = 1024


def sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses; with a single logit, labels are numbers on a scale."""
    if logits.shape[-1] == 1:
        return mse_loss(logits.flatten(), labels.float(), reduction="sum")
    return cross_entropy(logits, labels, reduction="sum")


def gather_rows(device: Device, rows: Tensor) -> Tensor:
    """Return every row from the worker that has it, on the host; on the others it is zero.

    By a sum, which every device can do, and which changes no number.
    """
    numbers = rows.flatten().tolist()
    whole: list[float] = []
    for first in range(0, len(numbers), AT_ONCE):
        part = numbers[first : first + AT_ONCE]
        whole += device.total([*part, *[0.0] * (AT_ONCE - len(part))])[: len(part)]
    return torch.tensor(whole).view(rows.shape)


def score(text: Labelled, logits: Tensor) -> dict[str, float]:
    """Return the mean loss, and what the data says a model is judged by, on its first samples."""
    labels = text.fixed(0, len(logits)).labels
    if text.labels:
        pairs = labels * text.num_outputs + logits.argmax(-1)
        counts = torch.bincount(pairs, minlength=text.num_outputs**2)
        scores = classification_scores(text.metrics, counts.tolist())
    else:
        scores = correlation_scores(text.metrics, logits.flatten().tolist(), labels.tolist())
    return {"loss": sum_losses(logits, labels).item() / len(logits)} | scores
