"""Compiles ahead what a run would need on other node counts, so that resuming it waits for nothing.

Each count gets a run of its own that only precompiles; training does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm.cluster.cache import PRECOMPILE
from trnslurm.config import Config
from trnslurm.errors import ConfigError, PlanError
from trnslurm.plan.spec import JobSpec, check_job_name, make_spec
from trnslurm.submit.job import Job, job_of


def jobs_ahead(
    config: Config, spec: JobSpec, counts: Sequence[int], template_dirs: Sequence[Path]
) -> list[Job]:
    """Return the precompile-only job of each other node count of a run, or refuse a count."""
    if PRECOMPILE not in spec.phases:
        raise ConfigError(f"--elastic: nothing is compiled ahead for {config.title} here")
    return [_job_ahead(config, spec, n, template_dirs) for n in counts if n != spec.nodes]


def _job_ahead(config: Config, spec: JobSpec, nodes: int, template_dirs: Sequence[Path]) -> Job:
    try:
        other = make_spec(config, nodes)
    except (PlanError, ConfigError) as error:
        raise ConfigError(f"--elastic {nodes}: {error}") from None
    if other.batch.global_batch != spec.batch.global_batch:
        raise ConfigError(
            f"--elastic {nodes}: the global batch grows with the nodes (batch.mode per_worker), "
            "so the run cannot go on there"
        )
    time_min = {phase: t for phase, t in other.time_min.items() if phase == PRECOMPILE}
    name = check_job_name(f"{spec.name}-{PRECOMPILE}-{nodes}")
    alone = replace(other, name=name, phases=(PRECOMPILE,), time_min=time_min, estimate=None)
    return job_of(alone, template_dirs)
