"""The known causes, from known/*.toml and a run's plug-ins, and how log lines match them."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from trnslurm.contract.files import open_file
from trnslurm.contract.rundir import RunFiles
from trnslurm.frozen import Frozen
from trnslurm.node.triage.budget import is_spent
from trnslurm.node.triage.gpu_memory import holders
from trnslurm.node.triage.mend import PASSES, RESUME, SUBMIT
from trnslurm.node.triage.patterns import readable

_PLACE = re.compile(r"\{(what|package|owner|newer|file|own|code)\}")
# Advice that only fits packages, because a user's script is not installed.
_OF_PACKAGE = re.compile(r"(,? or|;) update \{owner\}|[,;] or install the version of \{owner\} .*$")
_SHORTEST = 3
_MOST_FRAMES = 16 << 10
"""How many characters at a traceback's end are compared: enough for 100 frames."""
_AROUND = ("frame", "before", "log")
_compiled = functools.cache(re.compile)
CAUSE, EFFECT, HARMLESS, GENERAL, LAST = "cause", "effect", "harmless", "general", "last"
CRASHES = ("signal-abort", "signal-bus", "signal-fpe", "signal-segv")
"""The ends of a process by its own fault, which say nothing of the reason."""
NO_DIGITS = str.maketrans("", "", "0123456789")


class Context(Frozen):
    """The surroundings of a line."""

    frames: str = ""
    """The traceback that ends with the line."""
    before: str = ""
    """The lines just before the line, in its log and in the first node's log."""
    log: str = ""
    """These logs, and the batch script's log."""


_ALONE = Context()


class Cause(Frozen):
    """What a line in a failed job's log means: an entry of known/*.toml.

    The examples of Neuron lines are from AWS's documentation and the READMEs of its samples, or are
    composed from their wording. None was produced here.
    """

    name: str
    """The name in tests and in JSON."""
    source: str
    """Who prints the line.

    One of: neuron, slurm, node (its shell, or what its kernel counts), container, trnslurm, python
    (PyTorch, CUDA, the network, the operating system), or script (what may be the fault of the
    script or its packages).
    """
    kind: str
    """What the line explains.

    cause: why something failed; effect: a consequence of a failure in another process, to which any
    cause is preferred; harmless: healthy runs print the line too, so it is never named; general:
    what an exception that no other entry explains means, by its class and words; last: what a line
    means if a log without errors ends with it.
    """
    text: str
    """Its pattern, which is searched for in single lines.

    The groups `what` and `package` fill the placeholders in the report.
    """
    example: str = ""
    """A line that the pattern matches. Bundles omit it and the other examples."""
    near: tuple[str, ...] = ()
    """Lines that look similar but mean something else."""
    cause: str
    fix: str
    mend: str = ""
    """How a run continues after the fix.

    submit: as a new run, because the fix changes what the run has copied (its script, profile or
    options), so that a resume would fail again; resume: the fix is on the machines, or in what they
    share; either: it may be in both, so a run that has saved nothing is submitted again; passes:
    resume, and nothing needs a fix.
    """
    proven: bool = False
    """Whether it has correctly explained three or more failures that its author did not know.

    An exception of a script then counts as certain, unlike others.
    """
    wide: bool = False
    """Whether the line has several possible causes. A more specific line is preferred."""
    frame: re.Pattern[str] | None = None
    """The traceback must also match this pattern."""
    before: re.Pattern[str] | None = None
    """The lines just before the line must also match this pattern."""
    log: re.Pattern[str] | None = None
    """The log must also match this pattern."""
    beside: str = ""
    """An example of text that frame, before and log match."""
    words: frozenset[str] = frozenset()
    """Lowercase parts. Every matching line contains at least one of them. Empty if unknown."""
    memory: str = ""
    """Who holds the GPU's memory, according to the line's numbers."""
    weak: bool = False
    """Whether the line explains little or does not end a run. Any better cause is preferred."""

    @property
    def pattern(self) -> re.Pattern[str]:
        """The pattern, compiled when a line first contains one of its words. Few ever do."""
        return _compiled(self.text)

    def matches(self, line: str) -> bool:
        """Check whether this cause matches a line."""
        found = self.pattern.search(line) is not None
        return found and (not self.memory or self.memory in holders(line))

    @property
    def strong(self) -> bool:
        """Whether it explains a failure on its own."""
        return self.kind == CAUSE and not self.weak

    @property
    def conditions(self) -> int:
        """The number of conditions on the line's surroundings."""
        return sum(part is not None for part in (self.frame, self.before, self.log))

    def fits(self, context: Context) -> bool:
        """Check whether a line's surroundings meet the entry's conditions."""
        if self.conditions and is_spent():
            return False
        near = max(0, len(context.frames) - _MOST_FRAMES)  # a worker may print any traceback
        return (
            (self.frame is None or self.frame.search(context.frames, near) is not None)
            and (self.before is None or self.before.search(context.before) is not None)
            and (self.log is None or self.log.search(context.log) is not None)
        )

    def explain(self, lines: Iterable[str], **more: str) -> tuple[str, str]:
        """Return cause and fix, with placeholders filled from the matching line and `more`."""
        match = next((match for line in lines if (match := self.pattern.search(line))), None)
        named = {name: text or "" for name, text in match.groupdict().items()} if match else {}
        if more and named.get("package", "").split(".")[0] == more["owner"]:
            more = more | {"owner": "the script"}
        named = more | named
        fix = self.fix if named.get("newer", "?") else _OF_PACKAGE.sub("", self.fix)
        texts = (_PLACE.sub(lambda p: named.get(p[1], ""), text) for text in (self.cause, fix))
        cause, fix = (" ".join(text.replace(" ()", "").split()) for text in texts)
        return cause, fix

    @property
    def rank(self) -> int:
        """Return its rank as evidence.

        0: a specific cause; 1: a wide one; 2: a weak one; 3 and 4: consequences; 5: harmless.
        """
        if self.kind == CAUSE:
            return 2 if self.weak else int(self.wide)
        return 3 + self.wide if self.kind == EFFECT else 5


@functools.cache
def words_of(pattern: str) -> frozenset[str]:
    """Return lowercase parts, such that every text that a pattern matches contains one of them.

    Searching for them is a hundred times as fast as the pattern. The result is empty if no parts
    are certain. A bundle stores them in its tables, so only a launcher's Python parses patterns.
    """
    found = _needed(parser().parse(pattern))
    return found if found and min(map(len, found)) >= _SHORTEST else frozenset()


@functools.cache
def parser() -> Any:
    """Return the standard library's regular expression parser, a private module renamed in 3.11."""
    return importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


def _needed(tokens: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """Return the best set of strings such that every match of these tokens contains one of them."""
    kinds = parser()
    sets: list[frozenset[str]] = []
    run = ""
    for kind, value in [*tokens, (None, None)]:
        if kind is kinds.LITERAL:
            run += chr(value)
            continue
        if run:
            sets.append(frozenset([run.lower()]))
            run = ""
        if kind is kinds.BRANCH:
            parts = [_needed(part) for part in value[1]]
            sets += [frozenset().union(*parts)] if all(parts) else []
        elif kind is kinds.SUBPATTERN:
            sets.append(_needed(value[-1]))
        elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT) and value[0] > 0:
            sets.append(_needed(value[2]))
    return max(filter(None, sets), key=lambda each: min(map(len, each)), default=frozenset())


class Table:
    """A table of known causes that finds those that match a log line."""

    def __init__(self, causes: Iterable[Cause]) -> None:
        self.causes = tuple(causes)
        self._shape_may_match = functools.lru_cache(maxsize=1 << 15)(self._has_shape)
        # When a worker dies, all others print the same lines.
        self.matching = functools.lru_cache(maxsize=4096)(self._find)

    @functools.cached_property
    def _by_word(self) -> dict[str, list[int]]:
        """The indices of the causes whose lines may contain a word, for each word."""
        found: dict[str, list[int]] = {}
        for number, cause in enumerate(self.causes):
            for word in cause.words or {""} if cause.kind not in (GENERAL, LAST) else ():
                found.setdefault(word, []).append(number)
        return found

    @functools.cached_property
    def _by_digits(self) -> tuple[dict[str, list[str]], list[str]]:
        """The words without digits, by part, and the words that become too short."""
        words = {word: word.translate(NO_DIGITS) for word in self._by_word if word}
        short = [word for word, rest in words.items() if len(rest) < _SHORTEST]
        return _by_rarest({rest for rest in words.values() if len(rest) >= _SHORTEST}), short

    @functools.cached_property
    def _by_part(self) -> dict[str, list[str]]:
        return _by_rarest({word for word in self._by_word if word})

    def may_match(self, small: str) -> bool:
        """Check quickly whether a lower-case line contains a word that a pattern needs."""
        if self._shape_may_match(small.translate(NO_DIGITS)):
            return True
        return any(word in small for word in self._by_digits[1])

    def _has_shape(self, shape: str) -> bool:
        """Check the line without digits: most lines of healthy logs differ only in digits."""
        by_part = self._by_digits[0]
        parts = by_part.keys() & _parts(shape)
        return any(word in shape for part in parts for word in by_part[part])

    def _find(self, line: str) -> tuple[Cause, ...]:
        """Return the causes whose pattern matches a line, the most specific first."""
        small = line.lower()
        likely = set(self._by_word.get("", ()))
        for part in self._by_part.keys() & _parts(small):
            for word in self._by_part[part]:
                if word in small:
                    likely.update(self._by_word[word])
        found = (self.causes[n] for n in sorted(likely) if self.causes[n].matches(line))
        return tuple(sorted(found, key=_order))


@functools.cache
def built_in() -> Table:
    """Return the table of known/*.toml."""
    return Table(cause for table in _tables() for cause in read_causes(table))


def all_causes() -> tuple[Cause, ...]:
    """Return every entry of known/*.toml."""
    return built_in().causes


def read_causes(table: dict[str, Any], **usual: str) -> Iterator[Cause]:
    """Yield a table's entries; `shared` contains the patterns that several entries use by name."""
    for given in table["cause"]:
        entry = usual | given
        shared = entry.pop("shared", "")
        entry["text"] = readable(table["shared"][shared] if shared else entry.pop("pattern"))
        words = frozenset(entry.pop("words")) if "words" in entry else words_of(entry["text"])
        yield Cause(
            **{"mend": _usual_mend(entry)}
            | entry
            | {key: re.compile(readable(entry[key])) for key in _AROUND if key in entry}
            | {"near": tuple(entry.get("near", ())), "words": words}
        )


def with_words(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table for nodes, whose entries contain the words of their patterns."""
    causes = read_causes(table, source="script", kind=CAUSE)
    words = [sorted(cause.words) for cause in causes]
    return {**table, "cause": [{**e, "words": w} for e, w in zip(table["cause"], words)]}


def _tables() -> list[dict[str, Any]]:
    """Return the contents of known/*.toml. A bundle has them as one JSON file."""
    here = files("trnslurm.node.triage")
    if (bundled := here / "known.json").is_file():
        found: list[dict[str, Any]] = json.loads(bundled.read_text(encoding="utf-8"))
        return found
    import tomllib  # new in Python 3.11

    tables = sorted((here / "known").iterdir(), key=lambda file: file.name)
    return [tomllib.loads(file.read_text(encoding="utf-8")) for file in tables]


_of_run: ContextVar[Table | None] = ContextVar("causes", default=None)


@contextmanager
def causes_of(run: Path) -> Iterator[None]:
    """Also use the causes that the site gave a run, while its logs are read."""
    token = _of_run.set(_site_table(*_site_texts(run)))
    try:
        yield
    finally:
        _of_run.reset(token)


def _site_texts(run: Path) -> Iterator[tuple[str, str]]:
    """Yield tables in this user's own files, because others' patterns might never end."""
    for file in sorted(RunFiles(run).causes.glob("*.json")):
        with suppress(OSError, UnicodeDecodeError), open_file(file) as stream:
            if os.fstat(stream.fileno()).st_uid == os.geteuid():
                yield file.stem, stream.read().decode()


@functools.lru_cache(maxsize=8)
def _site_table(*texts: tuple[str, str]) -> Table | None:
    """Return the site's causes, or None without any. Damaged tables are skipped and reported.

    The submission has checked them (trnslurm/render/site_causes.py).
    """
    found: list[Cause] = []
    for name, text in texts:
        try:
            found += read_site_causes(name, json.loads(text))
        except (ValueError, KeyError, TypeError, re.error) as error:
            print(f"triage: the site's causes {name}: not read ({error})", file=sys.stderr)
    return Table(found) if found else None


def read_site_causes(name: str, table: dict[str, Any]) -> list[Cause]:
    """Return a table's causes. Their names start with its name, to keep tables apart."""
    causes = read_causes(table, source="script", kind=CAUSE)
    return [replace(cause, name=f"{name}/{cause.name}") for cause in causes]


def _usual_mend(entry: dict[str, Any]) -> str:
    """Return how a run continues if the entry does not specify it."""
    if entry["kind"] == EFFECT:
        return PASSES
    return SUBMIT if entry["source"] == "script" else RESUME


def named(name: str) -> Cause:
    """Return the entry with this name."""
    return next(cause for cause in all_causes() if cause.name == name)


def cause_of(lines: Iterable[str], context: Context = _ALONE) -> Cause | None:
    """Return the most specific entry for any line; among equals, the first line's entry."""
    return next((cause for cause, _ in explained(lines, context)), None)


def without_harmless(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the lines that no entry marks as harmless."""
    return tuple(x for x in lines if not ((cause := cause_of([x])) and cause.kind == HARMLESS))


def explained(lines: Iterable[str], context: Context = _ALONE) -> list[tuple[Cause, str]]:
    """Return the lines that match an entry, the most specific first."""
    found = [
        (cause, line)
        for line in lines
        if (cause := next((c for c in matching(line) if c.fits(context)), None))
    ]
    return sorted(found, key=lambda pair: _order(pair[0]))


def general_meaning(line: str, traceback: str) -> Cause | None:
    """Return the first entry that fits an exception's class, words and traceback."""
    context = Context(frames=traceback)
    general = (cause for cause in all_causes() if cause.kind == GENERAL)
    return next((c for c in general if c.pattern.search(line) and c.fits(context)), None)


def last_meaning(lines: Iterable[str]) -> tuple[Cause | None, str]:
    """Return the entry for a log's last meaningful line."""
    last = [cause for cause in all_causes() if cause.kind == LAST]
    found = ((c, line) for line in reversed([*lines]) for c in last if c.pattern.search(line))
    return next(found, (None, ""))


def _order(cause: Cause) -> tuple[int, int]:
    return cause.rank, -cause.conditions


def may_match(small: str) -> bool:
    """Check quickly whether a lower-case line contains a word that a pattern needs."""
    own = _of_run.get()
    return built_in().may_match(small) or (own is not None and own.may_match(small))


def _by_rarest(words: set[str]) -> dict[str, list[str]]:
    """Map each part of three letters to the words for which it is the rarest part.

    A line contains few of these parts, so few words must be searched for in it.
    """
    count = Counter(part for word in words for part in _parts(word))
    found: dict[str, list[str]] = {}
    for word in words:
        rarest = min(_parts(word), key=lambda part: (count[part], part))
        found.setdefault(rarest, []).append(word)
    return found


def _parts(text: str) -> set[str]:
    return {text[at : at + _SHORTEST] for at in range(len(text) - _SHORTEST + 1)}


def matching(line: str) -> tuple[Cause, ...]:
    """Return the entries whose pattern matches a line, the most specific first.

    Return none if the diagnosis has used up its time.
    """
    if is_spent():
        return ()
    found, own = built_in().matching(line), _of_run.get()
    return tuple(sorted((*found, *own.matching(line)), key=_order)) if own else found
