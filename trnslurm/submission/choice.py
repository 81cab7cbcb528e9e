"""Chooses the cluster, the preset and the configuration of a job from its JobOptions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm.config.above import with_whole_paths
from trnslurm.config.catalog import catalog, find
from trnslurm.config.continuing import (
    continuing_words,
    is_of_hydra,
    quoted_for_hydra,
    sources_of,
)
from trnslurm.config.entry import Entry
from trnslurm.config.load import resolve, resolve_cluster
from trnslurm.config.recipes import presets_of, recipe_layers
from trnslurm.config.schema import Cluster, Config
from trnslurm.config.script import batch_script
from trnslurm.config.search import Workspace, read_yaml
from trnslurm.config.sweep import Point
from trnslurm.config.times import parse_size, parse_time
from trnslurm.config.values import parse_notify
from trnslurm.console import Console
from trnslurm.errors import ConfigError
from trnslurm.plan.memory import check_memory
from trnslurm.plan.script import check_script
from trnslurm.plan.spec import JobSpec, make_spec
from trnslurm.plan.values import check_declared
from trnslurm.runs.result import no_result, refuse_other_model
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.slurm.commands import slurm_hint
from trnslurm.submission.options import AS_SLURM, JobOptions, parse_range

_MOST_COUNTS = 1000


def choose(options: JobOptions, console: Console) -> JobOptions:
    """Return the options with a cluster (from the settings or the recipe) and a preset."""
    cluster = options.cluster or options.workspace.cluster or _recipes_cluster(options)
    return _with_preset(options, cluster, [], console)


def choose_to_submit(options: JobOptions, console: Console) -> JobOptions:
    """Return the options with a cluster (from the settings, or this machine) and a preset."""
    cluster, announced = options.cluster or options.workspace.cluster, []
    if cluster is None:
        cluster = _this_machine()
        announced.append(f"--cluster {cluster}")
    return _with_preset(options, cluster, announced, console)


def _with_preset(
    options: JobOptions, cluster: str, announced: list[str], console: Console
) -> JobOptions:
    """Return the options with a cluster and its preset, and print the defaults that were chosen."""
    preset = options.preset
    if preset is None and (preset := _preset_of(options.workspace, cluster, options.recipe)):
        announced.append(f"--preset {preset}")
    if announced:
        console.say(f"Using {' '.join(announced)} by default")
    nodes = options.nodes
    script = batch_script(options.recipe) if nodes == AS_SLURM else None
    if script and script.told_nodes is None:
        profile = config_of(replace(options, cluster=cluster, preset=preset), console).cluster
        instance = find(catalog(profile.instance_types), profile.instance_type)
        nodes, why = script.nodes_of(instance if scheduler_of(profile).has_queue else None)
        console.say(why)
    return replace(options, cluster=cluster, preset=preset, nodes=nodes)


def _recipes_cluster(options: JobOptions) -> str:
    """Return the recipe's default cluster, for a plan where no cluster is chosen."""
    base, _ = recipe_layers(options.workspace.source(options.recipe))
    cluster = str(base.tree.get("default_cluster", "trn1"))
    options.workspace.cluster_file(cluster, f"{base.source}: default_cluster")
    return cluster


def what_submit_would_use(options: JobOptions, config: Config) -> str:
    """Return a line if submit would use defaults other than this plan's, or an empty string."""
    if options.cluster or options.workspace.cluster:
        return ""
    try:
        here = _this_machine()
        preset = options.preset or _preset_of(options.workspace, here, options.recipe)
        would = f"would use --cluster {here}" + (f" --preset {preset}" if preset else "")
        alike = (here, preset or config.preset) == (config.cluster_name, config.preset)
    except ConfigError:
        would, alike = "would ask for --cluster", False
    if alike:
        return ""
    chosen = f"--cluster {config.cluster_name}"
    chosen += f" --preset {config.preset}" if config.preset else ""
    return f"Using {chosen}, from the recipe; here, submit {would}"


def choose_data_cluster(workspace: Workspace, cluster: str | None, console: Console) -> str:
    """Return the cluster for a data command. Preferred presets are for training only."""
    if (cluster := cluster or workspace.cluster) is None:
        cluster = _this_machine()
        console.say(f"Using --cluster {cluster} by default")
    return str(cluster)


def cluster_of(workspace: Workspace, cluster: str | None, console: Console) -> Cluster:
    """Return the profile of the cluster for a data command."""
    return resolve_cluster(workspace, choose_data_cluster(workspace, cluster, console))


def _preset_of(workspace: Workspace, cluster: str, recipe: str) -> str | None:
    """Return the preset that the cluster profile prefers, if the recipe has it."""
    preset = read_yaml(workspace.cluster_file(cluster)).get("prefer_preset")
    return str(preset) if preset in presets_of(workspace.source(recipe)) else None


def _this_machine() -> str:
    """Return `local`, or refuse to choose on a host that shows signs of Slurm."""
    hint, has_srun = slurm_hint()
    if hint is None:
        return "local"
    if has_srun:
        raise ConfigError(
            "this host has Slurm, but no cluster profile is chosen: pass --cluster NAME, or make "
            "a profile with `trnslurm cluster detect --write`"
        )
    raise ConfigError(
        f"{hint} suggests that this host has Slurm, but srun is not on PATH: load your site's "
        "Slurm module, pass --cluster NAME for a profile with slurm.bin_dir, or --cluster local"
    )


def config_of(options: JobOptions, console: Console) -> Config:
    """Resolve the configuration of the job."""
    layers, checkpoint = _option_layers(options), None
    if word := options.from_run:
        checkpoint = options.host.find_checkpoint(word, options.workspace)
        layers["train.init_from"] = (f"--from {word}", str(checkpoint.path))
    elif options.previous:
        option = "--from" if options.inputs else "--chain"
        layers["train.init_from"] = (option, options.previous)
    _refuse_set_twice(options.settings, layers)
    assert options.cluster is not None  # set by choose() or choose_to_submit()
    arguments, added = _arguments_of(options, console)
    if arguments:
        layers["arguments"] = ("--", arguments)
    if added:
        layers["resume_arguments"] = ("the script's source", added)
    config = resolve(
        options.workspace,
        options.recipe,
        cluster=options.cluster,
        preset=options.preset,
        settings=options.settings,
        options=layers,
    )
    check_declared(config)
    if checkpoint:
        refuse_other_model(config, checkpoint)
        for why in checkpoint.passed_over:
            console.warn(why)
        console.say(f"From {checkpoint.path}")
    return config


def _arguments_of(options: JobOptions, console: Console) -> tuple[Sequence[str], Sequence[str]]:
    """Return a script's arguments, completed by trnslurm.

    Files above the project get absolute paths. The option that loads a checkpoint is added.
    """
    base, _ = recipe_layers(options.workspace.source(options.recipe))
    project, here = Path(str(base.tree.get("project", ""))), Path.cwd()
    if not project.is_absolute():  # a recipe's own
        return options.arguments, ()
    directory = here if here.is_relative_to(project) else project
    arguments, changed = with_whole_paths(options.arguments, directory)
    for value, path in changed.items():
        console.say(f"Using {path} for {value}, which is above the project")
    entry = Entry(str(base.tree["entry"]))
    own, others = sources_of(entry, project)
    if added := continuing_words(own, others, arguments):
        console.say(f"Added {' '.join(added)}, so that the script resumes from its checkpoint")
    if is_of_hydra(own, [*arguments, *added]):
        arguments, added = quoted_for_hydra(arguments), quoted_for_hydra(added)
    return arguments, added


def spec_of(
    options: JobOptions, console: Console, *, suffix: str = "", held: bool = False
) -> JobSpec:
    """Plan the job to submit. Reject missing initial parameters, and warn if memory may run out.

    `suffix` is added to the name of a sweep's run.
    """
    config = config_of(options, console)
    if problem := no_result(config):
        raise ConfigError(problem)
    name = (options.name or config.recipe_name) + suffix
    spec = make_spec(config, options.nodes, name=name, held=held)
    first, chosen = (c.cluster.slurm.partition or "" for c in (config, spec.config))
    if first != chosen:
        names = chosen.split(",")
        soonest = ", whichever can start it first" if len(names) > 1 else ""
        why = "" if first in names else f", because {first} does not allow it"
        console.say(f"Using partition {' or '.join(names)}{soonest}{why}")
    for warning in filter(None, (check_memory(spec), check_script(spec))):
        console.warn(warning)
    return spec


def at_points(options: JobOptions, points: Sequence[Point]) -> list[JobOptions]:
    """Return the options of each run of a sweep. Reject a sweep key that --set sets too."""
    keys = {key for point in points for key in point}
    for key in (word.partition("=")[0] for word in options.settings):
        if key in keys:
            raise ConfigError(
                f"--sweep {key} and --set {key}=… contradict each other: omit one of them"
            )
    given = [[f"{key}={value}" for key, value in point.items()] for point in points]
    return [replace(options, settings=[*options.settings, *words]) for words in given]


def _refuse_set_twice(settings: Sequence[str], layers: Mapping[str, tuple[str, Any]]) -> None:
    """Reject --set of a key that another option sets, because neither may be ignored silently."""
    for key in (word.partition("=")[0] for word in settings):
        if key in layers and key != "slurm.sbatch":  # --sbatch adds to slurm.sbatch
            raise ConfigError(
                f"{layers[key][0]} and --set {key}=… contradict each other: omit one of them"
            )


def _option_layers(options: JobOptions) -> dict[str, tuple[str, Any]]:
    """Return the configuration keys that dedicated options set."""
    layers: dict[str, tuple[str, Any]] = {}
    if (workers := options.workers_per_node) is not None:
        if workers < 1:
            raise ConfigError(f"--workers {workers}: a node needs at least one worker")
        layers["workers_per_node"] = ("--workers", workers)
    layers |= _part_of_a_node(options)
    if options.time:
        layers["slurm.time_min"] = ("--time", parse_time(options.time))
    if options.least_nodes is not None:
        asked = f"--nodes {options.least_nodes}-{options.nodes}"
        layers["slurm.min_nodes"] = (asked, options.least_nodes)
    if (spares := options.spares) is not None:
        if spares < 0:
            raise ConfigError(f"--spares {spares}: must be 0 or more")
        layers["slurm.spares"] = ("--spares", spares)
    for option, key, value in (
        ("--sbatch", "slurm.sbatch", options.sbatch),
        ("--allow-idle", "batch.allow_idle", options.allow_idle),
        ("--", "arguments", options.arguments),
        ("--launcher", "launcher", options.launcher),
        ("--", "launcher_arguments", options.launcher_arguments),
        ("--precompile", "precompile", options.precompile),
        ("--each-checkpoint-of", "follows", options.follows),
        ("if", "starts_if", options.starts_if),
    ):
        if value:
            layers[key] = (option, value)
    layers |= {f"inputs.{name}": (f"stage {name}", run) for name, run in options.inputs.items()}
    for name in options.env:
        if not re.fullmatch(r"\w+", name):
            raise ConfigError(
                f"--env {name}: expected a name: to set a value, use --set env.NAME=VALUE"
            )
        if name not in os.environ:
            raise ConfigError(f"--env {name}: this shell does not export this variable")
        layers[f"env.{name}"] = (f"--env {name}", os.environ[name])
    for key, value in parse_notify(options.notify).items():
        layers[f"notify.{key}"] = ("--notify", value)
    return layers


def _whole_range(text: str) -> range:
    least, most = parse_range(text) or (int(text), int(text))
    if most - least >= _MOST_COUNTS:
        raise ValueError
    return range(least, most + 1)


def parse_nodes(text: str, *, option: str = "--nodes") -> list[int]:
    """Return the node counts in an option's value, such as `1,2,4` or `2-4`."""
    try:
        counts = [n for part in text.split(",") for n in _whole_range(part)]
    except ValueError:
        raise ConfigError(
            f"{option} {text}: expected whole numbers, such as {option} 1,2,4"
        ) from None
    for count in counts:
        if count < 1:
            raise ConfigError(f"{option} {text}: a job needs at least one node")
    return counts


def _part_of_a_node(options: JobOptions) -> dict[str, tuple[str, Any]]:
    """Return the keys set by --gpus, --cpus and --mem, which leave the rest of a node free."""
    layers: dict[str, tuple[str, Any]] = {}
    if text := options.gpus:
        kind, _, number = text.rpartition(":")
        if not re.fullmatch(r"[1-9]\d{0,3}", number):
            raise ConfigError(
                f"--gpus {text}: expected a number, or a type and a number, such as a100:2"
            )
        layers["slurm.gpus_per_node"] = ("--gpus", int(number))
        if kind:
            layers["slurm.gpu_type"] = ("--gpus", kind)
        if options.workers_per_node is None:
            layers["workers_per_node"] = ("--gpus", int(number))
    if (cpus := options.cpus) is not None:
        if cpus < 1:
            raise ConfigError(f"--cpus {cpus}: must be at least 1")
        layers["slurm.cpus_per_task"] = ("--cpus", cpus)
    if options.mem:
        layers["slurm.mem_per_node_mib"] = ("--mem", parse_size(options.mem))
    if layers:
        option = next(iter(layers.values()))[0]
        layers["slurm.exclusive"] = (option, False)
    return layers
