"""Rewrites patterns so that Python before 3.11 can also read them."""

from __future__ import annotations

import re
import sys

_PART = re.compile(
    r"""
    (?P<open>    \( (?: (?! \? ) | \? (?: [:=!>] | <[=!] | P<\w+> | [a-zA-Z-]+: ) ) )
  | (?P<close>   \) )
  | (?P<repeat>  (?: [*+?] | \{ (?: \d+ (?: , \d* )? | ,\d+ ) \} ) [+?]? )
  | \\. | \[ \^? \]? (?: \\. | [^\]\\] )* \] | \( \? [^)]* \) | .
    """,
    re.DOTALL | re.VERBOSE,
)


def readable(pattern: str) -> str:
    """Return a pattern in a form that this Python's re module can read."""
    return pattern if sys.version_info >= (3, 11) else without_atomic(pattern)


def without_atomic(pattern: str) -> str:
    """Return a pattern without atomic groups and possessive quantifiers, which are new in 3.11.

    A lookahead does not retry either: (?>x) is (?=(?P<_0>x))(?P=_0). The pattern may refer to its
    groups only by name, because their numbers change.
    """
    parts: list[str] = []
    opened: list[tuple[int, str]] = []
    at = count = 0  # where the part before a quantifier starts
    for match in _PART.finditer(pattern):
        part, kind = match[0], match.lastgroup
        begin, end = f"(?:(?=(?P<_{count}>", f"))(?P=_{count}))"
        atomic = part == "(?>"
        possessive = kind == "repeat" and len(part) > 1 and part[-1] == "+"
        count += atomic or possessive
        if possessive:
            parts[at:] = [begin, *parts[at:], part[:-1], end]
        elif kind == "open":
            opened.append((len(parts), end if atomic else ")"))
            parts.append(begin if atomic else part)
        elif kind == "close":
            at, end = opened.pop()
            parts.append(end)
        else:
            at = at if kind == "repeat" else len(parts)
            parts.append(part)
    return "".join(parts)
