"""A log may have any content: no line of it keeps triage busy, and neither do all together."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trnslurm.node.triage
from trnslurm.node.triage.budget import LIMIT_S
from trnslurm.node.triage.causes import all_causes
from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.node.triage.finding import Finding

# The parser of patterns in the standard library, since Python 3.11.
_parser: Any = importlib.import_module("re._parser")
REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)
ONE_OF = (_parser.LITERAL, _parser.ANY, _parser.IN, _parser.NOT_LITERAL)
SAMPLES = "a0_ .A-/:\"'([\\=,x"
CATEGORIES: dict[Any, Callable[[str], bool]] = {
    _parser.CATEGORY_DIGIT: str.isdigit,
    _parser.CATEGORY_NOT_DIGIT: lambda c: not c.isdigit(),
    _parser.CATEGORY_SPACE: str.isspace,
    _parser.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    _parser.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    _parser.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}
LONGEST = 1000
"""Characters of a line that triage keeps."""
LIMIT = 16
"""How many times as long a pattern may take as one that reads the rest of a line from each word."""

Part = tuple[str, str]
"""A text, and the characters that its repeat accepts; empty: it is no repeat."""


def characters(kind: Any, value: Any) -> str:
    """Return characters that a part of a pattern accepts."""
    if kind is _parser.LITERAL:
        return chr(value)
    if kind is _parser.ANY:
        return SAMPLES
    if kind is _parser.NOT_LITERAL:
        return SAMPLES.replace(chr(value), "")

    def accepts(c: str) -> bool:
        return any(
            (what is _parser.LITERAL and ord(c) == of)
            or (what is _parser.RANGE and of[0] <= ord(c) <= of[1])
            or (what is _parser.CATEGORY and CATEGORIES[of](c))
            for what, of in value
        )

    negated = value[0][0] is _parser.NEGATE
    named = [of if what is _parser.LITERAL else of[0] for what, of in value
             if what in (_parser.LITERAL, _parser.RANGE)]  # fmt: skip
    tried = SAMPLES if negated else "".join(map(chr, named[:2])) + SAMPLES
    return "".join(c for c in dict.fromkeys(tried) if accepts(c) != negated) or "~"


def ways_through(tokens: Any, most: int = 12) -> list[list[Part]]:
    """Return ways through a pattern's parts; each alternative is on one of them."""
    ways: list[list[Part]] = [[]]
    for kind, value in tokens:
        found: list[list[Part]] = [[]]
        if kind in ONE_OF:
            found = [[(characters(kind, value)[0], "")]]
        elif kind is _parser.BRANCH:
            found = [way for part in value[1] for way in ways_through(part, most)]
        elif kind in (_parser.SUBPATTERN, _parser.ATOMIC_GROUP):
            found = ways_through(value[-1] if kind is _parser.SUBPATTERN else value, most)
        elif kind in (_parser.ASSERT, _parser.ASSERT_NOT) and value[0] > 0:
            found = [[], *ways_through(value[1], most)]
        elif kind in REPEATS:
            least, often, body = value
            if len(body) == 1 and body[0][0] in ONE_OF:
                accepted = characters(*body[0])
                text = accepted[0] * (least if often > 3 else max(least, 1))
                found = [[(text, accepted if often > 3 else "")]]
            else:
                found = ways_through(body, most)
        found = found[:most]
        ways = [ways[0] + way for way in found] + [way + found[0] for way in ways[1:]]
        ways = ways[: 2 * most]
    return ways


def blocks_of(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield what a slow line may begin with and repeat: what repeats accept, or is between them."""
    for way in ways_through(_parser.parse(pattern.pattern, pattern.flags)):
        parts: list[Part] = []
        for text, accepted in way:
            if parts and not accepted and not parts[-1][1]:
                parts[-1] = (parts[-1][0] + text, "")
            else:
                parts.append((text, accepted))
        texts = [text for text, _ in parts]
        for at, (_, accepted) in enumerate(parts):
            ends = range(at + 1, min(len(parts), at + 7) + 1)
            for block in [*accepted[:6], *("".join(texts[at:end]) for end in ends)]:
                if block:
                    yield "", block
                    yield "".join(texts[:at]), block


def lines_against(pattern: re.Pattern[str], length: int) -> Iterator[tuple[str, str]]:
    """Yield lines on which a pattern may be slow, each with the start that names it."""
    for before, block in dict.fromkeys(blocks_of(pattern)):
        line = before + block * (length // len(block) + 1)
        yield line[:length], f"{before!r} + {block!r} * n"
        yield f"{line[: length - 1]}~", f"{before!r} + {block!r} * n + '~'"


def seconds(read: Callable[[str], object], line: str, tries: int = 1) -> float:
    """Return the least CPU time of some tries."""
    best = float("inf")
    for _ in range(tries):
        began = time.thread_time()
        read(line)
        best = min(best, time.thread_time() - began)
    return best


def usual_seconds() -> float:
    """Return the time of what many good patterns do: from each word, read the rest of the line."""
    return seconds(re.compile("W&B.*(?:x|y)").search, "W&B" * (LONGEST // 3), tries=9)


def slow_line(pattern: re.Pattern[str], read: Callable[[str], object], usual: float) -> str:
    """Return a line that keeps a pattern busy for too long, and how long; empty: there is none.

    Short lines tell which long ones are worth a try. Both times are this machine's of this moment.
    """
    quarter = LONGEST // 4
    short = [(seconds(read, line), way) for line, way in lines_against(pattern, quarter)]
    slow = [(took, way) for took, way in sorted(short, reverse=True) if took > usual / 16]
    worth = dict.fromkeys(way for _, way in slow[:4])
    if slow and slow[0][0] > LIMIT * usual:
        return f"{slow[0][1]}: {slow[0][0] / usual:.0f} times, at {quarter} characters"
    for line, way in lines_against(pattern, LONGEST) if worth else ():
        if way in worth and seconds(read, line) > LIMIT * usual:
            took = seconds(read, line, tries=2) / usual_seconds()
            if took > LIMIT:
                return f"{way}: {took:.0f} times"
    return ""


def patterns() -> Iterator[tuple[str, re.Pattern[str], Callable[[str], object]]]:
    """Yield all patterns of triage: the known causes', and those of its modules."""
    for cause in all_causes():
        for key in ("pattern", "frame", "before", "log"):
            if pattern := getattr(cause, key):
                yield f"{cause.name}, {key}", pattern, pattern.search
    for module in pkgutil.iter_modules(trnslurm.node.triage.__path__):
        loaded = importlib.import_module(f"trnslurm.node.triage.{module.name}")
        source = Path(loaded.__file__ or "").read_text()
        for name, value in vars(loaded).items():
            for pattern in value.values() if isinstance(value, dict) else [value]:
                if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
                    at_start = f"{name}.match(" in source
                    read = pattern.match if at_start else pattern.search
                    yield f"{module.name}.{name}", pattern, read


def test_no_pattern_is_slow_whatever_a_line_says() -> None:
    """Runs of what a pattern repeats, and of what it looks for, do not keep it busy.

    A pattern without nested freedom reads the rest of a line at most once from each word of it.
    """
    usual = usual_seconds()
    found = {name: slow_line(pattern, read, usual) for name, pattern, read in patterns()}
    assert {name: line for name, line in found.items() if line} == {}
    for slow in (r"\w*_cpu\w* not", r"torch_shm\S*.*(failed|denied)"):
        assert slow_line(re.compile(slow), re.compile(slow).search, usual), slow


def test_a_diagnosis_ends_in_its_time_and_says_so(make_run) -> None:
    """It reads no log at the cost of the others, and says what it has."""
    run = make_run(states={"train": [{"state": "FAILED"}]}, phases=("train",))
    busy = "".join(f"{'NCCL WARN ' * 9}{n:b} failed\n".replace("1", "x") for n in range(300))
    run.node_log("train", 1, 0).write_text(busy.replace("0", "y"))
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    run.node_log("train", 1, 1).write_text(f"Traceback (most recent call last):\n{error}\n")
    now = 0.0

    def found_by(step: float) -> Finding:
        def clock() -> float:
            nonlocal now
            now += step
            return now

        found = diagnose(run.path, "train", 1, clock)
        assert found is not None
        return found

    whole, cut = found_by(0.0), found_by(LIMIT_S / 100)
    assert (whole.name, whole.in_part) == (cut.name, not cut.in_part) == ("gpu-memory", False)
    assert len([line for line in cut.report() if "a part of the logs was read" in line]) == 1
    assert all(
        ("a part of the logs was read" in each.line) == each.in_part for each in (cut, whole)
    )
    none = found_by(LIMIT_S)
    assert none.in_part and none.name == ""
