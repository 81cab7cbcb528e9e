"""The launcher as sent to a host: this package and the packages it needs, all pure Python."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import io
import tarfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trnslurm.config.search import packaged_root
from trnslurm.errors import TrnslurmError

_PACKAGE = Path(__file__).resolve().parent.parent
# The dependencies in pyproject.toml, and their dependencies.
_NEEDED = (
    "click",
    "PyYAML",
    "Jinja2",
    "MarkupSafe",
    "pathspec",
    "submitit",
    "cloudpickle",
    "typing_extensions",
)
_SHARE = ("templates", "cluster-config", "jobs")
_MAIN = b"""\
import sys

if sys.argv[1:2] == ["run"]:
    from trnslurm.cli.remote_main import main
else:
    from trnslurm.remote.server import main
main()
"""


class Launcher:
    """The files of the launcher, under a name that is a hash of them."""

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files by path."""
        return {"__main__.py": _MAIN, **dict(_own()), **dict(_needed())}

    @cached_property
    def name(self) -> str:
        """Return the name of its directory on the other host."""
        digest = hashlib.sha256()
        for name, data in sorted(self.files.items()):
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
        return f"launcher-{digest.hexdigest()[:16]}"

    @cached_property
    def archive(self) -> bytes:
        """Return the files as a tar file; the same files make the same bytes."""
        return pack(self.files)


@functools.cache
def own_launcher() -> Launcher:
    """Return the launcher of this process, read once."""
    return Launcher()


def pack(files: dict[str, bytes]) -> bytes:
    """Return files as a compressed tar file, without times and users."""
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def _own() -> Iterator[tuple[str, bytes]]:
    yield from _tree(_PACKAGE, "trnslurm")  # includes share/ in an installed package
    root = packaged_root()
    if not root.is_relative_to(_PACKAGE):
        for name in _SHARE:
            yield from _tree(root / name, f"trnslurm/share/{name}")


def _tree(directory: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    for file in directory.rglob("*"):
        inside = file.relative_to(directory)
        hidden = any(part.startswith((".", "__pycache__")) for part in inside.parts)
        if not hidden and file.suffix != ".pyc" and file.is_file():
            yield f"{prefix}/{inside.as_posix()}", file.read_bytes()


def _needed() -> Iterator[tuple[str, bytes]]:
    """Yield the Python sources of the needed packages; all work without compiled parts."""
    for name in _NEEDED:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise TrnslurmError(f"this Python lacks {name}: pip install {name}") from None
        for path in distribution.files or ():
            outside = ".." in path.parts or path.is_absolute() or "__pycache__" in path.parts
            metadata = path.parts[0].endswith(".dist-info") and path.name != "METADATA"
            if outside or metadata or path.suffix in (".so", ".pyc", ".pyi", ".c", ".pyx"):
                continue
            yield path.as_posix(), Path(str(distribution.locate_file(path))).read_bytes()
