"""What a job asks of the hardware and its transport, and the plain PyTorch answer (cpu, cuda)."""

import contextlib
import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from trnslurm.train.clock import Clock
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

# What torch_xla computes on, and the name that it has there; cpu and cuda are PyTorch's own.
_PJRT_DEVICES = {"neuron": "NEURON", "xla-cpu": "CPU", "xla-cuda": "CUDA"}
DEVICES = ("cpu", "cuda", *_PJRT_DEVICES)


class Device(ABC):
    """One worker's device and its tie to the other workers."""

    name: str
    rank: int
    world: int
    local_world: int
    torch_device: torch.device
    clock: Clock
    beats: int = 0
    """Calls of sync so far: what the watchdog takes for progress."""
    checkpoint: Callable[..., Any]
    """Run a function now and again in the backward pass, instead of keeping its activations."""

    def put(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self.torch_device)

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Give the context of the forward pass: bf16 arithmetic for "mixed", nothing for others."""
        if precision != "mixed":
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=torch.bfloat16)

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed what is random on the device."""

    def sync(self) -> None:
        """End a graph: what was asked for since the last call is compiled and run as one."""
        self._end_graph()
        self.beats += 1

    @abstractmethod
    def _end_graph(self) -> None:
        """Do what sync does, in the device's own way."""

    def steps_ahead(self, graphs_per_step: int) -> int:
        """Give the steps that this worker's host may have ended and not waited for.

        When it ends a step, all workers have given their parts of the steps before these.
        """
        return 0

    @abstractmethod
    def total(self, values: Sequence[float]) -> list[float]:
        """Sum a few numbers over all workers."""

    @abstractmethod
    def largest(self, values: Sequence[float]) -> list[float]:
        """Give the largest of each of a few numbers over all workers."""

    @abstractmethod
    def graphs(self) -> int:
        """Count the graphs compiled so far in this process."""

    def graphs_missed(self) -> int | None:
        """Count those that the cache of a precompile did not have; None: it cannot be asked."""
        return None

    def memory(self) -> dict[str, float]:
        """Give the most memory used so far, in MB: of this worker's host process, at least."""
        # Linux counts in KiB.
        return {"host_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Wait until every worker is here."""

    def close(self) -> None:
        """Wait for every worker, so that none leaves while another still needs it, and let go."""
        self.barrier("close")
        dist.destroy_process_group()


class TorchDevice(Device):
    """cpu with gloo or cuda with NCCL: eager PyTorch."""

    def __init__(self, name: str, environment: Environment) -> None:
        if name == "cuda" and not torch.cuda.is_available():
            raise TrainError("plan.json: device cuda, but PyTorch finds no CUDA device here")
        dist.init_process_group("nccl" if name == "cuda" else "gloo")
        self.name = name
        self.clock = Clock()
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.local_world = environment.local_world
        self.torch_device = torch.device(name)
        if name == "cuda":
            self.torch_device = torch.device("cuda", environment.local_rank)
            torch.cuda.set_device(self.torch_device)

    @staticmethod
    def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
        """Recompute in the backward pass, with the random state of the forward pass."""
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)

    def seed(self, seed: int) -> None:
        """Seed the CPU and every CUDA device."""
        torch.manual_seed(seed)

    def _end_graph(self) -> None:
        """Do nothing: eager PyTorch has no graphs to end."""

    def steps_ahead(self, graphs_per_step: int) -> int:
        """Give 0 for gloo, which blocks; on CUDA put() waits for all that was given before."""
        return 1 if self.name == "cuda" else 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Sum over all workers in double precision."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Give the largest over all workers."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = self.put(torch.tensor(values, dtype=torch.float64))
        dist.all_reduce(tensor, op=op)
        result: list[float] = tensor.tolist()
        return result

    def graphs(self) -> int:
        """Give 0: nothing is compiled."""
        return 0

    def memory(self) -> dict[str, float]:
        """Give the host's, and on CUDA what PyTorch has allocated on the device."""
        host = super().memory()
        if self.name != "cuda":
            return host
        return host | {"device_memory_mb": torch.cuda.max_memory_allocated() / 1e6}

    def barrier(self, name: str) -> None:
        """Wait in the process group."""
        dist.barrier()


def open_device(name: str, environment: Environment) -> Device:
    """Open the device that the plan names and join the other workers."""
    if name not in DEVICES:
        raise TrainError(f"plan.json: device {name!r} is not one of {', '.join(DEVICES)}")
    if environment.device not in ("", name):
        raise TrainError(f"plan.json: device {name}, but TRNSLURM_DEVICE is {environment.device}")
    if name not in _PJRT_DEVICES:
        return TorchDevice(name, environment)
    # torch_xla reads its environment when it starts, so this comes before its first import.
    os.environ["PJRT_DEVICE"] = _PJRT_DEVICES[name]
    if name == "xla-cuda" and (cache := os.environ.get("XLA_PERSISTENT_CACHE_PATH")):
        # Two workers that write to one directory spoil each other's entries.
        os.environ["XLA_PERSISTENT_CACHE_PATH"] = f"{cache}/{environment.rank}"
    from trnslurm.train.xla import XlaDevice

    return XlaDevice(name, environment)
