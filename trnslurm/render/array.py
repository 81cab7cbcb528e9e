"""Renders the script of a job array, whose tasks run the batch scripts of a sweep's runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm import __version__
from trnslurm.config.schema import Cluster
from trnslurm.config.search import packaged_root
from trnslurm.contract.halving import Rung
from trnslurm.contract.variables import Variable
from trnslurm.render.search_path import search_path
from trnslurm.render.template import fill, open_templates

_OF_ONE_RUN = re.compile(rb"^#SBATCH --(job-name|output)=.*\n|^(?!#SBATCH ).*\n", re.MULTILINE)


def shared_options(script: bytes) -> bytes:
    """Return the #SBATCH lines of a batch script, without the lines that name its run."""
    return _OF_ONE_RUN.sub(b"", script)


def can_be_task(script: bytes, phase: str) -> bool:
    """Check whether an array task can run a batch script, possibly from a user's template."""
    output = rf"#SBATCH --output=logs/{phase}-%j.log".encode()
    return (
        Variable.TASK.encode() in script
        and b"\n#SBATCH hetjob\n" not in script  # Slurm has no arrays of heterogeneous jobs
        and re.search(rb"^%b\s" % output, script, re.MULTILINE) is not None
    )


def render_array(script: bytes, name: str, phase: str, *, tasks: int, at_most: int | None) -> bytes:
    """Return the script of an array, with the options from the script of one of its runs."""
    values = _common(script, name, phase, tasks, at_most)
    return _fill("array.sbatch.j2", values)


def render_rung(
    script: bytes,
    name: str,
    phase: str,
    rungs: Sequence[Rung],
    number: int,
    *,
    at_most: int | None,
    cluster: Cluster,
) -> bytes:
    """Return the script of a later rung, with the options from the script of one of its runs."""
    rung = rungs[number - 1]
    values = _common(script, f"{name}-rung-{number}", phase, rung.runs, at_most) | {
        "rung": number,
        "rungs": len(rungs),
        "stop_at": rung.stop_at,
        "umask": f"{cluster.umask:03o}",
        "path": search_path(cluster.python, cluster.slurm.bin_dir),
        "activate": cluster.activate,
        "python": cluster.python,
    }
    return _fill("rung.sbatch.j2", values)


def _common(
    script: bytes, name: str, phase: str, tasks: int, at_most: int | None
) -> dict[str, Any]:
    return {
        "name": f"{name}-{phase}",
        "version": __version__,
        "phase": phase,
        "script": f"{phase}.sbatch",  # only Slurm has arrays
        "tasks": tasks,
        "array": f"1-{tasks}" + (f"%{at_most}" if at_most else ""),
        "options": shared_options(script).decode().splitlines(),
    }


def _fill(template: str, values: Mapping[str, Any]) -> bytes:
    environment = open_templates([packaged_root() / "templates"])
    return fill(environment, template, values).encode()
