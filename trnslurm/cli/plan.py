"""recipes, clusters, show, plan: list recipes and profiles, and plan a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trnslurm.cli.options import (
    ScriptCommand,
    json_option,
    preset_option,
    recipe_argument,
    spec_options,
    workspace_option,
)
from trnslurm.cli.output import Terminal, echo_json, echo_table, echo_text
from trnslurm.config.load import describe, resolve
from trnslurm.config.pipeline import is_pipeline
from trnslurm.config.recipes import presets_of
from trnslurm.config.script import Source
from trnslurm.config.search import Workspace
from trnslurm.config.tree import flatten, plain
from trnslurm.errors import ConfigError, TrnslurmError
from trnslurm.plan.keys import keys_of
from trnslurm.runs.tables import count
from trnslurm.submission.choice import choose, config_of, parse_nodes
from trnslurm.submission.foreign_data import describe_foreign
from trnslurm.submission.options import AS_SLURM, JobOptions
from trnslurm.submission.plan import make_plan

_SHOWN_CHARS = 60  # longest value in a table; --json has all
_NARROW = 20  # the same in a table with many columns


@click.command("recipes")
@recipe_argument(required=False)
@preset_option
@workspace_option
@json_option
def recipes_command(
    recipe: str | None, preset: str | None, workspace: Workspace, console: Terminal
) -> None:
    """List the recipes: the training jobs that can be submitted.

    With RECIPE, list its keys with their accepted values, their values in the preset, and their
    meanings.

    \b
    Example:
      trnslurm recipes
      trnslurm recipes gpt2_zero1
    """
    if recipe is not None:
        _print_keys(workspace, recipe, preset, console)
        return
    if preset is not None:
        raise click.UsageError("--preset requires a RECIPE")
    rows, broken = _listed(workspace.recipes(), _recipe_facts)
    if console.as_json:
        keys = ("recipe", "presets", "description", "directory")
        echo_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        table = [(name, ", ".join(presets), text) for name, presets, text, _ in rows]
        echo_table(("recipe", "presets", "description"), table)
    if broken:
        raise ConfigError("; ".join(broken))


def _print_keys(workspace: Workspace, recipe: str, preset: str | None, console: Terminal) -> None:
    config = resolve(workspace, recipe, cluster="local", preset=preset)  # any has the same keys
    keys = keys_of(config)
    if console.as_json:
        echo_json([asdict(key) | {"default": plain(key.default)} for key in keys])
        return
    click.echo(f"{recipe}, preset {config.preset or '-'}\n")
    rows = [
        (key.key, _short(_value(key.default), _NARROW), _short(key.accepts, 2 * _NARROW), key.help)
        for key in keys
    ]
    echo_table(("key", "value", "accepts", "meaning"), rows)


@click.command("clusters")
@workspace_option
@json_option
def clusters_command(workspace: Workspace, console: Terminal) -> None:
    """List the cluster profiles.

    \b
    Example:
      trnslurm clusters
    """
    rows, broken = _listed(workspace.clusters(), lambda file: (describe(file), str(file)))
    if console.as_json:
        keys = ("cluster", "description", "file")
        echo_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        marked = [(f"{n} *" if n == workspace.cluster else n, text, f) for n, text, f in rows]
        echo_table(("cluster", "description", "file"), marked)
        if workspace.cluster:
            click.echo(f"* the default, from {workspace.cluster_source}")
    if broken:
        raise ConfigError("; ".join(broken))


def _listed(
    found: Mapping[str, Path], facts: Callable[[Path], tuple[Any, ...]]
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Return the names and facts of the readable files, and the errors for the others."""
    rows: list[tuple[Any, ...]] = []
    broken = []
    for name, path in sorted(found.items()):
        try:
            rows.append((name, *facts(path)))
        except ConfigError as error:
            broken.append(str(error))
    return rows, broken


def _recipe_facts(directory: Path) -> tuple[list[str], str, str]:
    return presets_of(Source(path=directory)), describe(directory / "recipe.yaml"), str(directory)


@click.command("show", cls=ScriptCommand)
@recipe_argument(with_arguments=True)
@spec_options
@json_option
def show_command(console: Terminal, **options: Any) -> None:
    """Show the resolved configuration and where each value comes from.

    \b
    Example:
      trnslurm show gpt2_zero1 --preset tiny --set steps=50
    """
    config = config_of(choose(JobOptions(**options), console), console)
    if console.as_json:
        origins = {
            key: {"layer": origin.layer, "source": origin.source}
            for key, origin in config.origins.items()
        }
        echo_json({"config": plain(config.tree), "origins": origins})
        return
    click.echo(
        f"{config.recipe_name}, preset {config.preset or '-'}, cluster {config.cluster_name}\n"
    )
    rows = []
    for key, value in flatten(config.tree):
        origin = config.origins.get(key)
        source = f"{origin.layer}: {origin.source}" if origin and origin.source else ""
        rows.append((key, _value(value), source or "default"))
    echo_table(("key", "value", "from"), rows)


@click.command("plan", cls=ScriptCommand)
@recipe_argument(with_arguments=True)
@click.option("-n", "--nodes", default="1,2,4,8,16", help="Node counts, or a range such as 2-4.")
@spec_options
@json_option
def plan_command(nodes: str | int, console: Terminal, **options: Any) -> None:
    """Show the batch plan, hours and cost for each node count.

    For a pipeline (a YAML file of stages), show what submit would do.

    \b
    Example:
      trnslurm plan gpt2_zero1 --nodes 1,2,3,4,8,16
      trnslurm plan pipeline.yaml
    """
    if is_pipeline(options["recipe"] or ""):
        from trnslurm.cli.pipeline import plan_pipeline  # few plans are of one
        from trnslurm.cli.submit import submit_command

        plan_pipeline(Path(options["recipe"]), options, console, submit_command)
        return
    job = JobOptions(nodes=AS_SLURM if nodes == AS_SLURM else 1, **options)
    source = click.get_current_context().get_parameter_source("nodes")
    asked = source is not click.core.ParameterSource.DEFAULT
    found = make_plan(job, () if nodes == AS_SLURM else parse_nodes(str(nodes)), console)
    refused = [(n, str(error)) for n, error in found.refused.items()]
    from trnslurm.cli.costs import graphs_facts, plan_lines  # slow to import; only plan needs it

    if console.as_json:
        facts = graphs_facts(found.specs, job.workspace)
        rows = [row | graphs for row, graphs in zip(found.rows, facts, strict=True)]
        errors = [{"nodes": n, "error": error} for n, error in refused]
        echo_json(
            {"recipe": job.recipe, "cluster": found.cluster, "plans": rows, "refused": errors}
        )
    else:
        if found.note:
            console.say(found.note)
        graphs = plan_lines(found.specs, job.workspace)
        data = describe_foreign(found.specs[0].config)
        of_data = [data] if data else []
        click.echo("\n".join(found.lines()))
        for line in (*of_data, *graphs, *([] if asked else found.not_on())):
            echo_text(line)
    if refused and asked:
        raise TrnslurmError("; ".join(f"{count(n, 'node')}: {error}" for n, error in refused))


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return _short(str(plain(value)), _SHOWN_CHARS)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
