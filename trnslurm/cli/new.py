"""new: write a recipe for a custom script, or copy a recipe or an example, to review and change."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import get_args

import click
import yaml

from trnslurm.cli.options import ScriptCommand
from trnslurm.config.recipes import write_recipe
from trnslurm.config.script import Launcher, script_tree
from trnslurm.config.search import packaged_root, parse_yaml
from trnslurm.errors import ConfigError
from trnslurm.plan.spec import check_job_name

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_TEXT = """\
description: {entry}, a custom script
entry: {entry}
project: {project}
# The whole directory is submitted, except what .gitignore names. The script runs in a copy of it,
# work/ in the run directory, so files at relative paths stay with the run.
# links: [data]                # large directories in the project: linked, not submitted
launcher: {launcher}
# trnslurm, torchrun, accelerate, deepspeed, srun: once per worker. python, script: once per node.
precompile: never
devices: [cuda, cpu]
default_cluster: local          # for plan, show and render if no cluster is chosen
# To train on Trainium, set precompile: auto and add neuron to the devices.
arguments:{arguments}
# In braces: micro_batch, accumulation, global_batch, workers, workers_per_node, nodes, seed, steps,
# seq_len, checkpoints (a directory of the run), resume (the newest checkpoint; if there is none,
# resume and the preceding option are omitted), run, attempt, node, master_addr, master_port,
# device, name.
# places: {{lr: 1e-4}}         # the value of {{lr}} in the arguments, for --set places.lr=3e-4
# batch: {{global_batch: 64, micro_batch: 4}}    # for micro_batch and accumulation
# checkpoints: out             # where the script saves, if no argument is {{checkpoints}}: a job
#                              # that reaches its time limit with a new checkpoint is requeued
# slurm: {{time_min: 60}}
"""


@click.command("new", cls=ScriptCommand)
@click.argument("name")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENT...]", type=click.UNPROCESSED)
@click.option("--from", "script", metavar="SCRIPT", help="Script to start, or recipe to copy.")
@click.option(
    "--example",
    type=click.Choice(sorted(d.name for d in _EXAMPLES.iterdir())),
    help="Copy this example to NAME/ instead.",
)
@click.option("--launcher", type=click.Choice(get_args(Launcher)), help="Launcher for the script.")
@click.option("--force", is_flag=True, help="Replace an existing file or directory of this name.")
def new_command(
    name: str,
    script: str | None,
    example: str | None,
    arguments: tuple[str, ...],
    launcher: str | None,
    force: bool,
) -> None:
    """Write a recipe for a custom script: jobs/NAME/recipe.yaml.

    The recipe is commented and does the same as `trnslurm submit SCRIPT -- ARGUMENT...`.

    \b
    Example:
      trnslurm new ddp --from ./train.py -- --batch-size {micro_batch} --out {checkpoints}
      trnslurm new gpt --example nanogpt
      trnslurm new gpt2_mine --from gpt2_zero1
    """
    check_job_name(name)
    if example:
        if script or launcher or arguments:
            raise click.UsageError(
                "--example cannot be combined with --from, --launcher or ARGUMENT"
            )
        source = _EXAMPLES / example
        _copy(source, Path(name), force=force)
        mains = [source / "pipeline.yaml", source / "train.py"]
        mains += [*source.glob("*.sh"), *source.glob("*.py")]
        entry = next(file for file in mains if file.exists())
        click.echo(f"Wrote {name}/. In it, run the command in the first lines of {entry.name}.")
        return
    if script is None:
        raise click.UsageError("pass --from SCRIPT or --example EXAMPLE")
    file = Path("jobs", name, "recipe.yaml")
    recipe = packaged_root() / "jobs" / script
    if (recipe / file.name).is_file() and not Path(script).exists():
        if launcher or arguments:
            raise click.UsageError("--from RECIPE cannot be combined with --launcher or ARGUMENT")
        _copy(recipe, file.parent, force=force)
        click.echo(f"Wrote {file.parent}/. Edit it, then run: trnslurm submit {name} --path .")
        return
    tree = script_tree(Path(script))
    project = Path(tree["project"])
    text = _TEXT.format(
        entry=_scalar(tree["entry"]),
        project=_scalar(os.path.relpath(project, file.parent.absolute())),
        launcher=launcher or tree["launcher"],
        arguments="".join(f"\n  - {_scalar(word)}" for word in arguments) or " []",
    )
    write_recipe(file, text, force=force)
    click.echo(f"Wrote {file}. Review it, then run: trnslurm submit {name} --path . --nodes N")


def _copy(source: Path, target: Path, *, force: bool) -> None:
    if target.exists() and not force:
        raise ConfigError(f"{target} already exists: choose another NAME, or pass --force")
    try:
        shutil.copytree(
            source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"{target}: cannot copy {source}: {error}") from None


def _scalar(text: str) -> str:
    """Return a string as one line of YAML."""
    try:
        plain = re.fullmatch(r"[\w./-]+", text, re.ASCII) and parse_yaml(text) == text
    except (yaml.YAMLError, ValueError):
        plain = False
    return text if plain else json.dumps(text)
