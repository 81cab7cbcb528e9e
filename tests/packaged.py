"""This package inside a rendered bundle, as tests read and change it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from trnslurm.contract.rundir import PACKAGE


def source_names(bundle: Path) -> list[str]:
    """Return the files of the package in a bundle, as trnslurm/node/attempt.py."""
    with zipfile.ZipFile(bundle / PACKAGE) as archive:
        return archive.namelist()


def change_source(bundle: Path, name: str, change: Callable[[str], str]) -> None:
    """Change the text of one file of the package in a bundle."""
    with zipfile.ZipFile(bundle / PACKAGE) as archive:
        files = {member: archive.read(member) for member in archive.namelist()}
    files[name] = change(files[name].decode()).encode()
    with zipfile.ZipFile(bundle / PACKAGE, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
