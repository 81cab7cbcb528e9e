"""Tensors that are divided as one long row of numbers, filled up so that all parts are equal."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trnslurm.train.checkpoint.state import own_rows


def own_part(whole: Iterable[Tensor], length: int, worker: int) -> Tensor:
    """Cut a worker's part, of this length, out of tensors laid end to end."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in whole])
    part = flat[worker * length : (worker + 1) * length]
    return torch.nn.functional.pad(part, (0, length - len(part)))


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of these shapes from the joined parts of all workers."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = torch.split(flat[: sum(sizes)], sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def rows_of(whole: Tensor, worker: int, workers: int) -> tuple[range, Tensor]:
    """Return the rows of a whole tensor that a worker saves, as a copy: the rest can be freed."""
    rows = own_rows(whole.shape, worker, workers)
    return rows, whole.reshape(whole.shape or (1,))[rows.start : rows.stop].clone()
