"""render: the files that submit would run, on any host."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from trnslurm.cli.options import (
    choose_cluster,
    config_of,
    recipe_argument,
    run_roots,
    spec_options,
    workspace_of,
)
from trnslurm.errors import RenderError
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.render.bundle import Bundle, diff, read_bundle
from trnslurm.render.job import render_job
from trnslurm.rundir import CONFIG, NODE_SCRIPT, PLAN, STRATEGY, RunFiles
from trnslurm.runs.find import find_run
from trnslurm.runs.result import no_result

_READING_ORDER = (
    "precompile.sbatch", "precompile.sh", "train.sbatch", "train.sh", NODE_SCRIPT, PLAN, STRATEGY,
    CONFIG,
)  # fmt: skip


@click.command("render")
@recipe_argument(with_arguments=True)
@click.option("-n", "--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@spec_options
@click.option("-o", "--output", metavar="DIR", help="Write the bundle to this new directory.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option(
    "--diff", "against", metavar="RUN_OR_DIR", help="Show differences from another run or bundle."
)
def render_command(
    recipe: str, nodes: int, output: str | None, force: bool, against: str | None, **options: Any
) -> None:
    """Print the scripts, or write them to a directory.

    The directory is a whole bundle, for review and for sbatch. --diff exits with 1 if there are
    differences, like diff.

    \b
    Example:
      trnslurm render gpt2_zero1 --nodes 2 --cluster trn1
      trnslurm render gpt2_zero1 --nodes 2 --cluster trn1 -o reviewed
      trnslurm render gpt2_zero1 --nodes 4 --cluster trn1 --diff reviewed
    """
    if against is not None and output is not None:
        raise click.UsageError("--diff writes nothing: leave out -o")
    workspace = workspace_of(options)
    cluster, preset = choose_cluster(workspace, recipe, options, to_submit=False)
    config = config_of(workspace, recipe, options, cluster, preset)
    if problem := no_result(config):
        click.echo(f"warning: {problem}", err=True)
    spec = make_spec(config, nodes, name=options["name"])
    if warning := check_memory(spec):
        click.echo(f"warning: {warning}", err=True)
    bundle = render_job(spec, workspace.template_dirs())
    if against is not None:
        other = (
            Path(against)
            if Path(against).is_dir()
            else find_run(against, run_roots(workspace)).path
        )
        lines = list(diff(read_bundle(other), bundle))
        for line in lines:
            click.echo(line)
        sys.exit(1 if lines else 0)
    if output is None:
        for name in _READING_ORDER:
            if name in bundle.files:
                click.echo(f"==> {name} <==\n{bundle.files[name].decode()}")
        return
    write_bundle(bundle, Path(output), force=force)
    click.echo(f"Wrote {len(bundle.files)} files to {output}. To run them by hand:")
    for line in bundle_instructions(bundle):
        click.echo(f"  {line}")


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


def bundle_instructions(bundle: Bundle) -> list[str]:
    """Return the header's lines about running the bundle by hand."""
    script = next(n for n in ("train.sbatch", "train.sh") if n in bundle.files)
    lines = bundle.files[script].decode().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# By hand")) + 1
    found = []
    for line in lines[start:]:
        if not line.startswith("#   "):
            break
        found.append(line[4:])
    return found
