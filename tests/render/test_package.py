"""This package in a bundle: one zip file that Python imports from."""

from __future__ import annotations

import io
import json
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from trnslurm.contract.rundir import PACKAGE
from trnslurm.errors import RenderError
from trnslurm.node.triage.causes import all_causes
from trnslurm.render.bundle import Bundle
from trnslurm.render.package import ON_NODES, package_files, sources

from ..processes import run_process

ROOT = Path(__file__).parents[2]
KNOWN = "trnslurm/node/triage/known"
OF_TESTS = {"example", "near", "beside"}
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop())
import trnslurm
from trnslurm.node.triage.causes import all_causes
from trnslurm.node.triage.releases import packages
print(trnslurm.__file__, len(all_causes()), len(packages()))
"""


def test_every_bundle_of_a_version_has_the_same_file() -> None:
    first, again = (package_files(ON_NODES)[PACKAGE] for _ in range(2))
    assert first == again
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        members = archive.infolist()
    assert {m.compress_type for m in members} == {zipfile.ZIP_STORED}  # zlib's bytes differ
    assert {m.date_time for m in members} == {(1980, 1, 1, 0, 0, 0)}
    assert [m.filename for m in members] == sorted(m.filename for m in members)


def test_it_has_our_files_as_they_are() -> None:
    files = sources(package_files(ON_NODES))
    bundled = json.loads(files.pop(f"code/{KNOWN}.json"))
    for name, data in files.items():
        ours = (ROOT / name.removeprefix("code/")).read_bytes()
        assert data == ours, name
    tables = [tomllib.loads(file.read_text()) for file in sorted((ROOT / KNOWN).iterdir())]
    words = {cause.name: sorted(cause.words) for cause in all_causes()}
    for entry in (entry for table in tables for entry in table["cause"]):
        for key in OF_TESTS & entry.keys():
            del entry[key]
        entry["words"] = words[entry["name"]]  # nodes parse no patterns
    assert bundled == tables
    assert {"code/trnslurm/mirror/program.py", "code/trnslurm/train/trainer.py"} <= files.keys()


def test_its_tables_are_read_in_it(tmp_path: Path) -> None:
    Bundle(files=package_files(("node",))).write(tmp_path)
    place = str(tmp_path / PACKAGE)
    done = run_process([sys.executable, "-I", "-c", PROGRAM, place], cwd=tmp_path)
    file, causes, packages = done.out.split()
    assert file == f"{place}/trnslurm/__init__.py"
    assert int(causes) > 700 and int(packages) > 10


def encrypted() -> bytes:
    data = bytearray(packed(zipfile.ZIP_STORED))
    data[6] |= 1  # its own header, and the directory's
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def packed(method: int, size: int = 1) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("trnslurm/__init__.py", size * b"x")
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "File is not a zip file"),
        (packed(zipfile.ZIP_STORED)[:-1], "."),
        (packed(zipfile.ZIP_DEFLATED), "compressed or too large"),
        (packed(zipfile.ZIP_STORED, (64 << 20) + 1), "compressed or too large"),
        (encrypted(), "is encrypted"),
        (packed(zipfile.ZIP_STORED, 4).replace(b"xxxx", b"none"), "Bad CRC-32"),
    ],
)
def test_what_is_none_of_ours_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(RenderError, match=rf"code/trnslurm\.zip is damaged .*{why}.*render it"):
        sources({PACKAGE: data})
