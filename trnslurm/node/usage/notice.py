"""Finds anything in a node's metrics that a user should know and that no healthy job shows."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trnslurm.node.usage.devices import DeviceReport
from trnslurm.node.usage.host import Figures
from trnslurm.node.usage.read import Notice

_IDLE_S, _SLOW_S, _LEAK_S = 600.0, 300.0, 3600.0
_IDLE, _WORKS, _LITTLE, _BUSY = 0.02, 0.2, 0.5, 0.95
_MOSTLY = 0.8
# Caches and workers fill up in the first minutes.
_SETTLES_S = 1200.0
_HOURS_LEFT = 12.0
_STEADY = 0.95
_LEAST_MEMORY, _LEAST_SHM_GIB = 0.02, 0.05
_SLOW_WRITE_MS = 10_000.0
_MOST_NAMED = 4


class Look(NamedTuple):
    """One sample of a node's state."""

    at: float
    figures: Figures
    report: DeviceReport | None


class Notices:
    """The notices about one node, with their start and end times."""

    def __init__(self, *, devices: bool) -> None:
        """Also check devices if the phase is expected to use them."""
        self._devices = devices
        self._looks: deque[Look] = deque()
        self._memory: deque[tuple[float, float]] = deque()
        self._first_errors: dict[str, int] = {}
        self._begun: float | None = None
        self._all: dict[str, Notice] = {}

    @property
    def all(self) -> list[Notice]:
        """All notices, including those that are no longer true."""
        return [*self._all.values()]

    def look(self, look: Look, errors: dict[str, int]) -> bool:
        """Process a look at the node; return whether there are changes to report."""
        self._begun = look.at if self._begun is None else self._begun
        self._looks.append(look)
        while look.at - self._looks[0].at > _IDLE_S:
            self._looks.popleft()
        before = self.all
        true = dict(self._found(look, errors))
        for about, text in true.items():
            known = self._all.get(about)
            if known is None or known.until is not None:
                self._all[about] = Notice(text, look.at)
            elif about in errors:
                self._all[about] = known._replace(text=text)
        for about, known in self._all.items():
            if about not in true and known.until is None:
                self._all[about] = known._replace(until=look.at)
        return self.all != before

    def _found(self, look: Look, errors: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield what is true now: its subject, and a text."""
        if self._devices:
            yield from self._idle_devices()
            yield from self._slow_clocks()
        yield from self._new_errors(errors)
        yield from self._memory_left(look)
        if (shm := look.figures.get("shm_left_gib")) is not None and shm < _LEAST_SHM_GIB:
            yield "shm", f"/dev/shm has {1024 * shm:.0f} MiB left"
        if look.figures.get("write_ms", 0.0) > _SLOW_WRITE_MS:
            seconds = look.figures["write_ms"] / 1000
            yield "write", f"writing one line to the run directory takes {seconds:.0f} s"

    def _idle_devices(self) -> Iterator[tuple[str, str]]:
        """Find devices that have done nothing for ten minutes, in all looks."""
        looks = self._reported(_IDLE_S)
        names: set[int] = set.intersection(*(set(r.devices) for r in looks)) if looks else set()
        use = {
            name: shares
            for name in names
            if None not in (shares := [r.devices[name].use for r in looks])
        }
        most = {name: max(s for s in shares if s is not None) for name, shares in use.items()}
        idle = sorted(name for name, share in most.items() if share <= _IDLE)
        mean = {n: statistics.fmean(s or 0.0 for s in shares) for n, shares in use.items()}
        minutes = f"{_IDLE_S / 60:.0f} min"
        if idle and max(mean.values()) >= _WORKS:
            text = f"{_named(looks[-1].kind, idle)} did nothing for {minutes} while others worked"
            yield "idle", text
        elif idle and len(idle) == len(use):
            text = f"no {looks[-1].kind} did anything for {minutes}"
            yield "idle", f"{text}; the CPUs are {self._cpu():.0%} busy"
        elif use and statistics.fmean(mean.values()) < _LITTLE and self._cpu() > _BUSY:
            share = statistics.fmean(mean.values())
            text = f"the devices compute only {share:.0%} of the time, and all CPUs are busy"
            yield "starved", f"{text}: check the data loader"

    def _cpu(self) -> float:
        shares = [look.figures["cpu"] for look in self._looks if "cpu" in look.figures]
        return statistics.fmean(shares) if shares else 0.0

    def _slow_clocks(self) -> Iterator[tuple[str, str]]:
        looks = self._reported(_SLOW_S)
        slowed: dict[str, list[int]] = {}
        for name in looks[-1].devices if looks else ():
            why = [d.slowed_by for r in looks if (d := r.devices.get(name)) and d.slowed_by]
            if len(why) >= _MOSTLY * len(looks):
                slowed.setdefault(why[-1], []).append(name)
        for cause, devices in sorted(slowed.items()):
            clocks = [looks[-1].devices[name].mhz or 0.0 for name in devices]
            at = f", to {min(clocks):.0f} MHz" if min(clocks) else ""
            names = _named(looks[-1].kind, sorted(devices))
            yield f"clock {cause}", f"{names}: clock lowered by {cause}{at}"

    def _new_errors(self, errors: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Find counters that are higher than at the first look."""
        for name, number in errors.items():
            more = number - self._first_errors.setdefault(name, number)
            if more > 0:
                yield name, f"{name} ({more} since the start)"

    def _memory_left(self, look: Look) -> Iterator[tuple[str, str]]:
        left, whole = (look.figures.get(name) for name in ("memory_left_gib", "memory_gib"))
        if left is None or not whole:
            return
        if left < _LEAST_MEMORY * whole:
            yield "memory", f"only {left:.1f} of {whole:.0f} GiB of memory are left"
        assert self._begun is not None
        if look.at - self._begun < _SETTLES_S:
            return
        self._memory.append((look.at, left))
        while look.at - self._memory[0][0] > _LEAK_S:
            self._memory.popleft()
        if look.at - self._memory[0][0] < _MOSTLY * _LEAK_S:
            return
        lefts = [left for _, left in self._memory]
        if max(lefts) - min(lefts) < _LEAST_MEMORY * whole:
            return
        slope, correlation = _trend(self._memory)
        lost = -slope * 3600
        if correlation < -_STEADY and left < _HOURS_LEFT * lost:
            text = (
                f"available memory shrinks by {lost:.1f} GiB per hour, and {left:.0f} GiB are left"
            )
            yield "leak", text

    def _reported(self, within_s: float) -> list[DeviceReport]:
        """Return this period's reports, or none if it is not over or there are too few of them."""
        newest = self._looks[-1].at
        looks = [look for look in self._looks if newest - look.at <= within_s]
        found = [look.report for look in looks if look.report and look.report.devices]
        passed = newest - looks[0].at >= 0.95 * within_s
        return found if passed and len(found) >= _MOSTLY * len(looks) else []


def _named(kind: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{kind} {numbers[0]}"
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = len(numbers) - _MOST_NAMED
    return f"{kind}s {shown}{f' and {more} more' if more > 0 else ''}"


def _trend(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of the line of best fit, and the correlation.

    The statistics module has both only since Python 3.10.
    """
    x, y = (statistics.fmean(values) for values in zip(*points))
    xy = sum((a - x) * (b - y) for a, b in points)
    xx, yy = sum((a - x) ** 2 for a, _ in points), sum((b - y) ** 2 for _, b in points)
    return xy / xx, xy / math.sqrt(xx * yy)
