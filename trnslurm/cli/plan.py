"""recipes, clusters, show, plan: what there is, and what it would take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trnslurm.cli.graphs import graphs_facts, plan_lines
from trnslurm.cli.options import (
    choose_cluster,
    config_of,
    json_option,
    parse_nodes,
    path_option,
    recipe_argument,
    spec_options,
    workspace_of,
)
from trnslurm.cli.output import count, dollars, echo_json, echo_table, hours
from trnslurm.cluster.cache import CompileCache
from trnslurm.config import describe, presets_of
from trnslurm.config.tree import flatten, plain
from trnslurm.errors import ConfigError, PlanError, TrnslurmError
from trnslurm.plan.batch import even_nodes, without_padding
from trnslurm.plan.memory import estimate_memory
from trnslurm.plan.spec import JobSpec, make_spec, where_set

_SHOWN_CHARS = 60  # of a value in a table; --json has all of it


@click.command("recipes")
@path_option
@json_option
def recipes_command(path: tuple[str, ...], as_json: bool) -> None:
    """List the recipes: the training jobs that can be submitted.

    \b
    Example:
      trnslurm recipes
    """
    rows, broken = _listed(workspace_of({"path": path}).recipes(), _recipe_facts)
    if as_json:
        keys = ("recipe", "presets", "description", "directory")
        echo_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        table = [(name, ", ".join(presets), text) for name, presets, text, _ in rows]
        echo_table(("recipe", "presets", "description"), table)
    if broken:
        raise ConfigError("; ".join(broken))


@click.command("clusters")
@path_option
@json_option
def clusters_command(path: tuple[str, ...], as_json: bool) -> None:
    """List the cluster profiles.

    \b
    Example:
      trnslurm clusters
    """
    workspace = workspace_of({"path": path})
    rows, broken = _listed(workspace.clusters(), lambda file: (describe(file), str(file)))
    if as_json:
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
    """Return names and facts of what can be read, and the errors of the rest."""
    rows: list[tuple[Any, ...]] = []
    broken = []
    for name, path in sorted(found.items()):
        try:
            rows.append((name, *facts(path)))
        except ConfigError as error:
            broken.append(str(error))
    return rows, broken


def _recipe_facts(directory: Path) -> tuple[list[str], str, str]:
    return presets_of(directory), describe(directory / "recipe.yaml"), str(directory)


@click.command("show")
@recipe_argument()
@spec_options
@json_option
def show_command(recipe: str, as_json: bool, **options: Any) -> None:
    """Show the resolved configuration and its origins.

    \b
    Example:
      trnslurm show gpt2_zero1 --preset tiny --set steps=50
    """
    workspace = workspace_of(options)
    cluster, preset = choose_cluster(workspace, recipe, options, to_submit=False)
    config = config_of(workspace, recipe, options, cluster, preset)
    if as_json:
        origins = {key: asdict(origin) for key, origin in config.origins.items()}
        echo_json({"config": plain(config.tree), "origins": origins})
        return
    click.echo(f"{recipe}, preset {config.preset or '-'}, cluster {cluster}\n")
    rows = []
    for key, value in flatten(config.tree):
        origin = config.origins.get(key)
        source = f"{origin.layer}: {origin.source}" if origin and origin.source else ""
        rows.append((key, _value(value), source or "default"))
    echo_table(("key", "value", "from"), rows)


@click.command("plan")
@recipe_argument()
@click.option("-n", "--nodes", default="1,2,4,8,16", show_default=True, help="Node counts.")
@spec_options
@json_option
def plan_command(recipe: str, nodes: str, as_json: bool, **options: Any) -> None:
    """Show the batch on each node count, hours and cost.

    \b
    Example:
      trnslurm plan gpt2_zero1 --nodes 1,2,3,4,8,16
    """
    workspace = workspace_of(options)
    cluster, preset = choose_cluster(workspace, recipe, options, to_submit=False)
    config = config_of(workspace, recipe, options, cluster, preset)
    source = click.get_current_context().get_parameter_source("nodes")
    asked = source is not click.core.ParameterSource.DEFAULT
    specs: list[JobSpec] = []
    refused: list[tuple[int, TrnslurmError]] = []
    for number in parse_nodes(nodes):
        try:
            specs.append(make_spec(config, number, name=options["name"], need_time=False))
        except (ConfigError, PlanError) as error:
            refused.append((number, error))
    if not specs:
        raise refused[0][1]
    if as_json:
        cache = CompileCache(config.cluster)
        rows = [_plan_row(spec) | graphs_facts(spec, cache, workspace) for spec in specs]
        errors = [{"nodes": n, "error": str(error)} for n, error in refused]
        echo_json({"recipe": recipe, "cluster": cluster, "plans": rows, "refused": errors})
    else:
        _print_plan(specs)
        _print_memory(specs)
        for line in (*plan_lines(specs, workspace), *([] if asked else _not_on(refused))):
            click.echo(line)
    if refused and asked:
        raise TrnslurmError("; ".join(f"{count(n, 'node')}: {e}" for n, e in refused))


def _not_on(refused: Sequence[tuple[int, TrnslurmError]]) -> Iterator[str]:
    """Yield a line for each reason why the job cannot run on some node counts."""
    alike: dict[str, list[tuple[int, str]]] = {}
    for nodes, error in refused:
        why = str(error).partition("; ")[0]  # without the advice
        alike.setdefault(re.sub(r"\d+", "", why), []).append((nodes, why))
    for group in alike.values():
        first, why = group[0]
        example = f"on {first}, " if len(group) > 1 else ""
        yield f"Not on {_on([str(nodes) for nodes, _ in group])}: {example}{why}"


def _plan_row(spec: JobSpec) -> dict[str, Any]:
    estimate = asdict(spec.estimate) if spec.estimate else None
    memory = estimate_memory(spec)
    return {
        **asdict(spec.batch),
        "padding": spec.batch.padding,
        "even_nodes": even_nodes(spec.batch),
        "seq_len": spec.config.recipe.seq_len,
        "tokens_per_step": spec.tokens_per_step,
        "steps": spec.steps,
        "estimate": estimate,
        "memory": memory.facts() if memory else None,
    }


def _print_plan(specs: list[JobSpec]) -> None:
    first = specs[0]
    recipe, batch = first.config.recipe, first.batch
    click.echo(
        f"{first.config.recipe_name} ({first.config.preset or 'no preset'}) on "
        f"{first.instance.name}, "
        f"{count(batch.workers_per_node, 'worker')} per node, {recipe.precision}, "
        + count(first.steps, "step")
        + (f" of sequence length {recipe.seq_len}" if recipe.seq_len else "")
    )
    if batch.mode == "per_worker":
        click.echo("The global batch GROWS with the nodes (batch.mode per_worker):")
    click.echo()
    header = (
        "nodes", "workers", "global batch", "micro-batch", "accumulation", "padding %",
        "tokens/step", "hours", "node-hours", "cost",
    )  # fmt: skip
    echo_table(header, [_plan_cells(spec) for spec in specs], right=",".join(header))
    click.echo()
    for spec in specs:
        if spec.batch.padding_units:
            click.echo(
                f"{count(spec.nodes, 'node')}: {spec.batch.padding_units} of each step's "
                f"{spec.batch.accumulation * spec.batch.workers} micro-batches have weight zero; "
                f"{without_padding(spec.batch)}"
            )
    bases: dict[str, list[str]] = {}
    for spec in specs:
        if spec.estimate:
            bases.setdefault(spec.estimate.basis, []).append(str(spec.nodes))
    for basis, counts in bases.items():
        click.echo(f"Hours on {_on(counts)}: {basis}")
    if not bases:
        click.echo(
            f"Hours: no throughput of this preset is known on {first.instance.name}"
            f"{where_set(first.config, first.instance)}"
        )


def _print_memory(specs: list[JobSpec]) -> None:
    known = [(spec, memory) for spec in specs if (memory := estimate_memory(spec))]
    counts: dict[str, list[str]] = {}
    for spec, memory in known:
        counts.setdefault(f"{memory.total:.1f}", []).append(str(spec.nodes))
    said = [f"{total} on {_on(nodes)}" for total, nodes in counts.items()]
    if known:
        first = known[0][1]
        parts = {
            "parameters, gradients and optimizer": first.state,
            "gathered layers": first.gathered,
            "activations": first.activations,
            "the runtime": first.runtime,
        }
        most = ", ".join(f"{gib:.1f} {what}" for what, gib in parts.items() if gib)
        click.echo(
            f"GiB of a device's {first.available:g}, an estimate: {', '.join(said)}; "
            f"on {_on([str(known[0][0].nodes)])}: {most}"
        )
    if too_small := [str(spec.nodes) for spec, memory in known if not memory.fits]:
        click.echo(
            f"warning: too much for {specs[0].instance.name} on {_on(too_small)}: try "
            f"{' or '.join(_ways_to_fit(specs[0]))}"
        )


def _on(counts: list[str]) -> str:
    return f"{', '.join(counts)} {'node' if counts == ['1'] else 'nodes'}"


def _ways_to_fit(spec: JobSpec) -> list[str]:
    recipe, ways = spec.config.recipe, []
    if recipe.batch.micro_batch > 1:
        ways.append("a smaller batch.micro_batch")
    if recipe.train.get("gradient_checkpointing") is False:
        ways.append("train.gradient_checkpointing=true")
    return [*ways, "devices with more memory"]


def _plan_cells(spec: JobSpec) -> tuple[str, ...]:
    batch, estimate = spec.batch, spec.estimate
    return (
        str(batch.nodes), str(batch.workers), f"{batch.global_batch:,}", str(batch.micro_batch),
        str(batch.accumulation), f"{100 * batch.padding:.1f}",
        f"{spec.tokens_per_step:,}" if spec.tokens_per_step else "-",
        hours(estimate.hours if estimate else None),
        hours(estimate.node_hours if estimate else None),
        dollars(estimate.cost if estimate else None),
    )  # fmt: skip


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(plain(value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
