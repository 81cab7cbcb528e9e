"""Times and sizes in Slurm's notation."""

from __future__ import annotations

import re

from trnslurm.errors import ConfigError

LONGEST_MIN = 365 * 24 * 60
"""A year: the longest time limit. Slurm counts in 32 bits and overflows silently."""


def parse_time(text: str) -> int:
    """Return the minutes for a time in Slurm's notation: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d{1,999})-)?(\d{1,999})(?::(\d{1,999}))?(?::(\d{1,999}))?", text)
    if not match:
        raise ConfigError(f"--time {text}: expected minutes, HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = (int(g) if g else 0 for g in match.groups())
    if max(second, third) > 59:
        raise ConfigError(f"--time {text}: minutes and seconds after a colon can be at most 59")
    if match[1] is not None:  # D-H:M:S
        seconds = days * 86400 + first * 3600 + second * 60 + third
    elif match[4] is not None:  # H:M:S
        seconds = first * 3600 + second * 60 + third
    else:  # M or M:S
        seconds = first * 60 + second
    if seconds < 60:
        raise ConfigError(f"--time {text}: must be at least one minute")
    if seconds > LONGEST_MIN * 60:
        raise ConfigError(f"--time {text}: must be at most a year (365-00:00:00)")
    return -(-seconds // 60)


def parse_size(text: str) -> int:
    """Return the MiB of a size. Without a unit the size is in MiB, as with sbatch --mem."""
    found = re.fullmatch(r"(\d{1,9})([KMGT]?)B?", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f"--mem {text}: expected a number with K, M, G or T, such as 64G")
    kib = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}[found[2].upper() or "M"]
    return -(-int(found[1]) * kib // 1024)
