"""The launcher as sent to a host: this package and the packages that it needs, all pure Python."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from trnslurm.config.search import packaged_root
from trnslurm.errors import TrnslurmError

_PACKAGE = Path(__file__).resolve().parent.parent
# The dependencies in pyproject.toml, and their dependencies.
NEEDED = (
    "click",
    "PyYAML",
    "Jinja2",
    "MarkupSafe",
    "pathspec",
    "submitit",
    "cloudpickle",
    "typing_extensions",
)
ONE_FILE = "one-file-"
"""Prefix of the directory into which the one-file launcher (.ci/release.py) is unpacked."""
_SHARE = ("templates", "cluster-config", "jobs")
_MAIN = b"""\
import sys

if sys.argv[1:2] == ["run"]:
    from trnslurm.cli.remote_main import main
else:
    from trnslurm.remote.server import main
main()
"""


@functools.cache
def files() -> dict[str, bytes]:
    """Return the files of the launcher by path."""
    if _PACKAGE.parent.name.startswith(ONE_FILE):
        return {"__main__.py": _MAIN, **dict(_tree(_PACKAGE.parent))}
    return {"__main__.py": _MAIN, **dict(_own()), **dict(_needed())}


@functools.cache
def name(begin: str = "launcher-") -> str:
    """Return the name of the launcher's directory on the other host, from a hash of its files."""
    digest = hashlib.sha256()
    for path, data in sorted(files().items()):
        digest.update(f"{path}\0{len(data)}\0".encode())
        digest.update(data)
    return f"{begin}{digest.hexdigest()[:16]}"


@functools.cache
def archive() -> bytes:
    """Return the files as a tar file. The same files always give the same bytes."""
    return pack(files())


def pack(contents: dict[str, bytes]) -> bytes:
    """Return files as a compressed tar file, without times and users."""
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for path, data in sorted(contents.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def _own() -> Iterator[tuple[str, bytes]]:
    yield from _tree(_PACKAGE, "trnslurm")  # includes share/ in an installed package
    root = packaged_root()
    if not root.is_relative_to(_PACKAGE):
        for shared in _SHARE:
            yield from _tree(root / shared, f"trnslurm/share/{shared}")


def _tree(directory: Path, prefix: str = ".") -> Iterator[tuple[str, bytes]]:
    for file in directory.rglob("*"):
        inside = file.relative_to(directory)
        hidden = any(part.startswith((".", "__pycache__")) for part in inside.parts)
        if not hidden and file.suffix != ".pyc" and file.is_file():
            yield Path(prefix, inside).as_posix(), file.read_bytes()


def _needed() -> Iterator[tuple[str, bytes]]:
    """Yield the Python sources of the required packages. All work without compiled parts."""
    for package in NEEDED:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            raise TrnslurmError(
                f"this Python does not have {package}: run pip install {package}"
            ) from None
        for path in distribution.files or ():
            outside = ".." in path.parts or path.is_absolute() or "__pycache__" in path.parts
            metadata = path.parts[0].endswith(".dist-info") and path.name != "METADATA"
            if outside or metadata or path.suffix in (".so", ".pyc", ".pyi", ".c", ".pyx"):
                continue
            yield path.as_posix(), Path(str(distribution.locate_file(path))).read_bytes()
