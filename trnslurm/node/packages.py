"""Reports the package versions in a failed job's Python environment, from its own metadata."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

from trnslurm.contract.variables import Variable

_SEPARATORS = re.compile(r"[-_.]+")
_OF_DEVELOPERS = re.compile(r"(?i)dev|test|doc|lint|quality|bench|example|build|ci\b|all\b")


def packages(modules: Iterable[str]) -> dict[str, Any]:
    """Return the packages that contain these modules, and what they require of each other."""
    found = {m: each for m in modules if (each := _package_of(m))}
    # Workers may import from a copy of these packages on their node's own disk.
    places = {} if os.environ.get(Variable.ARCHIVE) else found
    return {
        "python": platform.python_version(),
        "packages": {module: [_name(each), each.version] for module, each in found.items()},
        "places": sorted({os.path.realpath(str(each.locate_file(""))) for each in places.values()}),
        "asks": list(dict.fromkeys(_asks(found.values()))),
    }


def _package_of(module: str) -> importlib.metadata.Distribution | None:
    """Return a module's package. Most have the same name."""
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        return importlib.metadata.distribution(module)
    names = importlib.metadata.distributions()
    having = [each for each in names if module in (each.read_text("top_level.txt") or "").split()]
    return having[0] if len(set(map(_name, having))) == 1 else None


def _name(package: importlib.metadata.Distribution) -> str:
    """Return a package's name, normalized as packaging.python.org says."""
    return _SEPARATORS.sub("-", package.metadata["Name"] or "").lower()


def _asks(
    found: Collection[importlib.metadata.Distribution],
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield which package requires which version of another, and whether that is installed."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:  # nearly every training package installs it
        return
    versions = {_name(each): each.version for each in found}
    for each in found:
        # Requirements of only some functions are extras, such as accelerate for transformers.
        extras = each.metadata.get_all("Provides-Extra") or ()
        uses = ["", *(extra for extra in extras if not _OF_DEVELOPERS.search(extra))]
        for text in each.requires or ():
            with suppress(InvalidRequirement, ValueError):
                asked = Requirement(text)
                other = _SEPARATORS.sub("-", asked.name).lower()
                marker = asked.marker
                applies = not marker or any(marker.evaluate({"extra": use}) for use in uses)
                if applies and asked.specifier and other in versions:
                    fits = asked.specifier.contains(versions[other], prereleases=True)
                    yield _name(each), other, f"{other}{asked.specifier}", fits
