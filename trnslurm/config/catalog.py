"""What each instance type has: devices, worker counts that work, network, memory, speed, price.

Figures are AWS's published ones; prices are on-demand, from third parties, and every field can be
overridden (or a type added) under `instance_types` in a cluster profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trnslurm.errors import ConfigError, did_you_mean

DEVICES = ("neuron", "xla-cpu", "cpu", "cuda", "xla-cuda")
ON_GPUS = ("cuda", "xla-cuda")
# Those whose collectives go over EFA between nodes.
WITH_EFA = ("neuron", *ON_GPUS)
# What else the same hardware can be.
_ALSO = {"xla-cpu": "cpu", "cpu": "xla-cpu", "cuda": "xla-cuda", "xla-cuda": "cuda"}


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    name: str
    device: str
    """neuron, cuda, xla-cuda (torch_xla on GPUs), xla-cpu (on the host's CPU) or cpu."""
    accelerators: int
    """Chips or GPUs in one instance."""
    workers: tuple[int, ...]
    """Worker counts per node that the runtime supports, on one node."""
    multi_node_workers: tuple[int, ...]
    """The same for jobs over several nodes; empty: no multi-node jobs on this type."""
    vcpus: int
    host_gib: int
    device_gib: int = 0
    """Device memory of the whole instance."""
    efa: int = 0
    """EFA interfaces."""
    network_gbps: int = 0
    bf16_tflops: float = 0.0
    """Dense BF16 TFLOP/s of the whole instance."""
    price_per_hour: float | None = None
    """US dollars, on demand; None where it is not known."""

    @property
    def gpus(self) -> int:
        """GPUs of one instance: a GRES in Slurm, unlike Neuron devices."""
        return self.accelerators if self.device in ON_GPUS else 0

    def choose_device(self, asked: str, usable: Sequence[str]) -> str | None:
        """Return the device that is asked for, or of `auto` this type's first, if it is usable.

        A recipe that says nothing of its devices can use any; a host with accelerators its CPU too.
        """
        own = (self.device, _ALSO.get(self.device, self.device))
        if asked == "auto":
            return next((d for d in own if d in (usable or DEVICES)), None)
        elsewhere = {self.device, asked} <= {*WITH_EFA} and asked not in own
        return asked if asked in (usable or DEVICES) and not elsewhere else None

    def default_workers(self, nodes: int) -> int:
        """Return the most workers per node that it supports."""
        return max((self.multi_node_workers if nodes > 1 else self.workers) or self.workers)

    def check_workers(self, workers_per_node: int, nodes: int) -> None:
        """Refuse a worker count or a node count that this type cannot run."""
        if nodes > 1 and not self.multi_node_workers:
            raise ConfigError(
                f"{self.name} does not run multi-node jobs (--nodes {nodes}): use --nodes 1 "
                "or another instance type"
            )
        valid = self.workers if nodes == 1 else self.multi_node_workers
        if workers_per_node not in valid:
            scope = "one node" if nodes == 1 else f"{nodes} nodes"
            noun = "worker" if workers_per_node == 1 else "workers"
            raise ConfigError(
                f"{workers_per_node} {noun} per node is not valid on {self.name} with {scope}: "
                f"choose {_or(valid)}"
            )


def _or(numbers: tuple[int, ...]) -> str:
    words = [str(n) for n in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_GPU_WORKERS = tuple(range(1, 9))

_TYPES = (
    InstanceType(
        name="trn1.2xlarge", device="neuron", accelerators=1, workers=(1, 2),
        multi_node_workers=(), vcpus=8, host_gib=32, device_gib=32, network_gbps=12,
        bf16_tflops=190, price_per_hour=1.34375,
    ),
    InstanceType(
        name="trn1.32xlarge", device="neuron", accelerators=16, workers=(1, 2, 8, 32),
        multi_node_workers=(32,), vcpus=128, host_gib=512, device_gib=512, efa=8,
        network_gbps=800, bf16_tflops=3040, price_per_hour=21.50,
    ),
    InstanceType(
        name="trn1n.32xlarge", device="neuron", accelerators=16, workers=(1, 2, 8, 32),
        multi_node_workers=(32,), vcpus=128, host_gib=512, device_gib=512, efa=16,
        network_gbps=1600, bf16_tflops=3040, price_per_hour=24.78,
    ),
    # Logical cores at the default NEURON_LOGICAL_NC_CONFIG=2.
    InstanceType(
        name="trn2.48xlarge", device="neuron", accelerators=16, workers=(1, 4, 16, 64),
        multi_node_workers=(64,), vcpus=192, host_gib=2048, device_gib=1536, efa=16,
        network_gbps=3200, bf16_tflops=10700,
    ),
    InstanceType(
        name="p4d.24xlarge", device="cuda", accelerators=8, workers=_GPU_WORKERS,
        multi_node_workers=_GPU_WORKERS, vcpus=96, host_gib=1152, device_gib=320, efa=4,
        network_gbps=400, bf16_tflops=2496, price_per_hour=21.957642,
    ),
    InstanceType(
        name="p4de.24xlarge", device="cuda", accelerators=8, workers=_GPU_WORKERS,
        multi_node_workers=_GPU_WORKERS, vcpus=96, host_gib=1152, device_gib=640, efa=4,
        network_gbps=400, bf16_tflops=2496, price_per_hour=27.44705,
    ),
    InstanceType(
        name="p5.48xlarge", device="cuda", accelerators=8, workers=_GPU_WORKERS,
        multi_node_workers=_GPU_WORKERS, vcpus=192, host_gib=2048, device_gib=640, efa=32,
        network_gbps=3200, bf16_tflops=7912, price_per_hour=55.04,
    ),
    # This machine, as N emulated nodes.
    InstanceType(
        name="local", device="xla-cpu", accelerators=1, workers=_GPU_WORKERS,
        multi_node_workers=_GPU_WORKERS, vcpus=1, host_gib=1,
    ),
)  # fmt: skip


def catalog(overrides: Mapping[str, Any] | None = None, where: str = "") -> dict[str, InstanceType]:
    """Return all instance types by name, with a profile's `instance_types` applied."""
    types = {t.name: t for t in _TYPES}
    for name, values in (overrides or {}).items():
        types[name] = _overridden(types.get(name), name, values, f"{where}instance_types.{name}")
    return types


def find(types: Mapping[str, InstanceType], name: str) -> InstanceType:
    """Return the type called `name`, or an error that names the nearest."""
    if name not in types:
        raise ConfigError(
            f"unknown instance type {name!r}{did_you_mean(name, types)}; known: {', '.join(types)}"
        )
    return types[name]


def _overridden(base: InstanceType | None, name: str, values: Any, where: str) -> InstanceType:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping of fields, found {values!r}")
    known = {f.name: f for f in fields(InstanceType) if f.name != "name"}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: unknown field {key}{did_you_mean(str(key), known)}")
    converted = {
        key: _field(f"{where}.{key}", str(known[key].type), v) for key, v in values.items()
    }
    if converted.get("device", "cpu") not in DEVICES:
        raise ConfigError(
            f"{where}.device: {values['device']!r} is not one of {', '.join(DEVICES)}"
        )
    if base is not None:
        return replace(base, **converted)
    required = {"device", "accelerators", "workers", "multi_node_workers", "vcpus", "host_gib"}
    if missing := sorted(required - set(converted)):
        raise ConfigError(f"{where}: a new instance type needs {', '.join(missing)}")
    return InstanceType(name=name, **converted)


def _field(where: str, annotation: str, value: Any) -> Any:
    def number(v: Any, *kinds: type) -> bool:
        return type(v) in kinds and v >= 0

    if annotation == "str" and isinstance(value, str):
        return value
    if annotation == "int" and number(value, int):
        return value
    if annotation.startswith("float") and number(value, int, float):
        return float(value)
    if annotation.endswith("| None") and value is None:
        return None
    if annotation.startswith("tuple") and isinstance(value, list):
        if all(number(v, int) and v > 0 for v in value):
            return tuple(sorted(value))
        raise ConfigError(f"{where}: expected a list of positive whole numbers, found {value!r}")
    raise ConfigError(f"{where}: expected {annotation.removesuffix(' | None')}, found {value!r}")
