"""Trainium through AWS's TorchNeuron: PyTorch's native device `neuron`, for trn2 and trn3.

Statements about TorchNeuron here are from AWS's documentation of SDK 2.33 (torch/guides/
torch-distributed, torch/about-pytorch-neuron, torch/compile/…) and from the beta's source code.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from trnslurm.devices import DeviceType
from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError


class TorchNeuronDevice(Device):
    """One logical NeuronCore, eager or with torch.compile."""

    def __init__(self, kind: DeviceType, environment: Environment) -> None:
        self.kind = kind
        self.compiler = kind.torch_type  # the name of its backend of torch.compile, too
        try:
            __import__("torch_neuronx")  # registers the device and the backend
        except ImportError as error:
            raise TrainError(
                f"device torchneuron: torch_neuronx is missing ({error}): install "
                "'.[torchneuron]' into an environment of its own"
            ) from None
        if not hasattr(torch, "neuron"):
            raise TrainError(
                "device torchneuron: the installed torch_neuronx is that of PyTorch/XLA: install "
                "'.[torchneuron]' into another environment, or set device to neuron"
            )
        # It takes the core of LOCAL_RANK and starts the runtime, so before any tensor is made.
        # After that, each process has a single device.
        dist.init_process_group(kind.backend, init_method="env://")
        self.torch_device = torch.device(kind.torch_type)
        self.timer = Timer()
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.local_world = environment.local_world

    def _recompute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Recompute in the backward pass, with the random state of the forward pass."""
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    def compiled_parts(self, layer: Any) -> Iterable[nn.Module]:
        """Return the layer, or its parts if it is recomputed.

        PyTorch cannot capture recomputed dropout on a PrivateUse1 device (2.9 and 2.13,
        torch/_prims/rng_prims.py: "Backend not supported"), and transformers 5 recomputes inside a
        layer's forward pass.
        """
        return layer.children() if layer.gradient_checkpointing else [layer]

    def seed(self, seed: int) -> None:
        """Seed the device, and the host, which generates random numbers for the device."""
        torch.manual_seed(seed)

    def _end_graph(self) -> None:
        """Do nothing, because operations are given to the device at once."""

    def steps_ahead(self, graphs_per_step: int) -> int:
        """Return 1, as on CUDA: copies to and from the device wait for everything given before.

        "PyTorch automatically performs necessary synchronization when copying data between host and
        devices" (AWS's frameworks/torch/pytorch-native-overview).
        """
        return 1

    def _reduce(self, values: Sequence[float], how: str) -> list[float]:
        """Reduce in single precision, exact up to 2 ** 24, because the device has no float64."""
        tensor = self.put(torch.tensor(values, dtype=torch.float32))
        dist.all_reduce(tensor, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
        result: list[float] = tensor.cpu().tolist()
        return result

    def memory(self) -> dict[str, float]:
        """Return the host's memory, and what PyTorch has allocated on the device."""
        neuron: Any = torch.get_device_module(self.torch_device)
        return super().memory() | {"device_memory_mb": neuron.max_memory_allocated() / 1e6}

    def barrier(self, name: str) -> None:
        """Wait in the process group."""
        dist.barrier()
