"""render: the files that submit would run, on any host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from trnslurm.api.arguments import (
    PathLike,
    Paths,
    Settings,
    file_name,
    flag,
    one_line_errors,
    options_of,
    take_remark,
    whole,
)
from trnslurm.api.choice import Say, choose_cluster, config_of
from trnslurm.api.search import Options, workspace_of
from trnslurm.config import Workspace
from trnslurm.errors import RenderError
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.render.bundle import Bundle
from trnslurm.render.job import render_job
from trnslurm.rundir import RunFiles
from trnslurm.runs.result import no_result


@one_line_errors
def render(
    recipe: PathLike, *, nodes: int = 1, output: PathLike | None = None, force: bool = False,
    cluster: str | None = None, preset: str | None = None, settings: Settings = (),
    workers: int | None = None, from_run: object = None, time: str | int | None = None,
    name: str | None = None, sbatch: str | Sequence[str] = (), allow_idle: bool = False,
    arguments: Sequence[str] = (), launcher: str | None = None,
    notify: str | Sequence[str] = (), path: Paths = (),
) -> Bundle:  # fmt: skip
    """Return the files that submit would run, and write them to a directory if asked to.

    The arguments are the options of `trnslurm render`; docs/python.md has them.
    """
    options = options_of(
        cluster=cluster, preset=preset, settings=settings, workers=workers, from_run=from_run,
        time=time, name=name, sbatch=sbatch, allow_idle=allow_idle, arguments=arguments,
        launcher=launcher, notify=notify, path=path,
    )  # fmt: skip
    directory = None if output is None else Path(file_name("output", output))
    replace = flag("force", force)
    bundle = make_bundle(
        workspace_of(options), file_name("recipe", recipe), whole("nodes", nodes), options,
        say=take_remark,
    )  # fmt: skip
    if directory is not None:
        write_bundle(bundle, directory, force=replace)
    return bundle


def make_bundle(
    workspace: Workspace, recipe: str, nodes: int, options: Options, *, say: Say
) -> Bundle:
    """Render a recipe as the options ask."""
    cluster, preset = choose_cluster(workspace, recipe, options)
    config = config_of(workspace, recipe, options, cluster, preset, say=say)
    if problem := no_result(config):
        say(f"warning: {problem}")
    spec = make_spec(config, nodes, name=options["name"])
    if warning := check_memory(spec):
        say(f"warning: {warning}")
    return render_job(spec, workspace.template_dirs())


def write_bundle(bundle: Bundle, directory: Path, *, force: bool) -> None:
    """Write a bundle to a new directory, whole or not at all."""
    occupied = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    if occupied:
        _refuse_replacing(directory, force=force)
    scratch = directory.absolute().with_name(f".{directory.name}.{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        bundle.write(scratch)
        if occupied:
            shutil.rmtree(directory)
        scratch.rename(directory)
    except OSError as error:
        raise RenderError(f"{directory}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse_replacing(directory: Path, *, force: bool) -> None:
    files = RunFiles(directory)
    if not files.plan_file.is_file():
        raise RenderError(f"{directory} exists and is not a bundle: choose another name")
    results = [f for d in (files.logs, files.state) for f in d.glob("[!.]*")]
    if results or files.record_file.exists() or files.metrics_file.exists():
        raise RenderError(f"{directory} holds the results of a run: choose another name")
    if not force:
        raise RenderError(f"{directory} already exists: pass --force to replace it")
