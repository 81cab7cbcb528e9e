"""Eager PyTorch: cpu with gloo, and cuda with NCCL."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from trnslurm.devices import DeviceType
from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.environment import Environment
from trnslurm.train.errors import MachineError


class CudaTimer(Timer):
    """Measures the time that the device, not its host, waits in collectives.

    The host gives work to the device and continues, so by the host's clock collectives would take
    no time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marks: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time of a block."""
        if name != "collectives":
            with super().__call__(name):
                yield
            return
        event: Any = torch.cuda.Event  # not annotated
        start, end = event(enable_timing=True), event(enable_timing=True)
        before, self.doing = self.doing, name
        start.record()
        try:
            with self._span(name):
                yield
        finally:
            end.record()
            self.doing = before
            self._marks.append((start, end))

    def take(self) -> dict[str, float]:
        """Return the seconds by name. Unfinished collectives are counted the next time."""
        waited = 0.0
        while self._marks and self._marks[0][1].query():
            start, end = self._marks.popleft()
            waited += start.elapsed_time(end) / 1000
        return super().take() | {"collectives": waited}


class TorchDevice(Device):
    """Eager PyTorch on the host's CPUs, with gloo."""

    def __init__(self, kind: DeviceType, environment: Environment) -> None:
        self.kind = kind
        self.torch_device = self._take(environment)
        # NCCL meets the others in the first collective. Given a device_id it would do so here, but
        # such groups hang at times (https://github.com/pytorch/pytorch/issues/153960, still open).
        dist.init_process_group(kind.backend)
        self.timer = self._make_timer()
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.local_world = environment.local_world

    def _take(self, environment: Environment) -> torch.device:
        """Make this worker's device the current one, before anything uses a device."""
        return torch.device(self.kind.torch_type)

    def _make_timer(self) -> Timer:
        return Timer()

    def _recompute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Recompute in the backward pass, with the random state of the forward pass."""
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)

    def seed(self, seed: int) -> None:
        """Seed the CPU and every CUDA device."""
        torch.manual_seed(seed)

    def _end_graph(self) -> None:
        """Do nothing, because eager PyTorch has no graphs to end."""

    def _reduce(self, values: Sequence[float], how: str) -> list[float]:
        """Reduce in double precision."""
        tensor = self.put(torch.tensor(values, dtype=torch.float64))
        dist.all_reduce(tensor, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
        result: list[float] = tensor.tolist()
        return result

    def barrier(self, name: str) -> None:
        """Wait in the process group."""
        dist.barrier()


class CudaDevice(TorchDevice):
    """Eager PyTorch on GPUs, with NCCL."""

    def _take(self, environment: Environment) -> torch.device:
        """Make the GPU with this worker's local rank the current one."""
        if not torch.cuda.is_available():
            raise MachineError("plan.json: device cuda, but PyTorch finds no CUDA device here")
        number = torch.cuda.device_count()
        if environment.local_world > number:
            # NCCL has no two workers on one GPU: "Duplicate GPU detected", up to version 2.29.
            raise MachineError(
                f"plan.json: {environment.local_world} workers per node, but PyTorch finds {number}"
                " CUDA devices here (CUDA_VISIBLE_DEVICES?): each worker needs one"
            )
        torch.cuda.set_device(environment.local_rank)
        return torch.device(self.kind.torch_type, environment.local_rank)

    def _make_timer(self) -> Timer:
        return CudaTimer()

    def steps_ahead(self, graphs_per_step: int) -> int:
        """Return 1, because put() waits for everything that the device was given before."""
        return 1

    def memory(self) -> dict[str, float]:
        """Return the host's memory, and what PyTorch has allocated on the device."""
        return super().memory() | {"device_memory_mb": torch.cuda.max_memory_allocated() / 1e6}

    def barrier(self, name: str) -> None:
        """Wait in the process group."""
        # Name the GPU, as NCCL would guess one: at worst by the rank over all nodes.
        dist.barrier(device_ids=[self.torch_device.index])
