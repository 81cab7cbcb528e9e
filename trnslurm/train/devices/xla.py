"""torch_xla devices: Trainium and GPUs natively, and their stand-in on CPUs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics
import torch_xla.distributed.xla_backend  # registers the backend "xla"
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint
from torch import Tensor

from trnslurm.devices import DeviceType
from trnslurm.train.devices import xla_cpu
from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

# neuronx-distributed's default; it notes NaN at step 3 for reduce-scatter buckets over 140 MB.
REDUCE_SCATTER_BUCKET_MB = 130


class XlaDevice(Device):
    """Any torch_xla device. The code is the same except for the transport below the collectives."""

    def __init__(self, kind: DeviceType, environment: Environment) -> None:
        self.kind = kind
        self.timer = Timer()
        self._precompiled = kind.cache_per_worker and _open_cache(environment)
        if kind.on_host:
            dist.init_process_group(kind.backend)
            xla_cpu.install(self.timer)
        else:
            _join(kind.backend)
        # From torch_xla and not from the environment: if its runtime has not found the other
        # workers, each would train a separate copy, and check_world refuses these numbers.
        self.rank = xr.global_ordinal()
        self.world = xr.world_size()
        self.local_world = environment.local_world
        self.torch_device = torch_xla.device()

    def _recompute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Recompute in the backward pass; PyTorch's own version fails on XLA tensors."""
        return torch_xla.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)

    def put_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copy tensors to the device in one transfer, as torch_xla's own loader does."""
        send: Any = xm.send_cpu_data_to_device  # annotated too narrowly
        sent: list[Tensor] = send(list(tensors), self.torch_device)
        return sent

    def fetch(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copy tensors from the device in one transfer."""
        # What xm.save uses for all tensors of a checkpoint.
        xlac: Any = torch_xla
        fetched: list[Tensor] = xlac._XLAC._xla_get_cpu_tensors(list(tensors))
        return fetched

    def seed(self, seed: int) -> None:
        """Seed the device; the seed is an input of the graph, so a new one compiles nothing."""
        xm.set_rng_state(seed)

    def _end_graph(self) -> None:
        """End the graph traced so far and start it."""
        torch_xla.sync()

    def steps_ahead(self, graphs_per_step: int) -> int:
        """Return the number of steps in flight, from the number of graphs in flight."""
        return -(-self.kind.graphs_in_flight // graphs_per_step)

    def _reduce(self, values: Sequence[float], how: str) -> list[float]:
        """Reduce on the device in single precision, which is exact up to 2 ** 24."""
        tensor = self.put(torch.tensor(values, dtype=torch.float32))
        xm.all_reduce(how, [tensor], pin_layout=False)
        torch_xla.sync()
        result: list[float] = tensor.cpu().tolist()
        return result

    def graphs(self) -> int:
        """Count the graphs that this process had not seen before."""
        return _counter("UncachedCompile")

    def graphs_missed(self) -> int | None:
        """Count the graphs that the trial run did not meet; only the cache of xla-cpu can tell."""
        return _counter("PersistentCacheMiss") if self._precompiled else None

    def barrier(self, name: str) -> None:
        """Wait at torch_xla's rendezvous."""
        xm.rendezvous(name)


def _join(backend: str) -> None:
    """Start torch_xla's runtime and join the other workers."""
    # With the default, env://, torch_xla is not told that its devices replicate each other, and
    # xr.world_size() stays 1 (_internal/rendezvous.py and runtime.py of torch_xla 2.9).
    try:
        dist.init_process_group(backend, init_method="xla://")
    except RuntimeError as error:
        if "No PjRtPlugin registered for: CUDA" not in str(error):
            raise
        raise TrainError(
            "this Python's torch_xla does not support GPUs, like every PyTorch/XLA since 2.8: "
            "install a build that supports them, such as TorchAcc's, or use a strategy for cuda"
        ) from None


def _counter(name: str) -> int:
    metrics: Any = torch_xla.debug.metrics  # not annotated
    return metrics.counter_value(name) or 0


def _open_cache(environment: Environment) -> bool:
    """Open the worker's cache before anything is computed; return whether it must be complete.

    Two workers that write to the same directory corrupt each other's entries.
    """
    if environment.compile_cache is None:
        return False
    training = environment.phase == "train"
    path = environment.compile_cache / str(environment.rank)
    xr.initialize_cache(str(path), readonly=training)
    return training


# AdamW divides by a rate in a tensor: at 0, parameters that never had a gradient become NaN.
SMALLEST_RATE = 1e-30


def rate_for(device: Device, lr: float, kinds: Sequence[str]) -> Tensor | float:
    """Return a learning rate for an optimizer that keeps these kinds of state.

    On the device it is a vector, because torch_xla compiles a plain 0 or 1 into the graph. SGD,
    which keeps no state, would read a tensor back to the host, so it gets the number.
    """
    return device.put(torch.tensor([max(lr, SMALLEST_RATE)])) if kinds else lr


def scalar_tensor(device: Device, value: float) -> Tensor:
    """Put a 0-dimensional number on an XLA device."""
    # Not put(): torch_xla compiles a 0-dimensional 0 or 1 into the graph.
    return device.put_all([torch.tensor(float(value))])[0]
