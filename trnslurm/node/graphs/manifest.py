"""The manifests and claims of the keys in a compile cache. A key without a valid manifest is cold.

    CACHE/trnslurm/KEY/manifest.json    written last, once every node's result was verified
    CACHE/trnslurm/KEY/claim-1.json     who compiles the key: the highest number counts
    CACHE/trnslurm/KEY/xla/…            torch_xla's own cache, on xla-cpu
    CACHE/trnslurm/KEY/output/…         the compiler's output, by node
    CACHE/trnslurm/KEY/left/…           locks that a compile left behind
    CACHE/neuronxcc-…/MODULE_…/…        Neuron's own cache; with compile_layout per-host in
    CACHE/hosts/HOST/…                  a directory of each host

Names of files in a manifest begin at CACHE.
"""

import contextlib
import json
import os
import pwd
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from trnslurm.frozen import Frozen
from trnslurm.node.claims import Claim, Holder, newest_in, take_next
from trnslurm.rundir import load_json

FORMAT = 1
MANIFEST = "manifest.json"
COMPILED, NOT_COMPILED = "compiled", "not compiled"
"""The words for what a cache has for a key."""


class CacheError(Exception):
    """A problem of the cache, in one line."""


class CachedFile(Frozen):
    """A file of the cache, as the precompile verified it."""

    name: str
    bytes: int
    sha256: str


class NodeResult(Frozen):
    """What one node found and compiled."""

    node: int
    host: str
    graphs: int
    compiled: int
    failed: int
    seconds: float
    files: tuple[CachedFile, ...] = ()


class GraphManifest(Frozen):
    """Everything compiled for a key."""

    key: str
    ingredients: Mapping[str, Any]
    versions: Mapping[str, str]
    made: Mapping[str, Any]
    """Which user, run and job compiled it, and when."""
    nodes: tuple[NodeResult, ...]

    @property
    def files(self) -> dict[str, CachedFile]:
        """All files by name; nodes of a shared cache name the same ones."""
        return {file.name: file for node in self.nodes for file in node.files}


def cache_root(compile_cache: str | None, run_root: str) -> str:
    """Return CACHE for a profile's values; manifests of a cache at a URL are in the run root.

    The path may begin with ~.
    """
    if compile_cache and "://" not in compile_cache:
        return compile_cache
    return f"{run_root.rstrip('/')}/.compiled"


def key_dir(cache: Path, key: str) -> Path:
    """Return the directory of a key."""
    return cache / "trnslurm" / key


def read_manifest(cache: Path, key: str, *, trusted: Collection[int] = ()) -> GraphManifest | None:
    """Return the manifest of a key; None if there is none. Refuse one of a user who is not trusted.

    `trusted` has user ids in addition to our own and root's.
    """
    path = key_dir(cache, key) / MANIFEST
    try:
        values = load_json(path)
        refuse_untrusted(path, trusted, cache)
        if values["format"] != FORMAT:
            raise CacheError(f"{path}: written by another version of trnslurm")
        manifest = GraphManifest(
            key=str(values["key"]),
            ingredients=dict(values["ingredients"]),
            versions={str(name): str(value) for name, value in values["versions"].items()},
            made=dict(values["made"]),
            nodes=tuple(map(_node_result, values["nodes"])),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise CacheError(f"{path}: damaged") from None
    if manifest.key != key:
        raise CacheError(f"{path}: belongs to key {manifest.key}")
    return manifest


def write_manifest(cache: Path, manifest: GraphManifest) -> Path:
    """Write a manifest, whole or not at all."""
    directory = key_dir(cache, manifest.key)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{MANIFEST}.{os.uname().nodename}-{os.getpid()}"
    try:
        with partial.open("w", encoding="utf-8") as stream:
            json.dump({"format": FORMAT} | asdict(manifest), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(directory / MANIFEST)
    finally:
        partial.unlink(missing_ok=True)
    return directory / MANIFEST


def newest_claim(cache: Path, key: str) -> Claim | None:
    """Return the newest claim of a key, the only one that counts; None if there is none."""
    return newest_in(key_dir(cache, key))


def take_claim(
    cache: Path, key: str, holder: Holder, *, after: Claim | None, trusted: Collection[int] = ()
) -> Claim | None:
    """Take the claim that follows a stale one; None if another process was faster."""
    return take_next(open_key_dir(cache, key, trusted=trusted), holder, after, readers=cache)


def open_key_dir(cache: Path, key: str, *, trusted: Collection[int] = ()) -> Path:
    """Make a key's directory with the cache's permissions; refuse one of a user not trusted."""
    cache.mkdir(parents=True, exist_ok=True)
    directory = key_dir(cache, key)
    all_keys = cache.stat().st_mode & 0o3777  # everybody who may write to the cache adds keys
    for place, mode in ((directory.parent, all_keys), (directory, mode_for_others(cache))):
        try:
            place.mkdir()
            place.chmod(mode)
        except FileExistsError:
            pass
        except PermissionError:
            for above in (cache, place.parent):
                if not is_trusted(uid := above.stat().st_uid, trusted):
                    raise foreign_place(above, uid) from None
            raise
        refuse_place(place, trusted, cache)
    return directory


def describe(cache: Path, path: Path) -> CachedFile:
    """Read a file whole for the manifest."""
    import hashlib  # slow, and a plan reads no graphs

    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        size = os.fstat(stream.fileno()).st_size
    return CachedFile(name=str(path.relative_to(cache)), bytes=size, sha256=digest)


def find_damage(
    cache: Path, manifest: GraphManifest, *, hashes: bool, trusted: Collection[int] = ()
) -> str | None:
    """Return the first missing or changed file of a manifest; `hashes`: read the files whole."""
    files = manifest.files.values()
    return next((said for _, said in damaged(cache, files, hashes=hashes, trusted=trusted)), None)


def damaged(
    cache: Path, files: Iterable[CachedFile], *, hashes: bool, trusted: Collection[int] = ()
) -> Iterator[tuple[Path, str]]:
    """Yield files that changed or that another user may have written, each with the reason."""
    for file in files:
        path = cache / file.name
        try:
            status = path.stat()
            refuse_untrusted(path, trusted, cache)
            if status.st_size != file.bytes:
                yield path, f"{path} has {status.st_size} bytes, not {file.bytes}"
            elif hashes and describe(cache, path) != file:
                yield path, f"{path} has changed"
        except FileNotFoundError:
            yield path, f"{path} is missing"
        except OSError as error:
            yield path, f"{path} cannot be read ({error.strerror})"
        except CacheError as error:
            yield path, str(error)


def refuse_untrusted(path: Path, trusted: Collection[int], cache: Path) -> None:
    """Refuse a file that others wrote or could replace: compiled graphs are programs."""
    if (uid := _untrusted_owner(path, trusted)) is not None:
        raise CacheError(
            f"{path}: was written by {user_name(uid)}, whom compile_trust does not name"
        )
    _refuse_open(path)
    for place in path.parents:
        if place.is_relative_to(cache):
            refuse_place(place, trusted, cache)


def refuse_place(place: Path, trusted: Collection[int], cache: Path) -> None:
    """Refuse a directory in which others can replace files.

    The cache itself may belong to any user, because the profile chose it.
    """
    uid = None if place == cache else _untrusted_owner(place, trusted)
    if uid is not None:
        raise foreign_place(place, uid)
    _refuse_open(place)


def foreign_place(place: Path, uid: int) -> CacheError:
    """Return the error for a directory of a user who is not trusted."""
    return CacheError(
        f"{place}: belongs to {user_name(uid)}, whom compile_trust does not name: set "
        "compile_cache to a directory of your own"
    )


def is_trusted(uid: int, trusted: Collection[int]) -> bool:
    """Check whether a user's graphs may run: our own, root's and those of trusted users."""
    return uid in {0, os.getuid(), *trusted}


def mode_for_others(cache: Path) -> int:
    """Return the mode of the cache's subdirectories: as open to others as the cache itself.

    But never writable by all users, and by a group only if the cache passes its group on (setgid).
    """
    mode = cache.stat().st_mode & 0o3777
    return mode & ~(0o002 if mode & stat.S_ISGID else 0o022)


@contextlib.contextmanager
def shared_with_others(cache: Path) -> Iterator[None]:
    """Write files with the cache's permissions for others, whatever the job's umask."""
    try:
        umask = ~mode_for_others(cache) & 0o077
    except OSError:  # there is none yet
        umask = 0o077
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def _untrusted_owner(path: Path, trusted: Collection[int]) -> int | None:
    """Return the owner of a path, or of a link to it, who is not trusted; None if all are."""
    owners = (path.stat().st_uid, path.lstat().st_uid)
    return next((uid for uid in owners if not is_trusted(uid, trusted)), None)


def _refuse_open(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CacheError(f"{path}: every user can write it: chmod o-w it")


def user_ids(names: Iterable[str]) -> set[int]:
    """Return the ids of the users that this host knows."""
    found = set()
    for name in names:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            pass  # no such user on this host
    return found


def user_name(uid: int) -> str:
    """Return a user's name where this host knows it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _node_result(values: dict[str, Any]) -> NodeResult:
    files = tuple(
        CachedFile(name=str(file["name"]), bytes=int(file["bytes"]), sha256=str(file["sha256"]))
        for file in values["files"]
    )
    for path in (PurePosixPath(file.name) for file in files):
        if path.is_absolute() or ".." in path.parts:
            raise CacheError(f"a manifest names {str(path)!r}, which is not a file of the cache")
    return NodeResult(
        node=int(values["node"]),
        host=str(values["host"]),
        graphs=int(values["graphs"]),
        compiled=int(values["compiled"]),
        failed=int(values["failed"]),
        seconds=float(values["seconds"]),
        files=files,
    )
