"""A stand-in for AWS's torch_neuronx: the device and the backend `neuron`, on this machine's CPU.

Like the real package it names PyTorch's PrivateUse1 `neuron`, is the module torch.neuron, and
brings a process group in Python that knows tensors of this device only. Operations are the CPU's,
by PyTorch's own fallback, and collectives gloo's; `torch.compile(backend="neuron")` runs the
captured graphs without compiling them, and writes a file for each where NEFFs would be.

Unlike the real one it refuses float64, which Neuron rounds to float32, and has neither streams nor
a graph compiler.
"""

import hashlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.utils import cpp_extension

_HERE = Path(__file__).parent
BUILT = Path(os.environ.get("TRNSLURM_BUILT", _HERE.parents[2] / ".make"))


def build() -> Path:
    """Compile the device for this PyTorch, once; it takes half a minute."""
    source = _HERE / "device.cpp"
    stamp = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    library = BUILT / f"neuron-device-{torch.__version__}-{stamp}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")
    abi = int(torch.compiled_with_cxx11_abi())
    words = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    words += [f"-I{path}" for path in cpp_extension.include_paths()]
    words += [str(source), "-o", str(partial)]
    words += [f"-L{path}" for path in cpp_extension.library_paths()]
    words += ["-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(words, check=True)
    partial.replace(library)
    return library


torch.ops.load_library(build())
torch.utils.rename_privateuse1_backend("neuron")

# What torch.neuron offers.
_initialized = False


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    if torch.device("neuron", device if isinstance(device, int) else 0).index:
        raise ValueError(f"Invalid device id: {device}. Valid range is 0 to 0")


def synchronize(device: Any = None) -> None:
    pass


def empty_cache() -> None:
    pass


def max_memory_allocated(device: Any = None) -> int:
    return int(torch.ops.neuron_device.most_bytes())


def manual_seed_all(seed: int) -> None:
    """Do nothing: random numbers are the CPU's."""


manual_seed = manual_seed_all


def _is_in_bad_fork() -> bool:
    return False


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


class Stream:
    """Work in order: there is one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("neuron", 0)

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> "Event":
        return event or Event()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """A point in that order, which has been reached."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def current_stream(device: Any = None) -> Stream:
    return Stream()


def stream(stream: Stream) -> Stream:
    return stream


torch._register_device_module("neuron", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()


class Group(dist.ProcessGroup):
    """Collectives of tensors on the device, in the memory of the host by gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # AWS's asserts the same, as its runtime takes this worker's core in the first group.
        first = not dist.is_initialized()
        assert not (first and torch.ops.neuron_device.most_bytes()), "a tensor before the group"
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "neuron"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("neuron")]

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    def _run(self, name: str, out: list[Any], into: list[Any], *options: Any) -> Any:
        """Run a collective of gloo on copies of (nested) tensors; copy the results back."""
        copies, sources = _on_host(out), _on_host(into)
        getattr(self._gloo, name)(
            *([copies] if out is into else [copies, sources]), *options
        ).wait()
        for tensor, copy in zip(_flat(out), _flat(copies), strict=True):
            tensor.copy_(copy)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(out)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._run("allreduce", tensors, tensors, options or AllreduceOptions())

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._run("broadcast", tensors, tensors, options)

    def allgather(self, out: Any, into: Any, options: Any = None) -> Any:
        return self._run("allgather", out, into, options or AllgatherOptions())

    def _allgather_base(self, out: Any, into: Any, options: Any = None) -> Any:
        pieces = list(out.view(self.size(), *into.shape).unbind())
        return self._run("allgather", [pieces], [into], AllgatherOptions())

    def _reduce_scatter_base(self, out: Any, into: Any, options: Any) -> Any:
        pieces = [list(into.view(self.size(), *out.shape).unbind())]
        return self.reduce_scatter([out], pieces, options)

    # Their names since PyTorch 2.13.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def reduce_scatter(self, out: Any, into: Any, options: Any = None) -> Any:
        """Reduce all, and keep a part: gloo has no reduce-scatter in PyTorch 2.9."""
        all_of = AllreduceOptions()
        all_of.reduceOp = (options or ReduceScatterOptions()).reduceOp
        whole = [torch.stack([piece.cpu() for piece in pieces]) for pieces in into]
        for kept, parts in zip(out, whole, strict=True):
            self._gloo.allreduce([parts], all_of).wait()
            kept.copy_(parts[self.rank()])
        return self._run_nothing(out)

    def _run_nothing(self, out: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(out)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return self._run_nothing([])


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _flat(each)]


def _on_host(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        assert tensors.device.type == "neuron", f"a tensor on {tensors.device} in a collective"
        return tensors.cpu()
    return [_on_host(each) for each in tensors]


dist.Backend.register_backend("neuron", Group, devices=["neuron"])


def _compiler(graph: Any, inputs: Any) -> Any:
    """Note a captured graph where its NEFF would be, and run it as it is."""
    if place := os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR"):
        text = graph.code  # without the places of its source, which differ by run
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        file = Path(place, name[:2], name[2:4], f"{name}.neff")
        if file.exists():
            return graph.forward
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(file)
    return graph.forward


def _backend(graph: Any, inputs: Any, **_: Any) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda g, i: make_boxed_func(_compiler(g, i)))(graph, inputs)


def _register() -> None:
    from torch._dynamo.backends.registry import register_backend

    register_backend(compiler_fn=_backend, name="neuron")


_register()
