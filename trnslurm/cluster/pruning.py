"""The contents of a cluster's compile cache: which of its keys are in use, and pruning the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from trnslurm.cluster.cache import CompileCache, still_compiles
from trnslurm.errors import SlurmError, TrnslurmError
from trnslurm.node.graphs.claims import Claim, newest_claim
from trnslurm.node.graphs.contents import Entry, choose, read_entry, remove
from trnslurm.runs.find import list_runs
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import statuses_of


def entries_of(cache: CompileCache) -> list[Entry]:
    """Return what the cache holds, the longest unused first."""
    entries = [read_entry(cache.root, key, trusted=cache.trusted) for key in cache.all_keys()]
    return sorted(entries, key=lambda entry: entry.used)


def users_of(cache: CompileCache, roots: Sequence[Path]) -> dict[str, str]:
    """Return the keys in use: key -> who uses it, as far as runs can be seen from here."""
    found = {}
    for key in cache.all_keys():
        claim = newest_claim(cache.root, key)
        if claim and _may_compile(claim, cache):
            found[key] = claim.holder.run or "a submission"
    statuses, _ = statuses_of([run for run in list_runs(list(roots)) if _names_key(run)])
    for status in statuses:
        if not status.final:
            found[status.precompile["key"]] = status.run
    return found


def prune(
    cache: CompileCache,
    in_use: Collection[str],
    *,
    unused_since: float | None,
    max_bytes: int | None,
) -> list[Entry]:
    """Return what pruning would remove."""
    entries = entries_of(cache)
    free = [entry for entry in entries if entry.key not in in_use]
    busy = [entry for entry in entries if entry.key in in_use]
    return choose(free, busy, unused_since=unused_since, max_bytes=max_bytes)


def remove_all(cache: CompileCache, entries: Sequence[Entry]) -> int:
    """Remove these keys; return the bytes that this freed."""
    gone = {entry.key for entry in entries}
    kept = [entry for entry in entries_of(cache) if entry.key not in gone]
    try:
        return sum(
            remove(cache.root, entry, [*kept, *entries[number + 1 :]])
            for number, entry in enumerate(entries)
        )
    except OSError as error:
        raise TrnslurmError(f"{error.filename}: cannot be removed ({error.strerror})") from None


def _may_compile(claim: Claim, cache: CompileCache) -> bool:
    try:
        return still_compiles(claim, cache.bin_dir)
    except SlurmError:  # nobody to ask here
        return True


def _names_key(run: RunDir) -> bool:
    try:
        return "key" in run.record().precompile
    except TrnslurmError:
        return False
