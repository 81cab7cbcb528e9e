"""Host lists for messages: a few hosts by name, many in Slurm's notation."""

import re
from collections.abc import Sequence

_NAMED = 8
"""Up to this many hosts are listed by name."""
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")


def brief(hosts: Sequence[str]) -> str:
    """Return the hosts in one line: node-1,node-2, or node-[1-100,102] if there are many."""
    if len(hosts) <= _NAMED:
        return ",".join(hosts)
    # By the text before the number, and by the number's width if it has leading zeros.
    groups: dict[tuple[str, int], list[int]] = {}
    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        prefix, digits = match.groups() if match else (host, "")
        padded = (prefix, len(digits))
        filled = len(digits) > 1 and digits.startswith("0")
        key = padded if filled or padded in groups else (prefix, 0)
        groups.setdefault(key, []).extend([int(digits)] if digits else [])
    return ",".join(
        f"{prefix}{_ranges(numbers, width)}" for (prefix, width), numbers in groups.items()
    )


def _ranges(numbers: Sequence[int], width: int) -> str:
    """Return numbers as [1-100,102], or a single number without brackets."""
    words = spans(numbers, width)
    alone = len(words) < 2 and "-" not in "".join(words)
    return "".join(words) if alone else f"[{','.join(words)}]"


def spans(numbers: Sequence[int], width: int = 1) -> list[str]:
    """Return numbers as 1-100 and 102; `width` pads them with zeros."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [
        f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
        for first, last in ranges
    ]
