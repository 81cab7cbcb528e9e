"""What is known about a waiting run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trnslurm.frozen import Frozen


class SickNode(Frozen):
    """A node on which the job cannot run now."""

    name: str
    state: str
    reason: str


@dataclass(kw_only=True)
class Diagnosis:
    """A run that may be waiting, and the reasons."""

    run: str
    state: str
    reason: str
    phase: str = ""
    """The phase that is waiting."""
    job_id: str = ""
    start: str = ""
    """The start time that Slurm expects; empty if unknown."""
    if_submitted_now: str = ""
    """What `sbatch --test-only` prints for the phase's script."""
    partition: str = ""
    nodes_needed: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)
    """State -> the number of the partition's nodes in that state."""
    sick: list[SickNode] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Nodes that the run excludes, and why."""
    lacks_nodes: bool = False
    """Whether fewer nodes are usable than the job needs."""
    problems: list[str] = field(default_factory=list)
    """Problems that need an action."""
    unknown: list[str] = field(default_factory=list)
    """Errors of Slurm's commands, which left questions open."""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.unknown
