"""submit --chain: runs of presets that follow one another; each starts from the previous result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm.api.choice import config_of
from trnslurm.api.options import JobOptions
from trnslurm.cluster.cache import CompileCache
from trnslurm.config.recipes import chain_of
from trnslurm.config.schema import Config
from trnslurm.console import Console
from trnslurm.errors import ConfigError
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.runs.result import other_sizes
from trnslurm.runs.run import RunDir
from trnslurm.submit.job import make_job
from trnslurm.submit.submission import PlannedRun, Submission, WaitsFor


def propose_chain(options: JobOptions, console: Console) -> Submission:
    """Return the runs of a preset and of the presets that follow it in the recipe."""
    chain = chain_of(options.workspace.recipe_dir(options.recipe), options.preset)
    if len(chain) < 2:
        name = next(iter(chain), None)
        raise ConfigError(
            f"--chain: no preset follows {f'{options.recipe} ({name})' if name else options.recipe}"
            "; leave it out, or write `then: PRESET` into its preset"
        )
    settings = divide_settings(options.settings, chain)
    names = {preset: f"{options.name or options.recipe}-{preset}" for preset in chain}
    runs: list[PlannedRun] = []
    before: Config | None = None
    root, stamp, previous = Path(), "", RunDir(Path())
    for preset, name in names.items():
        own = replace(options, preset=preset, settings=settings[preset], name=name)
        if before:
            own = replace(own, from_run=None, previous=str(previous.checkpoints))
        config = config_of(own, console)
        if before:
            _refuse_unfit(before, config)
        else:  # the next run starts from the directory that this run will have
            root, stamp = options.host.settle(config.cluster.run_root, list(names.values()))
        spec = make_spec(config, options.nodes, name=name)
        if warning := check_memory(spec):
            console.warn(f"{config.title}: {warning}")
        job = make_job(spec, options.workspace.template_dirs())
        waits_for = WaitsFor(success=previous.name) if before else WaitsFor()
        runs.append(PlannedRun(job=job, waits_for=waits_for))
        before, previous = config, RunDir(root / f"{stamp}-{name}")
    return Submission(runs=runs, cache=CompileCache(runs[0].job.profile), stamp=stamp)


def divide_settings(words: Sequence[str], chain: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the --set values for each preset, without those for other presets (PRESET:KEY=VALUE).

    A key in which the presets differ must name its preset.
    """
    divided: dict[str, list[str]] = {name: [] for name in chain}
    for word in words:
        dotted, equals, value = word.partition("=")
        name, colon, key = dotted.partition(":")
        if colon and name not in chain:
            raise ConfigError(f"--set {word}: {name!r} is not of the chain {', '.join(chain)}")
        if not colon and len({repr(values.get(dotted)) for values in chain.values()}) > 1:
            choice = " or ".join(f"--set {name}:{dotted}=…" for name in chain)
            raise ConfigError(f"--set {word}: the chain's presets differ in {dotted}; say {choice}")
        for each in [name] if colon else chain:
            divided[each].append(f"{key}{equals}{value}" if colon else word)
    return divided


def _refuse_unfit(before: Config, config: Config) -> None:
    if wrong := other_sizes(before.recipe.model, config.recipe.model):
        raise ConfigError(f"{config.title} cannot go on from {before.title}: {wrong[0]}")
    train = before.recipe.train
    if train.get("save_every") == 0 and not train.get("save_minutes"):
        raise ConfigError(
            f"{before.title}: train.save_every is 0, so {config.preset} would find no checkpoint"
        )
