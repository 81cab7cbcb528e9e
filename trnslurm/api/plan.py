"""plan: a recipe's batch, memory, hours and cost for each node count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from trnslurm.api.arguments import (
    JobArguments,
    PathLike,
    PythonConsole,
    options_of,
    takes_job,
    wholes,
)
from trnslurm.errors import ConfigError
from trnslurm.submission.plan import Plan, make_plan

NODES = (1, 2, 4, 8, 16)


@takes_job(JobArguments)
def plan(
    recipe: PathLike, *, nodes: int | Sequence[int] = NODES, **job: Unpack[JobArguments]
) -> Plan:
    """Return a recipe's batch, memory, hours and cost for each node count.

    The arguments are the options of `trnslurm plan`. See docs/python.md.
    """
    counts = wholes("nodes", nodes)
    if not counts:
        raise ConfigError("nodes: pass at least one node count")
    return make_plan(options_of(recipe, 1, job), counts, PythonConsole())
