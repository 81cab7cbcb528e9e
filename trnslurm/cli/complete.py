"""Completion of options and arguments. Imported only when a shell asks for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from trnslurm.config.load import resolve, resolve_cluster
from trnslurm.config.plugins import all_plugins
from trnslurm.config.recipes import presets_of
from trnslurm.config.search import Workspace, read_yaml
from trnslurm.config.tree import flatten
from trnslurm.errors import TrnslurmError
from trnslurm.plan.keys import keys_of
from trnslurm.records.foreign import this_user
from trnslurm.runs.find import group_of, list_runs
from trnslurm.runs.search import run_roots, workspace_of
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.trackers.send import TRACKERS

# The shell inserts a completed word unquoted, and others may write to a run root.
_HARMLESS = re.compile(r"\w[\w.-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_HOST = re.compile(r"[\w@][\w.@-]*")
_HOST_LINE = r"(?im)^\s*host\s+(.+)$"


def complete(what: str, ctx: click.Context, word: str) -> list[CompletionItem]:
    """Return the completions of a word; `what` is the kind of name, such as a recipe."""
    try:
        found = _NAMES[what](workspace_of(ctx.params.get("path") or ()), ctx, word)
        return [CompletionItem(name) for name in found if name.startswith(word)]
    except TrnslurmError:
        return []


def _recipe_of(workspace: Workspace, ctx: click.Context) -> str | None:
    # While an option still lacks its value, click leaves the recipe unparsed.
    words = [ctx.params.get("recipe"), *ctx.args]
    return next((w for w in words if w in workspace.recipes()), None)


def _presets(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    recipe = _recipe_of(workspace, ctx)
    return presets_of(workspace.source(recipe)) if recipe else []


def _settings(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    """Return the keys of the recipe, or the choices for the value of a key."""
    if (recipe := _recipe_of(workspace, ctx)) is None:
        return []
    cluster = ctx.params.get("cluster") or "local"  # any has the same keys
    config = resolve(workspace, recipe, cluster=cluster, preset=ctx.params.get("preset"))
    if "=" in word:
        return [f"{key.key}={choice}" for key in keys_of(config) for choice in key.choices]
    return [f"{key}=" for key, _ in flatten(config.tree)]


def _runs(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    names = [run.name for run in list_runs(run_roots(workspace))]
    return ["last", *filter(_HARMLESS.fullmatch, names)]


def _sweeps(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    groups = dict.fromkeys(map(group_of, list_runs(run_roots(workspace))))
    return filter(_HARMLESS.fullmatch, groups)


def _hosts(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    """Return the hosts named in profiles and in ssh's own configuration."""
    return dict.fromkeys(filter(_HOST.fullmatch, _known_hosts(workspace)))


def _known_hosts(workspace: Workspace) -> Iterator[str]:
    for file in workspace.clusters().values():
        try:
            yield str(read_yaml(file).get("remote") or "")
        except TrnslurmError:
            continue
    try:
        text = Path("~/.ssh/config").expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in re.findall(_HOST_LINE, text):
        yield from line.split()


def _jobs(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    """Return this user's jobs in Slurm."""
    cluster = ctx.params.get("cluster") or workspace.cluster
    profile = resolve_cluster(workspace, cluster) if cluster else None
    return scheduler_of(profile).job_ids(this_user())


def _variables(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    return filter(_VARIABLE.fullmatch, sorted(os.environ))


def _trackers(workspace: Workspace, ctx: click.Context, word: str) -> Iterable[str]:
    plugins = [plugin.name for plugin in all_plugins() if plugin.kind == "tracker"]
    return filter(_HARMLESS.fullmatch, dict.fromkeys([*TRACKERS, *plugins]))


_NAMES: dict[str, Callable[[Workspace, click.Context, str], Iterable[str]]] = {
    "recipe": lambda workspace, ctx, word: sorted(workspace.recipes()),
    "cluster": lambda workspace, ctx, word: sorted(workspace.clusters()),
    "preset": _presets,
    "setting": _settings,
    "run": _runs,
    "sweep": _sweeps,
    "host": _hosts,
    "variable": _variables,
    "job": _jobs,
    "tracker": _trackers,
}
