"""Tensors that are divided as one long row of numbers, filled up so that all parts are equal."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trnslurm.train.checkpoint.state import own_rows


def own_part(whole: Iterable[Tensor], length: int, worker: int) -> Tensor:
    """Cut out a worker's part, of so many numbers, of tensors one behind the other."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in whole])
    part = flat[worker * length : (worker + 1) * length]
    return torch.nn.functional.pad(part, (0, length - len(part)))


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Give the tensors of these shapes, of which all workers' parts were joined."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = torch.split(flat[: sum(sizes)], sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def rows_of(whole: Tensor, worker: int, workers: int) -> tuple[range, Tensor]:
    """Give the rows of a whole tensor that a worker saves; a copy, so that the rest can go."""
    rows = own_rows(whole.shape, worker, workers)
    return rows, whole.reshape(whole.shape or (1,))[rows.start : rows.stop].clone()
