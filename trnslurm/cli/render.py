"""render: write the files that submit would run. Works on any host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trnslurm.adopt.beside import beside
from trnslurm.cli.options import (
    ScriptCommand,
    nodes_option,
    recipe_argument,
    spec_options,
    sweep_options,
)
from trnslurm.cli.output import Terminal
from trnslurm.config.script import batch_script
from trnslurm.config.sweep import points_of, read_points
from trnslurm.contract.rundir import CONFIG, NODE_SCRIPT, PLAN, STRATEGY
from trnslurm.render.bundle import Bundle, diff, read_bundle
from trnslurm.runs.find import find_run
from trnslurm.runs.search import run_roots
from trnslurm.runs.tables import format_values
from trnslurm.submission.bundles import make_bundle, make_bundles, write_bundle, write_bundles
from trnslurm.submission.options import JobOptions

_READING_ORDER = (
    "precompile.sbatch",
    "precompile.sh",
    "train.sbatch",
    "train.sh",
    NODE_SCRIPT,
    PLAN,
    STRATEGY,
    CONFIG,
)


@click.command("render", cls=ScriptCommand)
@recipe_argument(with_arguments=True)
@nodes_option
@spec_options
@click.option("-o", "--output", metavar="DIR", help="Write the bundle to this new directory.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option(
    "--diff",
    "against",
    metavar="RUN|DIR|FILE",
    help="Show the differences from another run or bundle, or from a batch script's options.",
)
@sweep_options("Write")
def render_command(
    output: str | None,
    force: bool,
    against: str | None,
    sweep: tuple[str, ...],
    sweep_file: str | None,
    **options: Any,
) -> None:
    """Print the scripts, or write them to a directory.

    The directory is a complete bundle, for review and for sbatch. --diff exits with code 1 if there
    are differences, like diff. With a batch script, it compares the sbatch options. --sweep writes
    a bundle for each run: DIR/1, DIR/2 and so on.

    \b
    Example:
      trnslurm render gpt2_zero1 --nodes 2 --cluster trn1
      trnslurm render gpt2_zero1 --nodes 2 --cluster trn1 -o reviewed
      trnslurm render gpt2_zero1 --nodes 4 --cluster trn1 --diff reviewed
      trnslurm render gpt2_zero1 --nodes 2 --cluster trn1 --diff job.sbatch
      trnslurm render gpt2_zero1 --cluster trn1 --sweep train.lr=1e-4,3e-4 -o reviewed
    """
    if against is not None and output is not None:
        raise click.UsageError("--diff writes nothing: omit -o")
    job = JobOptions(**options)
    if sweep or sweep_file:
        if output is None:
            raise click.UsageError("--sweep requires -o DIR, where it writes a bundle for each run")
        points = points_of(sweep, read_points(sweep_file) if sweep_file else ())
        write_bundles(make_bundles(job, points, Terminal()), Path(output), force=force)
        for number, point in enumerate(points, 1):
            click.echo(f"{output}/{number}  {format_values(point)}")
        return
    bundle = make_bundle(job, Terminal())
    if against is not None:
        if batch_script(against):
            if (ours := "train.sbatch") not in bundle.files:
                raise click.UsageError(
                    "--diff FILE compares sbatch options: choose a Slurm cluster with --cluster "
                    "NAME"
                )
            lines = beside(Path(against), bundle.files[ours].decode(), ours)
            click.echo("\n".join(lines))
            sys.exit(1 if any(not line.startswith(" ") for line in lines) else 0)
        is_bundle = Path(against).is_dir()
        other = Path(against) if is_bundle else find_run(against, run_roots(job.workspace)).path
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


def bundle_instructions(bundle: Bundle) -> list[str]:
    """Return the header lines about running the bundle by hand."""
    script = next(n for n in ("train.sbatch", "train.sh") if n in bundle.files)
    lines = bundle.files[script].decode().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# By hand")) + 1
    found = []
    for line in lines[start:]:
        if not line.startswith("#   "):
            break
        found.append(line[4:])
    return found
