"""Lists the contents and users of a cluster's compile cache, and removes unused graphs."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trnslurm.cluster.cache import PRECOMPILE, CompileCache
from trnslurm.cluster.claims import Claim
from trnslurm.config.load import read_cluster
from trnslurm.config.search import read_yaml
from trnslurm.contract.files import load_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.errors import RunError, SlurmError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.node.graphs.manifest import (
    COMPILED,
    MANIFEST,
    NOT_COMPILED,
    USED,
    CacheError,
    GraphManifest,
)
from trnslurm.records.foreign import refuse_foreign
from trnslurm.records.run import RunDir, process_alive
from trnslurm.runs.find import find_run, list_runs
from trnslurm.runs.status import run_status, statuses_of

_SUBMITTING_S = 180  # longer than any sbatch call with its retries


class CachedKey(Frozen):
    """One key in the cache."""

    key: str
    manifest: GraphManifest | None
    """The manifest, or None if no compilation has finished or the manifest is not trusted."""
    problem: str
    sizes: Mapping[str, int]
    """The size of every file of this key, by its name in the cache."""
    made: float
    used: float
    """When a training job last verified the graphs; before that, when they were made."""

    @property
    def words(self) -> str:
        """The state of the key's graphs in words, or their problem."""
        return COMPILED if self.manifest else self.problem or NOT_COMPILED

    @property
    def bytes(self) -> int:
        """The size of all its files, including those shared with other keys."""
        return sum(self.sizes.values())


def still_compiles(claim: Claim, cache: CompileCache) -> bool:
    """Check whether the run that took a claim might still be compiling.

    It is not if its job ended without a manifest, or if its submission was killed.
    """
    holder = claim.holder
    if not holder.job:
        here = holder.host == socket.gethostname()
        return process_alive(holder.process) if here else claim.age_s < _SUBMITTING_S
    if "@" not in holder.job:
        return cache.scheduler.may_start(holder.job, holder.user, Path(holder.run))
    try:
        status = run_status(RunDir(Path(holder.run)))
    except RunError:  # the run is deleted, or we do not have permission to read it
        return holder.host == socket.gethostname() and process_alive(holder.job)
    return not any(p.final for p in status.phases if p.phase == PRECOMPILE)


def users_of(cache: CompileCache, roots: Sequence[Path]) -> dict[str, str]:
    """Return the user of each key that is in use: a run, among the readable ones."""
    found = {}
    for key in cache.all_keys():
        claim = cache.newest_claim(key)
        try:
            compiling = claim is not None and still_compiles(claim, cache)
        except SlurmError:  # no controller answers on this host
            compiling = True
        if claim and compiling:
            found[key] = claim.holder.run or "a submission"
    statuses, _ = statuses_of(list_runs(list(roots)))
    for status in statuses:
        if not status.final and "key" in status.precompile:
            found[status.precompile["key"]] = status.run
    return found


def entries_of(cache: CompileCache) -> list[CachedKey]:
    """Return the entries of the cache, the least recently used first."""
    return sorted((_entry(cache, key) for key in cache.all_keys()), key=lambda entry: entry.used)


def _entry(cache: CompileCache, key: str) -> CachedKey:
    directory, manifest, problem = cache.directory(key), None, ""
    try:
        manifest = cache.read(key)
    except CacheError as error:
        problem = str(error)
    files = [file for file in directory.rglob("*") if file.is_file()]
    sizes = {str(file.relative_to(cache.root)): file.stat().st_size for file in files}
    if manifest:
        sizes |= {name: file.bytes for name, file in manifest.files.items()}
    made = _mtime(directory / MANIFEST) or _mtime(directory)
    return CachedKey(
        key=key,
        manifest=manifest,
        problem=problem,
        sizes=sizes,
        made=made,
        used=max(made, _mtime(directory / USED)),
    )


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def total_bytes(entries: Iterable[CachedKey]) -> int:
    """Return the total size of all files, each counted once."""
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes |= entry.sizes
    return sum(sizes.values())


def prune(
    cache: CompileCache,
    in_use: Collection[str],
    *,
    unused_since: float | None,
    max_bytes: int | None,
) -> list[CachedKey]:
    """Return the keys to remove: all unused since a time, then the oldest until the rest fits.

    A key that is in use is never removed.
    """
    entries = entries_of(cache)
    busy = [entry for entry in entries if entry.key in in_use]
    left = [entry for entry in entries if entry.key not in in_use]
    chosen = [entry for entry in left if unused_since is not None and entry.used < unused_since]
    left = left[len(chosen) :]
    while max_bytes is not None and left and total_bytes([*left, *busy]) > max_bytes:
        chosen.append(left.pop(0))
    return chosen


def remove_all(cache: CompileCache, entries: Sequence[CachedKey]) -> int:
    """Remove these keys; return the number of bytes freed."""
    left = {entry.key: entry for entry in entries_of(cache)}
    freed = 0
    try:
        for entry in entries:
            left.pop(entry.key, None)
            freed += _remove(cache, entry, left.values())
    except OSError as error:
        raise TrnslurmError(f"{error.filename}: cannot be removed ({error.strerror})") from None
    return freed


def _remove(cache: CompileCache, entry: CachedKey, others: Iterable[CachedKey]) -> int:
    """Remove a key and the files that no other key uses; return the number of bytes freed.

    Links are not followed, because another user of the cache may have made them.
    """
    directory = cache.directory(entry.key)
    if _is_behind_link(cache.root, directory / MANIFEST):
        raise TrnslurmError(
            f"{directory.parent}: its path under {cache.root} contains a link: remove the link"
        )
    # Remove the manifest first, so that the key is cold from now on.
    (directory / MANIFEST).unlink(missing_ok=True)
    shared = {name for other in others for name in other.sizes}
    freed = 0
    for name, size in entry.sizes.items():
        file = cache.root / name
        if name in shared or _is_behind_link(cache.root, file):
            continue
        freed += size
        file.unlink(missing_ok=True)
        if directory not in file.parents:
            _remove_graph(cache.root, file.parent, shared)
    shutil.rmtree(directory)
    return freed


def _is_behind_link(root: Path, file: Path) -> bool:
    """Check whether a directory between the cache and a file is a link."""
    return file.parent.resolve() != root.resolve() / file.parent.relative_to(root)


def _remove_graph(root: Path, directory: Path, shared: set[str]) -> None:
    """Remove the other files in a graph's directory, such as Neuron's mark of a compiled graph."""
    with contextlib.suppress(OSError):  # gone already, or not empty
        names = {str(file.relative_to(root)) for file in directory.iterdir()}
        if directory == root or names & shared:
            return
        for name in names:
            (root / name).unlink()
        while directory != root:
            directory.rmdir()
            directory = directory.parent


def find_ingredients(
    word: str, cache: CompileCache, roots: Sequence[Path]
) -> tuple[dict[str, Any], str]:
    """Return the ingredients of a key (including `versions`), and why versions are unknown, if so.

    The word names a key in the cache, a bundle's directory, or a run.
    """
    if word in cache.all_keys():
        try:
            manifest = cache.read(word)
        except CacheError as error:
            raise RunError(str(error)) from None
        if manifest is None:
            raise RunError(
                f"{word} has no manifest in {cache.root}, so its graphs are not compiled"
            )
        return {**manifest.ingredients, "versions": manifest.versions}, ""
    bundle = RunFiles(Path(word))
    if bundle.ingredients_file.is_file() and not bundle.record_file.is_file():
        for path in (
            bundle.path,
            bundle.config_file,
        ):  # the file names the Python interpreter that we start
            refuse_foreign(path, "compare")
        try:
            saved = read_yaml(bundle.config_file)["config"]
            own = CompileCache(read_cluster(saved, str(bundle.config_file)))
        except (KeyError, TypeError, ValueError):
            raise RunError(
                f"{bundle.config_file} is damaged: create a bundle with `trnslurm render -o DIR`"
            ) from None
        versions, unknown = own.versions, own.unknown
    else:
        run = find_run(word, list(roots))
        bundle, versions = run, run.record().precompile.get("versions", {})
        unknown = "" if versions else "unknown on the host that submitted it"
    file = bundle.ingredients_file
    try:
        return {**load_json(file), "versions": versions}, unknown
    except FileNotFoundError:
        raise RunError(
            f"{bundle.path} has no {file.name}: an older version made it, or it prepares data"
        ) from None
    except (OSError, ValueError):
        raise RunError(f"{file} is damaged or unreadable") from None
