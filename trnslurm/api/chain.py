"""submit --chain: a preset and those that follow it, each starting from the previous result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm.api.choice import Say, config_of
from trnslurm.api.search import Options
from trnslurm.config import Config, Workspace, chain_of
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import JobSpec, make_spec
from trnslurm.runs.result import other_sizes
from trnslurm.runs.run import RunDir
from trnslurm.submit.job import Job, Link, make_job

# Stands for a run's checkpoints while a chain is checked: no run has a directory yet.
_NOT_MADE = "RUN/checkpoints"


class _Stage(Frozen):
    """One preset of the chain, with the options for it."""

    workspace: Workspace
    recipe: str
    options: Options
    nodes: int
    cluster: str
    preset: str
    say: Say

    def config(self, checkpoints: str) -> Config:
        """Resolve it; `checkpoints` is what it goes on from, empty for the first of a chain."""
        return config_of(
            self.workspace, self.recipe, self.options, self.cluster, self.preset,
            checkpoints=checkpoints, say=self.say,
        )  # fmt: skip

    def spec(self, config: Config) -> JobSpec:
        """Plan it."""
        return make_spec(config, self.nodes, name=self.options["name"])

    def job(self, config: Config) -> Job:
        """Render it."""
        return make_job(self.spec(config), self.workspace.template_dirs())

    def job_after(self, ahead: RunDir) -> Job:
        """Render it to go on from a run."""
        return self.job(self.config(str(ahead.checkpoints)))


def links_of(
    workspace: Workspace, recipe: str, options: Options, nodes: int, cluster: str,
    preset: str | None, say: Say,
) -> list[Link]:  # fmt: skip
    """Return the jobs of a preset and of those that its recipe lets follow it."""
    chain = chain_of(workspace.recipe_dir(recipe), preset)
    if len(chain) < 2:
        name = next(iter(chain), None)
        raise ConfigError(
            f"--chain: no preset follows {f'{recipe} ({name})' if name else recipe}; leave it out, "
            "or write `then: PRESET` into its preset"
        )
    settings = divide_settings(options["settings"], chain)
    links: list[Link] = []
    before: Config | None = None
    for name in chain:
        own = {**options, "settings": settings[name], "name": f"{options['name'] or recipe}-{name}"}
        own |= {"from_run": None} if before else {}
        stage = _Stage(
            workspace=workspace, recipe=recipe, options=own, nodes=nodes, cluster=cluster,
            preset=name, say=say,
        )  # fmt: skip
        config = stage.config(_NOT_MADE if before else "")
        if before:
            _refuse_unfit(before, config)
        if warning := check_memory(stage.spec(config)):
            say(f"warning: {config.title}: {warning}")
        links.append(Link(stage.job(config), stage.job_after))
        before = config
    return links


def divide_settings(words: Sequence[str], chain: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the --set words of each preset: all of them, less those of others (PRESET:KEY=VALUE).

    A key in which the presets differ must say whose it is.
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
