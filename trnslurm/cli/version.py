"""--version, with and without --verbose."""

from __future__ import annotations

from dataclasses import asdict

import click

from trnslurm.cli.output import echo_json, echo_table
from trnslurm.cluster.installed import PACKAGES, Installed, Jobs, installed
from trnslurm.config.command import HEADS
from trnslurm.config.load import resolve_cluster
from trnslurm.config.plugins import Plugin
from trnslurm.node.notify import WAYS
from trnslurm.runs.search import workspace_of
from trnslurm.trackers.send import TRACKERS

_BUILT_IN = {"launcher": HEADS, "tracker": TRACKERS, "notifier": tuple(WAYS)}


def print_installed(cluster: str | None, *, as_json: bool) -> None:
    """Print what is installed here and what the jobs of a cluster, or the default one, use."""
    workspace = workspace_of(())
    name = cluster or workspace.cluster
    found = installed(name, resolve_cluster(workspace, name) if name else None)
    if as_json:
        echo_json(asdict(found))
        return
    click.echo(f"trnslurm {found.trnslurm}, {found.directory}")
    click.echo(f"Python {found.python}, {found.executable}")
    if found.jobs:
        click.echo(_of_jobs(found.jobs))
    for plugin in found.plugins:
        click.echo(f"plug-in: {plugin}{_hidden(plugin)}")
    click.echo()
    _print_packages(found)


def _of_jobs(jobs: Jobs) -> str:
    words = [f"jobs on {jobs.cluster}: {jobs.python} on {jobs.device}"]
    words += [f"in {jobs.image}"] if jobs.image else []
    words += [f"for Neuron SDK {jobs.neuron_sdk}"] if jobs.neuron_sdk else []
    words += [jobs.problem] if jobs.problem and not jobs.image else []
    return ", ".join(words)


def _hidden(plugin: Plugin) -> str:
    built_in = plugin.name in _BUILT_IN.get(plugin.kind, ())
    return ", unused: the built-in one of this name takes precedence" if built_in else ""


def _print_packages(found: Installed) -> None:
    columns = {"here": found.packages}
    if jobs := found.jobs:
        columns |= {} if jobs.problem else {f"on {jobs.cluster}": jobs.packages}
        columns |= {"jobs need": jobs.needs}
    names = [name for name in PACKAGES if any(name in column for column in columns.values())]
    rows = [(name, *(column.get(name, "-") for column in columns.values())) for name in names]
    echo_table(("package", *columns), rows)
