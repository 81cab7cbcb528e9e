"""The instance types: devices, supported worker counts, network, memory, speed and price.

A cluster profile can override fields and add types under `instance_types`. Sources, read in
November 2026:

- CPUs, memory, GPUs, network and EFA interfaces: EC2's DescribeInstanceTypes of 2026-10-27, as in
  moto 5.2.5 (moto/ec2/resources/instance_types.json.gz). Memory is in whole GiB, rounded down.
- Trainium's memory and speed: AWS's Neuron documentation (about-neuron/arch/neuron-hardware,
  2026-08). EC2 gives 512 GiB per chip as the memory of trn2; the chip has 96.
- Speed of GPUs: NVIDIA's data sheets of H100 and H200, HGX B200 and HGX B300 (alike in BF16) and
  L40S and of GB200 NVL72, halved where they count sparsity.
- Prices: on demand in us-east-1, of August and September 2026, from third parties. p5e and trn2
  have no public on-demand price: they are sold in capacity blocks.

- p6e-gb200, which is not in EC2's data of that day: CPUs, memory and GPUs from hyperpod-cli's
  constants (aws/sagemaker-hyperpod-cli), device memory from AWS's P6 page. Its EFA is at least
  "4 EFA network interfaces x 400 Gbps" (EC2 User Guide, efa-acc-inst-types, 2026-08);
  ParallelCluster 3.16.1 makes 16 (templates/queues_stack.py).

g5, g6, g7 and g7e have neither speed nor price here. trn3 is missing, because EC2 lists no instance
type for it. Neuron's documentation (neuron-hardware/trn3-arch, 2026-08) describes UltraServers. Per
server, Gen1 has 16 chips, 192 vCPUs, 2048 GiB and EFA of 3200 Gbps; Gen2 has 4, 64, 768 and 800. A
chip has 144 GiB and 671 TFLOP/s in BF16. The EFA interfaces and prices are unknown.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm.config.schema import DeviceName
from trnslurm.config.tree import build, check, fields_of, lacking
from trnslurm.devices import CUDA, DEVICES, NEURON, TORCHNEURON, XLA_CPU, DeviceType, device_named
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen


class InstanceType(Frozen):
    name: str
    device: DeviceType
    accelerators: int
    """Chips or GPUs in one instance."""
    workers: tuple[int, ...]
    """Supported worker counts for jobs on one node."""
    multi_node_workers: tuple[int, ...]
    """Supported worker counts per node for multi-node jobs; empty if there are none."""
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
    """US dollars per hour on demand, or None if unknown."""
    lnc: int = 0
    """Physical NeuronCores per logical core, in which workers are counted. 0 if there is no
    choice."""

    @property
    def gpus(self) -> int:
        """GPUs in one instance, which are a GRES in Slurm. Neuron devices are not."""
        return self.accelerators if self.device.on_gpus else 0

    def own_devices(self, usable: Sequence[str]) -> list[DeviceType]:
        """Return the devices of this hardware that are among the recipe's (empty: all)."""
        also = DEVICES.get(self.device.also, self.device)
        own = dict.fromkeys((self.device, also if also.runs_on(self.name) else self.device))
        return [device for device in own if device.name in (usable or DEVICES)]

    def choose_device(self, asked: str, usable: Sequence[str]) -> DeviceType | None:
        """Return the device asked for, or the first usable one for `auto`, or None without one.

        A host with accelerators also has its CPU.
        """
        own = self.own_devices(usable)
        if asked == "auto":
            return next((d for d in own if d is self.device or not d.only_if_asked), None)
        device = device_named(asked)
        elsewhere = not (self.device.on_host or device.on_host or device in self.own_devices(()))
        return device if asked in (usable or DEVICES) and not elsewhere else None

    def efa_for(self, device: DeviceType, nodes: int) -> int:
        """Return how many EFA interfaces per node a job's collectives use."""
        return self.efa if nodes > 1 and device.uses_efa else 0

    def neuron_devices(self, device: DeviceType) -> int:
        """Return how many Neuron devices per node a job uses."""
        return self.accelerators if device.on_trainium else 0

    def default_workers(self, nodes: int) -> int:
        """Return the largest supported number of workers per node."""
        return max((self.multi_node_workers if nodes > 1 else self.workers) or self.workers)

    def check_workers(self, workers_per_node: int, nodes: int) -> None:
        """Reject a worker count or a node count that this type does not support."""
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


def _gpus(
    name: str,
    number: int,
    device_gib: int,
    bf16_tflops: float,
    price_per_hour: float | None,
    *,
    vcpus: int,
    host_gib: int,
    efa: int,
    network_gbps: int,
) -> InstanceType:
    return InstanceType(
        name=name,
        device=CUDA,
        accelerators=number,
        workers=_GPU_WORKERS[:number],
        multi_node_workers=_GPU_WORKERS[:number],
        vcpus=vcpus,
        host_gib=host_gib,
        device_gib=device_gib,
        efa=efa,
        network_gbps=network_gbps,
        bf16_tflops=bf16_tflops,
        price_per_hour=price_per_hour,
    )


_TYPES = (
    InstanceType(
        name="trn1.2xlarge", device=NEURON, accelerators=1, workers=(1, 2),
        multi_node_workers=(), vcpus=8, host_gib=32, device_gib=32, network_gbps=12,
        bf16_tflops=190, price_per_hour=1.34375,
    ),
    InstanceType(
        name="trn1.32xlarge", device=NEURON, accelerators=16, workers=(1, 2, 8, 32),
        multi_node_workers=(32,), vcpus=128, host_gib=512, device_gib=512, efa=8,
        network_gbps=800, bf16_tflops=3040, price_per_hour=21.50,
    ),
    InstanceType(
        name="trn1n.32xlarge", device=NEURON, accelerators=16, workers=(1, 2, 8, 32),
        multi_node_workers=(32,), vcpus=128, host_gib=512, device_gib=512, efa=16,
        network_gbps=1600, bf16_tflops=3040, price_per_hour=24.78,
    ),
    # No AWS document says that Neuron trains on more than one trn2.3xlarge.
    InstanceType(
        name="trn2.3xlarge", device=TORCHNEURON, accelerators=1, workers=(1, 4),
        multi_node_workers=(), vcpus=12, host_gib=128, device_gib=96, efa=1,
        network_gbps=200, bf16_tflops=667, lnc=2,
    ),
    *(
        InstanceType(
            name=name, device=TORCHNEURON, accelerators=16, workers=(1, 4, 16, 64),
            multi_node_workers=(64,), vcpus=192, host_gib=2048, device_gib=1536, efa=16,
            network_gbps=3200, bf16_tflops=10700, lnc=2,
        )
        for name in ("trn2.48xlarge", "trn2u.48xlarge")  # trn2u: a quarter of an UltraServer
    ),
    _gpus(
        "p4d.24xlarge", 8, 320, 2496, 21.957642,
        vcpus=96, host_gib=1152, efa=4, network_gbps=400,
    ),
    _gpus(
        "p4de.24xlarge", 8, 640, 2496, 27.44705,
        vcpus=96, host_gib=1152, efa=4, network_gbps=400,
    ),
    _gpus("p5.4xlarge", 1, 80, 989, 6.88, vcpus=16, host_gib=256, efa=1, network_gbps=100),
    _gpus("p5.48xlarge", 8, 640, 7912, 55.04, vcpus=192, host_gib=2048, efa=32, network_gbps=3200),
    _gpus("p5e.48xlarge", 8, 1128, 7912, None, vcpus=192, host_gib=2048, efa=32, network_gbps=3200),
    _gpus(
        "p5en.48xlarge", 8, 1128, 7912, 63.296,
        vcpus=192, host_gib=2048, efa=16, network_gbps=3200,
    ),
    _gpus(
        "p6-b200.48xlarge", 8, 1432, 18000, 113.9328,
        vcpus=192, host_gib=2048, efa=8, network_gbps=3200,
    ),
    _gpus(
        "p6-b300.48xlarge", 8, 2148, 18000, 142.42,
        vcpus=192, host_gib=4096, efa=16, network_gbps=6400,
    ),
    # One of the 9 or 18 of an UltraServer, whose GPUs share NVLink; arm64.
    _gpus(
        "p6e-gb200.36xlarge", 4, 740, 10000, None,
        vcpus=144, host_gib=960, efa=4, network_gbps=1600,
    ),
    _gpus("g6e.xlarge", 1, 44, 362, 1.861, vcpus=4, host_gib=32, efa=0, network_gbps=20),
    _gpus("g6e.2xlarge", 1, 44, 362, 2.24208, vcpus=8, host_gib=64, efa=0, network_gbps=20),
    _gpus("g6e.4xlarge", 1, 44, 362, 3.00424, vcpus=16, host_gib=128, efa=0, network_gbps=20),
    _gpus("g6e.8xlarge", 1, 44, 362, 4.52856, vcpus=32, host_gib=256, efa=1, network_gbps=25),
    _gpus("g6e.12xlarge", 4, 178, 1448, 10.49264, vcpus=48, host_gib=384, efa=1, network_gbps=100),
    _gpus("g6e.16xlarge", 1, 44, 362, 7.57719, vcpus=64, host_gib=512, efa=1, network_gbps=35),
    _gpus("g6e.24xlarge", 4, 178, 1448, 15.06559, vcpus=96, host_gib=768, efa=2, network_gbps=200),
    _gpus(
        "g6e.48xlarge", 8, 357, 2896, 30.13118,
        vcpus=192, host_gib=1536, efa=4, network_gbps=400,
    ),
    _gpus("g5.xlarge", 1, 22, 0, None, vcpus=4, host_gib=16, efa=0, network_gbps=10),
    _gpus("g5.2xlarge", 1, 22, 0, None, vcpus=8, host_gib=32, efa=0, network_gbps=10),
    _gpus("g5.4xlarge", 1, 22, 0, None, vcpus=16, host_gib=64, efa=0, network_gbps=25),
    _gpus("g5.8xlarge", 1, 22, 0, None, vcpus=32, host_gib=128, efa=1, network_gbps=25),
    _gpus("g5.12xlarge", 4, 89, 0, None, vcpus=48, host_gib=192, efa=1, network_gbps=40),
    _gpus("g5.16xlarge", 1, 22, 0, None, vcpus=64, host_gib=256, efa=1, network_gbps=25),
    _gpus("g5.24xlarge", 4, 89, 0, None, vcpus=96, host_gib=384, efa=1, network_gbps=50),
    _gpus("g5.48xlarge", 8, 178, 0, None, vcpus=192, host_gib=768, efa=1, network_gbps=100),
    _gpus("g6.xlarge", 1, 22, 0, None, vcpus=4, host_gib=16, efa=0, network_gbps=10),
    _gpus("g6.2xlarge", 1, 22, 0, None, vcpus=8, host_gib=32, efa=0, network_gbps=10),
    _gpus("g6.4xlarge", 1, 22, 0, None, vcpus=16, host_gib=64, efa=0, network_gbps=25),
    _gpus("g6.8xlarge", 1, 22, 0, None, vcpus=32, host_gib=128, efa=1, network_gbps=25),
    _gpus("g6.12xlarge", 4, 89, 0, None, vcpus=48, host_gib=192, efa=1, network_gbps=40),
    _gpus("g6.16xlarge", 1, 22, 0, None, vcpus=64, host_gib=256, efa=1, network_gbps=25),
    _gpus("g6.24xlarge", 4, 89, 0, None, vcpus=96, host_gib=384, efa=1, network_gbps=50),
    _gpus("g6.48xlarge", 8, 178, 0, None, vcpus=192, host_gib=768, efa=1, network_gbps=100),
    _gpus("g7e.2xlarge", 1, 96, 0, None, vcpus=8, host_gib=64, efa=0, network_gbps=50),
    _gpus("g7e.4xlarge", 1, 96, 0, None, vcpus=16, host_gib=128, efa=0, network_gbps=50),
    _gpus("g7e.8xlarge", 1, 96, 0, None, vcpus=32, host_gib=256, efa=1, network_gbps=100),
    _gpus("g7e.12xlarge", 2, 192, 0, None, vcpus=48, host_gib=512, efa=1, network_gbps=400),
    _gpus("g7e.24xlarge", 4, 384, 0, None, vcpus=96, host_gib=1024, efa=2, network_gbps=800),
    _gpus("g7e.48xlarge", 8, 768, 0, None, vcpus=192, host_gib=2048, efa=4, network_gbps=1600),
    _gpus("g7.2xlarge", 1, 32, 0, None, vcpus=8, host_gib=32, efa=0, network_gbps=60),
    _gpus("g7.4xlarge", 1, 32, 0, None, vcpus=16, host_gib=64, efa=0, network_gbps=100),
    _gpus("g7.8xlarge", 1, 32, 0, None, vcpus=32, host_gib=128, efa=1, network_gbps=100),
    _gpus("g7.12xlarge", 2, 64, 0, None, vcpus=48, host_gib=192, efa=1, network_gbps=175),
    _gpus("g7.24xlarge", 4, 128, 0, None, vcpus=96, host_gib=384, efa=1, network_gbps=350),
    _gpus("g7.48xlarge", 8, 256, 0, None, vcpus=192, host_gib=768, efa=2, network_gbps=700),
    # This machine as N emulated nodes.
    InstanceType(
        name="local", device=XLA_CPU, accelerators=1, workers=_GPU_WORKERS,
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


# The GPUs of the families, by EC2's DescribeInstanceTypes (GpuInfo), as Slurm's GRES name them.
_GPU_OF = {
    "p4d": "a100", "p4de": "a100", "p5": "h100", "p5e": "h200", "p5en": "h200",
    "p6-b200": "b200", "p6-b300": "b300", "p6e-gb200": "gb200",
    "g5": "a10g", "g6": "l4", "g6e": "l40s", "g7": "4500", "g7e": "6000",  # RTX PRO
}  # fmt: skip
_EC2 = re.compile(
    r"(?<![a-z0-9])([a-z]{1,3}\d[a-z0-9]*(?:-flex|-g?b\d+)?)[._-]"
    r"(nano|micro|small|medium|large|\d*xlarge|metal(?:-\d+xl)?)(?![a-z0-9])"
)


def ec2_name(text: str) -> str | None:
    """Return the EC2 instance type that another name contains, whether or not we know it.

    Examples are ml.p5.48xlarge, a partition of SageMaker HyperPod, and p5-48xlarge-3, a node of
    PCS, whose names have no dots.
    """
    match = _EC2.search(text.lower())
    return ".".join(match.groups()) if match else None


def is_accelerated(name: str) -> bool:
    """Check whether instances of an EC2 type have GPUs or Neuron devices, by its family."""
    return bool(re.match(r"(p|g|gr|trn|inf)\d", name))


def types_of_size(
    types: Mapping[str, InstanceType], *, cpus: int, memory_mib: int, gpus: int, gpu: str = ""
) -> list[str]:
    """Return the types, suitable for multi-node jobs, that match a node of this size.

    Slurm's RealMemory is slightly less than the type's memory: 95 % with ParallelCluster, 98 % if
    slurmd measured it. `gpu` is the type in the GRES and can be empty.
    """
    return [
        name
        for name, known in types.items()
        if known.multi_node_workers
        and not known.device.on_host
        and known.gpus == gpus
        and cpus in (known.vcpus, known.vcpus // 2)
        and 0.9 * known.host_gib <= memory_mib / 1024 <= known.host_gib
        and (not gpu or _GPU_OF.get(name.partition(".")[0]) in re.split(r"[^a-z0-9]", gpu.lower()))
    ]


def _overridden(base: InstanceType | None, name: str, values: Any) -> InstanceType:
    where = f"instance_types.{name}"
    hints = {**fields_of(InstanceType), "device": DeviceName}
    del hints["name"]
    given = check(values, hints, where)
    for key, value in given.items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(n, int | float) and not n >= 0 for n in numbers):
            raise ConfigError(f"{where}: {key} is {value!r}; it must not be negative")
        if isinstance(value, list):
            if 0 in value:
                raise ConfigError(f"{where}: {key} must be positive whole numbers, found {value!r}")
            value.sort()
    if "device" in given:
        given["device"] = device_named(given["device"])
    tree = {"name": name, **(vars(base) if base else {}), **given}
    if missing := lacking(InstanceType, tree):
        raise ConfigError(f"{where}: a new instance type requires {', '.join(sorted(missing))}")
    return build(InstanceType, tree)
