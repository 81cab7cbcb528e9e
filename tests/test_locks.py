"""The locks of .ci/locks: exact versions with hashes, which are what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / ".ci/locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.11", "3.12", "3.13")


def pinned(lock: str, python: str) -> dict[str, str]:
    """Return the version of each package that a lock has for a Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "extra": ""}
    found = {}
    for line in (LOCKS / f"{lock}.txt").read_text().splitlines():
        if line[0] not in " #":
            requirement = Requirement(line.removesuffix(" \\"))
            if not requirement.marker or requirement.marker.evaluate(environment):
                (version,) = requirement.specifier
                found[canonicalize_name(requirement.name)] = version.version
    return found


def wanted(*extras: str) -> Iterator[Requirement]:
    """Yield what the project needs with these extras, through the extras that they name."""
    project = PROJECT["project"]
    lists = [project["dependencies"]] + [project["optional-dependencies"][e] for e in extras]
    for requirement in (Requirement(text) for texts in lists for text in texts):
        if requirement.name == "trnslurm":
            yield from wanted(*requirement.extras)
        else:
            yield requirement


@pytest.mark.parametrize(
    ("lock", "extras", "groups"),
    [
        ("train", ["train"], ["editable"]),
        ("dev", ["train", "dev"], ["editable"]),
        ("uv", [], ["uv"]),
    ],
)
def test_a_lock_has_what_the_project_asks_for(
    lock: str, extras: list[str], groups: list[str]
) -> None:
    asked = list(wanted(*extras)) if extras else []
    asked += [Requirement(text) for name in groups for text in PROJECT["dependency-groups"][name]]
    for python in PYTHONS:
        versions = pinned(lock, python)
        wrong = [
            f"{requirement}, but {versions.get(canonicalize_name(requirement.name))} is locked"
            for requirement in asked
            if versions.get(canonicalize_name(requirement.name), "0") not in requirement.specifier
        ]
        assert wrong == [], "make lock"


def test_the_demo_and_the_tests_have_the_same_versions() -> None:
    for python in PYTHONS:
        assert pinned("train", python).items() <= pinned("dev", python).items()


@pytest.mark.parametrize("file", sorted(LOCKS.iterdir()), ids=lambda file: file.name)
def test_every_package_has_hashes_and_no_index_is_named(file: Path) -> None:
    text = file.read_text()
    blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert blocks and all("--hash=sha256:" in block for block in blocks)
    assert "://" not in text and "--index" not in text and "--extra" not in text
