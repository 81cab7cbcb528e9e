"""Reads the data of the live view from the runs' files and from Slurm."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.node.hosts import brief
from trnslurm.records.foreign import cleaned, printable
from trnslurm.records.run import RunDir
from trnslurm.report.history import is_number
from trnslurm.runs.explain import explained
from trnslurm.runs.logs import choose_log, print_log
from trnslurm.runs.nodes import nodes_told
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.runs.tables import figure, text_table
from trnslurm.runs.usage import Usage, rows_of, usage_of

HEADER = ("run", "state", "step", "loss", "left", "nodes", "speed", "reason")
_RECENT = 20
_POINTS = 400
_MOST_NODES = 8


class View(Frozen):
    """The data of one run."""

    status: RunStatus
    losses: Sequence[float]
    """The loss of each step that counts, newest last, thinned to the width of a curve."""
    share: float | None
    """The share of the run's steps that are done."""
    facts: Sequence[tuple[str, str]]
    log: Sequence[str]
    """The last lines of node 0's log."""


def row_of(status: RunStatus) -> tuple[str, ...]:
    """Return a run's row in the list, below HEADER."""
    metrics = status.metrics
    step = f"{metrics['step']}/{metrics.get('steps', '?')}" if "step" in metrics else "-"
    return (
        status.run,
        status.state,
        step,
        figure(metrics.get("loss"), ".4f"),
        time_left(status, metrics.get("step_s")),
        str(status.nodes),
        speed_of(metrics),
        status.reason,
    )


def view_of(run: RunDir, *, lines: int) -> View:
    """Return the current state of a run, with the last lines of its log."""
    status = run_status(run)
    if status.state.failed:
        reason, fix, mend = _way_back(run, status.state, len(status.attempts))
        status = replace(status, reason=reason, fix=fix, mend=mend)
    steps = [cleaned(step) for step in run.steps()]
    losses = [s["loss"] for s in steps if is_number(s.get("loss"))]
    every = -(-len(losses) // _POINTS) or 1
    recent = [s["step_s"] for s in steps[-_RECENT:] if is_number(s.get("step_s"))]
    last = steps[-1] if steps else {}
    done, whole = last.get("step"), last.get("steps")
    share = done / whole if is_number(done) and is_number(whole) and whole else None
    held_out = next((s["eval_loss"] for s in reversed(steps) if "eval_loss" in s), None)
    hosts = next((phase.hosts for phase in reversed(status.phases) if phase.hosts), "")
    named = f": {brief(hosts.split(','))}" if hosts else ""
    preset = f" ({status.preset})" if status.preset else ""
    told = nodes_told(run, status.nodes, status.attempts)
    usage = usage_of(run, status)
    alive = not status.final and usage.now
    facts = [
        ("recipe", f"{status.recipe}{preset} on {status.cluster}"),
        ("nodes", f"{status.nodes}{named}"),
        ("range", told.get("nodes", "")),
        *((name, text) for name, text in told.items() if name != "nodes"),
        ("attempts", str(len(status.attempts)) if len(status.attempts) > 1 else ""),
        ("step", f"{done}/{whole}" if share is not None else str(done or "")),
        ("loss", figure(losses[-1] if losses else None, ".4f") if losses else ""),
        ("held out", figure(held_out, ".4f") if held_out is not None else ""),
        ("speed", speed_of(last).replace("-", "")),
        ("left", time_left(status, statistics.median(recent) if recent else None).strip("-")),
        ("use", usage.brief() if alive else ""),
        *(("", line) for line in usage.told()),
        *(("", line) for line in _lines_of(usage) if alive),
        ("next", status.next),
        ("note", status.note),
    ]
    return View(
        status=status,
        losses=losses[::every],
        share=share,
        facts=[(name, text) for name, text in facts if text],
        log=log_lines(run, lines),
    )


def _lines_of(usage: Usage) -> list[str]:
    """Return a line for each node, if the screen has enough room."""
    nodes = usage.nodes if 1 < len(usage.nodes) <= _MOST_NODES else ()
    header, rows = rows_of(nodes)
    return text_table(header, rows, right=",".join({*header} - {"host"})) if rows else []


@functools.lru_cache(maxsize=64)
def _way_back(run: RunDir, state: str, attempts: int) -> tuple[str, str, str]:
    """Return the reason, fix and command for a failed run, cached because the view keeps asking.

    The state and the number of attempts show whether the answer is still right.
    """
    status, _ = explained(run, run_status(run))
    return status.reason, status.fix, status.mend


def log_lines(run: RunDir, lines: int) -> list[str]:
    """Return the last lines of node 0's newest log, or a line that says why it cannot be read."""
    try:
        file = choose_log(run)
        text = b"".join(print_log(file, lines)) if file else b""
    except (OSError, RunError) as error:
        return [printable(str(error))]
    return [printable(line.expandtabs()) for line in text.decode(errors="replace").splitlines()]


def speed_of(metrics: Mapping[str, Any]) -> str:
    """Return tokens or samples per second."""
    for key, unit in (("tokens_per_s", "tok/s"), ("samples_per_s", "seq/s")):
        if is_number(metrics.get(key)):
            return f"{metrics[key]:,.0f} {unit}"
    return "-"


def time_left(status: RunStatus, step_s: Any) -> str:
    """Return the time for the remaining steps of an active run."""
    step, steps = (status.metrics.get(name) for name in ("step", "steps"))
    if not status.state.alive or not all(map(is_number, (step, steps, step_s))):
        return "-"
    minutes = max(0.0, steps - step) * step_s / 60  # type: ignore[operator]
    if minutes < 1:
        return "< 1 min"
    if minutes < 100:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h" if minutes < 6000 else f"{minutes / 1440:.1f} d"
