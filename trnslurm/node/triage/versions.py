"""The package versions of a failed attempt, which help to choose between causes of a line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.contract.files import read_file, read_json
from trnslurm.node.triage.evidence import Suspect
from trnslurm.node.triage.mend import RESUME
from trnslurm.node.triage.releases import day_of, newest_on
from trnslurm.node.triage.words import frames_in, of_others

_MOST_PACKAGES = 4
_LONGEST_SCRIPT = 1 << 20
_PACKAGE = re.compile(r"(.*[/\\](?:site|dist)-packages)[/\\](?:google[/\\](?=\w+[/\\]))?(\w+)")
"""Matches a module's path. Several packages share the directory google/."""
_STARTERS = {"torchrun", "accelerate", "deepspeed", "click", "hydra", "fire", "typer"}
"""Packages that start a traceback without being involved."""
_NAMED = re.compile(
    r"from '([A-Za-z_]\w*)[\w.]*'|No module named '(\w+)\."
    r"|module '([A-Za-z_]\w*)[\w.]*' has no attribute"
    r"|\b([A-Za-z][\w-]*)[<>=!~]=?\d[\w.,<>=!~*]* is required"
)
"""Matches the module that an exception's line names."""
_OBJECT = re.compile(
    r"'(\w+)' object has no attribute|type object '(\w+)' has no attribute"
    r"|\b([A-Za-z_]\w*)\.\w+\(\) (?:got|missing)|\b([A-Za-z_]\w*)\(\) (?:got|missing)"
)
_LACKS = re.compile(
    r"cannot import name '(\w+)' from '(\w+)[\w.]*' \(\S*[/\\](?:site|dist)-packages[/\\]"
    r"|module '(?!torch\.(?:_C|distributed)\b)(\w+)[\w.]*'"
    r" has no attribute '(\w+)'"
    r"|\b([A-Za-z_]\w*)(?:\.\w+)?\(\) got an unexpected keyword argument '(\w+)'"
)
"""Matches text that a package lacks a name, except names that some PyTorch builds lack."""
_OF_VERSIONS = re.compile(r"(?i)\b(versions?|older|newer|too (old|new)|releases?|upgrade|update)\b")
_KINDS = re.compile(r"(?:\w+\.)*(ImportError|ModuleNotFoundError|AttributeError|TypeError)\b")
_IMPORTED = re.compile(
    r"^[ \t]*from[ \t]+([A-Za-z_]\w*)(?:\.[\w.]*)?[ \t]+import[ \t]+(\([^)]{,2000}\)|[^\n]+)",
    re.MULTILINE,
)


def _modules_of(suspect: Suspect) -> tuple[str, ...]:
    """Return the modules whose versions an exception may be about, the likeliest first."""
    lines = [suspect.telling, *reversed(suspect.lines), *suspect.more]
    ends = [line for line in lines if line and not line.startswith("  ")]
    named = [next(filter(None, m.groups())) for line in ends if (m := _NAMED.search(line))]
    files = [file for file, _ in reversed(frames_in(suspect.lines))]
    owners = [m[2] for file in files if (m := _PACKAGE.match(file))]
    objects = [next(filter(None, m.groups())) for line in ends if (m := _OBJECT.search(line))]
    callers = [file for file in files if not of_others(file) or file == files[0]]
    imported = [
        module
        for file in (callers if objects else ())
        for module, names in _IMPORTED.findall(_text_of(file))
        if any(re.search(rf"\b{re.escape(name)}\b", names) for name in objects)
    ]
    others = [name for name in owners[1:] if name not in _STARTERS]
    return tuple(dict.fromkeys((*named, *owners[:1], *imported, *others)))


class Lack(NamedTuple):
    """A name that one package uses and another package does not have."""

    user: str
    lacking: str
    name: str


def _lack_of(suspect: Suspect) -> Lack | None:
    """Return the name that a package lacks according to an exception, if another package uses it.

    A file of the project may hide the package.
    """
    match = _LACKS.search(suspect.lines[-1])
    files = [file for file, _ in frames_in(suspect.lines)]
    met = _PACKAGE.match(files[-1]) if files else None
    if not match or not met:
        return None
    imported, module, module_too, attribute, called, argument = match.groups()
    if called:
        owners = _IMPORTED.findall(_text_of(files[-1]))
        named = rf"\b{re.escape(called)}\b"
        module = next((module for module, names in owners if re.search(named, names)), "")
    lack = Lack(met[2], module or module_too, imported or attribute or argument)
    own = [Path(file) for file in files if not of_others(file)]
    hides = any(file.with_name(f"{lack.lacking}.py").exists() for file in own)
    return lack if lack.lacking and lack.lacking != lack.user and not hides else None


def _text_of(file: str) -> str:
    try:
        return read_file(Path(file), _LONGEST_SCRIPT).decode(errors="replace")
    except OSError:
        return ""


class Requirement(NamedTuple):
    """A package's requirement on another package."""

    package: str
    other: str
    requirement: str
    fits: bool
    """Whether the installed version meets the requirement."""


class Versions:
    """The package versions in a failed attempt. Other users may have written the file."""

    def __init__(self, file: Path, suspect: Suspect) -> None:
        self.modules = _modules_of(suspect)
        """The modules whose packages the failure concerns."""
        self._end, self._lack = suspect.lines[-1], _lack_of(suspect)
        self._packages, self._asked = _read(file, suspect)

    def explain(self, text: str) -> bool:
        """Check whether package versions may explain an error; `text` is its cause and fix."""
        in_circle = "partially initialized module" in self._end
        return not in_circle and bool(_KINDS.match(self._end) or _OF_VERSIONS.search(text))

    def decided(self) -> tuple[str, str, str] | None:
        """Return cause, fix and mend if a package has an unsuitable version."""
        return self._unsuited() or self._older()

    def told(self) -> str:
        """Return the packages with their requirements on each other."""
        installed = ", ".join(self._installed())
        return installed and f"installed: {installed}"

    def _unsuited(self) -> tuple[str, str, str] | None:
        """Return cause, fix and mend if a package requires another version of the failed one."""
        names = [self._packages[m][0] for m in self.modules[:2] if m in self._packages]
        versions = dict(self._packages.values())
        for package, other, requirement, fits in self._asked:
            if fits or not (other in names[:1] or {package, other} <= {*names}):
                continue
            own, installed = (f"{name} {versions.get(name, '')}" for name in (package, other))
            return (
                f"{own} requires {requirement}, but {installed} is installed",
                f"that Python -m pip install '{requirement}', or use the {package} that fits "
                f"{installed}; then trnslurm resume",
                RESUME,
            )
        return None

    def _older(self) -> tuple[str, str, str] | None:
        """Return cause, fix and mend if one of two packages is too old for the other."""
        lack = self._lack
        if not lack or not {lack.user, lack.lacking} <= {*self._packages}:
            return None
        (user, users), (other, others) = (self._packages[each] for each in lack[:2])
        day, other_day = day_of(user, users), day_of(other, others)
        if not day or not other_day or day == other_day:
            return None
        is_new = other_day > day
        too, since = ("new", "any longer") if is_new else ("old", "yet")
        ways = [
            f"'{package}{'>=' if newer else '=='}{version}'"
            for package, its, on, newer in (
                (other, other_day, day, not is_new),
                (user, day, other_day, is_new),
            )
            if (version := newest_on(package, on)) and day_of(package, version) != its
        ]
        what = f"it does not have {lack.name} {since}"
        return (
            f"{other} {others} is too {too} for {user} {users}: {what}",
            f"that Python -m pip install {' or '.join(ways) or f'-U {other} {user}'}; "
            "then trnslurm resume",
            RESUME,
        )

    def _installed(self) -> Iterator[str]:
        """Yield the packages with their requirements on each other."""
        known = dict.fromkeys(self._packages[m] for m in self.modules if m in self._packages)
        for name, version in [*known][:_MOST_PACKAGES]:
            asks = next((a.requirement for a in self._asked if a.package == name), "")
            yield f"{name} {version}" + (f" (requires {asks})" if asks else "")


def _read(file: Path, suspect: Suspect) -> tuple[dict[str, tuple[str, str]], list[Requirement]]:
    """Return the name and version of each module's package, and their mutual requirements."""
    facts = read_json(file)
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        if _are_of(suspect, facts["places"]):
            found = {m: (plain_word(n), plain_word(v)) for m, (n, v) in facts["packages"].items()}
            asks = [
                Requirement(plain_word(p), plain_word(o), plain_word(r), fits)
                for p, o, r, fits in facts["asks"]
            ]
            return found, asks
    return {}, []


def _are_of(suspect: Suspect, places: list[str]) -> bool:
    """Check whether a traceback's packages are in these directories; without any, return True."""
    own = {m[1] for file, _ in frames_in(suspect.lines) if (m := _PACKAGE.match(file))}
    return not own or not places or bool({os.path.realpath(each) for each in own} & {*places})


def plain_word(value: Any) -> str:
    """Return a name, version or requirement unchanged, or "" for anything else."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w.+!<>=~*,-]{1,80}", value) else ""
