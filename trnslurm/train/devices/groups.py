"""Collectives within groups of workers. A division puts each worker into one group."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trnslurm.train.devices.device import Device

Division = list[list[int]]
"""All workers by rank, in groups of equal size."""


class Group(ABC):
    """This worker's group. All workers of a division make the same calls."""

    def __init__(self, division: Division, rank: int) -> None:
        own = next(ranks for ranks in division if rank in ranks)
        self.size = len(own)
        self.index = own.index(rank)
        """This worker's position in its group."""

    def all_reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Return the sum of the workers' tensors or, with "max", their maximum."""
        return tensor if self.size == 1 else self._all_reduce(tensor, how)

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """Join each of these tensors over the workers, along a dimension."""
        return list(tensors) if self.size == 1 else self._all_gather(list(tensors), dim)

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """Sum each of these tensors over the workers; return this worker's parts of the sums."""
        return list(tensors) if self.size == 1 else self._reduce_scatter(list(tensors), dim)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, how: str) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, tensors: list[Tensor], dim: int) -> list[Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, tensors: list[Tensor], dim: int) -> list[Tensor]: ...


def open_group(device: Device, division: Division) -> Group:
    """Open the groups of a division, and return this worker's."""
    kind = XlaGroup if device.torch_device.type == "xla" else TorchGroup
    return kind(division, device.rank)


class TorchGroup(Group):
    """A group that uses torch.distributed."""

    def __init__(self, division: Division, rank: int) -> None:
        super().__init__(division, rank)
        everyone = self.size == dist.get_world_size()
        # Every worker makes all groups of a division, in one order.
        divide: Any = dist.new_subgroups_by_enumeration  # not annotated
        self._group: Any = None if everyone else divide(division)[0]

    def _all_reduce(self, tensor: Tensor, how: str) -> Tensor:
        result = tensor.clone()
        op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how]
        dist.all_reduce(result, op=op, group=self._group)
        return result

    def _all_gather(self, tensors: list[Tensor], dim: int) -> list[Tensor]:
        return [self._gather_one(tensor, dim) for tensor in tensors]

    def _gather_one(self, tensor: Tensor, dim: int) -> Tensor:
        # PyTorch joins along the first dimension.
        own = tensor.movedim(dim, 0).contiguous()
        joined = own.new_empty(self.size * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(joined, own, group=self._group)
        return joined.movedim(0, dim)

    def _reduce_scatter(self, tensors: list[Tensor], dim: int) -> list[Tensor]:
        return [self._scatter_one(tensor, dim) for tensor in tensors]

    def _scatter_one(self, tensor: Tensor, dim: int) -> Tensor:
        whole = tensor.movedim(dim, 0).contiguous()
        own = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=self._group)
        return own.movedim(0, dim)


class XlaGroup(Group):
    """A group that uses torch_xla, whose compiled collectives list the groups of all workers."""

    def __init__(self, division: Division, rank: int) -> None:
        import torch_xla.core.xla_model as xm

        from trnslurm.train.devices.xla import REDUCE_SCATTER_BUCKET_MB

        super().__init__(division, rank)
        self._xm: Any = xm
        self._most = REDUCE_SCATTER_BUCKET_MB << 20
        self._options: dict[str, Any] = {"groups": division, "pin_layout": False}

    def _all_reduce(self, tensor: Tensor, how: str) -> Tensor:
        reduced: Tensor = self._xm.all_reduce(how, tensor, **self._options)
        return reduced

    def _all_gather(self, tensors: list[Tensor], dim: int) -> list[Tensor]:
        results: list[Tensor] = []
        for some in _buckets(tensors, self._most // self.size):
            results += _as_list(self._xm.all_gather(_alone(some), dim, **self._options))
        return results

    def _reduce_scatter(self, tensors: list[Tensor], dim: int) -> list[Tensor]:
        results: list[Tensor] = []
        for some in _buckets(tensors, self._most):
            part = self._xm.reduce_scatter(
                "sum", _alone(some), 1.0, dim, self.size, **self._options
            )
            results += _as_list(part)
        return results


def _alone(tensors: list[Tensor]) -> Tensor | list[Tensor]:
    """Return a single tensor by itself, because torch_xla then uses a simpler operation."""
    return tensors[0] if len(tensors) == 1 else tensors


def _as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _buckets(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield tensors in groups of at most so many bytes; a larger tensor is alone in its group."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    yield bucket
