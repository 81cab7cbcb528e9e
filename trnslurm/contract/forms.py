"""Finds the newest checkpoint that a library wrote for a script, without any report.

Only complete checkpoints count. Nothing is loaded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trnslurm.contract import whole
from trnslurm.contract.entries import (
    Named,
    changed_in,
    entries_in,
    is_file,
    same,
    walk,
)
from trnslurm.contract.layouts import (
    INDEX,
    OF_STEPS,
    OF_TRAINER,
    RANDOM,
    SAVED_BY_TORCH,
    STATE,
    UNFINISHED,
    Candidate,
    Found,
    Life,
    directory_at,
    file_at,
    if_all,
    outlived,
    pointed_at,
    step_in,
)

_MOST_CHECKED = 200
"""The number of checkpoints to examine, newest first, until a complete one is found."""
_NO_STEPS = re.compile(r"(?i)(fold|seed|split|part|shard|rank)[-_.]?\d")
"""Numbers in names that say which part of a set, not which step."""
_BEST = re.compile(r"(^|[-_.\d])best", re.I)


class Place(NamedTuple):
    """A directory in which a script may save."""

    path: Path
    copy: Path | None = None
    """The project from which the files were copied. Files identical to the project's are not the
    script's."""


def whole_ones(
    places: Iterable[Place], pattern: str = "", *, lives: Sequence[Life] = (), workers: int = 0
) -> Iterator[Found]:
    """Yield the complete checkpoints in these places, as far as known, newest first.

    A checkpoint named best comes after all others. With a pattern of paths relative to a place,
    only matching paths count. `lives` are those of the attempts, oldest first. `workers` is the
    number of workers that write.
    """
    found: list[tuple[bool, float, int, Candidate]] = []
    for place in places:
        for each in _candidates(place, pattern, lives, workers):
            if place.copy is None or not same(
                each.mark, place.copy / each.mark.relative_to(place.path)
            ):
                best = bool(_BEST.search(each.found.path.name))
                step = -1 if each.found.step is None else each.found.step
                found.append((not best, each.found.time, step, each))
    found.sort(key=lambda one: one[:3], reverse=True)
    yield from filter(None, (one.whole() for *_, one in found[:_MOST_CHECKED]))


def older(whole: Sequence[Found], keep: int) -> list[Path]:
    """Return checkpoints made unnecessary by `keep` newer ones of the same library and place.

    For DeepSpeed and Megatron, whose directory names the newest one, these are parts of the
    directory. Trainer and Lightning delete their own checkpoints, and know which is the best.
    """
    newest = next(iter(whole), None)
    if newest is None or newest.form in ("Trainer", "Lightning"):
        return []
    if form := OF_STEPS.get(newest.form):
        numbers = {n: int(m[1]) for n in entries_in(newest.path) if (m := form.fullmatch(n))}
        names = sorted(
            (n for n in numbers if numbers[n] <= (newest.step or 0)), key=numbers.__getitem__
        )
        return [newest.path / name for name in names[::-1][keep:]]
    if _NO_STEPS.search(newest.path.name):
        return []
    alike = [one for one in whole if one.form == newest.form and _series(one) == _series(newest)]
    return [one.path for one in alike[keep:]]


def _series(found: Found) -> tuple[Path, str]:
    path = found.path  # litgpt uses a directory for each, users of torch.save a name
    return path.parent.parent, re.sub(r"\d+", "0", f"{path.parent.name}/{path.name}")


def is_torn(path: Path) -> bool:
    """Check whether a directory or file shows that its writer has not finished."""
    if not path.is_dir():
        return whole.is_whole(path) is False
    named = entries_in(path)
    distributed = any(name.endswith(".distcp") for name in named)
    return (distributed and INDEX not in named) or any(
        whole.is_whole(path / name) is False
        for name, entry in named.items()
        if name.endswith((*SAVED_BY_TORCH, ".safetensors")) and is_file(entry)
    )


def _candidates(
    place: Place, pattern: str, lives: Sequence[Life], workers: int
) -> Iterator[Candidate]:
    for here, named, below in walk(place.path):
        if pattern:
            yield from _matched(place.path, here, named, pattern, lives)
            continue
        # A script's checkpoint directory can be a checkpoint itself.
        if here != place.path or place.copy is None:
            own = list(directory_at(here, named, lives, workers))
            if own or STATE in named or RANDOM in named or OF_TRAINER.fullmatch(here.name):
                below.clear()  # its parts are not checkpoints
                yield from own
                continue
        yield from pointed_at(here, named, below, workers)
        for entry in named.values():
            yield from file_at(here, entry)


def _matched(
    root: Path,
    here: Path,
    named: Named,
    pattern: str,
    lives: Sequence[Life],
) -> Iterator[Candidate]:
    """Yield the matches of a user's pattern."""
    wanted = pattern.removeprefix("./").rstrip("/").split("/")
    parts = here.relative_to(root).parts
    if len(parts) != len(wanted) - 1 or not _fit(parts, wanted):
        return
    fits = {n: e for n, e in named.items() if fnmatch.fnmatchcase(n, wanted[-1])}
    newest = max((changed_in(here / n, e) for n, e in fits.items()), default=0.0)
    for name, entry in fits.items():
        if entry.is_symlink() or UNFINISHED.search(name):
            continue
        path, changed = here / name, changed_in(here / name, entry)
        last = changed >= newest and not outlived(changed, lives)

        found = Found(path, step_in(name, here.name), changed, f"the pattern {pattern}")
        yield Candidate(found, if_all(found, partial(_tells, path, otherwise=not last)), path)


def _fit(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return all(map(fnmatch.fnmatchcase, parts, wanted))


def _tells(path: Path, *, otherwise: bool) -> bool:
    """Check whether a file or directory is complete; return `otherwise` if it is unknown."""
    if not path.is_dir():
        told = whole.is_whole(path)
        return otherwise if told is None else told
    named = entries_in(path)
    if own := list(directory_at(path, named, (), 0)):
        return all(each.whole() for each in own)
    if any(name.endswith(".distcp") for name in named) and INDEX not in named:
        return False
    parts = (whole.is_whole(path / name) for name, entry in named.items() if is_file(entry))
    return otherwise and False not in parts
