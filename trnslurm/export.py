"""Exports a run's checkpoint: starts the job's own export script with the cluster's Python."""

from __future__ import annotations

from collections.abc import Sequence

from trnslurm.cluster_python import run_python
from trnslurm.config import read_cluster
from trnslurm.config.search import read_yaml
from trnslurm.errors import RunError
from trnslurm.run import RunDir

_MODULES = ("torch", "transformers", "safetensors")


def export(run: RunDir, options: Sequence[str] = ()) -> int:
    """Run the export script of a run's code, with options of its own; return its exit code."""
    record = run.record()
    script = run.code / "jobs" / record.recipe / "export.py"
    if not script.is_file():
        raise RunError(f"{run.name}: {record.recipe} has no export.py, so it exports nothing")
    saved = read_yaml(run.config_file).get("config")
    if not isinstance(saved, dict):
        raise RunError(f"{run.config_file}: damaged, it has no config")
    cluster = read_cluster(saved, str(run.config_file))
    return run_python(
        cluster,
        [str(script), str(run.plan_file), *options],
        cwd=run.path,
        pythonpath=run.code,
        modules=_MODULES,
        umask=0o027 if cluster.group_readable else 0o077,
    )
