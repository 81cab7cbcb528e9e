"""A compile cache and the manifests of its keys. A key without a valid manifest is cold.

    CACHE/trnslurm/KEY/manifest.json    written last, when every node's result is verified
    CACHE/trnslurm/KEY/claim-1.json     who compiles the key: the highest number counts
    CACHE/trnslurm/KEY/used             touched by a job that has verified the graphs
    CACHE/trnslurm/KEY/xla/…            torch_xla's own cache, on xla-cpu
    CACHE/trnslurm/KEY/neff/…           TorchNeuron's, on torchneuron
    CACHE/trnslurm/KEY/output/…         the compiler's output, by node
    CACHE/trnslurm/KEY/left/…           locks that a compile left behind
    CACHE/neuronxcc-…/MODULE_…/…        Neuron's own cache; with compile_layout per-host in
    CACHE/hosts/HOST/…                  a directory for each host

File names in a manifest are relative to CACHE.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from trnslurm.contract.files import load_json, naming, sha256_of
from trnslurm.frozen import Frozen

FORMAT = 1
MANIFEST, USED = "manifest.json", "used"
COMPILED, NOT_COMPILED = "compiled", "not compiled"
"""The states of a key, as all messages name them."""


class CacheError(Exception):
    """A problem with the cache, in one line."""


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
    """The user, run and job that compiled it, and the time."""
    nodes: tuple[NodeResult, ...]

    @property
    def files(self) -> dict[str, CachedFile]:
        """All files by name. Nodes with a shared cache list the same files."""
        return {file.name: file for node in self.nodes for file in node.files}


def cache_root(compile_cache: str | None, run_root: str) -> str:
    """Return a profile's CACHE. If its cache is at a URL, the manifests are in the run root.

    The path may start with ~.
    """
    if compile_cache and "://" not in compile_cache:
        return compile_cache
    return f"{run_root.rstrip('/')}/.compiled"


class GraphCache:
    """A compile cache, and the users whose graphs may run in addition to ours and root's."""

    def __init__(self, root: Path, trusted: Collection[int] = ()) -> None:
        self.root, self.trusted = root, trusted

    def directory(self, key: str) -> Path:
        """Return a key's directory."""
        return self.root / "trnslurm" / key

    def read(self, key: str) -> GraphManifest | None:
        """Return a key's manifest, or None. Refuse the manifest of a user who is not trusted."""
        path = self.directory(key) / MANIFEST
        try:
            values = load_json(path)
            self.refuse_untrusted(path)
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

    def write(self, manifest: GraphManifest) -> Path:
        """Write a manifest, completely or not at all."""
        directory = self.directory(manifest.key)
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f".{MANIFEST}.{os.uname().nodename}-{os.getpid()}"
        try:
            with naming(partial), partial.open("w", encoding="utf-8") as stream:
                json.dump({"format": FORMAT} | asdict(manifest), stream, indent=1)
                stream.flush()
                os.fsync(stream.fileno())
            partial.rename(directory / MANIFEST)
        finally:
            partial.unlink(missing_ok=True)
        return directory / MANIFEST

    def open(self, key: str) -> Path:
        """Make a key's directory with the cache's permissions. Refuse one of an untrusted user."""
        self.root.mkdir(parents=True, exist_ok=True)
        directory = self.directory(key)
        # Everyone who may write to the cache adds keys.
        modes = {directory.parent: self._mode(), directory: self.mode_for_others()}
        for place, mode in modes.items():
            try:
                place.mkdir()
                place.chmod(mode)
            except FileExistsError:
                pass
            except PermissionError:
                for above in (self.root, place.parent):
                    self._refuse_owner(above.stat().st_uid, above)
                raise
            self._refuse_place(place)
        return directory

    def describe(self, path: Path) -> CachedFile:
        """Read a file in full for the manifest."""
        with path.open("rb") as stream:
            digest = sha256_of(stream)
            size = os.fstat(stream.fileno()).st_size
        return CachedFile(name=str(path.relative_to(self.root)), bytes=size, sha256=digest)

    def damaged(self, files: Iterable[CachedFile], *, hashes: bool) -> Iterator[tuple[Path, str]]:
        """Yield files that have changed or that another user may have written, with the reasons.

        `hashes` means to read the files in full.
        """
        for file in files:
            path = self.root / file.name
            try:
                status = path.stat()
                self.refuse_untrusted(path)
                if status.st_size != file.bytes:
                    yield path, f"{path} has {status.st_size} bytes, not {file.bytes}"
                elif hashes and self.describe(path) != file:
                    yield path, f"{path} has changed"
            except FileNotFoundError:
                yield path, f"{path} is missing"
            except OSError as error:
                yield path, f"{path} cannot be read ({error.strerror})"
            except CacheError as error:
                yield path, str(error)

    def first_damage(self, manifest: GraphManifest, *, hashes: bool) -> str:
        """Return what is wrong with the first bad file of a manifest, or "" if all are good."""
        bad = self.damaged(manifest.files.values(), hashes=hashes)
        return next((reason for _, reason in bad), "")

    def trusts(self, uid: int) -> bool:
        """Check whether a user's graphs may run."""
        return uid in {0, os.getuid(), *self.trusted}

    def refuse_untrusted(self, path: Path) -> None:
        """Refuse a file that others wrote or could replace: compiled graphs are programs."""
        if (uid := self._untrusted_owner(path)) is not None:
            raise CacheError(
                f"{path}: was written by {user_name(uid)}, whom compile_trust does not name"
            )
        _refuse_open(path)
        for place in path.parents:
            if place.is_relative_to(self.root):
                self._refuse_place(place)

    def mode_for_others(self) -> int:
        """Return the mode of the cache's subdirectories: as open to others as the cache itself.

        But they are never writable by all users, and by a group only if the cache passes its group
        on (setgid).
        """
        mode = self._mode()
        return mode & ~(0o002 if mode & stat.S_ISGID else 0o022)

    @contextlib.contextmanager
    def shared_with_others(self) -> Iterator[None]:
        """Write files with the cache's permissions for others, whatever the job's umask."""
        try:
            umask = ~self.mode_for_others() & 0o077
        except OSError:  # the cache does not exist yet
            umask = 0o077
        before = os.umask(umask)
        try:
            yield
        finally:
            os.umask(before)

    def _mode(self) -> int:
        return self.root.stat().st_mode & 0o3777

    def _refuse_place(self, place: Path) -> None:
        """Refuse a directory in which others can replace files.

        The cache itself may belong to any user, because the profile's author chose it.
        """
        if place != self.root and (uid := self._untrusted_owner(place)) is not None:
            self._refuse_owner(uid, place)
        _refuse_open(place)

    def _refuse_owner(self, uid: int, place: Path) -> None:
        if not self.trusts(uid):
            raise CacheError(
                f"{place}: belongs to {user_name(uid)}, whom compile_trust does not name: set "
                "compile_cache to a directory of your own"
            )

    def _untrusted_owner(self, path: Path) -> int | None:
        """Return the untrusted owner of a path or of a link to it, or None if all are trusted."""
        owners = (path.stat().st_uid, path.lstat().st_uid)
        return next((uid for uid in owners if not self.trusts(uid)), None)


def _refuse_open(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CacheError(f"{path}: every user can write to it: run chmod o-w on it")


def user_ids(names: Iterable[str]) -> set[int]:
    """Return the ids of those users that this host knows."""
    found = set()
    for name in names:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            pass  # no such user on this host
    return found


def user_name(uid: int) -> str:
    """Return a user's name, if this host knows it."""
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
