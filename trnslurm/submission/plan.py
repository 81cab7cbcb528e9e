"""Plans a recipe: its batch, memory, hours and cost for each node count."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trnslurm.console import Console
from trnslurm.errors import ConfigError, PlanError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.plan.batch import even_nodes, without_padding
from trnslurm.plan.memory import (
    Memory,
    check_memory,
    estimate_memory,
    larger_micro_batch,
    why_no_memory,
)
from trnslurm.plan.script import check_script
from trnslurm.plan.spec import (
    JobSpec,
    ends_unknown,
    has_own_batch,
    has_own_steps,
    make_spec,
    why_no_hours,
)
from trnslurm.runs.roles import nodes_told, without_price
from trnslurm.runs.tables import cells_of, count, dollars, escaped, hours, html_table, text_table
from trnslurm.submission.choice import choose, config_of, what_submit_would_use
from trnslurm.submission.options import JobOptions


class Plan(Frozen):
    """The batch, memory, hours and cost of a recipe by node count, shown as a table."""

    recipe: str
    """The name of the recipe, or the path of the script."""
    preset: str | None
    """The preset, or None without one."""
    cluster: str
    """The name of the cluster profile."""
    specs: Sequence[JobSpec]
    """The job for each node count on which it can run."""
    refused: Mapping[int, TrnslurmError]
    """The other node counts, and why the job cannot run on them."""
    note: str = ""
    """Defaults that plan chose, if submit would choose differently."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The numbers for each node count, as in `trnslurm plan --json`."""
        return [_row(spec) for spec in self.specs]

    @property
    def warnings(self) -> list[str]:
        """Warnings: node counts with too little memory, or a GPU that a script does not request."""
        found: dict[str, list[str]] = {}
        for spec in self.specs:
            if warning := check_memory(spec):
                found.setdefault(warning, []).append(str(spec.nodes))
        lines = [f"on {_on(nodes)}, {warning}" for warning, nodes in found.items()]
        return [*lines, *filter(None, [check_script(self.specs[0])])]

    @property
    def hints(self) -> list[str]:
        """Hints about node counts on which half of a device's memory stays free."""
        found: dict[int, list[str]] = {}
        for spec in self.specs:
            if larger := larger_micro_batch(spec):
                found.setdefault(larger, []).append(str(spec.nodes))
        return [
            f"on {_on(nodes)}, more than half of a device's memory stays free: batch.micro_batch="
            f"{larger} may be faster"
            for larger, nodes in found.items()
        ]

    def lines(self) -> Iterator[str]:
        """Yield the plan as text, without the node counts that were rejected."""
        header, rows = self._table()
        yield from (self._title(), *self._growth(), "")
        yield from text_table(header, rows, right=",".join(header))
        yield from ("", *self._remarks())
        if memory := self._memory():
            yield from ("", f"{_OF_MEMORY}:", "")
            yield from text_table(*memory, right=",".join(memory[0]))
            yield ""
        yield from (f"warning: {text}" for text in self.warnings)
        yield from (f"hint: {text}" for text in self.hints)

    def not_on(self) -> Iterator[str]:
        """Yield a line for each reason why the job cannot run on certain node counts."""
        alike: dict[str, list[tuple[int, str]]] = {}
        for nodes, error in self.refused.items():
            why = str(error).partition("; ")[0]  # without the advice
            alike.setdefault(re.sub(r"\d+", "", why), []).append((nodes, why))
        for group in alike.values():
            first, why = group[0]
            example = f"on {first}, " if len(group) > 1 else ""
            yield f"Not on {_on([str(nodes) for nodes, _ in group])}: {example}{why}"

    def __repr__(self) -> str:
        return "\n".join([*filter(None, [self.note]), *self.lines(), *self.not_on()]).rstrip()

    def _repr_html_(self) -> str:
        header, rows = self._table()
        parts = [self.note, self._title(), *self._growth()]
        found = [f"<p>{escaped(part)}</p>" for part in parts if part]
        found.append(html_table(header, rows, right=",".join(header)))
        if memory := self._memory():
            found.append(f"<p>{_OF_MEMORY}:</p>")
            found.append(html_table(*memory, right=",".join(memory[0])))
        said = [f"warning: {text}" for text in self.warnings]
        said += [f"hint: {text}" for text in self.hints]
        below = (*said, *self._remarks(), *self.not_on())
        return "\n".join([*found, *(f"<p>{escaped(line)}</p>" for line in below)])

    def _title(self) -> str:
        first = self.specs[0]
        recipe, most = first.config.recipe, max(spec.steps for spec in self.specs)
        preset = f" ({self.preset or 'no preset'})" if self.preset or not recipe.project else ""
        title = f"{self.recipe}{preset} on {first.instance.name}{nodes_told(first.roles)}"
        if not _starts_its_own(first):
            title += f", {count(first.batch.workers_per_node, 'worker')} per node"
        if (size := first.batch.workers // first.batch.groups) > 1:
            title += f" in groups of {size}"
        if has_own_steps(recipe):
            return title
        steps = f"at most {most:,} steps" if self._differ("steps") else count(most, "step")
        length = f" of sequence length {recipe.seq_len}" if recipe.seq_len else ""
        epochs = f", {count(first.epochs, 'epoch')}" if first.epochs else ""
        if ends_unknown(first.config):
            return f"{title}, {recipe.precision}{epochs}{length}"
        epochs = "" if self._differ("epochs") else epochs
        return f"{title}, {recipe.precision}, {steps}{length}{epochs}"

    def _growth(self) -> list[str]:
        grows = self.specs[0].config.recipe.batch.mode == "per_worker"
        return (
            ["The global batch GROWS with the number of nodes (batch.mode per_worker):"]
            if grows
            else []
        )

    @property
    def _has_own_batch(self) -> bool:
        return has_own_batch(self.specs[0].config.recipe)

    def _differ(self, name: str) -> bool:
        """Check whether steps or epochs differ by node count. If not, the title shows them."""
        return len({getattr(spec, name) for spec in self.specs}) > 1

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        if self._has_own_batch:
            columns = _COLUMNS_OF_LIMIT
            unknown = {
                name for name, cell in columns.items() if all(cell(s) == "-" for s in self.specs)
            }
        else:
            columns = _COLUMNS
            unknown = {name for name in ("steps", "epochs") if not self._differ(name)}
        return cells_of({n: cell for n, cell in columns.items() if n not in unknown}, self.specs)

    def _remarks(self) -> Iterator[str]:
        """Yield remarks about where work is wasted, and where the hours come from."""
        for spec in self.specs:
            if spec.batch.padding_units:
                yield (
                    f"{count(spec.nodes, 'node')}: {spec.batch.padding_units} of each step's "
                    f"{spec.batch.accumulation * spec.batch.groups} micro-batches have weight "
                    f"zero; {without_padding(spec.batch)}"
                )
        bases: dict[str, list[str]] = {}
        for spec in self.specs:
            if spec.estimate:
                bases.setdefault(spec.estimate.basis, []).append(str(spec.nodes))
        for basis, counts in bases.items():
            yield f"Hours on {_on(counts)}: {basis}"
        if self._has_own_batch:
            first = self.specs[0]
            if _limit_hours(first):
                yield "Hours: the time limit, because the script decides its number of steps"
            elif first.has_queue:
                yield "Hours: unknown. Pass --time to show the maximum"
            if not _starts_its_own(first):
                yield (
                    "Batch: decided by the script. To plan it, pass --set batch.global_batch=N "
                    "--set batch.micro_batch=N, and add {micro_batch} and {accumulation} to the "
                    "script's arguments"
                )
        elif not bases:
            first = self.specs[0]
            yield f"Hours: {why_no_hours(first.config, first.instance, 'this preset')}"
        priced = self.specs[0].instance.price_per_hour and (bases or _limit_hours(self.specs[0]))
        if priced and (without := without_price(self.specs[0].roles)):
            yield f"Cost:{without}"
        if why := why_no_memory(self.specs[0]):
            yield why

    def _memory(self) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
        """Return the memory on a worker's device. Node counts with the same memory share a row."""
        recomputes = self.specs[0].config.recipe.train.get("gradient_checkpointing")
        columns = _memory_columns(recomputes)
        alike: dict[tuple[str, ...], list[str]] = {}
        for spec in self.specs:
            if memory := estimate_memory(spec):
                cells = tuple(cell(memory) for cell in columns.values())
                alike.setdefault(cells, []).append(str(spec.nodes))
        if not alike:
            return None
        rows = [(",".join(nodes), *cells) for cells, nodes in alike.items()]
        header = ("nodes", *columns)
        used = [n for n in range(len(header)) if any(row[n] != "-" for row in rows)]
        return [header[n] for n in used], [[row[n] for n in used] for row in rows]


_OF_MEMORY = "GiB of a worker's device (estimate)"


def make_plan(options: JobOptions, counts: Sequence[int], console: Console) -> Plan:
    """Plan a recipe for each node count, or for its batch script's. Raise if it fits none."""
    chosen = choose(options, console)
    counts = counts or (chosen.nodes,)
    config = config_of(chosen, console)
    specs: list[JobSpec] = []
    refused: dict[int, TrnslurmError] = {}
    for number in counts:
        try:
            spec = make_spec(config, number, name=options.name, need_time=False)
            check_memory(spec)
            specs.append(spec)
        except (ConfigError, PlanError) as error:
            refused[number] = error
    if not specs:
        raise refused[counts[0]]
    return Plan(
        recipe=options.recipe,
        preset=config.preset,
        cluster=config.cluster_name,
        specs=specs,
        refused=refused,
        note=what_submit_would_use(options, config),
    )


def _row(spec: JobSpec) -> dict[str, Any]:
    estimate = asdict(spec.estimate) if spec.estimate else None
    memory = estimate_memory(spec)
    batch = asdict(spec.batch) | {
        "padding": spec.batch.padding, "even_nodes": even_nodes(spec.batch)
    }  # fmt: skip
    if has_own_batch(spec.config.recipe):
        batch |= dict.fromkeys(batch.keys() - {"nodes", "workers", "workers_per_node"})
    return {
        **batch,
        "seq_len": spec.config.recipe.seq_len,
        "tokens_per_step": spec.tokens_per_step,
        "steps": None if has_own_steps(spec.config.recipe) else spec.steps,
        "epochs": spec.epochs,
        "estimate": estimate,
        "memory": memory.facts() | {"warning": check_memory(spec) or None} if memory else None,
    }


def _memory_columns(recomputes: bool | None) -> dict[str, Callable[[Memory], str]]:
    def gib(value: float) -> str:
        return f"{value:.1f}" if value else "-"

    def other(memory: Memory) -> float:
        if recomputes is None:
            return 0.0
        return memory.activations_kept if recomputes else memory.activations_recomputed

    return {
        "parameters": lambda m: gib(m.parameters),
        "gradients": lambda m: gib(m.gradients),
        "optimizer": lambda m: gib(m.optimizer),
        "gathered": lambda m: gib(m.gathered),
        "activations": lambda m: gib(m.activations),
        "(kept)" if recomputes else "(recomputed)": lambda m: gib(other(m)),
        "runtime": lambda m: gib(m.runtime),
        "total": lambda m: f"{m.total:.1f}",
        "device": lambda m: f"{m.available:g}",
    }


def _on(counts: list[str]) -> str:
    return f"{', '.join(counts)} {'node' if counts == ['1'] else 'nodes'}"


def _of_estimate(write: Callable[[float | None], str], name: str) -> Callable[[JobSpec], str]:
    return lambda spec: write(getattr(spec.estimate, name) if spec.estimate else None)


def _starts_its_own(spec: JobSpec) -> bool:
    """Check for a batch script or a Ray driver, which starts as many workers as it wants."""
    return spec.config.recipe.launcher in ("job", "ray")


def _limit_hours(spec: JobSpec) -> float | None:
    minutes = spec.config.cluster.slurm.time_min
    return minutes / 60 if minutes else None


def _limit_cost(spec: JobSpec) -> float | None:
    limit, price = _limit_hours(spec), spec.instance.price_per_hour
    return limit * (spec.all_nodes - spec.apart) * price if limit and price else None


_COLUMNS_OF_LIMIT: dict[str, Callable[[JobSpec], str]] = {
    "nodes": lambda spec: str(spec.nodes),
    "workers": lambda spec: "-" if _starts_its_own(spec) else str(spec.batch.workers),
    "max hours": lambda spec: hours(_limit_hours(spec)),
    "max node-hours": lambda spec: hours((_limit_hours(spec) or 0) * spec.all_nodes or None),
    "max cost": lambda spec: dollars(_limit_cost(spec)),
}
"""The columns for a script that decides its batch and its number of steps."""
_COLUMNS: dict[str, Callable[[JobSpec], str]] = {
    "nodes": lambda spec: str(spec.nodes),
    "workers": lambda spec: str(spec.batch.workers),
    "global batch": lambda spec: f"{spec.batch.global_batch:,}",
    "micro-batch": lambda spec: str(spec.batch.micro_batch),
    "accumulation": lambda spec: str(spec.batch.accumulation),
    "padding %": lambda spec: f"{100 * spec.batch.padding:.1f}",
    "tokens/step": lambda spec: f"{spec.tokens_per_step:,}" if spec.tokens_per_step else "-",
    "steps": lambda spec: f"{spec.steps:,}",
    "epochs": lambda spec: str(spec.epochs or "-"),
    "hours": _of_estimate(hours, "hours"),
    "node-hours": _of_estimate(hours, "node_hours"),
    "cost": _of_estimate(dollars, "cost"),
}
