"""The keys in a compile cache: list them with sizes and last uses, and remove them."""

import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from trnslurm.frozen import Frozen
from trnslurm.node.graphs.manifest import (
    COMPILED,
    MANIFEST,
    NOT_COMPILED,
    CacheError,
    GraphManifest,
    key_dir,
    read_manifest,
)

USED = "used"
"""The file in a key's directory that a training touches when it has verified the graphs."""


class CachedKey(Frozen):
    """One key in the cache."""

    key: str
    manifest: GraphManifest | None
    """None: no compile has finished, or its manifest cannot be trusted."""
    problem: str
    sizes: Mapping[str, int]
    """The size of every file of this key, by its name in the cache."""
    made: float
    used: float
    """When a training last verified the graphs; until then, when they were made."""

    @property
    def words(self) -> str:
        """The state of the key's graphs in words, or their problem."""
        return COMPILED if self.manifest else self.problem or NOT_COMPILED

    @property
    def bytes(self) -> int:
        """The size of all its files, including those that other keys share."""
        return sum(self.sizes.values())


def read_entry(cache: Path, key: str, *, trusted: Collection[int] = ()) -> CachedKey:
    """Return what the cache has for a key."""
    directory, manifest, problem = key_dir(cache, key), None, ""
    try:
        manifest = read_manifest(cache, key, trusted=trusted)
    except CacheError as error:
        problem = str(error)
    files = [f for f in directory.rglob("*") if f.is_file()]
    sizes = {str(f.relative_to(cache)): f.stat().st_size for f in files}
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


def total_bytes(entries: Iterable[CachedKey]) -> int:
    """Return the size of all files, each counted once."""
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes |= entry.sizes
    return sum(sizes.values())


def choose(
    free: Collection[CachedKey],
    in_use: Collection[CachedKey],
    *,
    unused_since: float | None,
    max_bytes: int | None,
) -> list[CachedKey]:
    """Return the keys to remove: all unused since a time, then the longest unused until all fit."""
    left = sorted(free, key=lambda entry: entry.used)
    chosen = [e for e in left if unused_since is not None and e.used < unused_since]
    left = left[len(chosen) :]
    while max_bytes is not None and left and total_bytes([*left, *in_use]) > max_bytes:
        chosen.append(left.pop(0))
    return chosen


def remove(cache: Path, entry: CachedKey, others: Iterable[CachedKey]) -> int:
    """Remove a key and the files that no other key names; return the number of bytes freed."""
    directory = key_dir(cache, entry.key)
    # The manifest first, so that the key is cold from here on.
    (directory / MANIFEST).unlink(missing_ok=True)
    shared = {name for other in others for name in other.sizes}
    freed = 0
    for name, size in entry.sizes.items():
        if name in shared:
            continue
        freed += size
        (cache / name).unlink(missing_ok=True)
        if directory not in (cache / name).parents:
            _remove_graph(cache, (cache / name).parent, shared)
    import shutil  # the words for a key need none of this

    shutil.rmtree(directory)
    return freed


def _remove_graph(cache: Path, directory: Path, shared: set[str]) -> None:
    """Remove the other files in a graph's directory, such as Neuron's mark of a compiled graph."""
    with contextlib.suppress(OSError):  # gone already, or not empty
        names = {str(file.relative_to(cache)) for file in directory.iterdir()}
        if directory == cache or names & shared:
            return
        for name in names:
            (cache / name).unlink()
        while directory != cache:
            directory.rmdir()
            directory = directory.parent


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
