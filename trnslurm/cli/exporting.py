"""export: a checkpoint of a run as a folder for others."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trnslurm.cli.options import json_option, path_option, run_argument, run_roots, workspace_of
from trnslurm.export import export
from trnslurm.runs import find_run


@click.command("export")
@run_argument
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Default: the newest whole.")
@click.option("-o", "--output", metavar="DIR", help="Default: exported/step-N of the run.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["hf"]),
    default="hf",
    show_default=True,
    help="A Hugging Face folder: there is no other.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
    help="Of the weights.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an export that is there already.")
@path_option
@json_option
def export_command(
    run: str, step: int | None, output: str | None, form: str, dtype: str, force: bool,
    path: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Write a checkpoint as a Hugging Face folder, which from_pretrained loads.

    It runs on this host, with the Python of the run's cluster; no device is needed.

    \b
    Example:
      trnslurm export last
      trnslurm export last --format hf
      trnslurm export last --step 20 --dtype bfloat16 -o my-gpt2
    """
    directory = find_run(run, run_roots(workspace_of({"path": path})))
    options = [f"--dtype={dtype}"]
    options += [] if step is None else [f"--step={step}"]
    options += [] if output is None else [f"--output={Path(output).absolute()}"]
    options += ["--force"] if force else []
    options += ["--json"] if as_json else []
    sys.exit(export(directory, options))
