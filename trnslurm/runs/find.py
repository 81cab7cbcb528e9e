"""Finds runs by path, name or part of a name, in all run roots that this user has used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trnslurm.contract.files import make_private, read_file
from trnslurm.contract.rundir import RECORD
from trnslurm.errors import RunError
from trnslurm.records.foreign import is_ours
from trnslurm.records.run import RunDir


def find_run(word: str, roots: list[Path]) -> RunDir:
    """Return the run that `word` names: a path, a name, a unique part of a name, or `last`."""
    if not word:
        raise RunError("pass the name of a run, or `last`")
    if "/" in word or (word != "last" and RunDir(Path(word)).is_run):
        run = RunDir(Path(word).absolute())
        if not run.is_run and run.script("train").is_file():
            raise RunError(f"{word} has not started: run trnslurm submit --rendered {word}")
        if not run.is_run:
            raise RunError(f"{word}: not a run directory (no {RECORD})")
        return run
    return _pick(word, list_runs(roots), roots)


def _matching(word: str, names: Iterable[str]) -> list[str]:
    """Return the names equal to a word, or else those ending with it, or else containing it."""
    known = list(dict.fromkeys(names))
    return (
        [name for name in known if name == word]
        or [name for name in known if name.endswith(f"-{word}")]
        or [name for name in known if word in name]
    )


def _pick(word: str, runs: list[RunDir], roots: list[Path]) -> RunDir:
    if word == "last" and runs:
        own = (r for r in reversed(runs) if is_ours(r.path) and not r.followed.is_dir())
        return next(own, runs[-1])
    names = {*_matching(word, (r.name for r in runs))}
    matches = [r for r in runs if r.name in names]
    if len(matches) == 1:
        return matches[0]
    if matches and len({group_of(run) for run in matches}) == 1 and group_of(matches[0]):
        raise RunError(
            f"{word} is a sweep of {len(matches)} runs: name one of them, such as {matches[0].name}"
        )
    if matches:
        raise _ambiguous(word, "runs", [r.name for r in matches])
    where = ", ".join(map(str, roots)) or "no run root"
    raise RunError(f"no run {word!r} in {where}; run `trnslurm runs` to list them")


def _ambiguous(word: str, kind: str, names: Sequence[str]) -> RunError:
    some = ", ".join([*["…"][: len(names) > 3], *names[-3:]])
    return RunError(f"{word} matches {len(names)} {kind} ({some}): type more of the name")


def find_runs(word: str, roots: list[Path]) -> list[RunDir]:
    """Return the run that `word` names, or all runs of a sweep. Names are as in find_run."""
    if not word or word == "last" or "/" in word or RunDir(Path(word)).is_run:
        return [find_run(word, roots)]
    near = [run for run in list_runs(roots) if word in run.name]
    if any(run.name == word for run in near):
        return [_pick(word, near, roots)]
    named: dict[str, list[RunDir]] = {}
    for run in near:
        named.setdefault(group_of(run) or run.name, []).append(run)
    found = _matching(word, named)
    if len(found) == 1:
        return in_order(named[found[0]])
    if found:
        raise _ambiguous(word, "runs or sweeps", sorted(found))
    return [_pick(word, near, roots)]


def group_of(run: RunDir) -> str:
    """Return the name of a run's sweep; empty if it has none or if run.json is damaged."""
    try:
        return run.record().group
    except RunError:
        return ""


def in_order(runs: Iterable[RunDir]) -> list[RunDir]:
    """Return the runs of a sweep or a pipeline in numeric order, so that -10 comes after -2."""
    found = [*runs]
    with contextlib.suppress(RunError):
        if stages := [*found[0].record().stages.values()]:
            return sorted(found, key=lambda run: stages.index(run.name))
    return sorted(
        found, key=lambda run: [int(w) if w.isdigit() else 0 for w in run.name.split("-")]
    )


def list_runs(roots: list[Path]) -> list[RunDir]:
    """Return all runs below the given roots, oldest first."""
    found: list[RunDir] = []
    for root in roots:
        try:
            # Only printable names: other users may be able to write to a root.
            directories = [d for d in root.iterdir() if d.name.isprintable()]
        except OSError:
            continue
        for directory in directories:
            with contextlib.suppress(OSError):  # another user's private run
                if (directory / RECORD).is_file():
                    found.append(RunDir(directory))
    return sorted(found, key=lambda r: (r.name, str(r.path)))


def state_home() -> Path:
    """Return the directory where trnslurm keeps this user's state between commands."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "trnslurm"


def known_roots() -> list[Path]:
    """Return the run roots that this user has submitted to."""
    try:
        lines = read_file(state_home() / "run-roots").decode(errors="replace").splitlines()
    except OSError:
        return []
    return [Path(line) for line in dict.fromkeys(lines) if line.startswith("/")]


def remember_root(root: Path) -> None:
    """Add a run root to those that `runs`, `status` and `logs` search."""
    if root in known_roots():
        return
    try:
        make_private(state_home())
        with (state_home() / "run-roots").open("a", encoding="utf-8") as file:
            file.write(f"{root}\n")
    except OSError:
        pass  # a read-only home: runs are still found by path and through their profile
