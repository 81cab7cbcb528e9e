"""The base of all devices: what trnslurm may ask of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from trnslurm.frozen import Frozen

# Of PyTorch/XLA's last release, and the oldest that other devices take.
OF_XLA = {"torch": "2.9", "transformers": "4.57", "accelerate": "1.15"}
OF_OTHERS = {name: f">={version}" for name, version in OF_XLA.items()}


class NeuronSdk(Frozen):
    """One release of AWS's Neuron SDK."""

    support: str
    """AWS's statement about training with it."""
    pythons: tuple[int, int]
    """The lowest and the highest minor version of Python 3 for which it and trnslurm are made."""
    pip: Mapping[str, str]
    apt: Mapping[str, str]
    graphs_ahead: int = 0
    """How many graphs the host submits ahead, by AWS's advice; 0: its runtime takes no number."""


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
    """It computes on the host's CPUs, which every node has."""
    on_gpus: bool = False
    """It computes on GPUs, which are a GRES in Slurm; Neuron devices are not."""
    on_trainium: bool = False
    also: str = ""
    """The other device of the same hardware, the second choice of `device: auto`."""
    only_if_asked: bool = False
    """`device: auto` does not choose it as a second choice."""
    uses_efa: bool = False
    """Its collectives use EFA between nodes."""
    probe: str = ""
    """The class in trnslurm.node that asks the hardware; empty: there is nothing to ask."""
    preflight_wait_s: float = 20.0
    """How long a preflight's node 0 waits for the others. They try to reach node 0 for a shorter
    time, and wait for its answer for a longer time, so that they do not give up before it."""

    # The software.
    pins: Mapping[str, str]
    """The Python packages of its jobs; those of Neuron's SDK come on top."""
    sdks: ClassVar[Mapping[str, NeuronSdk]] = {}
    """The releases of AWS's Neuron SDK that are for it."""
    commands: Sequence[str] = ()
    """What must be on the PATH of a node."""
    imports: Sequence[str] = ()
    """Packages of which a custom script for it imports one; empty: plain PyTorch has the device."""
    one_of: Sequence[str] = ()
    """Packages of which a node's Python needs one."""
    module_has_version: bool = False
    """The module torch_neuronx has the version of its package."""

    # Its graphs.
    by_xla: bool = False
    """PyTorch/XLA runs it, and compiles everything."""
    compiles_ahead: bool = False
    """A job compiles its graphs before the training when `precompile: auto`."""
    compiles_scripts_ahead: bool = True
    """It can do so for a custom script, too."""
    compiled_by: str = "the trial run"
    """What compiles them."""
    parallel_compile: bool = False
    """neuron_parallel_compile compiles what a short run of the job has traced."""
    cache_on_nodes: bool = False
    """Its cache may be on the nodes' disks: in /var/tmp, or with `compile_layout: per-host`."""
    cache_name: str = ""
    """The directory below a key's where a trial run leaves them."""
    cache_per_worker: bool = False
    """Each worker has a directory of its own there: two would spoil each other's entries."""
    compiler_flags: Sequence[str] = ()
    """Flags that every job has in NEURON_CC_FLAGS."""
    sets_neuron_env: bool = False
    """Its jobs export the recipe's neuron.env."""
    compile_shapes_graphs: bool = False
    """With train.compile it keeps other graphs than without."""

    # The training.
    strategies: Sequence[str] = ()
    """The values of strategy.name that it can do."""
    has_zero1: bool = False
    """Workers can divide the optimizer's state."""
    keeps_attention_weights: bool = False
    """A layer keeps a weight for each head and pair of tokens, as without flash attention."""
    runtime: str
    """The class in trnslurm.train that drives it."""
    torch_type: str
    """The type of its torch.device."""
    backend: str
    """Its backend of torch.distributed."""
    graphs_in_flight: int = 0
    """The most graphs that a host has issued and its device not finished."""
    checkup_mb: int = 256
    """The size of the all-reduce that a checkup times."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<device {self.name}>"

    def __deepcopy__(self, memo: object) -> DeviceType:
        return self

    def runs_on(self, instance_type: str) -> bool:
        """Check whether its software knows an instance type of its hardware."""
        return True

    def machine_of(self, files: Sequence[str]) -> tuple[str, str] | None:
        """Return the instance type of a machine by its files in /dev, and the sign of that."""
        return None

    def why_one_node(self, nodes: int, instance_type: str) -> str:
        """Return why nodes cannot be emulated on one machine; empty: they can."""
        return ""

    def why_not_cached(self, cache: str, layout: str) -> str:
        """Return why it cannot keep graphs in such a cache; empty: it can."""
        return ""

    def container_options(self, runtime: str, accelerators: int) -> Sequence[str]:
        """Return the options of apptainer or podman that let a container use the device."""
        return ()

    def environment(self, given: Mapping[str, str], rank: int) -> dict[str, str]:
        """Return the variables that a worker needs before its software is imported."""
        return {}
