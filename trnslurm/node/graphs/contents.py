"""What a cache holds: its keys with their sizes and last uses, and removing some of them."""

import contextlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from trnslurm.frozen import Frozen
from trnslurm.node.graphs.manifest import (
    MANIFEST,
    CacheError,
    Manifest,
    key_dir,
    read_manifest,
)

USED = "used"
"""Touched in a key's directory when a training has verified its graphs."""


class Entry(Frozen):
    """What the cache holds of one key."""

    key: str
    manifest: Manifest | None
    """None: nothing that was finished, or nothing that can be believed."""
    problem: str
    sizes: Mapping[str, int]
    """The size of every file of this key, by its name in the cache."""
    made: float
    used: float
    """When a training verified it last; before the first one, when it was made."""

    @property
    def bytes(self) -> int:
        """All its files; those that other keys name as well are counted with each."""
        return sum(self.sizes.values())


def read_entry(cache: Path, key: str, *, trusted: Collection[int] = ()) -> Entry:
    """Return what there is of a key."""
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
    return Entry(
        key=key, manifest=manifest, problem=problem, sizes=sizes, made=made,
        used=max(made, _mtime(directory / USED)),
    )  # fmt: skip


def total_bytes(entries: Iterable[Entry]) -> int:
    """Return the size of all files, each counted once."""
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes |= entry.sizes
    return sum(sizes.values())


def choose(
    free: Collection[Entry],
    in_use: Collection[Entry],
    *,
    unused_since: float | None,
    max_bytes: int | None,
) -> list[Entry]:
    """Return what to remove: unused for so long, and the longest unused until the rest fits."""
    left = sorted(free, key=lambda entry: entry.used)
    chosen = [e for e in left if unused_since is not None and e.used < unused_since]
    left = left[len(chosen) :]
    while max_bytes is not None and left and total_bytes([*left, *in_use]) > max_bytes:
        chosen.append(left.pop(0))
    return chosen


def remove(cache: Path, entry: Entry, kept: Iterable[Entry]) -> int:
    """Remove a key and its files, but for those that other keys name; return the bytes of it."""
    directory = key_dir(cache, entry.key)
    # First, so that the key is cold from here on.
    (directory / MANIFEST).unlink(missing_ok=True)
    shared = {name for other in kept for name in other.sizes}
    freed = 0
    for name, size in entry.sizes.items():
        if name in shared:
            continue
        freed += size
        (cache / name).unlink(missing_ok=True)
        if directory not in (cache / name).parents:
            _remove_graph(cache, (cache / name).parent, shared)
    shutil.rmtree(directory)
    return freed


def _remove_graph(cache: Path, directory: Path, shared: set[str]) -> None:
    """Remove what else lies in the directory of a graph, as Neuron's mark that it is compiled."""
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
