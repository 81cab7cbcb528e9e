"""The interface to the hardware and to the other workers."""

import contextlib
import resource
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.profiler
from torch import Tensor

from trnslurm.devices import DeviceType
from trnslurm.tracing import SPAN
from trnslurm.train.errors import TrainError

# In the first steps graphs are compiled: they do not count for how long a step takes.
STEPS_THAT_COMPILE = 2


def say(line: str) -> None:
    """Print a line; ignore a full disk or a closed pipe."""
    try:
        print(line, flush=True)
    except OSError:
        pass


class Timer:
    """Where a worker is and where its time goes. Other threads, such as the watchdog, read it."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self.doing = ""
        """The innermost block that this worker is in."""
        self.traces = False
        """Whether blocks are recorded as spans of a trace."""
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start timing with a step. Step 0 means that no step has started."""
        self.step = step
        """The step that this worker is in."""
        self.steps = 0
        """The number of steps since then."""
        self.durations: deque[float] = deque(maxlen=100)
        """The duration of each of the last steps, in seconds."""
        self.sums: Counter[str] = Counter()
        """Seconds over all steps, by name."""
        self._since = time.monotonic()

    def end_step(self) -> dict[str, float]:
        """Count a step; return its seconds by name."""
        spent, now = self.take(), time.monotonic()
        self.steps += 1
        if self.steps > STEPS_THAT_COMPILE:
            self.durations.append(now - self._since)
            self.sums.update({**spent, "steps": 1, "step": now - self._since})
        self._since = now
        return spent

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time of a block."""
        start = time.monotonic()
        before, self.doing = self.doing, name
        try:
            with self._span(name):
                yield
        finally:
            self.doing = before
            self._spent[name] = self._spent.get(name, 0.0) + time.monotonic() - start

    def _span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if not self.traces:
            return contextlib.nullcontext()
        return torch.profiler.record_function(f"{SPAN}{name}")

    def take(self) -> dict[str, float]:
        """Return the seconds by name, and start over."""
        spent, self._spent = self._spent, {}
        return spent


class Device(ABC):
    """One worker's device, and its connection to the other workers."""

    kind: DeviceType
    rank: int
    world: int
    local_world: int
    torch_device: torch.device
    timer: Timer
    beats: int = 0
    """The number of calls to sync so far, which the watchdog counts as progress."""
    compiles: bool = False
    """Whether torch.compile is used."""
    compiler: str = "inductor"
    """The backend of torch.compile."""

    @property
    def name(self) -> str:
        """Return the device's name, as in the plan."""
        return self.kind.name

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a layer, and rerun it in the backward pass instead of storing its activations.

        Reentrant recomputation looks only at the inputs to decide whether there is a backward pass.
        After frozen embeddings the inputs require no gradient, so this layer and all earlier ones
        would not be trained (PyTorch 2.9, torch/utils/checkpoint.py: "Gradients will be None").
        """
        inputs = [each for each in args if isinstance(each, Tensor)]
        if torch.is_grad_enabled() and not any(each.requires_grad for each in inputs):
            # transformers gives a method of the layer, with its options; our Llama the layer.
            method = getattr(function, "func", function)
            layer: Any = getattr(method, "__self__", method)
            if not any(each.requires_grad for each in layer.parameters()):
                return function(*args)
            args = (args[0].detach().requires_grad_(), *args[1:])  # what flows from layer to layer
        return self._recompute(function, *args)

    @abstractmethod
    def _recompute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function, and rerun it in the backward pass."""

    def say(self, line: str) -> None:
        """Print a line, on one worker for all."""
        if self.rank == 0:
            say(line)

    def put(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self.torch_device)

    def put_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copy tensors to the device, in one transfer if the device supports that."""
        return [self.put(tensor) for tensor in tensors]

    def fetch(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copy a finished graph's tensors to the host, in one transfer if possible."""
        return [tensor.cpu() for tensor in tensors]

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass: bf16 arithmetic for "mixed", otherwise none."""
        if precision != "mixed":
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=torch.bfloat16)

    def compile_layers(self, model: torch.nn.Module) -> None:
        """Let a transformers model compile its layers on first use, if the recipe asks for it.

        Layers of the same kind share a graph, so this takes seconds, while compiling the whole
        model takes minutes. Code that recomputes or shards a layer stays outside its graph, and
        parameters keep their names.
        """
        if not self.compiles:
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        if not layers:
            raise TrainError(f"train.compile: {type(model).__name__} has no layers to compile")
        for layer in layers:
            for part in self.compiled_parts(layer):
                part.forward = self.compiled(part.forward)

    def compiled_parts(self, layer: Any) -> Iterable[torch.nn.Module]:
        """Return the modules of a layer that become one graph each."""
        return [layer]

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is compiled at its first use, if the recipe asks for that."""
        # A graph for each shape: one for all shapes would compute otherwise.
        if not self.compiles:
            return function
        return torch.compile(function, dynamic=False, backend=self.compiler)

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's random number generator."""

    def sync(self) -> None:
        """End a graph: compile and run the operations since the last call as one graph."""
        self._end_graph()
        self.beats += 1

    @abstractmethod
    def _end_graph(self) -> None:
        """End a graph, in the way that this device needs."""

    def steps_ahead(self, graphs_per_step: int) -> int:
        """Return how many steps this worker's host may be ahead of the device.

        When the host ends a step, every worker has contributed to all older steps.
        """
        return 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Sum a few numbers over all workers."""
        return self._reduce(values, "sum")

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over all workers of each of a few numbers."""
        return self._reduce(values, "max")

    @abstractmethod
    def _reduce(self, values: Sequence[float], how: str) -> list[float]:
        """Reduce numbers over all workers, by sum or max."""

    def graphs(self) -> int:
        """Count the graphs that torch.compile has compiled so far in this process."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.compiles else 0

    def graphs_missed(self) -> int | None:
        """Count the graphs missing from the precompile's cache; None if the cache cannot tell."""
        return None

    def memory(self) -> dict[str, float]:
        """Return the peak memory so far, in MB, at least that of this worker's host process."""
        # Linux counts in KiB.
        return {"host_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Wait until every worker has arrived."""

    def close(self) -> None:
        """Wait for every worker, so that none leaves while another needs it; then leave."""
        self.barrier("close")
        dist.destroy_process_group()
