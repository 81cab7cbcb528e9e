"""export: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from trnslurm.cli.options import cluster_option, json_option, run_name_argument, workspace_option
from trnslurm.cli.output import Terminal
from trnslurm.cluster.programs import export, export_file, option_words
from trnslurm.config.load import resolve
from trnslurm.config.search import Workspace
from trnslurm.runs.find import find_run
from trnslurm.runs.search import run_roots
from trnslurm.submission.choice import choose_data_cluster

_PASSED_ON = ("format", "weights", "dtype", "step", "output", "tokenizer", "force")


def _check_step(ctx: click.Context, param: click.Parameter, step: str | None) -> str | None:
    if step not in (None, "best") and not re.fullmatch(r"[1-9][0-9]*", str(step)):
        raise click.BadParameter(f"{step!r} is neither a step number nor 'best'")
    return step


@click.command("export")
@run_name_argument
@click.option(
    "--step",
    metavar="N|best",
    callback=_check_step,
    help="Step to export, or 'best' for the best score  [default: the newest valid one].",
)
@click.option(
    "-o", "--output", metavar="DIR", help="Output directory  [default: exported/step-N in the run]."
)
@click.option(
    "--format", type=click.Choice(["hf"]), default="hf", help="Format; only hf is supported."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Data type of the weights.",
)
@click.option(
    "--weights", metavar="KIND", help="Averaged weights that train.py keeps, such as ema."
)
@click.option("--tokenizer", metavar="DIR", help="Copy the tokenizer from this folder.")
@click.option("--force", is_flag=True, help="Replace an existing export.")
@click.option("--recipe", metavar="RECIPE", help="Read RUN as a .pt file of this recipe's model.")
@click.option("-p", "--preset", metavar="NAME", help="With --recipe: the preset of the model.")
@cluster_option
@workspace_option
@json_option
def export_command(
    run: str,
    recipe: str | None,
    preset: str | None,
    cluster: str | None,
    workspace: Workspace,
    console: Terminal,
    **options: Any,
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    from_pretrained can load the folder. The export runs on this host with the Python of the run's
    cluster, and does not need a device. With --recipe, RUN is a checkpoint file of another program,
    such as ckpt_28125.pt of AWS's BERT tutorial.

    \b
    Example:
      trnslurm export last
      trnslurm export last --format hf
      trnslurm export last --step best
      trnslurm export last --step 20 --dtype bfloat16 -o my-gpt2
      trnslurm export ckpt_28125.pt --recipe bert_pretrain -o my-bert
    """
    for name in ("output", "tokenizer"):
        options[name] = options[name] and Path(options[name]).absolute()
    given = {name: options[name] for name in _PASSED_ON} | {"json": console.as_json}
    words = option_words(given)
    if recipe is None:
        if preset or cluster:
            raise click.UsageError(
                "--preset and --cluster require a checkpoint file: pass --recipe too"
            )
        if run.endswith(".pt"):
            raise click.UsageError(f"{run} is a file: pass the recipe of its model with --recipe")
        sys.exit(export(find_run(run, run_roots(workspace)), words))
    if options["step"] or options["weights"] or options["output"] is None:
        raise click.UsageError("with --recipe, RUN is a file: omit --step and pass --output")
    chosen = choose_data_cluster(workspace, cluster, console)
    config = resolve(workspace, recipe, cluster=chosen, preset=preset)
    sys.exit(export_file(config, Path(run), words))
