"""The number of nodes on which a run trained, and the state of its spares."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import read_file
from trnslurm.contract.rundir import OF_COUNT
from trnslurm.frozen import Frozen
from trnslurm.node.hosts import brief
from trnslurm.records.run import RunDir
from trnslurm.runs.roles import roles_told

_SPARES = re.compile(rb" --spares=(\d+) ")
_MOST_TOLD = 5


class Spares(Frozen):
    """The nodes that a job holds in reserve for a fault."""

    number: int
    used: tuple[str, ...]
    """The spares that are training, or have trained, in this job."""
    gone: tuple[str, ...]
    """The nodes that they replaced."""

    @property
    def left(self) -> int:
        return max(0, self.number - len(self.used))

    def __str__(self) -> str:
        if not self.used:
            return f"{self.number}, none used"
        used = brief(self.used) + (f" for {brief(self.gone)}" if self.gone else "")
        return f"{len(self.used)} of {self.number} used ({used}), {self.left} left"


def spares_of(run: RunDir, attempts: Sequence[Attempt]) -> Spares | None:
    """Return the spares of a run's newest job, or None if it has none.

    A requeue allocates new nodes, so attempts before it do not count.
    """
    number = 0
    with suppress(OSError):
        if found := _SPARES.search(read_file(run.script("train"))):
            number = int(found[1])
    if not number:
        return None
    began = [a for a in attempts if a.phase == "train" and a.hosts]
    here = [a for a in began if (a.job_id, a.restarts) == (began[-1].job_id, began[-1].restarts)]
    first, last = (here[at].hosts.split(",") if here else [] for at in (0, -1))
    trained = dict.fromkeys(host for a in here for host in a.hosts.split(","))
    return Spares(
        number=number,
        used=tuple(host for host in trained if host not in first),
        gone=tuple(host for host in trained if host not in last),
    )


def least_nodes(run: RunDir, nodes: int) -> int:
    """Return the smallest number of nodes on which the job may start, by default `nodes`."""
    fewer = [f.parent.name.rpartition("-")[2] for f in run.path.glob(OF_COUNT.format("*/train.*"))]
    return min((int(count) for count in fewer if count.isdecimal()), default=nodes)


def sizes_of(run: RunDir, nodes: int, attempts: Sequence[Attempt]) -> str:
    """Return the node count of each attempt in words, if the job has a range of nodes."""
    least = least_nodes(run, nodes)
    if least >= nodes:
        return ""
    began = [(a.attempt, len(a.hosts.split(","))) for a in attempts if a.hosts]
    told = []
    for size, group in itertools.groupby(began, key=lambda pair: pair[1]):
        first, *_, last = [number for number, _ in group] * 2
        told.append(f"{size} in attempt{'' if first == last else 's'} {first}")
        told[-1] += "" if first == last else f" to {last}"
    more = "… " if len(told) > _MOST_TOLD else ""
    return f"{least} to {nodes} allowed; {more}{', '.join(told[-_MOST_TOLD:])}".rstrip("; ")


def nodes_told(run: RunDir, nodes: int, attempts: Sequence[Attempt]) -> dict[str, str]:
    """Return the lines of status about a run's spares, range of nodes, and roles."""
    spares = spares_of(run, attempts)
    found = {"spares": str(spares or ""), "nodes": sizes_of(run, nodes, attempts)}
    found |= roles_told(run, attempts)
    return {name: text for name, text in found.items() if text}
