"""Gradients of workers on one machine's CPUs, summed in memory that all of them see."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.train.devices.device import Device


class SharedGradients:
    """The gradients of a model in one piece of memory, beside those of the other workers.

    Each worker sums its part of all of them, always in one order, and copies the other parts' sums.
    gloo would send them through TCP: more work than the sum itself, where cores are few.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: Device
    ) -> None:
        """Allocate zeros for parameters, which come in one order on all workers."""
        self._device = device
        sizes = [parameter.numel() for parameter in parameters]
        rows = _allocate(device, (device.world + 1) * sum(sizes), dtype).view(-1, sum(sizes))
        self._each, self._sum = rows[:-1], rows[-1]
        self._part = slice(*(sum(sizes) * (device.rank + end) // device.world for end in (0, 1)))
        self.whole = self._each[device.rank]
        """All gradients of this worker, one behind the other."""
        views = zip(parameters, torch.split(self.whole, sizes), strict=True)
        self.gradients = {parameter: view.view_as(parameter) for parameter, view in views}
        """A gradient for each parameter: a view of the whole."""

    @staticmethod
    def fit(device: Device) -> bool:
        """Check whether the workers compute on one machine's CPUs, and several of them."""
        together = device.world > 1 and device.world == device.local_world
        return together and device.name == "cpu" and hasattr(os, "memfd_create")  # not on macOS

    def begin_last_unit(self) -> None:
        """Do nothing: sums that compute beside a backward pass would take its cores."""

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Sum what all workers have."""
        self._device.barrier("gradients")
        part = self._part
        torch.sum(self._each[:, part], dim=0, out=self._sum[part])
        self._device.barrier("sums")
        # The next sums are written after the next barrier: by then all have copied these.
        self.whole.copy_(self._sum)


def _allocate(device: Device, count: int, dtype: torch.dtype) -> Tensor:
    """Return zeros that all workers see.

    A file without a name, in no directory: it takes no room in /dev/shm, which containers have
    little of, and is gone with the last worker however that ends.
    """
    file, where = -1, torch.zeros(2, dtype=torch.int64)
    if device.rank == 0:
        file = os.memfd_create("gradients")
        os.ftruncate(file, count * dtype.itemsize)
        where = torch.tensor([os.getpid(), file])
    dist.broadcast(where, 0)
    path = "/proc/{}/fd/{}".format(*where.tolist())
    tensor = torch.from_file(path, shared=True, size=count, dtype=dtype)
    device.barrier("memory")  # all have opened it
    if device.rank == 0:
        os.close(file)
    return tensor
