"""Renders and writes the files that submit would run. Works on any host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from trnslurm.config.sweep import Point
from trnslurm.console import Console
from trnslurm.contract.rundir import RunFiles
from trnslurm.errors import RenderError
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.render.bundle import Bundle
from trnslurm.render.job import render_job
from trnslurm.runs.result import no_result
from trnslurm.submission.choice import at_points, choose, config_of
from trnslurm.submission.options import JobOptions


def make_bundle(options: JobOptions, console: Console) -> Bundle:
    """Render a recipe with these options."""
    return _render(choose(options, console), console)


def make_bundles(
    options: JobOptions, points: Sequence[Point], console: Console
) -> dict[str, Bundle]:
    """Render each run of a sweep as submit would, and return the bundles by run number."""
    each = enumerate(at_points(choose(options, console), points), 1)
    return {str(number): _render(own, console, suffix=f"-{number}") for number, own in each}


def _render(options: JobOptions, console: Console, *, suffix: str = "") -> Bundle:
    config = config_of(options, console)
    if problem := no_result(config):
        console.warn(problem)
    name = (options.name or config.recipe_name) + suffix if suffix else options.name
    spec = make_spec(config, options.nodes, name=name)
    if warning := check_memory(spec):
        console.warn(warning)
    return render_job(spec, options.workspace.template_dirs())


def write_bundle(bundle: Bundle, directory: Path, *, force: bool) -> None:
    """Write a bundle to a new directory, completely or not at all."""
    write_bundles({"": bundle}, directory, force=force)


def write_bundles(bundles: Mapping[str, Bundle], directory: Path, *, force: bool) -> None:
    """Write bundles below a new directory, completely or not at all."""
    occupied = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    if occupied:
        several = "" not in bundles and directory.is_dir()
        for place in sorted(directory.iterdir()) if several else [directory]:
            _refuse_replacing(place, force=force)
    scratch = directory.absolute().with_name(f".{directory.name}.{os.getpid()}")
    try:
        for name, bundle in bundles.items():
            (scratch / name).mkdir(parents=True)
            bundle.write(scratch / name)
        if occupied:
            shutil.rmtree(directory)
        scratch.rename(directory)
    except OSError as error:
        raise RenderError(f"cannot write {directory} ({error.strerror})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse_replacing(directory: Path, *, force: bool) -> None:
    files = RunFiles(directory)
    if not files.plan_file.is_file():
        raise RenderError(f"{directory} exists and is not a bundle: choose another name")
    results = [f for d in (files.logs, files.state) for f in d.glob("[!.]*")]
    if results or files.record_file.exists() or files.metrics_file.exists():
        raise RenderError(f"{directory} contains the results of a run: choose another name")
    if not force:
        raise RenderError(f"{directory} already exists: pass --force to replace it")
