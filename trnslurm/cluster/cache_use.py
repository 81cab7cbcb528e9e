"""Lists the contents and users of a cluster's compile cache, and removes unused graphs."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trnslurm.cluster.cache import PRECOMPILE, CompileCache
from trnslurm.config.load import read_cluster
from trnslurm.config.search import read_yaml
from trnslurm.errors import RunError, SlurmError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.node.claims import Claim
from trnslurm.node.graphs.contents import CachedKey, choose, read_entry, remove
from trnslurm.node.graphs.manifest import CacheError, newest_claim, read_manifest
from trnslurm.rundir import RunFiles, load_json
from trnslurm.runs.find import find_run, list_runs
from trnslurm.runs.foreign import refuse_foreign
from trnslurm.runs.phase import is_live
from trnslurm.runs.process import process_alive
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import run_status, statuses_of
from trnslurm.slurm.commands import Slurm, find_job

_SUBMITTING_S = 180  # longer than any sbatch call with its retries


def still_compiles(claim: Claim, bin_dir: str | None) -> bool:
    """Check whether the run that took a claim may still compile.

    It does not if its job ended without a manifest, or its submission was killed.
    """
    holder = claim.holder
    if not holder.job:
        here = holder.host == socket.gethostname()
        return process_alive(holder.process) if here else claim.age_s < _SUBMITTING_S
    if "@" not in holder.job:
        queue = Slurm(bin_dir).queue([holder.user])
        return is_live(find_job(queue, holder.job, Path(holder.run)))
    try:
        status = run_status(RunDir(Path(holder.run)))
    except RunError:  # the run is deleted, or we may not read it
        return holder.host == socket.gethostname() and process_alive(holder.job)
    return not any(p.final for p in status.phases if p.phase == PRECOMPILE)


def entries_of(cache: CompileCache) -> list[CachedKey]:
    """Return the entries of the cache, the least recently used first."""
    entries = [read_entry(cache.root, key, trusted=cache.trusted) for key in cache.all_keys()]
    return sorted(entries, key=lambda entry: entry.used)


def users_of(cache: CompileCache, roots: Sequence[Path]) -> dict[str, str]:
    """Return the user of each key that is in use: a run, among those that we can read."""
    found = {}
    for key in cache.all_keys():
        claim = newest_claim(cache.root, key)
        try:
            compiling = claim is not None and still_compiles(claim, cache.bin_dir)
        except SlurmError:  # no controller answers here
            compiling = True
        if claim and compiling:
            found[key] = claim.holder.run or "a submission"
    statuses, _ = statuses_of(list_runs(list(roots)))
    for status in statuses:
        if not status.final and "key" in status.precompile:
            found[status.precompile["key"]] = status.run
    return found


def prune(
    cache: CompileCache,
    in_use: Collection[str],
    *,
    unused_since: float | None,
    max_bytes: int | None,
) -> list[CachedKey]:
    """Return the entries to remove; an entry in use is never one."""
    entries = entries_of(cache)
    free = [entry for entry in entries if entry.key not in in_use]
    busy = [entry for entry in entries if entry.key in in_use]
    return choose(free, busy, unused_since=unused_since, max_bytes=max_bytes)


def remove_all(cache: CompileCache, entries: Sequence[CachedKey]) -> int:
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


class GraphSource(Frozen):
    """The ingredients of a key, and the versions if they are known."""

    ingredients: Mapping[str, Any]
    versions: Mapping[str, str]
    unknown: str = ""
    """Why the versions are not known."""


def find_source(word: str, cache: CompileCache, roots: Sequence[Path]) -> GraphSource:
    """Return the source that a word names: a key in the cache, a bundle's directory, or a run."""
    if word in cache.all_keys():
        try:
            manifest = read_manifest(cache.root, word, trusted=cache.trusted)
        except CacheError as error:
            raise RunError(str(error)) from None
        if manifest is None:
            raise RunError(f"{word} has no manifest in {cache.root}: it is not compiled")
        return GraphSource(ingredients=manifest.ingredients, versions=manifest.versions)
    bundle = RunFiles(Path(word))
    if bundle.ingredients_file.is_file() and not bundle.record_file.is_file():
        for path in (bundle.path, bundle.config_file):  # we start the Python that the file names
            refuse_foreign(path, "compare")
        try:
            saved = read_yaml(bundle.config_file)["config"]
            own = CompileCache(read_cluster(saved, str(bundle.config_file)))
        except (KeyError, TypeError, ValueError):
            raise RunError(
                f"{bundle.config_file}: damaged; make a bundle with `trnslurm render -o DIR`"
            ) from None
        versions, unknown = own.versions, own.unknown
    else:
        run = find_run(word, list(roots))
        bundle, versions = run, run.record().precompile.get("versions", {})
        unknown = "" if versions else "not known where it was submitted"
    file = bundle.ingredients_file
    try:
        ingredients = load_json(file)
    except FileNotFoundError:
        raise RunError(
            f"{bundle.path} has no {file.name}: it was made by an older version, or prepares data"
        ) from None
    except (OSError, ValueError):
        raise RunError(f"{file}: damaged or unreadable") from None
    return GraphSource(ingredients=ingredients, versions=versions, unknown=unknown)
