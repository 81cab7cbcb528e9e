"""Options shared by several commands, and their completion."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from trnslurm.api.search import run_roots, workspace_of
from trnslurm.config.script import Launcher
from trnslurm.config.search import Workspace
from trnslurm.errors import TrnslurmError
from trnslurm.runs.find import group_of, list_runs

Command = Callable[..., Any]
# The shell inserts a completed word unquoted, and others may write to a run root.
_HARMLESS = r"\w[\w.-]*"


def _complete(names: Callable[[Workspace, click.Context], Sequence[str]]) -> Any:
    def complete(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
        try:
            found = names(workspace_of(ctx.params.get("path") or ()), ctx)
        except TrnslurmError:
            return []
        return [CompletionItem(n) for n in found if n.startswith(word)]

    return complete


def _recipe_of(workspace: Workspace, ctx: click.Context) -> str | None:
    # While an option still lacks its value, click leaves the recipe unparsed.
    words = [ctx.params.get("recipe"), *ctx.args]
    return next((w for w in words if w in workspace.recipes()), None)


def _preset_names(workspace: Workspace, ctx: click.Context) -> Sequence[str]:
    from trnslurm.config.recipes import presets_of

    recipe = _recipe_of(workspace, ctx)
    return presets_of(workspace.recipe_dir(recipe)) if recipe else []


def _complete_setting(
    ctx: click.Context, param: click.Parameter, word: str
) -> list[CompletionItem]:
    """Complete a key of the recipe, and its value where there are choices."""
    from trnslurm.config.load import resolve
    from trnslurm.config.tree import flatten
    from trnslurm.plan.keys import keys_of

    try:
        workspace = workspace_of(ctx.params.get("path") or ())
        if (recipe := _recipe_of(workspace, ctx)) is None:
            return []
        cluster = ctx.params.get("cluster") or "local"  # any has the same keys
        config = resolve(workspace, recipe, cluster=cluster, preset=ctx.params.get("preset"))
    except TrnslurmError:
        return []
    found = [f"{key}=" for key, _ in flatten(config.tree)]
    if "=" in word:
        found = [f"{key.key}={choice}" for key in keys_of(config) for choice in key.choices]
    return [CompletionItem(name) for name in found if name.startswith(word)]


def _run_names(workspace: Workspace, ctx: click.Context) -> Sequence[str]:
    names = [run.name for run in list_runs(run_roots(workspace))]
    return ["last", *filter(re.compile(_HARMLESS).fullmatch, names)]


def _sweep_names(workspace: Workspace) -> Sequence[str]:
    groups = dict.fromkeys(map(group_of, list_runs(run_roots(workspace))))
    return [*filter(re.compile(_HARMLESS).fullmatch, groups)]


def path_option(command: Command) -> Command:
    """Add --path."""
    return click.option(
        "--path",
        multiple=True,
        metavar="DIR",
        help="Search here first for jobs/, cluster-config/ and templates/.",
    )(command)


def json_option(command: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def notify_option(command: Command) -> Command:
    """Add --notify."""
    return click.option(
        "--notify",
        multiple=True,
        metavar="COMMAND|@FILE",
        help="Tell a command, or the webhook whose URL is in FILE, what becomes of the run.",
    )(command)


def run_argument(command: Command, *, required: bool = True) -> Command:
    """Add RUN."""
    names = _complete(_run_names)
    return click.argument("run", required=required, shell_complete=names)(command)


def sweep_argument(command: Command) -> Command:
    """Add SWEEP."""
    names = _complete(lambda workspace, ctx: _sweep_names(workspace))
    return click.argument("sweep", required=False, shell_complete=names)(command)


def runs_argument(*, required: bool = True) -> Callable[[Command], Command]:
    """Add RUN..., one or several."""
    return click.argument(
        "runs",
        metavar="RUN..." if required else "[RUN...]",
        nargs=-1,
        required=required,
        shell_complete=_complete(_run_names),
    )


def recipe_argument(
    *, required: bool = True, with_arguments: bool = False
) -> Callable[[Command], Command]:
    """Add RECIPE, and the arguments of a custom script."""
    names = _complete(lambda workspace, ctx: sorted(workspace.recipes()))
    recipe = click.argument("recipe", required=required, shell_complete=names)
    if not with_arguments:
        return recipe
    more = click.argument("arguments", nargs=-1, metavar="[-- ARGUMENT...]", type=click.UNPROCESSED)
    return lambda command: recipe(more(command))


def cluster_option(command: Command) -> Command:
    """Add --cluster."""
    names = _complete(lambda workspace, ctx: sorted(workspace.clusters()))
    return click.option(
        "-c", "--cluster", metavar="NAME", shell_complete=names, help="Cluster profile to use."
    )(command)


def preset_option(command: Command) -> Command:
    """Add --preset."""
    return click.option(
        "-p",
        "--preset",
        metavar="NAME",
        shell_complete=_complete(_preset_names),
        help="Preset of the recipe.",
    )(command)


_CONFIG_OPTIONS: list[Callable[[Command], Command]] = [
    path_option,
    cluster_option,
    preset_option,
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=_complete_setting,
        help="Set any key of `trnslurm show`, e.g. batch.micro_batch=2.",
    ),
]
_SPEC_OPTIONS: list[Callable[[Command], Command]] = [
    *_CONFIG_OPTIONS,
    click.option("--workers", "workers_per_node", type=int, metavar="N", help="Workers per node."),
    click.option(
        "--from",
        "from_run",
        metavar="RUN",
        shell_complete=_complete(_run_names),
        help="Start from a run's newest checkpoint (parameters only), or from a checkpoint.",
    ),
    click.option("--time", "time", metavar="TIME", help="Time limit, in Slurm's format."),
    click.option("--name", metavar="NAME", help="Name of the run and its jobs."),
    click.option(
        "--launcher", type=click.Choice(get_args(Launcher)), help="What starts a custom script."
    ),
    click.option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help="Any other sbatch option, e.g. --sbatch=--comment=x; it is written into the script.",
    ),
    notify_option,
    click.option(
        "--allow-idle", is_flag=True, help="Allow more workers than micro-batches per step."
    ),
]


def config_options(command: Command) -> Command:
    """Add the options that choose a configuration: preset, cluster, single keys."""
    return functools.reduce(lambda c, option: option(c), reversed(_CONFIG_OPTIONS), command)


def spec_options(command: Command) -> Command:
    """Add the options that choose what is trained and where."""
    return functools.reduce(lambda c, option: option(c), reversed(_SPEC_OPTIONS), command)
