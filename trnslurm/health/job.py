"""The job of `trnslurm doctor --run`: a training job's scripts whose workers only measure.

It uses the same batch script and ranks.sh as any training job on this cluster, so their environment
is checked as well. trnslurm.node.preflight.checkup runs around the workers and checks the nodes.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from trnslurm.config.schema import Batch, Cluster, Config, Origin, Recipe
from trnslurm.contract.rundir import NODE_SCRIPT
from trnslurm.plan.spec import JobSpec, make_spec
from trnslurm.render.bundle import Bundle
from trnslurm.render.package import ON_NODES, package_files
from trnslurm.submission.job import Job, make_job

NAME = "checkup"
RANKS_SCRIPT = "ranks.sh"
# Nodes boot one by one. After that the checkup takes at most five minutes.
_LIMIT_MIN = 30
_ENTRY = b"""\
from trnslurm.train.checkup import main

main()
"""
# Only a new graph shows that the cache is writable, so the graph's size comes from the clock.
_SIZES = 100_000


def make_spec_of_checkup(
    cluster: Cluster, name: str, origins: Mapping[str, Origin], nodes: int
) -> JobSpec:
    """Return the spec of the job: one step with one sample per worker."""
    limits = [_LIMIT_MIN, cluster.slurm.max_time_min or _LIMIT_MIN]
    slurm = replace(
        cluster.slurm, time_min=min(limits), requeue=False, stop_before_s=0, max_crashes=1,
        srun_wait_s=0,  # a finished node does not end the others
    )  # fmt: skip
    # The checkup runs the preflight itself, and continues even if that finds a problem.
    profile = replace(cluster, slurm=slurm, preflight=False)
    recipe = Recipe(batch=Batch(mode="per_worker", per_worker=1), precompile="never")
    config = Config(
        recipe_name=NAME, recipe_dir="", preset=None, cluster_name=name, cluster=profile,
        recipe=recipe, tree=asdict(profile) | asdict(recipe), origins=origins,
    )  # fmt: skip
    return make_spec(config, nodes, name="doctor")


def make_checkup(spec: JobSpec, template_dirs: Sequence[Path]) -> Job:
    """Render the job: the files of a training job, with the checkup around the node script."""
    code = package_files(ON_NODES) | {f"code/jobs/{NAME}/train.py": _ENTRY}
    job = make_job(spec, template_dirs, code=code)
    files = dict(job.bundle.files)
    files[RANKS_SCRIPT] = files[NODE_SCRIPT]
    files[NODE_SCRIPT] = _node_script(spec).encode()
    return replace(job, bundle=Bundle(files=dict(sorted(files.items()))), source_dir=None)


def _node_script(spec: JobSpec) -> str:
    cache = spec.config.cluster.compile_cache
    words = [
        f"--device={spec.device}",
        f"--devices={spec.instance.neuron_devices(spec.device)}",
        f"--workers={spec.batch.workers_per_node}",
        f"--cache-layout={spec.config.cluster.compile_layout}",
        f"--graph-size={1000 + int(time.time()) % _SIZES}",
    ]
    if cache and spec.device.on_trainium and not spec.device.cache_on_nodes:
        words.append(f"--cache={cache}")
    return "\n".join(
        [
            "#!/bin/bash",
            "# One node's part of `trnslurm doctor --run`; ranks.sh is the same as for training.",
            "set -euo pipefail",
            'exec "$TRNSLURM_PYTHON" -m trnslurm.node.preflight.checkup \\',
            f"  {shlex.join(words)} -- bash {RANKS_SCRIPT} train",
            "",
        ]
    )
