"""Sums of gradients over the workers: in buckets during the backward pass, or in shared memory."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError

# Each message has a cost: PyTorch's DistributedDataParallel begins with 1 MiB and continues with 25
# (docs: bucket_cap_mb). A smaller model would be one bucket, which is ready last.
_LARGEST, _SMALLEST, _AT_LEAST = 25 << 20, 1 << 20, 8


class Buckets:
    """A model's gradients in one block of memory, which is summed bucket by bucket.

    They are in the order in which a backward pass completes them, which is the model's order
    reversed. In the last unit of a step, a bucket is sent as soon as its last gradient is complete.
    All workers send the buckets in the same order, whatever the order in which these become
    complete.

    The first step counts how often a unit adds to each bucket, and sends all buckets at its end. A
    unit may not use a parameter at all, or use it more than once in recomputed layers.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Allocate zeros for parameters, which are given in the model's order."""
        order = list(reversed(parameters))
        sizes = [parameter.numel() for parameter in order]
        self.whole = torch.zeros(sum(sizes), dtype=dtype, device=order[0].device)
        """All gradients, one after another."""
        views = zip(order, torch.split(self.whole, sizes), strict=True)
        self.gradients = {parameter: view.view_as(parameter) for parameter, view in views}
        """A gradient for each parameter, as a view of `whole`."""
        self._bucket_of: dict[Tensor, int] = {}
        self._buckets = self._cut(order, _bucket_bytes(self.whole))
        for parameter in order:
            register: Any = parameter.register_post_accumulate_grad_hook  # not annotated
            register(self._add)
        self._usual: list[int] | None = None
        self._added = [0] * len(self._buckets)
        self._works: list[Any] = []
        self._last = False

    def _cut(self, order: Sequence[nn.Parameter], size: int) -> list[Tensor]:
        """Divide `whole`, between gradients, into buckets of about the same size."""
        buckets: list[Tensor] = []
        start = end = 0
        for parameter in order:
            self._bucket_of[parameter] = len(buckets)
            end += parameter.numel()
            if (end - start) * self.whole.itemsize >= size or end == len(self.whole):
                buckets.append(self.whole[start:end])
                start = end
        return buckets

    def begin_last_unit(self) -> None:
        """From now on, expect the gradients of the step's last unit."""
        self._last = True

    def _add(self, parameter: Tensor) -> None:
        """Note that a unit's gradient has been added; send complete buckets."""
        if not self._last:
            return
        bucket = self._bucket_of[parameter]
        if bucket < self._sent:
            raise TrainError(
                "a micro-batch changed gradients more often than in the first step: the model's "
                "graph must not change from step to step"
            )
        self._added[bucket] += 1
        if self._usual is not None:
            for added, usual in list(zip(self._added, self._usual, strict=True))[self._sent :]:
                if added < usual:
                    break
                self._send()

    def all_reduce(self) -> None:
        """Send the remaining buckets, and wait until all are summed."""
        while self._sent < len(self._buckets):
            self._send()
        for work in self._works:
            work.wait()
        if self._last and self._usual is None:
            self._usual = list(self._added)
        self._works.clear()
        self._added = [0] * len(self._buckets)
        self._last = False

    @property
    def _sent(self) -> int:
        return len(self._works)

    def _send(self) -> None:
        """Start summing the next bucket."""
        self._works.append(dist.all_reduce(self._buckets[self._sent], async_op=True))


def _bucket_bytes(whole: Tensor) -> int:
    return max(_SMALLEST, min(_LARGEST, whole.nbytes // _AT_LEAST))


class SharedGradients:
    """A model's gradients in one block of memory, next to the other workers' gradients.

    Each worker sums one part of all gradients, always in the same order, and copies the sums of the
    other parts. gloo would send them through TCP, which on few cores is more work than the sum
    itself. Summing during a backward pass would use the cores that it needs.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: Device
    ) -> None:
        """Allocate zeros for parameters, which are given in the same order on all workers."""
        self._device = device
        sizes = [parameter.numel() for parameter in parameters]
        rows = _allocate(device, (device.world + 1) * sum(sizes), dtype).view(-1, sum(sizes))
        self._each, self._sum = rows[:-1], rows[-1]
        self._part = slice(*(sum(sizes) * (device.rank + end) // device.world for end in (0, 1)))
        self.whole = self._each[device.rank]
        """All gradients of this worker, one after another."""
        views = zip(parameters, torch.split(self.whole, sizes), strict=True)
        self.gradients = {parameter: view.view_as(parameter) for parameter, view in views}
        """A gradient for each parameter, as a view of `whole`."""

    @staticmethod
    def fit(device: Device) -> bool:
        """Check whether there is more than one worker and all compute on one machine's CPUs."""
        together = device.world > 1 and device.world == device.local_world
        return together and device.kind.on_host and hasattr(os, "memfd_create")  # not on macOS

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Sum the gradients of all workers."""
        self._device.barrier("gradients")
        part = self._part
        torch.sum(self._each[:, part], dim=0, out=self._sum[part])
        self._device.barrier("sums")
        # The next sums are written after the next barrier: by then all workers have copied these.
        self.whole.copy_(self._sum)


def _allocate(device: Device, count: int, dtype: torch.dtype) -> Tensor:
    """Return zeros that all workers share.

    They are in an unnamed file, which can be in any directory. It takes no room in /dev/shm, which
    is small in containers, and disappears with the last worker, however that worker ends.
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
