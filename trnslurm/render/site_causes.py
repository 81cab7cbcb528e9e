"""Checks the causes of failures that a site adds before they go into a run.

The nodes match them against any line that a job prints. So this module rejects patterns that could
keep a node busy, or that do not match their own example.
"""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trnslurm.config.plugins import Plugin, plugin_named
from trnslurm.config.search import read_text
from trnslurm.errors import ConfigError, TrnslurmError

if TYPE_CHECKING:
    from trnslurm.node.triage.causes import Cause

_NEEDED = ("name", "pattern", "example", "cause", "fix")
_VALUES = {
    "source": ("script", "node", "slurm", "container", "python", "neuron"),
    "kind": ("cause", "effect", "harmless"),
    "mend": ("submit", "resume", "either", "passes"),
}
_SWITCHES = ("wide", "weak")
_LONGEST_TEXT = 180
_LONGEST_LINE = 1000
"""The characters of a line that triage keeps."""
_SLOW_S = 0.1
"""The limit for one such line. A usual pattern takes microseconds."""


def site_causes(name: str) -> tuple[str, str]:
    """Return the name, and the table as JSON, for an entry of `causes`.

    Nodes may have a Python older than 3.11, which cannot read TOML.
    """
    if not name.endswith(".toml"):
        plugin = plugin_named("causes", name, "causes")
        return plugin.name, _checked(plugin.name, _text_of(plugin), plugin.error)
    file = Path(name).expanduser()
    if not file.is_absolute():
        raise ConfigError(
            f"causes {name}: a file must be given by its full path, starting with / or ~"
        )
    if not re.fullmatch(r"\w[\w.-]*", file.stem):
        raise ConfigError(f"causes {name}: a file name may contain only letters, digits, and _ . -")

    def error(said: str) -> ConfigError:
        return ConfigError(f"{name}: {said}")

    try:
        text = read_text(file).decode()
    except UnicodeDecodeError:
        raise error("not UTF-8") from None
    return file.stem, _checked(file.stem, text, error)


def _text_of(plugin: Plugin) -> str:
    """Return a plug-in's table. Its object is the TOML text or the file that contains it."""
    given = plugin.load()
    with plugin.blamed():
        return str(given if isinstance(given, str) else given.read_text(encoding="utf-8"))


def _checked(name: str, text: str, error: Callable[[str], TrnslurmError]) -> str:
    from trnslurm.node.triage.causes import read_site_causes, with_words  # many patterns

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as wrong:
        raise error(f"not valid TOML: {wrong}") from None
    entries = table.get("cause")
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        raise error("expected a table with [[cause]] entries")
    for number, entry in enumerate(entries, 1):
        if wrong_key := next(_faults_of_keys(entry), ""):
            raise error(f"cause {entry.get('name', number)}: {wrong_key}")
    causes = read_site_causes(name, table)
    names = [cause.name for cause in causes]
    for cause in causes:
        twice = "there are two causes with this name" if names.count(cause.name) > 1 else ""
        if fault := twice or next(_faults_of(cause), ""):
            raise error(f"cause {cause.name}: {fault}")
    return f"{json.dumps(with_words(table), indent=1)}\n"


def _faults_of_keys(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors in an entry's keys or in the form of its pattern."""
    yield from (f"it has no {key}" for key in _NEEDED if not entry.get(key))
    known = {*_NEEDED, *_VALUES, *_SWITCHES, "near"}
    yield from (f"unknown key {key}" for key in entry if key not in known)
    near = entry.get("near", [])
    texts = [*(entry[key] for key in _NEEDED), *(near if isinstance(near, list) else [None])]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        yield "its values must be one-line strings"
    for key, values in _VALUES.items():
        if entry.get(key, values[0]) not in values:
            yield f"{key} must be one of {', '.join(values)}"
    for key in _SWITCHES:
        if not isinstance(entry.get(key, False), bool):
            yield f"{key} must be true or false"
    for key in ("cause", "fix"):
        if len(entry[key]) > _LONGEST_TEXT:
            yield f"{key} is longer than {_LONGEST_TEXT} characters"
    from trnslurm.node.triage.causes import parser  # many patterns

    try:
        parsed = parser().parse(entry["pattern"])
    except re.error as error:
        yield f"its pattern is not a valid Python pattern: {error}"
    else:
        if _repeats_freely(parsed, inside=False):
            yield "its pattern nests repeats or alternatives, so matching could take forever"


def _repeats_freely(tokens: Any, *, inside: bool) -> bool:
    """Check for a repeat that contains repeats or alternatives, which takes exponential time."""
    from trnslurm.node.triage.causes import parser

    kinds = parser()
    gives_back = (kinds.MAX_REPEAT, kinds.MIN_REPEAT)
    for kind, value in tokens:
        repeats = kind in gives_back and value[1] > 1
        varies = kind is kinds.BRANCH or (kind in gives_back and value[0] != value[1])
        if inside and varies:
            return True
        parts = value if isinstance(value, tuple | list) else [value]
        if kind is kinds.BRANCH:
            parts = value[1]
        for part in parts:
            if isinstance(part, kinds.SubPattern) and _repeats_freely(
                part, inside=inside or repeats
            ):
                return True
    return False


def _faults_of(cause: Cause) -> Iterator[str]:
    """Yield the errors in a pattern."""
    if not cause.words:
        yield (
            "its pattern must contain at least three fixed characters in a row, which every "
            "matching line has"
        )
    if slow := _slow_line(cause):
        yield f"its pattern is slow on lines like {slow!r}"
    elif not cause.matches(cause.example):
        yield "its pattern does not match its example"
    elif matched := [line for line in cause.near if cause.matches(line)]:
        yield f"its pattern also matches a line in near: {matched[0]}"


def _slow_line(cause: Cause) -> str:
    """Return the beginning of a line that takes long to match, or an empty string.

    Lines grow until one is slow, because the time can grow with a high power of the length.
    """
    search, example = cause.pattern.search, cause.example
    for block in dict.fromkeys([example, *example.split(), *cause.words, *"aA0 -_./:"]):
        for length in (16, 32, 64, 128, 256, 512, _LONGEST_LINE):
            line: str = (block * (length // len(block) + 1))[:length]
            began = time.thread_time()
            search(line)
            if time.thread_time() - began > _SLOW_S:
                return line[:16]
    return ""
