"""The instance types: devices, supported worker counts, network, memory, speed and price.

The figures are AWS's; prices are on demand, from third parties. A cluster profile can override
fields, or add types, under `instance_types`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from trnslurm.config.schema import Device
from trnslurm.config.tree import build, check, fields_of, lacking
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen

DEVICES = get_args(Device)
ON_GPUS = ("cuda", "xla-cuda")
# Devices whose collectives use EFA between nodes.
WITH_EFA = ("neuron", *ON_GPUS)
# The other device of the same hardware.
_ALSO = {"xla-cpu": "cpu", "cpu": "xla-cpu", "cuda": "xla-cuda", "xla-cuda": "cuda"}


class InstanceType(Frozen):
    name: str
    device: Device
    accelerators: int
    """Chips or GPUs in one instance."""
    workers: tuple[int, ...]
    """Supported worker counts for jobs on one node."""
    multi_node_workers: tuple[int, ...]
    """Supported worker counts per node for multi-node jobs; empty: no multi-node jobs."""
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
    """US dollars, on demand; None: unknown."""

    @property
    def gpus(self) -> int:
        """GPUs of one instance, which are a GRES in Slurm; Neuron devices are not."""
        return self.accelerators if self.device in ON_GPUS else 0

    def own_devices(self, usable: Sequence[str]) -> list[str]:
        """Return the devices that this type's hardware can be, among the recipe's (empty: all)."""
        own = dict.fromkeys((self.device, _ALSO.get(self.device, self.device)))
        return [device for device in own if device in (usable or DEVICES)]

    def choose_device(self, asked: str, usable: Sequence[str]) -> str | None:
        """Return the device asked for, or for `auto` this type's first usable one; None: neither.

        A host with accelerators also has its CPU. A GPU is used by torch_xla only if that is asked
        for: PyTorch/XLA has no GPUs since 2.8 (https://github.com/pytorch/xla/pull/9618), so the
        nodes need another build of it.
        """
        own = self.own_devices(usable)
        if asked == "auto":
            return next((d for d in own if d == self.device or d != "xla-cuda"), None)
        elsewhere = {self.device, asked} <= {*WITH_EFA} and asked not in self.own_devices(())
        return asked if asked in (usable or DEVICES) and not elsewhere else None

    def default_workers(self, nodes: int) -> int:
        """Return the largest supported number of workers per node."""
        return max((self.multi_node_workers if nodes > 1 else self.workers) or self.workers)

    def check_workers(self, workers_per_node: int, nodes: int) -> None:
        """Refuse a worker count or a node count that this type does not support."""
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
                f"choose {', '.join(map(str, valid[:-1]))}{' or ' if valid[1:] else ''}{valid[-1]}"
            )


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


def catalog(overrides: Mapping[str, Any] | None = None) -> dict[str, InstanceType]:
    """Return all instance types by name, with a profile's `instance_types` applied."""
    types = {t.name: t for t in _TYPES}
    for name, values in (overrides or {}).items():
        types[name] = _overridden(types.get(name), name, values)
    return types


def find(types: Mapping[str, InstanceType], name: str) -> InstanceType:
    """Return an instance type, or raise an error that suggests the nearest name."""
    if name not in types:
        raise ConfigError(
            f"unknown instance type {name!r}{did_you_mean(name, types)}; known: {', '.join(types)}"
        )
    return types[name]


def _overridden(base: InstanceType | None, name: str, values: Any) -> InstanceType:
    where = f"instance_types.{name}"
    hints = {key: hint for key, hint in fields_of(InstanceType).items() if key != "name"}
    given = check(values, hints, where)
    for key, value in given.items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(n, int | float) and not n >= 0 for n in numbers):
            raise ConfigError(f"{where}: {key} is {value!r}; it must not be negative")
        if isinstance(value, list):
            if 0 in value:
                raise ConfigError(f"{where}: {key} must be positive whole numbers, found {value!r}")
            value.sort()
    tree = {"name": name, **(asdict(base) if base else {}), **given}
    if missing := lacking(InstanceType, tree):
        raise ConfigError(f"{where}: a new instance type needs {', '.join(sorted(missing))}")
    return build(InstanceType, tree)
