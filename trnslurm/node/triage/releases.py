"""Which of two packages is older, from the days of their releases on PyPI.

A package was written for the other packages of its day. A newer package has lost names that it no
longer has, and an older package does not have new names yet. `make releases` writes the list of
days.
"""

import re
from functools import cache
from importlib.resources import files

_FILE = files("trnslurm.node.triage") / "releases.txt"
_FINAL = re.compile(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+[\w.]+)?")
_AFTER_ALL = "after all that are listed"

Version = tuple[int, ...]


@cache
def _releases() -> dict[str, list[tuple[Version, str]]]:
    """Return, for each package, its versions in order with their days."""
    found = {}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        package, *listed = line.split()
        pairs = (each.split("=") for each in listed)
        found[package] = [(_numbers(version), day) for version, day in pairs]
    return found


def packages() -> list[str]:
    """Return the listed packages."""
    return list(_releases())


def day_of(package: str, version: str) -> str:
    """Return the day of a release or of its series, or "". Days sort by time."""
    final, listed = _FINAL.fullmatch(version), _releases().get(package)
    if not final or not listed:
        return ""
    wanted = _numbers(final[1])
    if wanted[:2] > listed[-1][0][:2]:
        return _AFTER_ALL
    return next((day for known, day in reversed(listed) if known <= wanted), "")


def newest_on(package: str, day: str) -> str:
    """Return a package's highest version that existed on a day, or ""."""
    found = [version for version, of in _releases().get(package, ()) if of <= day]
    return ".".join(map(str, max(found))) if found else ""


def _numbers(version: str) -> Version:
    return tuple(map(int, version.split(".")))
