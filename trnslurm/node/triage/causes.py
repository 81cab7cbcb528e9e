"""The known causes, from causes.toml, and which one a log line matches."""

import functools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from trnslurm.frozen import Frozen

CAUSE, EFFECT, HARMLESS = "cause", "effect", "harmless"
_FILE = Path(__file__).with_name("causes.toml")


class Cause(Frozen):
    """One entry of causes.toml, which describes the fields."""

    name: str
    source: str
    kind: str
    pattern: re.Pattern[str]
    example: str
    cause: str
    fix: str
    weak: bool = False

    @property
    def strong(self) -> bool:
        """Whether it alone explains a failure."""
        return self.kind == CAUSE and not self.weak


@functools.cache
def all_causes() -> tuple[Cause, ...]:
    """Return every entry, in the file's order."""
    entries = tomllib.loads(_FILE.read_text(encoding="utf-8"))["cause"]
    return tuple(Cause(**entry | {"pattern": re.compile(entry["pattern"])}) for entry in entries)


def named(name: str) -> Cause:
    """Return the entry with a name."""
    return next(cause for cause in all_causes() if cause.name == name)


def cause_of(lines: Iterable[str]) -> Cause | None:
    """Return the entry for the first line that matches one."""
    return next((cause for line in lines if (cause := _of_line(line))), None)


@functools.lru_cache(maxsize=4096)
def _of_line(line: str) -> Cause | None:
    """Look up a line once: when a worker dies, all others print the same lines."""
    return next((cause for cause in all_causes() if cause.pattern.search(line)), None)
