"""Makes the tables of a report, which `trnslurm compare` also prints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trnslurm.contract.files import read_json
from trnslurm.contract.roles import Stand
from trnslurm.frozen import Frozen
from trnslurm.node.hosts import brief
from trnslurm.records.foreign import printable
from trnslurm.report.figures import own_numbers
from trnslurm.report.history import ENDING, STARTING, TRAINING, UNDONE, History, is_number
from trnslurm.runs.nodes import spares_of
from trnslurm.runs.silence import no_numbers
from trnslurm.runs.tables import dollars, figure, format_values

_MOST_STEPS = 200
_FORMS = {
    "loss": ".4f",
    "eval_loss": ".4f",
    "grad_norm": ".4f",
    "lr": ".3g",
    "tokens_per_s": ",.0f",
}


class Table(Frozen, kw_only=False):
    """A table of the page. Its columns are right-aligned from column `numbers` on."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: str = ""
    numbers: int = 1
    folded: bool = False


def tables_of_one(run: History) -> Iterator[Table]:
    """Yield the tables of a run's report."""
    yield from _attempts(run)
    yield from _servers(run)
    yield from _hours_spent(run)
    yield from _plan_and_fact(run)
    yield from _graphs(run)
    yield _steps(run)
    yield from _configuration(run)


def _attempts(run: History) -> Iterator[Table]:
    costs = {id(stay): hours for stay, hours in run.interruptions()}
    rows = []
    for stay in run.stays:
        attempt, steps = stay.attempt, ""
        if stay.lines:
            steps = f"{stay.lines[0]['step']:,} – {stay.lines[-1]['step']:,}"
        rows.append(
            [
                f"{attempt.phase} {attempt.attempt}",
                _clock(stay.began),
                stay.end,
                brief(attempt.hosts.split(",")),
                _span(stay.ended - stay.began),
                steps,
                f"{stay.redone:,}" if stay.redone else "",
                hours_of(costs[id(stay)]) if id(stay) in costs else "",
            ]
        )
    header = (
        "attempt",
        "began (UTC)",
        "end",
        "nodes",
        "took",
        "steps",
        "undone",
        "node-hours lost",
    )
    about = (
        "Undone steps were repeated by a later attempt. Lost node-hours are the time of undone "
        "steps, the time after an attempt's last step, and the time until the next attempt's "
        "first step."
    )
    if rows:
        yield Table("Attempts", header, rows, about=about, numbers=4)


def _servers(run: History) -> Iterator[Table]:
    rows = []
    for server in run.servers:
        ready, unwell = server.seconds(Stand.READY), server.seconds(Stand.UNWELL)
        silent = _span(unwell) if unwell else ""
        rows.append([server.name, server.why, f"{server.starts:,}", _span(ready), silent])
    header = ("server", "the last end", "starts", "ready for", "without an answer")
    if rows:
        yield Table("Servers", header, rows, numbers=2)


def _hours_spent(run: History) -> Iterator[Table]:
    total, price = run.node_hours(), run.price_per_hour
    if not total:
        return
    kinds = dict.fromkeys(part[0] for stay in run.stays for part in stay.parts)
    known = {
        TRAINING: "steps that count",
        UNDONE: "steps repeated later",
        STARTING: "until the first step",
        ENDING: "after the last step",
    }
    rows = []
    for kind in kinds:
        spent = run.node_hours(kind)
        money = dollars(spent * price) if price is not None else "-"
        rows.append([known.get(kind, kind), hours_of(spent), f"{spent / total:.1%}", money])
    money = dollars(total * price) if price is not None else "-"
    rows.append(["all", hours_of(total), "100.0%", money])
    yield Table("Node-hours by activity", ("part", "node-hours", "share", "cost"), rows)


def _plan_and_fact(run: History) -> Iterator[Table]:
    """Yield a table that compares the plan with what ran."""
    plan, batch = run.plan, run.plan.get("batch")
    if not isinstance(batch, Mapping) or not run.steps:
        return
    last = run.steps[-1]
    nodes = sorted({stay.nodes for stay in run.stays if stay.attempt.phase == "train"})
    spares = spares_of(run.run, run.status.attempts)
    step, samples = last.get("step"), last.get("samples")
    each = f"{samples / step:,.6g}" if is_number(samples) and is_number(step) and step else "-"
    padding = last.get("padding")
    rows = [
        ["nodes", str(plan.get("nodes", "-")), ", ".join(map(str, nodes))],
        *([["spares", str(spares.number), f"{len(spares.used)} used"]] if spares else []),
        ["workers", str(plan.get("workers", "-")), ""],
        ["samples per step", str(batch.get("global_batch", "-")), each],
        ["micro-batch", str(batch.get("micro_batch", "-")), ""],
        ["micro-batches per worker and step", str(batch.get("accumulation", "-")), ""],
        [
            "padding",
            f"{_share(batch.get('padding_units'), batch.get('units'))}",
            figure(padding, ".1%"),
        ],
        ["steps", figure(plan.get("steps"), ","), figure(step, ",")],
        ["samples", "", figure(samples, ",")],
    ]
    yield Table("Batch: plan and actual", ("", "plan", "ran"), rows)


def _graphs(run: History) -> Iterator[Table]:
    compiled = [stay.attempt.attempt for stay in run.stays if stay.attempt.phase == "precompile"]
    rows = [
        [
            printable(str(found.get("host", "-"))),
            *(figure(found.get(key), ",") for key in ("found", "compiled", "failed")),
            figure(found.get("seconds"), ",.0f"),
        ]
        for attempt in compiled
        for found in map(read_json, run.run.graphs_files(attempt))
    ]
    late = run.last.get("late_graphs")
    if not rows and "graphs" not in run.last:
        return
    key = printable(str(run.record.precompile.get("key", "")))
    about = [f"Key {key}." if key else ""]
    if "graphs" in run.last:
        about.append(f"Training used {run.last['graphs']:,.0f}; ")
        about[-1] += f"{late:,.0f} were missing." if late else "none were missing."
    yield Table(
        "Compiled graphs",
        ("node", "found", "compiled", "failed", "seconds"),
        rows,
        about=" ".join(filter(None, about)),
        folded=len(rows) > 8,
    )


def _steps(run: History) -> Table:
    """Return a table of the metrics for a readable number of steps."""
    every = -(-len(run.steps) // _MOST_STEPS) or 1
    shown = [*run.steps[:-1:every], *run.steps[-1:]]
    known = [
        name
        for name in ("loss", "eval_loss", "grad_norm", "lr", "tokens_per_s")
        if any(name in line for line in shown)
    ]
    rows = [
        [f"{line['step']:,}", str(line["attempt"]), _moment(line.get("time"))]
        + [figure(line.get(name), _FORMS.get(name, ",.1f")) for name in known]
        for line in shown
    ]
    title = "Steps" if every == 1 else f"Steps, one in {every}"
    return Table(title, ("step", "attempt", "time (UTC)", *known), rows, numbers=0, folded=True)


def _configuration(run: History) -> Iterator[Table]:
    origins = run.record.origins
    rows = [[key, _text(value), origins.get(key, "")] for key, value in run.config.items()]
    chosen = [row for row in rows if row[2]]
    header = ("key", "value", "from")
    if chosen:
        rest = [row for row in rows if not row[2]]
        yield Table("Configuration", header, chosen, numbers=3, folded=len(chosen) > 60)
        yield Table("Defaults", header[:2], [row[:2] for row in rest], numbers=2, folded=True)
    elif rows:
        yield Table("Configuration", header[:2], [r[:2] for r in rows], numbers=2, folded=True)


def tables_of_many(runs: Sequence[History]) -> Iterator[Table]:
    """Yield tables that compare runs: states and results, and configurations."""
    names = ("loss", "eval_loss", "tokens_per_s", *own_numbers(runs))
    columns = [name for name in names if any(name in run.last for run in runs)]
    rows = []
    for run in runs:
        done = run.steps[-1]["step"] if run.steps else None
        rows.append(
            [
                run.run.name,
                format_values(run.record.values),
                run.status.state,
                str(run.record.nodes),
                figure(done, ","),
                *(figure(run.last.get(n), _FORMS.get(n, ",.4g")) for n in columns),
                hours_of(run.node_hours()),
                hours_of(run.lost_node_hours),
            ]
        )
    header = ["run", "values", "state", "nodes", "step", *columns, "node-hours", "lost"]
    if not any(row[1] for row in rows):
        rows, header = [[row[0], *row[2:]] for row in rows], [header[0], *header[2:]]
    yield Table(
        "Runs",
        header,
        rows,
        about=no_numbers([run.status for run in runs]),
        numbers=header.index("nodes"),
    )
    rows = [[key, *map(_text, values)] for key, values in differing(runs).items()]
    about = "" if rows else "The runs have the same configuration."
    yield Table(
        "Differences in configuration",
        ("key", *(run.run.name for run in runs)),
        rows,
        about=about,
        numbers=len(runs) + 1,
    )


def differing(runs: Sequence[History]) -> dict[str, list[Any]]:
    """Return each configuration key in which runs differ, with its value in each run.

    The definitions of instance types are skipped, because `instance_type` names the type in use.
    """
    known = "instance_types"
    keys = dict.fromkeys(k for run in runs for k in run.config if k.partition(".")[0] != known)
    found = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: v for key, v in found.items() if any(value != v[0] for value in v)}


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else printable(str(value))


def _share(part: Any, whole: Any) -> str:
    return f"{part / whole:.1%}" if is_number(part) and is_number(whole) and whole else "-"


def hours_of(value: float) -> str:
    """Format node-hours for a table."""
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}"


def _span(seconds: float) -> str:
    """Return a duration in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))


def _moment(value: Any) -> str:
    try:
        return _clock(float(value)) if is_number(value) else "-"
    except (ValueError, OverflowError, OSError):
        return "-"
