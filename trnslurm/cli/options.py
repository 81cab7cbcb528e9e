"""Options shared by several commands, their completion, and the configuration they ask for."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from trnslurm.config import Cluster, Config, Workspace, flatten, presets_of, resolve
from trnslurm.config.recipes import recipe_layers
from trnslurm.config.schema import Launcher
from trnslurm.config.search import read_yaml
from trnslurm.config.values import LONGEST_MIN
from trnslurm.errors import ConfigError, TrnslurmError
from trnslurm.runs.find import known_roots, list_runs
from trnslurm.runs.result import INIT_FROM, Checkpoint, find_checkpoint, refuse_other_model
from trnslurm.sandbox.layout import search_roots
from trnslurm.slurm.commands import slurm_hint

Command = Callable[..., Any]


def _complete(names: Callable[[Workspace, click.Context], Sequence[str]]) -> Any:
    def complete(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
        try:
            found = names(workspace_of(ctx.params), ctx)
        except TrnslurmError:
            return []
        return [CompletionItem(n) for n in found if n.startswith(word)]

    return complete


def _recipe_of(workspace: Workspace, ctx: click.Context) -> str | None:
    # While an option has no value yet, click leaves the recipe among the unparsed words.
    words = [ctx.params.get("recipe"), *ctx.args]
    return next((w for w in words if w in workspace.recipes()), None)


def _preset_names(workspace: Workspace, ctx: click.Context) -> Sequence[str]:
    recipe = _recipe_of(workspace, ctx)
    return presets_of(workspace.recipe_dir(recipe)) if recipe else []


def _complete_setting(
    ctx: click.Context, param: click.Parameter, word: str
) -> list[CompletionItem]:
    """Complete a key of the recipe, and after it a value where there are choices."""
    from trnslurm.plan.keys import keys_of

    try:
        workspace = workspace_of(ctx.params)
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
    # The shell puts a completed word in as it is, and a run root may be everybody's.
    names = [run.name for run in list_runs(run_roots(workspace))]
    return ["last", *(name for name in names if re.fullmatch(r"\w[\w.-]*", name))]


def path_option(command: Command) -> Command:
    """Add --path."""
    return click.option(
        "--path", multiple=True, metavar="DIR",
        help="Search here first for jobs/, cluster-config/ and templates/.",
    )(command)  # fmt: skip


def json_option(command: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def run_argument(command: Command, *, required: bool = True) -> Command:
    """Add RUN."""
    names = _complete(_run_names)
    return click.argument("run", required=required, shell_complete=names)(command)


def recipe_argument(
    *, required: bool = True, with_arguments: bool = False
) -> Callable[[Command], Command]:
    """Add RECIPE, and what a script of one's own is given."""
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
        "-p", "--preset", metavar="NAME", shell_complete=_complete(_preset_names),
        help="Preset of the recipe.",
    )(command)  # fmt: skip


_CONFIG_OPTIONS: list[Callable[[Command], Command]] = [
    path_option,
    cluster_option,
    preset_option,
    click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE",
        shell_complete=_complete_setting,
        help="Set any key of `trnslurm show`, e.g. batch.micro_batch=2.",
    ),
]  # fmt: skip
_SPEC_OPTIONS: list[Callable[[Command], Command]] = [
    *_CONFIG_OPTIONS,
    click.option(
        "--workers", "workers_per_node", type=int, metavar="N", help="Workers per node."
    ),
    click.option(
        "--from", "from_run", metavar="RUN", shell_complete=_complete(_run_names),
        help="Start from a run's newest checkpoint (parameters only), or from a checkpoint.",
    ),
    click.option("--time", "time", metavar="TIME", help="Time limit, in Slurm's format."),
    click.option("--name", metavar="NAME", help="Name of the run and its jobs."),
    click.option(
        "--launcher", type=click.Choice(get_args(Launcher)), help="What starts one's own script."
    ),
    click.option(
        "--sbatch", multiple=True, metavar="OPTION",
        help="Any other sbatch option, e.g. --sbatch=--comment=x; it is written into the script.",
    ),
    click.option(
        "--allow-idle", is_flag=True, help="Allow more workers than micro-batches per step."
    ),
]  # fmt: skip


def config_options(command: Command) -> Command:
    """Add the options that choose a configuration: recipe's preset, cluster, single keys."""
    return functools.reduce(lambda c, option: option(c), reversed(_CONFIG_OPTIONS), command)


def spec_options(command: Command) -> Command:
    """Add the options that choose what is trained and where."""
    return functools.reduce(lambda c, option: option(c), reversed(_SPEC_OPTIONS), command)


def workspace_of(options: dict[str, Any]) -> Workspace:
    """Return the search path that the options ask for."""
    return Workspace.discover(options.get("path") or (), more=search_roots())


def choose_cluster(
    workspace: Workspace, recipe: str, options: dict[str, Any], *, to_submit: bool
) -> tuple[str, str | None]:
    """Return cluster and preset: as asked, as configured, or a default that is announced."""
    cluster, preset = options["cluster"] or workspace.cluster, options["preset"]
    if cluster is None and not to_submit:
        return _recipes_cluster(workspace, recipe), preset
    announced = []
    if cluster is None:
        cluster = _this_machine()
        announced.append(f"--cluster {cluster}")
    if preset is None and (preset := _preset_of(workspace, cluster, recipe)):
        announced.append(f"--preset {preset}")
    if announced and to_submit:
        click.echo(f"Using {' '.join(announced)}, as no other was chosen", err=True)
    return cluster, preset


def _recipes_cluster(workspace: Workspace, recipe: str) -> str:
    """Return the cluster for which a recipe is described where none is chosen."""
    base, _ = recipe_layers(workspace.recipe_dir(recipe))
    cluster = str(base.tree.get("default_cluster", "trn1"))
    workspace.cluster_file(cluster, f"{base.source}: default_cluster")
    return cluster


def say_what_submit_would_use(
    workspace: Workspace, config: Config, options: dict[str, Any]
) -> None:
    """Say for what a recipe is planned, if nothing was chosen and submit would choose otherwise."""
    if options["cluster"] or workspace.cluster:
        return
    try:
        here = _this_machine()
        preset = options["preset"] or _preset_of(workspace, here, config.recipe_name)
        would = f"would use --cluster {here}" + (f" --preset {preset}" if preset else "")
        alike = (here, preset or config.preset) == (config.cluster_name, config.preset)
    except ConfigError:
        would, alike = "would ask for --cluster", False
    if not alike:
        chosen = f"--cluster {config.cluster_name}"
        chosen += f" --preset {config.preset}" if config.preset else ""
        click.echo(f"Using {chosen}, as the recipe says; submit here {would}", err=True)


def choose_data_cluster(workspace: Workspace, options: dict[str, Any]) -> str:
    """Return the cluster whose data is meant; a preferred preset is for training only."""
    if (cluster := options["cluster"] or workspace.cluster) is None:
        cluster = _this_machine()
        click.echo(f"Using --cluster {cluster}, as no other was chosen", err=True)
    return str(cluster)


def _preset_of(workspace: Workspace, cluster: str, recipe: str) -> str | None:
    """Return the preset that the cluster profile prefers, if the recipe has it."""
    preset = read_yaml(workspace.cluster_file(cluster)).get("prefer_preset")
    return str(preset) if preset in presets_of(workspace.recipe_dir(recipe)) else None


def _this_machine() -> str:
    """Return `local`, unless the host hints at a Slurm that may be meant."""
    hint, has_srun = slurm_hint()
    if hint is None:
        return "local"
    if has_srun:
        raise ConfigError(
            "this host has Slurm and no cluster profile is chosen: pass --cluster NAME, "
            "or make a profile with `trnslurm cluster detect --write`"
        )
    raise ConfigError(
        f"{hint} hints at Slurm, but srun is not on PATH: load your site's Slurm module, "
        "pass --cluster NAME for a profile with slurm.bin_dir, or --cluster local"
    )


def config_of(
    workspace: Workspace, recipe: str, options: dict[str, Any], cluster: str, preset: str | None,
    *, checkpoints: str = "",
) -> Config:  # fmt: skip
    """Resolve the configuration that the options of a training ask for.

    A run of a chain starts from the `checkpoints` of the previous one.
    """
    from trnslurm.plan.values import check_declared  # many commands need no configuration

    layers, checkpoint = _option_layers(options), None
    if word := options["from_run"]:
        checkpoint = find_checkpoint(word, run_roots(workspace))
        layers[INIT_FROM] = (f"--from {word}", str(checkpoint.path))
    elif checkpoints:
        layers[INIT_FROM] = ("--chain", checkpoints)
    _refuse_second_word(options["settings"], layers)
    config = resolve(
        workspace, recipe, cluster=cluster, preset=preset,
        settings=options["settings"], options=layers,
    )  # fmt: skip
    check_declared(config)
    if checkpoint:
        refuse_other_model(config, checkpoint)
        _say_from(checkpoint)
    return config


def _refuse_second_word(settings: Sequence[str], layers: Mapping[str, tuple[str, Any]]) -> None:
    """Refuse --set of a key that another option sets: neither may be ignored silently."""
    for key in (word.partition("=")[0] for word in settings):
        if key in layers and key != "slurm.sbatch":  # to which --sbatch adds
            raise ConfigError(
                f"{layers[key][0]} and --set {key}=… contradict each other: leave out one of them"
            )


def _say_from(checkpoint: Checkpoint) -> None:
    for why in checkpoint.passed_over:
        click.echo(f"warning: {why}", err=True)
    click.echo(f"From {checkpoint.path}", err=True)


def _option_layers(options: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the configuration keys that dedicated options set."""
    layers: dict[str, tuple[str, Any]] = {}
    if options["workers_per_node"] is not None:
        workers = options["workers_per_node"]
        if workers < 1:
            raise ConfigError(f"--workers {workers}: a node needs at least one worker")
        layers["workers_per_node"] = ("--workers", workers)
    if options["time"]:
        layers["slurm.time_min"] = ("--time", parse_time(options["time"]))
    if options["sbatch"]:
        layers["slurm.sbatch"] = ("--sbatch", options["sbatch"])
    if options["allow_idle"]:
        layers["batch.allow_idle"] = ("--allow-idle", True)
    if options.get("arguments"):
        layers["arguments"] = ("--", options["arguments"])
    if options.get("launcher"):
        layers["launcher"] = ("--launcher", options["launcher"])
    if options.get("precompile"):
        layers["precompile"] = ("--precompile", options["precompile"])
    return layers


def parse_time(text: str) -> int:
    """Return minutes for a time as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d{1,999})-)?(\d{1,999})(?::(\d{1,999}))?(?::(\d{1,999}))?", text)
    if not match:
        raise ConfigError(f"--time {text}: expected minutes, HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = (int(g) if g else 0 for g in match.groups())
    if max(second, third) > 59:
        raise ConfigError(f"--time {text}: minutes and seconds after a colon go up to 59")
    if match[1] is not None:  # D-H:M:S
        seconds = days * 86400 + first * 3600 + second * 60 + third
    elif match[4] is not None:  # H:M:S
        seconds = first * 3600 + second * 60 + third
    else:  # M or M:S
        seconds = first * 60 + second
    if seconds < 60:
        raise ConfigError(f"--time {text}: at least one minute")
    if seconds > LONGEST_MIN * 60:
        raise ConfigError(f"--time {text}: at most a year, 365-00:00:00")
    return -(-seconds // 60)


def parse_nodes(text: str, *, option: str = "--nodes") -> list[int]:
    """Return the node counts of an option's value such as `1,2,4`."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} {text}: expected whole numbers, as in {option} 1,2,4"
        ) from None
    for count in counts:
        if count < 1:
            raise ConfigError(f"{option} {text}: a job needs at least one node")
    return counts


def run_roots(workspace: Workspace) -> list[Path]:
    """Return where to look for runs: run roots used before, and those of known profiles."""
    roots = known_roots()
    for file in workspace.clusters().values():
        try:
            root = read_yaml(file).get("run_root", Cluster().run_root)
            roots.append(Path(str(root)).expanduser())
        except (TrnslurmError, RuntimeError):  # ~name of nobody
            continue
    # Unlike Path.is_dir, it is False for what can be no path at all.
    return [r for r in dict.fromkeys(roots) if os.path.isdir(r)]  # noqa: PTH112
