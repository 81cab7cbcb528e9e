"""This package in a bundle: one zip file that the nodes' Python imports from.

Python imports from zip files on its path: https://docs.python.org/3/library/zipimport.html. The
file is the same for all training jobs of a version, on every machine. It is stored without
compression, because different zlib libraries produce different bytes.
"""

from __future__ import annotations

import functools
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from trnslurm.contract.files import read_file
from trnslurm.contract.rundir import PACKAGE
from trnslurm.errors import RenderError
from trnslurm.render.cached import cached

_HERE = Path(__file__).resolve().parent.parent
_NAME = _HERE.name
# The parts that a training job copies, and those that every job copies.
ON_NODES = (
    *("node", "train", "samples", "datasets", "saves", "mirror"),
    *("declared.py", "errors.py"),
)
_SHARED = (
    *("__init__.py", "calls.py", "contract", "ddp_pace.py", "devices", "frozen.py", "pace.py"),
    "tracing.py",
)
# The tables of known causes. Nodes get them as JSON, because Python reads TOML only since 3.11.
_TABLES = f"{_NAME}/node/triage/known"
_OF_TESTS = ("beside", "example", "near")
"""Keys that only the tests of the tables read."""
MAX_CODE_MIB = 64
_MAX_BYTES = MAX_CODE_MIB << 20
_MODE = 0o644 << 16
_UNIX = 3


def package_files(parts: Sequence[str]) -> dict[str, bytes]:
    """Return the bundle file with parts of this package and the modules that all parts share."""
    files: dict[str, bytes] = {}
    for part in (*_SHARED, *parts):
        if part.endswith(".py"):
            files[f"{_NAME}/{part}"] = (_HERE / part).read_bytes()
        else:
            files |= dict(tree(_HERE / part, f"{_NAME}/{part}"))
    tables = [files.pop(name) for name in sorted(files) if name.startswith(f"{_TABLES}/")]
    if tables:
        files[f"{_TABLES}.json"] = cached(__file__, tables, lambda: _as_json(tables))
    return {PACKAGE: _zipped(files)}


def sources(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a bundle with this package's source files in place of the zip.

    Bundles of older versions contain the source files directly.
    """
    if PACKAGE not in files:
        return dict(files)
    others = {name: data for name, data in files.items() if name != PACKAGE}
    return others | _unzipped(files[PACKAGE])


def tree(directory: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files under a directory with their names, except hidden files and bytecode."""
    for file in sorted(directory.rglob("*")):
        parts = file.relative_to(directory).parts
        hidden = any(p.startswith(".") or p == "__pycache__" for p in parts)
        if hidden or not file.is_file() or file.suffix == ".pyc":
            continue
        yield f"{prefix}/{PurePosixPath(*parts)}", read(file)


def read(file: Path) -> bytes:
    """Read a file of a bundle, or raise an error with the reason."""
    try:
        return read_file(file, _MAX_BYTES)
    except OSError as error:
        raise RenderError(f"{file}: cannot be read ({error.strerror})") from None


def _as_json(tables: Sequence[bytes]) -> bytes:
    """Return tables of causes in one file, without the keys that only their tests read."""
    import tomllib  # once per version of the tables

    from trnslurm.node.triage.causes import with_words

    found = [with_words(tomllib.loads(table.decode())) for table in tables]
    for cause in (cause for table in found for cause in table["cause"]):
        for key in _OF_TESTS:
            cause.pop(key, None)
    return json.dumps(found, ensure_ascii=False).encode()


def _zipped(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name)  # its time is the earliest that the format allows
            info.create_system, info.external_attr = _UNIX, _MODE
            archive.writestr(info, files[name])
    return out.getvalue()


@functools.lru_cache(maxsize=4)
def _unzipped(data: bytes) -> dict[str, bytes]:
    """Return the files of a package, by their names in a bundle; reject an unexpected archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [*_checked(archive.infolist())]
            return {f"code/{member.filename}": archive.read(member) for member in members}
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError) as error:
        raise RenderError(f"{PACKAGE} is damaged ({error}): render it again") from None


def _checked(members: Iterable[zipfile.ZipInfo]) -> Iterator[zipfile.ZipInfo]:
    left = _MAX_BYTES
    for member in members:
        left -= member.file_size
        if left < 0 or member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its files are compressed or too large")
        yield member
