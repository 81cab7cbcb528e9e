"""Measures what only all workers of a job together can measure, for `trnslurm doctor --run`.

    python -m trnslurm.node.launcher … code/jobs/checkup/train.py plan.json
    python -m trnslurm.train.checkup --graph 1000      # or --native-graph: that of the nodes' part

Each worker writes its results to a separate file after every step, so the file of a worker that
hangs shows where it hangs. The caller compares the files. Comparing them here would need the very
collectives that are being tested.
"""

import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trnslurm.contract.files import load_json, write_json
from trnslurm.contract.variables import Variable
from trnslurm.devices import NEURON, TORCHNEURON, device_named
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment, read_environment

STAND_IN = Variable.STAND_IN_DEVICE
"""The device to use instead of one that a sandbox cannot have."""
DEADLINE_S = 180.0
_ROUNDS = 3
# What NCCL 2.x and aws-ofi-nccl 1.x say with NCCL_DEBUG=INFO about the network that they chose:
# `NET/OFI Selected provider is efa, fabric is efa (found 4 nics)`, `Using network Libfabric`,
# `NET/Plugin: Could not find: libnccl-net.so`.
_OF_NETWORK = ("selected provider is", "using network", "net/plugin", "net/socket")
_MOST_LINES = 12


class CheckupWorker:
    """One worker, and its results so far."""

    def __init__(self, environment: Environment, planned: str) -> None:
        self._file = environment.files.checkup_file("rank", environment.rank)
        self._deadline = time.monotonic() + DEADLINE_S
        self.seen: dict[str, Any] = {
            "rank": environment.rank,
            "node": environment.node,
            "host": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
            "device": planned,
            "doing": "",
            "error": "",
        }

    @contextmanager
    def doing(self, what: str) -> Iterator[dict[str, Any]]:
        """Write the results before and after a step that adds to them; an error ends the file."""
        self.seen["doing"] = what
        self._write()
        try:
            yield self.seen
        except BaseException as error:
            self.seen["error"] = f"{type(error).__name__}: {error}"[:500]
            self._write()
            raise
        self.seen["doing"] = ""
        self._write()

    def watch(self) -> threading.Thread:
        """End this process at the deadline: a collective that others have left never returns."""

        def end() -> None:
            time.sleep(max(0.0, self._deadline - time.monotonic()))
            self.seen["error"] = f"did not finish within {DEADLINE_S:g} s"
            self._write()
            os._exit(1)

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        return thread

    def _write(self) -> None:
        write_json(self._file, self.seen)


def main() -> None:
    """Measure as a worker of a plan, or run only the small graph."""
    if sys.argv[1].endswith("graph"):
        meet_graph(int(sys.argv[2]), native=sys.argv[1] == "--native-graph")
        return
    plan = load_json(Path(sys.argv[1]))
    environment = read_environment()
    worker = CheckupWorker(environment, plan["device"])
    worker.watch()
    name = os.environ.get(STAND_IN) or plan["device"]
    if name != plan["device"]:
        worker.seen["stand_in"] = name
        environment = replace(environment, device=name)
    with worker.doing("versions") as seen:
        seen["versions"] = versions()
    uses_nccl = device_named(name).backend == "nccl"
    log = listen_to_nccl(environment) if uses_nccl else None
    with worker.doing("joining the other workers") as seen:
        device = open_device(name, environment)
        seen["world"] = device.world
    with worker.doing("all-reduce of ones") as seen:
        seen["ones"] = device.total([1.0])[0]
    with worker.doing("rounding to bf16") as seen:
        seen |= rounding(device)
    with worker.doing("timing an all-reduce") as seen:
        seen |= timed(device)
    if log:
        with worker.doing("reading NCCL's log") as seen:
            seen["network"] = network_lines(log)
    with worker.doing("parting"):
        device.close()


def versions() -> dict[str, str]:
    """Return the versions of PyTorch, CUDA and NCCL in this process, and of its packages."""
    found = {"torch": str(torch.__version__)}
    for package in ("torch-xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "nki"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        if torch.cuda.is_available():
            nccl: Any = torch.cuda.nccl  # not annotated
            found["NCCL"] = ".".join(map(str, nccl.version()))
    return found


def listen_to_nccl(environment: Environment) -> Path:
    """Let NCCL log its choice of network to a file; call this before NCCL starts."""
    log = environment.files.state / f"nccl-{environment.rank}.log"
    os.environ |= {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log),
    }  # fmt: skip
    return log


def network_lines(log: Path) -> list[str]:
    """Return NCCL's lines about its network, without host, process and duplicates."""
    said: dict[str, None] = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        _, _, text = line.partition("NCCL INFO ")
        if any(word in text.lower() for word in _OF_NETWORK):
            said[text.strip()] = None
    return list(said)[:_MOST_LINES]


def rounding(device: Device) -> dict[str, Any]:
    """Cast known values to bf16 on the device; return a checksum and whether it matches a host's.

    The values are those between 1 and 1.0078 with every pattern of the 16 bits that are lost,
    including ties. Stochastic rounding, or rounding towards zero, gives other bits.
    """
    values = (torch.arange(1 << 16, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    there = device.put(values)
    device.sync()  # or XLA folds the cast of a constant on the host
    found = checksum(cast(there))
    return {"rounding": found, "to_nearest": found == checksum(values.to(torch.bfloat16))}


def cast(values: torch.Tensor) -> torch.Tensor:
    """Round to bf16 on the device of the values, and copy the result to the host."""
    return values.to(torch.bfloat16).cpu()


def checksum(values: torch.Tensor) -> str:
    """Return the checksum of the bits."""
    return hashlib.sha256(values.view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def timed(device: Device) -> dict[str, Any]:
    """Time all-reduces of one tensor, after a first one that compiles its graph."""
    size = device.kind.checkup_mb * 10**6
    tensor = device.put(torch.ones(size // 4, dtype=torch.float32))
    reduce_all(device, tensor)
    took = []
    for _ in range(_ROUNDS):
        device.total([0.0])  # together
        start = time.monotonic()
        reduce_all(device, tensor)
        took.append(time.monotonic() - start)
    return {"bytes": size, "took_s": [round(seconds, 6) for seconds in took]}


def reduce_all(device: Device, tensor: torch.Tensor) -> None:
    """Reduce the tensor over all workers, and wait for the result."""
    if device.torch_device.type != "xla":
        dist.all_reduce(tensor)
        if not device.kind.on_host:
            torch.get_device_module(device.torch_device).synchronize()
        return
    import torch_xla.core.xla_model as xm

    xm.all_reduce(xm.REDUCE_SUM, [tensor], pin_layout=False)
    device.sync()
    xm.wait_device_ops()


def meet_graph(size: int, *, native: bool) -> None:
    """Run two operations on a vector whose length gives a graph that is in no cache."""
    if os.environ.get(STAND_IN):
        print(f"no graph of {size} on {os.environ[STAND_IN]}, a stand-in", flush=True)
        return
    if native:
        __import__("torch_neuronx")  # registers the device and the compiler
        own = TORCHNEURON.torch_type
        compiled = torch.compile(double_and_one, dynamic=False, backend=own)
        result = compiled(torch.ones(size, device=own))
    else:
        os.environ |= NEURON.environment(os.environ, 0)
        import torch_xla

        result = double_and_one(torch.ones(size, device=torch_xla.device()))
        torch_xla.sync()
    print(f"a graph of {size}: {result.cpu()[0].item()}", flush=True)


def double_and_one(vector: torch.Tensor) -> torch.Tensor:
    """Run the two operations."""
    return vector * 2 + 1


if __name__ == "__main__":
    main()
