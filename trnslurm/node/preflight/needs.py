"""What a job needs from a node, and what a check of that finds."""

from pathlib import Path

from trnslurm.devices import CPU, DeviceType
from trnslurm.frozen import Frozen

MIB, GIB = 2**20, 2**30


class Needs(Frozen):
    """A job's requirements for one node."""

    run: Path
    phase: str
    nodes: int = 1
    device: DeviceType = CPU
    devices: int = 0
    """The number of Neuron devices of the instance type."""
    workers: int = 1
    """The number of workers on this node. Each worker needs a NeuronCore or a GPU."""
    efa: int = 0
    data: str = ""
    caches: tuple[str, ...] = ()
    min_free: int = 256 * MIB
    """The bytes that must be free on each disk that is written to."""


class Checked(Frozen):
    """The result of a check: a fact for a table, and a problem with its fix."""

    fact: str = ""
    problem: str = ""
    warning: str = ""
