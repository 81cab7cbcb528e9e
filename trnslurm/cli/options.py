"""Options shared by several commands, and the objects that commands receive instead of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any, get_args

import click
from click.core import ParameterSource

from trnslurm.cli import completer
from trnslurm.cli.output import Terminal
from trnslurm.config.batch_script import BatchScript, contradicted
from trnslurm.config.command import Command as UsersCommand
from trnslurm.config.command import Per, launcher_for, read_command
from trnslurm.config.entry import Entry, as_name
from trnslurm.config.script import Launcher, batch_script, is_script
from trnslurm.runs.find import find_run, find_runs
from trnslurm.runs.search import run_roots, workspace_of
from trnslurm.submission.options import AS_SLURM, parse_range

Command = Callable[..., Any]
_OUTPUT = ("as_json", "follow", "detach", "yes", "dry_run")


def path_option(command: Command) -> Command:
    """Add --path."""
    return click.option(
        "--path",
        multiple=True,
        metavar="DIR",
        help="Search this directory first for jobs/, cluster-config/ and templates/.",
    )(command)


def workspace_option(command: Command) -> Command:
    """Add --path. The command receives the Workspace."""

    @functools.wraps(command)
    def with_workspace(*found: Any, path: tuple[str, ...], **values: Any) -> Any:
        return command(*found, workspace=workspace_of(path), **values)

    return path_option(with_workspace)


def takes_console(command: Command) -> Command:
    """Pass a command a Terminal instead of its output options."""

    @functools.wraps(command)
    def with_console(*found: Any, **values: Any) -> Any:
        given = {name: values.pop(name) for name in _OUTPUT if name in values}
        return command(*found, console=Terminal(**given), **values)

    return with_console


def json_option(command: Command) -> Command:
    """Add --json. The command receives a Terminal."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return option(takes_console(command))


def take_nodes(ctx: click.Context, param: click.Parameter, value: Any) -> int | None:
    """Return the number of nodes. For a range, set `least_nodes` to the smallest number."""
    if value is None:
        return None
    if isinstance(value, str) and (found := parse_range(value)):
        ctx.params["least_nodes"] = found[0]
        return found[1]
    return int(click.INT.convert(value, param, ctx))


def nodes_option(command: Command) -> Command:
    """Add --nodes."""
    return click.option(
        "-n",
        "--nodes",
        type=click.UNPROCESSED,
        callback=take_nodes,
        default=1,
        metavar="N|MIN-MAX",
        help="Number of nodes, or a range.",
    )(command)


def notify_option(command: Command) -> Command:
    """Add --notify."""
    return click.option(
        "--notify",
        multiple=True,
        metavar="COMMAND|@FILE|plugin:NAME",
        help="Send notifications about the run to a command, the webhook in FILE, or a plug-in.",
    )(command)


def run_name_argument(command: Command, *, required: bool = True) -> Command:
    """Add RUN. The command receives the argument as typed."""
    return click.argument("run", required=required, shell_complete=completer("run"))(command)


def run_argument(command: Command) -> Command:
    """Add RUN. The command receives the run instead of RUN and --path."""
    return _with_found(find_run, command)


def run_or_sweep_argument(command: Command) -> Command:
    """Add RUN. The command receives the run, or a sweep's runs, instead of RUN and --path."""
    return _with_found(find_runs, command)


def _with_found(find: Callable[[str, list[Path]], Any], command: Command) -> Command:
    @functools.wraps(command)
    def with_found(run: str, path: tuple[str, ...], **values: Any) -> Any:
        return command(find(run, run_roots(workspace_of(path))), **values)

    return run_name_argument(with_found)


def sweep_argument(command: Command) -> Command:
    """Add SWEEP."""
    return click.argument("sweep", required=False, shell_complete=completer("sweep"))(command)


def runs_argument(*, required: bool = True) -> Callable[[Command], Command]:
    """Add RUN..., which accepts one or more runs."""
    return click.argument(
        "runs",
        metavar="RUN..." if required else "[RUN...]",
        nargs=-1,
        required=required,
        shell_complete=completer("run"),
    )


class ScriptCommand(click.Command):
    """A command that accepts a recipe, or a user's command, whose arguments come after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        after = len(args) - args.index("--") - 1 if "--" in args else 0
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:
            return rest
        recipe, arguments = ctx.params.get("recipe"), ctx.params.get("arguments") or ()
        words = (*([recipe] if recipe else ()), *arguments)
        early, late = words[: max(0, len(words) - after)], words[max(0, len(words) - after) :]
        if "recipe" in ctx.params:
            _take_command(ctx, early, late)
        elif arguments[: max(0, len(arguments) - after)]:
            _refuse_early("", arguments)
        return rest


def _take_command(ctx: click.Context, early: Sequence[str], late: Sequence[str]) -> None:
    """Set the job's options from the arguments before and after `--`, from -m and from --per."""
    params, module = ctx.params, ctx.params.pop("module", None)
    params["launcher_arguments"] = ()
    if module and early:
        raise click.UsageError(f"-m {module} starts a module: omit {early[0]}")
    if len(early) > 1:
        _refuse_early(early[0], early[1:])
    if module:
        params["recipe"], params["arguments"] = Entry.module(module).text, tuple(late)
    elif late and not early:
        _take(ctx, read_command(late))
    elif early and (script := batch_script(early[0])):
        _take_script(ctx, script)
    elif not early and "rendered" not in params:
        raise click.MissingParameter(ctx=ctx, param_type="argument", param_hint="'RECIPE'")
    if per := params.pop("per", None):
        if params["launcher"]:
            raise click.UsageError("--per chooses the launcher: omit --launcher")
        params["launcher"] = launcher_for(str(params["recipe"] or ""), per)


def _take_script(ctx: click.Context, script: BatchScript) -> None:
    """Set the node count and the name from a batch script, and report the options left out."""
    params = ctx.params
    if params["launcher"] or params.get("per"):
        raise click.UsageError(
            f"{script.file} is a batch script, which starts its own workers: omit "
            f"{'--launcher' if params['launcher'] else '--per'}"
        )
    if ctx.get_parameter_source("nodes") != ParameterSource.COMMANDLINE:
        params["nodes"] = script.told_nodes or AS_SLURM
    if params["name"] is None and script.name:
        params["name"] = as_name(script.name)
    if script.tasks and ("at_most" in params or params.get("output")):
        tasks = ",".join(map(str, script.tasks))
        params["sweep"] = (*params["sweep"], f"slurm.array_task={tasks}")
        if "at_most" in params:
            params["at_most"] = params["at_most"] or script.at_most
    nodes = [f"--nodes={params['nodes']}"] if params["nodes"] else []
    kept = [*nodes, *script.kept]
    click.echo(f"{script.file} requests {' '.join(kept)}", err=True)
    gpus, cpus, memory = (bool(params.get(name)) for name in ("gpus", "cpus", "mem"))
    others = contradicted(script.kept, gpus=gpus, cpus=cpus, memory=memory)
    left_out = [*script.replaced, *((word, "overridden by the command line") for word in others)]
    for word, instead in left_out:
        click.echo(f"Left out {word}{f': {instead}' if instead else ''}", err=True)


def _take(ctx: click.Context, command: UsersCommand) -> None:
    """Set the job's options from a command's arguments, except those that the user passes too."""
    params = ctx.params
    if params["launcher"] and command.launcher_arguments:
        what = " ".join(command.launcher_arguments)
        raise click.UsageError(f"--launcher {params['launcher']} does not accept {what}")
    params["recipe"], params["arguments"] = command.recipe, command.arguments
    params["launcher"] = params["launcher"] or (None if params.get("per") else command.launcher)
    params["launcher_arguments"] = command.launcher_arguments
    taken = []
    if command.nodes and ctx.get_parameter_source("nodes") != ParameterSource.COMMANDLINE:
        params["nodes"] = command.nodes
        taken.append(f"--nodes {command.nodes}")
    nodes = params.get("nodes")
    workers = command.workers_on(nodes if isinstance(nodes, int) else command.nodes or 1)
    if workers and params["workers_per_node"] is None:
        params["workers_per_node"] = workers
        taken.append(f"--workers {workers}")
    if command.read_as:
        click.echo(f"Reading it as {command.read_as}", err=True)
    if command.why and params["launcher"] == command.launcher and not params.get("per"):
        click.echo(command.why, err=True)
    if taken:
        click.echo(f"Using {' '.join(taken)}, from the command", err=True)
    if command.left_out:
        click.echo(f"Left out {' '.join(command.left_out)}: trnslurm handles this itself", err=True)


def _refuse_early(recipe: str, words: Sequence[str]) -> None:
    """Reject words after the recipe that could be arguments, a preset or a command."""
    if is_script(recipe) or not recipe:
        raise click.UsageError(f"put -- before the arguments of the script, as in -- {join(words)}")
    raise click.UsageError(
        f"{recipe} {words[0]}: to run a command, put it after --, as in -- "
        f"{join((recipe, *words))}; to choose a preset, pass --preset {words[0]}"
    )


def recipe_argument(
    *, required: bool = True, with_arguments: bool = False
) -> Callable[[Command], Command]:
    """Add RECIPE, which also accepts whatever else a ScriptCommand can start."""
    required = required and not with_arguments
    recipe = click.argument("recipe", required=required, shell_complete=completer("recipe"))
    if not with_arguments:
        return recipe
    more = click.argument("arguments", nargs=-1, metavar="[-- WORD...]", type=click.UNPROCESSED)
    module = click.option(
        "-m", "module", metavar="MODULE", help="Start a Python module instead of a RECIPE."
    )
    per = click.option(
        "--per",
        type=click.Choice(get_args(Per)),
        help="Start the command once per worker, once per node, or once per job.",
    )
    return lambda command: recipe(more(module(per(command))))


def cluster_option(command: Command) -> Command:
    """Add --cluster."""
    return click.option(
        "-c",
        "--cluster",
        metavar="NAME",
        shell_complete=completer("cluster"),
        help="Cluster profile to use.",
    )(command)


def preset_option(command: Command) -> Command:
    """Add --preset."""
    return click.option(
        "-p",
        "--preset",
        metavar="NAME",
        shell_complete=completer("preset"),
        help="Preset of the recipe.",
    )(command)


_CONFIG_OPTIONS: list[Callable[[Command], Command]] = [
    workspace_option,
    cluster_option,
    preset_option,
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=completer("setting"),
        help="Set any key of `trnslurm show`, e.g. batch.micro_batch=2.",
    ),
]
_SPEC_OPTIONS: list[Callable[[Command], Command]] = [
    *_CONFIG_OPTIONS,
    click.option(
        "--spares",
        type=int,
        metavar="N",
        help="Number of spare nodes, which replace nodes that fail.",
    ),
    click.option(
        "--workers", "workers_per_node", type=int, metavar="N", help="Number of workers per node."
    ),
    click.option(
        "--gpus", metavar="[TYPE:]N", help="GPUs to use on each node; other jobs can use the rest."
    ),
    click.option("--cpus", type=int, metavar="N", help="CPUs to use on each node."),
    click.option("--mem", metavar="SIZE", help="Memory to use on each node, such as 64G."),
    click.option(
        "--from",
        "from_run",
        metavar="RUN",
        shell_complete=completer("run"),
        help="Start from a run's newest checkpoint (parameters only), or from a given checkpoint.",
    ),
    click.option("--time", "time", metavar="TIME", help="Time limit, in Slurm's format."),
    click.option("--name", metavar="NAME", help="Name of the run and its jobs."),
    click.option(
        "--launcher", type=click.Choice(get_args(Launcher)), help="Launcher for a custom script."
    ),
    click.option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help="Any other sbatch option to write into the script, e.g. --sbatch=--comment=x.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME",
        shell_complete=completer("variable"),
        help="Copy a variable of this shell into the job; repeat for several variables.",
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
    """Add the options that choose what to train and where."""
    return functools.reduce(lambda c, option: option(c), reversed(_SPEC_OPTIONS), command)


def sweep_options(verb: str) -> Callable[[Command], Command]:
    """Add --sweep and --sweep-file."""

    def add(command: Command) -> Command:
        file = click.option(
            "--sweep-file", metavar="FILE", help="Values of a sweep, as a YAML file."
        )
        sweep = click.option(
            "--sweep",
            multiple=True,
            metavar="KEY=V,V",
            help=f"{verb} a run for each value; repeat for each combination of several keys.",
        )
        return sweep(file(command))

    return add


def refuse_pairs(options: Mapping[str, object]) -> None:
    """Reject options that do not work with each other."""
    if len(given := [name for name, value in options.items() if value]) > 1:
        raise click.UsageError(f"{given[1]} does not work with {given[0]}: omit one of them")
