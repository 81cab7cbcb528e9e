"""Evaluates the conditions of a batch script, as far as possible without running it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from trnslurm.adopt.shell import Block, Command, Part, Statement, Word, statements
from trnslurm.adopt.variables import SOME, Variables

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def holds(test: Sequence[Statement], variables: Variables) -> bool | None:
    """Return whether the test of an `if` holds, or None if only the job knows.

    https://www.gnu.org/software/bash/manual/bash.html#Bash-Conditional-Expressions
    """
    found: bool | None = None
    for n, statement in enumerate(test):
        if n and statement.after not in ("&&", "||"):
            return None
        stops = statement.after == "||"  # the result that decides without the rest
        if n and found is stops:
            continue
        this = _one_holds(statement, variables)
        if not n or found is not None or this is stops:
            found = this
    return found


def _one_holds(statement: Statement, variables: Variables) -> bool | None:
    if isinstance(statement, Block):
        if arithmetic := re.fullmatch(r"\(\((.*)\)\)", statement.raw, re.DOTALL):
            number = variables.number(arithmetic[1])
            return None if number is None else number != 0
        if not statement.raw.startswith("[[") or not statement.raw.endswith("]]"):
            return None
        several = statements(statement.raw[2:-2])
        joined = {each.after for each in several[1:]}
        if len(joined) != 1 or not all(isinstance(each, Command) for each in several):
            return None
        mark = Word("[[", (Part("text", "[["),))
        tests = [
            c._replace(words=(mark, *c.words, mark)) for c in several if isinstance(c, Command)
        ]
        return holds(tests, variables)
    if statement.assignments or statement.redirections or not statement.words:
        return None
    if statement.head in ("true", ":", "false"):
        return statement.head != "false"
    if statement.head == "!":
        found_one = _one_holds(statement._replace(words=statement.words[1:]), variables)
        return None if found_one is None else not found_one
    if statement.head not in ("[", "[[", "test"):
        return None
    words = [*statement.words[1 : None if statement.head == "test" else -1]]
    no = bool(words) and words[0].raw == "!"
    found = _compared([variables.seen(word) for word in words[no:]],
                      globs=statement.head == "[[")  # fmt: skip
    return found if found is None else found is not no


def matches(word: Word, patterns: Sequence[Word], variables: Variables) -> bool | None:
    """Return whether the word of a `case` matches a pattern, or None if only the job knows."""
    text, globs = variables.plain(word), [variables.seen(pattern) for pattern in patterns]
    if globs == ["*"]:
        return True
    asked = any(part.kind == "name" and variables.is_unset(part.text) for part in word.parts)
    if text is None or None in globs or asked:
        return None
    return any(fnmatchcase(text, pattern) for pattern in globs if pattern is not None)


def _compared(words: Sequence[str | None], *, globs: bool) -> bool | None:
    if None in words:
        return None
    match words:
        case ["-z", str(text)]:
            return not text
        case [str(text)] | ["-n", str(text)]:
            return bool(text)
        case [str(left), _, str(right)] if SOME in left + right:
            return None
        case [str(left), "=" | "==" | "!=" as sign, str(right)]:
            if not globs and set(right) & {"*", "?", "["}:
                return None
            same = fnmatchcase(left, right) if globs else left == right
            return same is not (sign == "!=")
        case [str(left), str(sign), str(right)] if sign in _NUMBERS:
            with suppress(ValueError):
                return _NUMBERS[sign](int(left), int(right))
    return None
