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
    preset_option,
    recipe_argument,
    say_what_submit_would_use,
    spec_options,
    workspace_of,
)
from trnslurm.cli.output import count, dollars, echo_json, echo_table, hours
from trnslurm.cluster.cache import CompileCache
from trnslurm.config import Workspace, describe, presets_of, resolve
from trnslurm.config.tree import flatten, plain
from trnslurm.errors import ConfigError, PlanError, TrnslurmError
from trnslurm.plan.batch import even_nodes, without_padding
from trnslurm.plan.keys import keys_of
from trnslurm.plan.memory import Memory, check_memory, estimate_memory
from trnslurm.plan.spec import JobSpec, has_own_batch, make_spec, where_set

_SHOWN_CHARS = 60  # of a value in a table; --json has all of it
_NARROW = 20  # where much stands beside it


@click.command("recipes")
@recipe_argument(required=False)
@preset_option
@path_option
@json_option
def recipes_command(
    recipe: str | None, preset: str | None, path: tuple[str, ...], as_json: bool
) -> None:
    """List the recipes: the training jobs that can be submitted.

    With RECIPE list its keys: what each accepts, its value in the preset, and what it means.

    \b
    Example:
      trnslurm recipes
      trnslurm recipes gpt2_zero1
    """
    if recipe is not None:
        _print_keys(workspace_of({"path": path}), recipe, preset, as_json=as_json)
        return
    if preset is not None:
        raise click.UsageError("--preset goes with a RECIPE")
    rows, broken = _listed(workspace_of({"path": path}).recipes(), _recipe_facts)
    if as_json:
        keys = ("recipe", "presets", "description", "directory")
        echo_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        table = [(name, ", ".join(presets), text) for name, presets, text, _ in rows]
        echo_table(("recipe", "presets", "description"), table)
    if broken:
        raise ConfigError("; ".join(broken))


def _print_keys(workspace: Workspace, recipe: str, preset: str | None, *, as_json: bool) -> None:
    config = resolve(workspace, recipe, cluster="local", preset=preset)  # any has the same keys
    keys = keys_of(config)
    if as_json:
        echo_json([asdict(key) | {"default": plain(key.default)} for key in keys])
        return
    click.echo(f"{recipe}, preset {config.preset or '-'}\n")
    rows = [
        (key.key, _short(_value(key.default), _NARROW), _short(key.accepts, 2 * _NARROW), key.help)
        for key in keys
    ]
    echo_table(("key", "value", "accepts", "meaning"), rows)


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
@recipe_argument(with_arguments=True)
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
@recipe_argument(with_arguments=True)
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
    if has_own_batch(config.recipe):
        raise ConfigError(
            f"{config.title} decides its batch itself, so there is nothing to plan: "
            "--set batch.global_batch=N --set batch.micro_batch=N, and give it to the script by "
            "{micro_batch} and {accumulation}"
        )
    source = click.get_current_context().get_parameter_source("nodes")
    asked = source is not click.core.ParameterSource.DEFAULT
    specs: list[JobSpec] = []
    refused: list[tuple[int, TrnslurmError]] = []
    for number in parse_nodes(nodes):
        try:
            spec = make_spec(config, number, name=options["name"], need_time=False)
            check_memory(spec)
            specs.append(spec)
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
        say_what_submit_would_use(workspace, config, options)
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
        "memory": memory.facts() | {"warning": check_memory(spec) or None} if memory else None,
    }


def _print_plan(specs: list[JobSpec]) -> None:
    first = specs[0]
    recipe, batch = first.config.recipe, first.batch
    steps = {spec.steps for spec in specs}
    click.echo(
        f"{first.config.recipe_name} ({first.config.preset or 'no preset'}) on "
        f"{first.instance.name}, "
        f"{count(batch.workers_per_node, 'worker')} per node, {recipe.precision}, "
        + (count(first.steps, "step") if len(steps) == 1 else f"{max(steps):,} steps at most")
        + (f" of sequence length {recipe.seq_len}" if recipe.seq_len else "")
    )
    if batch.mode == "per_worker":
        click.echo("The global batch GROWS with the nodes (batch.mode per_worker):")
    click.echo()
    header: tuple[str, ...] = (
        "nodes", "workers", "global batch", "micro-batch", "accumulation", "padding %",
        "tokens/step", "steps", "hours", "node-hours", "cost",
    )  # fmt: skip
    rows = [_plan_cells(spec) for spec in specs]
    if len(steps) == 1:  # the first line says it
        here = header.index("steps")
        header, *rows = [(*row[:here], *row[here + 1 :]) for row in (header, *rows)]
    echo_table(header, rows, right=",".join(header))
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
    """Print what a worker's device must hold, a line for all node counts that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for spec in specs:
        if memory := estimate_memory(spec):
            alike.setdefault(_memory_cells(spec, memory), []).append(str(spec.nodes))
    if not alike:
        return
    rows = [(",".join(nodes), *cells) for cells, nodes in alike.items()]
    header = (
        "nodes", "parameters", "gradients", "optimizer", "gathered", "activations",
        "other way", "runtime", "total", "device",
    )  # fmt: skip
    used = [n for n in range(len(header)) if any(row[n] != "-" for row in rows)]
    other = "kept" if specs[0].config.recipe.train.get("gradient_checkpointing") else "recomputed"
    shown = tuple(header[n].replace("other way", f"({other})") for n in used)
    click.echo("\nGiB of a worker's device, an estimate:\n")
    echo_table(shown, [tuple(row[n] for n in used) for row in rows], right=",".join(shown))
    click.echo()
    warnings: dict[str, list[str]] = {}
    for spec in specs:
        if text := check_memory(spec):
            warnings.setdefault(text, []).append(str(spec.nodes))
    for text, nodes in warnings.items():
        click.echo(f"warning: on {_on(nodes)}, {text}")


def _memory_cells(spec: JobSpec, memory: Memory) -> tuple[str, ...]:
    recomputes = spec.config.recipe.train.get("gradient_checkpointing")
    other = memory.activations_kept if recomputes else memory.activations_recomputed
    cells = [memory.parameters, memory.gradients, memory.optimizer, memory.gathered]
    cells += [memory.activations, 0.0 if recomputes is None else other, memory.runtime]
    numbers = [f"{gib:.1f}" if gib else "-" for gib in cells]
    return (*numbers, f"{memory.total:.1f}", f"{memory.available:g}")


def _on(counts: list[str]) -> str:
    return f"{', '.join(counts)} {'node' if counts == ['1'] else 'nodes'}"


def _plan_cells(spec: JobSpec) -> tuple[str, ...]:
    batch, estimate = spec.batch, spec.estimate
    return (
        str(batch.nodes), str(batch.workers), f"{batch.global_batch:,}", str(batch.micro_batch),
        str(batch.accumulation), f"{100 * batch.padding:.1f}",
        f"{spec.tokens_per_step:,}" if spec.tokens_per_step else "-", f"{spec.steps:,}",
        hours(estimate.hours if estimate else None),
        hours(estimate.node_hours if estimate else None),
        dollars(estimate.cost if estimate else None),
    )  # fmt: skip


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return _short(str(plain(value)), _SHOWN_CHARS)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
