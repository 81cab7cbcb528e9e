"""Adds up what many runs used, and how much of that was training that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trnslurm.frozen import Frozen
from trnslurm.report.history import COMPILING, PREPARING, TRAINING, History
from trnslurm.report.tables import hours_of
from trnslurm.runs.tables import count, dollars

BY: dict[str, Callable[[History], str]] = {
    "user": lambda run: run.record.user,
    "recipe": lambda run: run.record.recipe,
    "cluster": lambda run: run.record.cluster,
    "state": lambda run: run.status.state,
}
HEADER = ("runs", "node-hours", "trained", "compiled", "lost", "goodput", "MFU", "cost")


class Used(Frozen):
    """The node-hours that a group of runs used."""

    what: tuple[str, ...]
    """The values that these runs have in common."""
    runs: int
    node_hours: float
    trained: float
    """Steps that count, including saves and evaluations."""
    compiled: float
    """Precompiling and preparing data."""
    lost: float
    """Node-hours lost to interruptions: repeated steps, ends and starts."""
    mfu: float | None
    """The mean over the runs that report it, weighted by node-hours."""
    cost: float | None
    """In US dollars, for the runs whose price is known, or None if there are none."""
    unpriced: int
    """The number of runs whose price is unknown."""

    @property
    def goodput(self) -> float | None:
        """The share of the node-hours spent training."""
        return self.trained / self.node_hours if self.node_hours else None


def used_by(runs: Iterable[History], by: Sequence[str]) -> list[Used]:
    """Return what runs used, sorted by use, with the total last."""
    groups: dict[tuple[str, ...], list[History]] = {}
    for run in runs:
        groups.setdefault(tuple(BY[name](run) for name in by), []).append(run)
    found = [_used(what, members) for what, members in groups.items()]
    found.sort(key=lambda used: -used.node_hours)
    every = [run for members in groups.values() for run in members]
    return [*found, _used(("all", *[""] * (len(by) - 1)), every)]


def _used(what: tuple[str, ...], runs: Sequence[History]) -> Used:
    hours = [run.node_hours() for run in runs]
    prices = [run.price_per_hour for run in runs]
    priced = [n * price for n, price in zip(hours, prices, strict=True) if price is not None]
    shares = [(run.last.get("mfu"), n) for run, n in zip(runs, hours, strict=True)]
    known = [(share, n) for share, n in shares if share is not None and n]
    weight = sum(n for _, n in known)
    return Used(
        what=what,
        runs=len(runs),
        node_hours=sum(hours),
        trained=sum(run.node_hours(TRAINING) for run in runs),
        compiled=sum(run.node_hours(COMPILING, PREPARING) for run in runs),
        lost=sum(run.lost_node_hours for run in runs),
        mfu=sum(share * n for share, n in known) / weight if weight else None,
        cost=sum(priced) if priced else None,
        unpriced=len(runs) - len(priced),
    )


def cells(used: Used) -> list[str]:
    """Return a row of the table, below the names in `by` and HEADER."""
    goodput, mfu = used.goodput, used.mfu
    return [
        *used.what,
        str(used.runs),
        *map(hours_of, (used.node_hours, used.trained, used.compiled, used.lost)),
        "-" if goodput is None else f"{goodput:.0%}",
        "-" if mfu is None else f"{mfu:.1%}",
        "-" if used.cost is None else dollars(used.cost),
    ]


def remark(used: Used) -> str:
    """Return a note on what the table does not show, or empty if there is nothing."""
    if not used.unpriced:
        return ""
    return f"cost: without {count(used.unpriced, 'run')} on machines whose price is unknown"
