"""The base class of all devices: what trnslurm can query about a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from trnslurm.frozen import Frozen

# The versions of PyTorch/XLA's last release, which are the oldest that other devices accept.
OF_XLA = {"torch": "2.9", "transformers": "4.57", "accelerate": "1.15"}
OF_OTHERS = {name: f">={version}" for name, version in OF_XLA.items()}


class NeuronSdk(Frozen):
    """One release of the AWS Neuron SDK."""

    support: str
    """AWS's statement about training with it."""
    pythons: tuple[int, int]
    """The lowest and highest minor versions of Python 3 that it and trnslurm support."""
    pip: Mapping[str, str]
    apt: Mapping[str, str]
    graphs_ahead: int = 0
    """How many graphs the host submits in advance, as AWS advises; 0 if the runtime has no such
    setting."""


class DeviceType:
    """What a worker computes on: a kind of hardware, and the software that uses it.

    A subclass is one device or a family of devices, and its attributes are the facts. Instances
    have no attributes of their own, so nothing can be assigned.
    """

    __slots__ = ()

    name: str
    """Its name in profiles, recipes, plan.json and records."""

    # The hardware.
    on_host: bool = False
    """Whether it computes on the host's CPUs, which every node has."""
    on_gpus: bool = False
    """Whether it computes on GPUs, which are a GRES in Slurm. Neuron devices are not."""
    on_trainium: bool = False
    also: str = ""
    """The other device on the same hardware, which is the second choice of `device: auto`."""
    only_if_asked: bool = False
    """Whether `device: auto` never selects it as a second choice."""
    uses_efa: bool = False
    """Whether its collectives use EFA between nodes."""
    probe: str = ""
    """The class in trnslurm.node that queries the hardware; empty if there is nothing to query."""
    preflight_wait_s: float = 20.0
    """How long a preflight's node 0 waits for the others. They try to reach node 0 for a shorter
    time, and wait for its answer for a longer time, so that they do not give up first."""

    # The software.
    pins: Mapping[str, str]
    """The Python packages of its jobs, in addition to those of Neuron's SDK."""
    sdks: ClassVar[Mapping[str, NeuronSdk]] = {}
    """The releases of the AWS Neuron SDK that support it."""
    commands: Sequence[str] = ()
    """Commands that must be on a node's PATH."""
    imports: Sequence[str] = ()
    """A custom script for the device imports one of these packages; empty if plain PyTorch has the
    device."""
    one_of: Sequence[str] = ()
    """A node's Python needs one of these packages."""
    module_has_version: bool = False
    """Whether the module torch_neuronx has the version of its package."""

    # Its graphs.
    by_xla: bool = False
    """Whether PyTorch/XLA runs it and compiles everything."""
    compiles_ahead: bool = False
    """Whether a job compiles its graphs before training with `precompile: auto`."""
    compiles_scripts_ahead: bool = True
    """Whether it can also do so for a custom script."""
    compiled_by: str = "the trial run"
    """What compiles the graphs."""
    parallel_compile: bool = False
    """Whether neuron_parallel_compile compiles what a short run of the job has traced."""
    cache_on_nodes: bool = False
    """Whether its cache can be on the nodes' disks: in /var/tmp, or with `compile_layout:
    per-host`."""
    cache_name: str = ""
    """The directory within a key's directory where a trial run leaves the graphs."""
    cache_per_worker: bool = False
    """Whether each worker has its own directory there, because two would corrupt each other's
    entries."""
    compiler_flags: Sequence[str] = ()
    """Flags that every job has in NEURON_CC_FLAGS."""
    sets_neuron_env: bool = False
    """Whether its jobs export the recipe's neuron.env."""
    compile_shapes_graphs: bool = False
    """Whether it stores different graphs with train.compile than without."""

    # The training.
    strategies: Sequence[str] = ()
    """The values of strategy.name that it supports."""
    has_zero1: bool = False
    """Whether workers can shard the optimizer state."""
    keeps_attention_weights: bool = False
    """Whether a layer stores a weight per head and pair of tokens, as without flash attention."""
    runtime: str
    """The class in trnslurm.train that drives it."""
    torch_type: str
    """The type of its torch.device."""
    backend: str
    """Its torch.distributed backend."""
    graphs_in_flight: int = 0
    """The most graphs that a host has issued and its device has not finished."""
    checkup_mb: int = 256
    """The size in MB of the all-reduce that a checkup times."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<device {self.name}>"

    def __deepcopy__(self, memo: object) -> DeviceType:
        return self

    def runs_on(self, instance_type: str) -> bool:
        """Check whether its software supports an instance type of its hardware."""
        return True

    def machine_of(self, files: Sequence[str]) -> tuple[str, str] | None:
        """Return the instance type of a machine from its files in /dev, and the evidence for it."""
        return None

    def why_one_node(self, nodes: int, instance_type: str) -> str:
        """Return why nodes cannot be emulated on one machine, or an empty string if they can."""
        return ""

    def why_not_cached(self, cache: str, layout: str) -> str:
        """Return why it cannot store graphs in such a cache, or an empty string if it can."""
        return ""

    def container_options(self, runtime: str, accelerators: int) -> Sequence[str]:
        """Return the apptainer or podman options that let a container use the device."""
        return ()

    def environment(self, given: Mapping[str, str], rank: int) -> dict[str, str]:
        """Return the variables that a worker needs before its software is imported."""
        return {}
