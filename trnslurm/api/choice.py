"""What the options of a command or call ask for: search path, cluster, preset, configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trnslurm.api.search import Options, run_roots
from trnslurm.config import Config, Workspace, presets_of, resolve
from trnslurm.config.recipes import recipe_layers
from trnslurm.config.search import read_yaml
from trnslurm.config.values import LONGEST_MIN, parse_notify
from trnslurm.errors import ConfigError
from trnslurm.slurm.commands import slurm_hint

Say = Callable[[str], None]
"""Takes a remark for the user; one that begins with `warning: ` needs attention."""


def choose_cluster(
    workspace: Workspace, recipe: str, options: Options, *, say: Say | None = None
) -> tuple[str, str | None]:
    """Return cluster and preset: as asked, as configured, or a default.

    With `say` it is for a submission: the default fits this machine, and is announced.
    """
    cluster, preset = options["cluster"] or workspace.cluster, options["preset"]
    if cluster is None and say is None:
        return _recipes_cluster(workspace, recipe), preset
    announced = []
    if cluster is None:
        cluster = _this_machine()
        announced.append(f"--cluster {cluster}")
    if preset is None and (preset := _preset_of(workspace, cluster, recipe)):
        announced.append(f"--preset {preset}")
    if announced and say:
        say(f"Using {' '.join(announced)}, as no other was chosen")
    return cluster, preset


def _recipes_cluster(workspace: Workspace, recipe: str) -> str:
    """Return the cluster for which a recipe is described where none is chosen."""
    base, _ = recipe_layers(workspace.recipe_dir(recipe))
    cluster = str(base.tree.get("default_cluster", "trn1"))
    workspace.cluster_file(cluster, f"{base.source}: default_cluster")
    return cluster


def what_submit_would_use(
    workspace: Workspace, recipe: str, config: Config, options: Options
) -> str:
    """Return for what a recipe is planned, if nothing was chosen and submit would choose otherwise.

    It is empty where submit would choose the same.
    """
    if options["cluster"] or workspace.cluster:
        return ""
    try:
        here = _this_machine()
        preset = options["preset"] or _preset_of(workspace, here, recipe)
        would = f"would use --cluster {here}" + (f" --preset {preset}" if preset else "")
        alike = (here, preset or config.preset) == (config.cluster_name, config.preset)
    except ConfigError:
        would, alike = "would ask for --cluster", False
    if alike:
        return ""
    chosen = f"--cluster {config.cluster_name}"
    chosen += f" --preset {config.preset}" if config.preset else ""
    return f"Using {chosen}, as the recipe says; submit here {would}"


def choose_data_cluster(workspace: Workspace, options: Options, say: Say) -> str:
    """Return the cluster whose data is meant; a preferred preset is for training only."""
    if (cluster := options["cluster"] or workspace.cluster) is None:
        cluster = _this_machine()
        say(f"Using --cluster {cluster}, as no other was chosen")
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
    workspace: Workspace, recipe: str, options: Options, cluster: str, preset: str | None,
    *, say: Say, checkpoints: str = "",
) -> Config:  # fmt: skip
    """Resolve the configuration that the options of a training ask for.

    A run of a chain starts from the `checkpoints` of the previous one.
    """
    from trnslurm.plan.values import check_declared  # many commands need no configuration

    layers, checkpoint = _option_layers(options), None
    if word := options["from_run"]:
        from trnslurm.runs.result import find_checkpoint  # most need no run

        find = options.get("find_checkpoint") or partial(
            find_checkpoint, roots=run_roots(workspace)
        )
        checkpoint = find(word)
        layers["train.init_from"] = (f"--from {word}", str(checkpoint.path))
    elif checkpoints:
        layers["train.init_from"] = ("--chain", checkpoints)
    _refuse_second_word(options["settings"], layers)
    config = resolve(
        workspace, recipe, cluster=cluster, preset=preset,
        settings=options["settings"], options=layers,
    )  # fmt: skip
    check_declared(config)
    if checkpoint:
        from trnslurm.runs.result import refuse_other_model

        refuse_other_model(config, checkpoint)
        for why in checkpoint.passed_over:
            say(f"warning: {why}")
        say(f"From {checkpoint.path}")
    return config


def _refuse_second_word(settings: Sequence[str], layers: Mapping[str, tuple[str, Any]]) -> None:
    """Refuse --set of a key that another option sets: neither may be ignored silently."""
    for key in (word.partition("=")[0] for word in settings):
        if key in layers and key != "slurm.sbatch":  # to which --sbatch adds
            raise ConfigError(
                f"{layers[key][0]} and --set {key}=… contradict each other: leave out one of them"
            )


def _option_layers(options: Options) -> dict[str, tuple[str, Any]]:
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
    for key, value in parse_notify(options.get("notify", ())).items():
        layers[f"notify.{key}"] = ("--notify", value)
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
