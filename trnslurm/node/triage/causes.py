"""The known causes, from known/*.toml, and which one a log line matches."""

import functools
import importlib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trnslurm.frozen import Frozen

_PLACE = re.compile(r"\{(what|package)\}")
# The parser of patterns in the standard library, since Python 3.11.
_parser: Any = importlib.import_module("re._parser")
_SHORTEST = 3
CAUSE, EFFECT, HARMLESS = "cause", "effect", "harmless"
_FILES = Path(__file__).with_name("known")


class Cause(Frozen):
    """What a line of a failed job's log means: an entry of known/*.toml.

    Examples of Neuron's lines are from its documentation and its samples' READMEs, or composed from
    their wording: none was produced here.
    """

    name: str
    """What tests and JSON call it."""
    source: str
    """Who prints the line: neuron, slurm, container, trnslurm, python (PyTorch, CUDA, the network,
    the operating system), or script: what may be the fault of the script or its packages."""
    kind: str
    """cause: why something failed; effect: a consequence of a failure in another process, to which
    any cause is preferred; harmless: healthy runs print the line too, so it is never named."""
    pattern: re.Pattern[str]
    """It is searched in single lines. Its groups `what` and `package` fill the texts."""
    example: str
    """A line that the pattern matches."""
    near: tuple[str, ...] = ()
    """Lines that look alike and mean something else."""
    cause: str
    fix: str
    wide: bool = False
    """The line may have several causes: one with a specific line is preferred."""
    words: frozenset[str] = frozenset()
    """Parts in lower case, one of which is in every line that matches; empty: not known."""
    weak: bool = False
    """The line explains little, or does not end a run: any better cause is preferred."""

    @property
    def strong(self) -> bool:
        """Whether it alone explains a failure."""
        return self.kind == CAUSE and not self.weak

    def explain(self, lines: Iterable[str]) -> tuple[str, str]:
        """Return cause and fix, filled with what the first matching line names."""
        match = next((match for line in lines if (match := self.pattern.search(line))), None)
        named = {name: text or "" for name, text in match.groupdict().items()} if match else {}
        texts = (_PLACE.sub(lambda p: named.get(p[1], ""), text) for text in (self.cause, self.fix))
        cause, fix = (" ".join(text.replace(" ()", "").split()) for text in texts)
        return cause, fix

    @property
    def rank(self) -> int:
        """Return its place in the order of evidence.

        0: a specific cause; 1: a wide one; 2: a weak one; 3 and 4: consequences; 5: harmless.
        """
        if self.kind == CAUSE:
            return 2 if self.weak else int(self.wide)
        return 3 + self.wide if self.kind == EFFECT else 5


def words_of(pattern: str) -> frozenset[str]:
    """Return parts in lower case, one of which is in every text that a pattern matches.

    Looking for them is a hundred times as fast as the pattern. Empty: there are none to be sure of.
    """
    found = _needed(_parser.parse(pattern))
    return found if found and min(map(len, found)) >= _SHORTEST else frozenset()


def _needed(tokens: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """Return the best set of texts of which a match of these tokens has at least one."""
    sets: list[frozenset[str]] = []
    run = ""
    for kind, value in [*tokens, (None, None)]:
        if kind is _parser.LITERAL:
            run += chr(value)
            continue
        if run:
            sets.append(frozenset([run.lower()]))
            run = ""
        if kind is _parser.BRANCH:
            parts = [_needed(part) for part in value[1]]
            sets += [frozenset().union(*parts)] if all(parts) else []
        elif kind is _parser.SUBPATTERN:
            sets.append(_needed(value[-1]))
        elif kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT) and value[0] > 0:
            sets.append(_needed(value[2]))
    return max(filter(None, sets), key=lambda each: min(map(len, each)), default=frozenset())


@functools.cache
def all_causes() -> tuple[Cause, ...]:
    """Return every entry."""
    files = sorted(_FILES.glob("*.toml"))
    tables = [tomllib.loads(file.read_text(encoding="utf-8"))["cause"] for file in files]
    return tuple(
        Cause(
            **entry
            | {
                "pattern": re.compile(entry["pattern"]),
                "near": tuple(entry.get("near", ())),
                "words": words_of(entry["pattern"]),
            }
        )
        for table in tables
        for entry in table
    )


def named(name: str) -> Cause:
    """Return the entry with a name."""
    return next(cause for cause in all_causes() if cause.name == name)


def cause_of(lines: Iterable[str]) -> Cause | None:
    """Return the most specific entry that any line matches; of equals, the first line's."""
    return next((cause for cause, _ in explained(lines)), None)


def explained(lines: Iterable[str]) -> list[tuple[Cause, str]]:
    """Return the lines that match an entry, the most specific first."""
    found = [(cause, line) for line in lines if (cause := _of_line(line))]
    return sorted(found, key=lambda pair: pair[0].rank)


@functools.cache
def _by_word() -> dict[str, list[int]]:
    """Return the numbers of the causes whose lines may have a word, by word."""
    found: dict[str, list[int]] = {}
    for number, cause in enumerate(all_causes()):
        for word in cause.words or {""}:
            found.setdefault(word, []).append(number)
    return found


@functools.lru_cache(maxsize=4096)
def _of_line(line: str) -> Cause | None:
    """Look up a line once: when a worker dies, all others print the same lines."""
    small = line.lower()
    by_word = _by_word()
    likely: set[int] = set()
    for word, numbers in by_word.items():
        if word in small:
            likely.update(numbers)
    causes = all_causes()
    found = (causes[n] for n in sorted(likely) if causes[n].pattern.search(line))
    return min(found, key=lambda cause: cause.rank, default=None)
