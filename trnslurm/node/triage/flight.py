"""Compares dumps of PyTorch's flight recorder: which ranks were not in a collective."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trnslurm.contract.files import open_file
from trnslurm.contract.rundir import RunFiles
from trnslurm.frozen import Frozen
from trnslurm.node.triage.budget import is_spent, share
from trnslurm.node.triage.flight_dump import DEFAULT, Dump, Kind, Work, name_of, read_dump, short
from trnslurm.node.triage.mend import SUBMIT

WAITING = (
    *("barrier-timeout", "broadcast-timeout", "collective-aborted", "collective-timeout"),
    *("first-collective", "gather-timeout", "gloo-timeout", "ranks-diverged", "scalar-timeout"),
    *("stuck", "sum-timeout", "watchdog-stuck"),
)
"""Known causes that only say that a rank waited for others, or that no rank continued."""

_HEAD_BYTES = 64 << 10
_ALIKE = 4
"""How many ranks with equal progress are read before all others."""
_CLOCKS_S = 5.0
"""How much the nodes' clocks may differ; the preflight allows this much."""
_MOST_NAMED = 8
_LISTED = re.compile(r"\[([0-9]{1,6}(?:, ?[0-9]{1,6}){0,99999})\]")
_NEED_ALL = ("all_reduce", "all_gather", "all_to_all", "barrier")
"""Gloo's collectives that no rank completes before all ranks have entered them."""


class Verdict(Frozen):
    """What the dumps show, in one sentence."""

    sentence: str
    fix: str
    ranks: tuple[int, ...] = ()
    """The ranks that others waited for, and that were not waiting themselves. They held up the
    others."""
    certain: bool = True
    mend: str = ""
    """How the run continues after the fix (see Cause.mend), or "" as after any timeout."""


class _Stuck(NamedTuple):
    """A collective that some ranks of its group have not entered, or have entered differently."""

    work: Work
    waiting: set[int]
    missing: set[int]
    silent: set[int]
    """The ranks without a dump."""
    unknown: set[int]
    """The ranks with a dump that is damaged, was not read, or says nothing about it."""
    kinds: dict[Kind, list[int]]
    """The operations that ranks entered under this number, if they differ."""

    def begun(self, dumps: Mapping[int, Dump]) -> bool:
        """Check whether all missing ranks were already connected to the group."""
        begun = (self.work.group in dumps[rank].works for rank in self.missing)
        return not self.work.of_nccl or all(begun)


def compare_dumps(
    run: Path, phase: str, attempt: int, workers: int, hosts: Sequence[str]
) -> Verdict | None:
    """Compare the workers' dumps; return the finding, or None if nothing is certain."""
    files = RunFiles(run).flight_files(phase, attempt)
    if not files:
        return None
    dumps = {}
    share(6)
    for rank in _in_order(files):
        if is_spent():
            break
        if dump := read_dump(files[rank]):
            dumps[rank] = dump
    share(1)
    return judge(dumps, files.keys(), workers, hosts)


def _in_order(files: Mapping[int, Path]) -> list[int]:
    """Return the ranks: first a few from each equal stage, and first those with few peers.

    A dump starts with the number of each group's last collective. Most of a thousand dumps are
    needed only to count the waiting ranks.
    """
    alike: dict[bytes, list[int]] = {}
    for rank, file in files.items():
        if is_spent():
            break
        try:
            with open_file(file) as stream:
                head = stream.read(_HEAD_BYTES)
        except OSError:
            continue
        status = head[head.find(b"pg_status") : head.find(b"entries")]
        alike.setdefault(status, []).append(rank)
    classes = sorted(alike.values(), key=len)
    first = [rank for ranks in classes for rank in ranks[:_ALIKE]]
    return [*first, *(rank for ranks in classes for rank in ranks[_ALIKE:])]


def judge(
    dumps: Mapping[int, Dump], written: Collection[int], workers: int, hosts: Sequence[str] = ()
) -> Verdict | None:
    """Return what dumps show about a run with this many workers (0 if unknown) on these hosts.

    `written` are all ranks with a dump, even if it is damaged or was not read.
    """
    groups = sorted({group for dump in dumps.values() for group in dump.works})
    found = (_stuck(group, dumps, written, workers) for group in groups)
    stuck = sorted((each for each in found if each), key=lambda each: each.work.entered)
    # A rank that NCCL is still connecting has called the first collective, without a record.
    stuck.sort(key=lambda each: not each.begun(dumps))
    waits = {rank for each in stuck for rank in each.waiting}
    waits |= {rank for rank, dump in dumps.items() if dump.waits}
    for each in stuck:
        if free := each.missing - waits:
            return _never_entered(each, dumps, free)
    for each in stuck:
        if each.kinds:
            return _differ(each, dumps)
    for each in stuck:
        if each.missing:
            return _in_a_circle(each, dumps, stuck)
    for each in stuck:
        late = each.unknown & dumps.keys()
        if each.silent and not late and len(each.silent) <= len(each.waiting):
            on = {
                hosts[rank * len(hosts) // workers]
                for rank in each.silent
                if rank < workers and hosts
            }
            return _wrote_nothing(each, sorted(on))
    return None


def _stuck(
    group: tuple[str, str, str], dumps: Mapping[int, Dump], written: Collection[int], workers: int
) -> _Stuck | None:
    """Return a group's first collective that not all of its ranks have entered alike."""
    # A batch of messages uses up a collective number of its group, but only on participating
    # ranks (ProcessGroupNCCL::startCoalescing). Then the same number is another collective.
    if any(group in dump.messages for dump in dumps.values()):
        return None
    works = {rank: dump.works[group] for rank, dump in dumps.items() if group in dump.works}
    lasts = {rank: max(own) for rank, own in works.items()}
    members = _members(group, dumps, written, workers)
    silent = members - set(written)
    for number in sorted({n for own in works.values() for n, work in own.items() if not work.done}):
        entered = {rank: own[number] for rank, own in works.items() if number in own}
        waiting = {rank for rank, work in entered.items() if work.waits}
        waited = bool(waiting)
        since = min(work.entered for work in entered.values())
        missing = {
            rank
            for rank in members & dumps.keys()
            if lasts.get(rank, 0) < number
            and dumps[rank].written > since + _CLOCKS_S
            and _is_aligned(rank, group, dumps, entered)
        }
        if missing and not waiting:  # by Gloo: a rank that has entered it cannot have completed it
            waiting = {rank for rank, work in entered.items() if work.op in _NEED_ALL}
            missing = missing if waiting else set()
        kinds: dict[Kind, list[int]] = {}
        sized = all(work.kind().of for work in entered.values())
        for rank, work in entered.items():
            kinds.setdefault(work.kind() if sized else Kind(work.op, ""), []).append(rank)
        ended = {rank for rank in entered if lasts[rank] == number}
        differ = len(kinds) > 1 and bool(waiting or ended)
        if differ or (waiting and (missing or silent)):
            unknown = members - entered.keys() - missing - silent
            work = entered[min(waiting or ended)]
            return _Stuck(work, waiting, missing, silent, unknown, kinds if differ else {})
        if waited:
            return None  # all ranks are in it, and later collectives wait for it
    return None


def _is_aligned(
    rank: int, group: tuple[str, str, str], dumps: Mapping[int, Dump], entered: Iterable[int]
) -> bool:
    """Check whether a rank counts a group's collectives as the ranks ahead of it do.

    Their records of the rank's last collective must be alike. If the rank has no record of the
    group, its dump must contain everything from the start.
    """
    own = dumps[rank].works.get(group)
    if own is None:
        named_so = any(other[:2] == group[:2] for other in dumps[rank].works)
        return dumps[rank].whole and not named_so
    last = own[max(own)]
    others = (dumps[other].works[group].get(last.number) for other in entered)
    return any(
        (other.logical, other.kind()) == (last.logical, last.kind()) for other in others if other
    )


def _members(
    group: tuple[str, str, str], dumps: Mapping[int, Dump], written: Collection[int], workers: int
) -> set[int]:
    """Return a group's ranks, as far as they are known."""
    if listed := _LISTED.fullmatch(group[2]):
        return {int(rank) for rank in listed[1].split(",")}
    # Gloo does not record which ranks a group has.
    if group[1] == DEFAULT and max(written, default=0) < workers:
        return set(range(workers))
    return {rank for rank, dump in dumps.items() if group in dump.works}


# -- in a sentence


def _never_entered(each: _Stuck, dumps: Mapping[int, Dump], free: set[int]) -> Verdict:
    first = min(free)
    newest = dumps[first].newest
    last = f"last entered {newest.called}" if newest else "has entered no collective"
    who = f"it {last}" if len(free) == 1 else f"rank {first} {last}"
    at = f" at {each.work.place}" if each.work.place else ""
    sentence = (
        f"{_ranks(free)} never entered {each.work.named}, where {_others(each, free)} waited{at}; "
        f"{who}"
    )
    begun = each.begun(dumps)
    if not begun:
        sentence += ", or NCCL has not connected it yet"
    if each.silent:  # which may be why these ranks are late
        sentence += f"; {_ranks(each.silent)} wrote no dump"
    return Verdict(
        sentence=sentence,
        ranks=tuple(sorted(free)) if begun and not each.silent else (),
        certain=begun,
        fix=f"find out what rank {first} did next: it may have failed, hung, worked alone (saving, "
        "evaluation), or had one batch fewer; all ranks must enter the same collectives",
    )


def _differ(each: _Stuck, dumps: Mapping[int, Dump]) -> Verdict:
    group, number = each.work.group, each.work.number
    told = []
    for kind, ranks in sorted(each.kinds.items(), key=lambda item: (len(item[1]), item[1])):
        alike = len({other.op for other in each.kinds}) == 1
        what = f"{short(kind.op)} of {kind.of}" if alike else short(kind.op)
        place = dumps[ranks[0]].works[group][number].place
        told.append(f"{_ranks(ranks)} entered {what}{f' at {place}' if place else ''}")
    more = f", and {len(told) - 3} others" if len(told) > 3 else ""
    return Verdict(
        sentence=f"as collective {number:,} of {name_of(group)}, {' and '.join(told[:3])}{more}",
        fix="make the same calls in the same order, with the same sizes and types, on all ranks",
        mend=SUBMIT,
    )


def _in_a_circle(each: _Stuck, dumps: Mapping[int, Dump], stuck: Iterable[_Stuck]) -> Verdict:
    """Return that ranks wait for each other in different collectives."""
    first = min(each.missing)
    places = (other.work for other in stuck if first in other.waiting)
    other = next(places, None) or dumps[first].waits
    assert other
    return Verdict(
        sentence=f"{_ranks(each.missing)} never entered {each.work.named}, where "
        f"{_others(each, each.missing)} waited: rank {first} waited in {other.called}",
        fix="enter the collectives of all groups in the same order on all ranks",
        mend=SUBMIT,
    )


def _wrote_nothing(each: _Stuck, hosts: Sequence[str]) -> Verdict:
    first = min(each.silent)
    on = f" on {', '.join(hosts[:_MOST_NAMED])}" if hosts else ""
    at = f" at {each.work.place}" if each.work.place else ""
    return Verdict(
        sentence=f"{_ranks(each.silent)}{on} wrote no dump of the flight recorder; "
        f"{_others(each, each.silent)} waited in {each.work.named}{at}",
        fix=f"see how rank {first} ended, and whether its node responds: a rank that has ended "
        "or is cut off writes no dump",
        certain=False,
    )


def _others(each: _Stuck, but: set[int]) -> str:
    count = len(each.waiting)
    if count == 1:
        return f"rank {min(each.waiting)}"
    apart = each.unknown | (each.missing | each.silent) - but
    return f"{count} others" if apart else f"the other {count}"


def _ranks(ranks: Collection[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > _MOST_NAMED:
        return f"{len(ordered)} ranks ({ordered[0]}, {ordered[1]}, …)"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
