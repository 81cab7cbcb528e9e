"""The job of `trnslurm doctor --run`: a training's scripts, in which the workers only measure.

Its batch script and what starts its workers (ranks.sh) are those of any training on this cluster,
so that what they set in the environment is checked as well; around the workers goes
trnslurm.node.checkup, which looks at the nodes.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from trnslurm.config import Cluster, Config, Recipe
from trnslurm.config.schema import Batch, Origin
from trnslurm.plan.spec import JobSpec, make_spec
from trnslurm.render.bundle import ON_NODES, Bundle, package_files
from trnslurm.rundir import NODE_SCRIPT
from trnslurm.submit.job import Job, make_job

NAME = "checkup"
RANKS_SCRIPT = "ranks.sh"
# Nodes boot one by one; on them it takes at most five minutes.
_LIMIT_MIN = 30
_ENTRY = b"""\
from trnslurm.train.checkup import main

main()
"""
# A graph has to be new to show that the cache can be written: so its size comes from the clock.
_SIZES = 100_000


def make_spec_of_checkup(cluster: Cluster, name: str, source: str, nodes: int) -> JobSpec:
    """Make the job: one step of one sample per worker."""
    limits = [_LIMIT_MIN, cluster.slurm.max_time_min or _LIMIT_MIN]
    slurm = replace(
        cluster.slurm, time_min=min(limits), requeue=False, stop_before_s=0, max_crashes=1,
        srun_wait_s=0,  # no node is ended because another has finished
    )  # fmt: skip
    # The checkup runs the preflight itself, and continues if that finds a problem.
    profile = replace(cluster, slurm=slurm, preflight=False)
    recipe = Recipe(batch=Batch(mode="per_worker", per_worker=1), precompile="never")
    origin = Origin(layer="cluster profile", source=source)
    config = Config(
        recipe_name=NAME, recipe_dir="", preset=None, cluster_name=name, cluster=profile,
        recipe=recipe, tree=asdict(profile) | asdict(recipe),
        origins={"device": origin, "slurm.max_nodes": origin, "slurm.max_time_min": origin},
    )  # fmt: skip
    return make_spec(config, nodes, name="doctor")


def make_checkup(spec: JobSpec, template_dirs: Sequence[Path]) -> Job:
    """Render it: a training's files, and the program around its node script."""
    code = package_files(ON_NODES) | {f"code/jobs/{NAME}/train.py": _ENTRY}
    job = make_job(spec, template_dirs, code=code)
    files = dict(job.bundle.files)
    files[RANKS_SCRIPT] = files[NODE_SCRIPT]
    files[NODE_SCRIPT] = _node_script(spec).encode()
    return replace(job, bundle=Bundle(files=dict(sorted(files.items()))), source_dir=None)


def _node_script(spec: JobSpec) -> str:
    neuron = spec.device == "neuron"
    words = [
        f"--device={spec.device}",
        f"--devices={spec.instance.accelerators if neuron else 0}",
        f"--workers={spec.batch.workers_per_node}",
        f"--cache-layout={spec.config.cluster.compile_layout}",
        f"--graph-size={1000 + int(time.time()) % _SIZES}",
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            "# One node's part of `trnslurm doctor --run`; ranks.sh is that of a training.",
            "set -euo pipefail",
            'exec "$TRNSLURM_PYTHON" -m trnslurm.node.checkup \\',
            f"  {shlex.join(words)} -- bash {RANKS_SCRIPT} train",
            "",
        ]
    )
