"""Read sizes, ages and times from options; write sizes for people."""

from __future__ import annotations

import re
import time

from trnslurm.errors import ConfigError
from trnslurm.rundir import utc_time

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def size_of(size: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def parse_age(text: str, option: str = "--older-than") -> float:
    """Return the seconds in `12h`, `30d` or `4w`."""
    match = re.fullmatch(r"(\d{1,9})([hdw])", text)
    if not match:
        raise ConfigError(f"{option} {text}: expected hours, days or weeks, as 12h, 30d or 4w")
    return int(match[1]) * _SECONDS[match[2]]


def parse_time(text: str, option: str = "--since") -> str:
    """Return a date, or the time that long ago, in the format of records."""
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return f"{text}T00:00:00Z"
    try:
        return stamp_before(parse_age(text, option))
    except ConfigError:
        raise ConfigError(
            f"{option} {text}: expected a day or an age, as 2026-11-21, 12h, 30d or 4w"
        ) from None


def stamp_before(seconds: float) -> str:
    """Return the time that many seconds ago, in the format of records."""
    return utc_time(max(0.0, time.time() - seconds))


def parse_size(text: str) -> int:
    """Return the bytes in `500M`, `50G` or `1T`."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text)
    if not match:
        raise ConfigError(f"--max-size {text}: expected a size, as 500M, 50G or 1T")
    return int(match[1]) * _UNITS[match[2]]
