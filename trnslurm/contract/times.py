"""Times in the form of records and messages, and of the contents of a directory."""

from __future__ import annotations

import calendar
import contextlib
import os
import time
from pathlib import Path


def changed_at(directory: Path) -> float:
    """Return when the contents of a directory last changed, two levels deep; 0 if it is empty."""
    times = [0.0]
    for pattern in ("*", "*/*"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                times.append(path.lstat().st_mtime)
    return max(times)


def now_there(directory: Path) -> float:
    """Return the time of the clock that stamps a directory's files, if we can write there.

    The clock can be a file server's, and the clocks of hosts can be wrong.
    """
    import tempfile  # rarely needed, and slow to import

    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


_TIME = "%Y-%m-%dT%H:%M:%SZ"


def utc_time(seconds: float | None = None) -> str:
    """Return a time in the form of records and messages; the default is now."""
    return time.strftime(_TIME, time.gmtime(seconds))


def seconds_of(text: str) -> float | None:
    """Return a record's time in seconds since the epoch, or None if the text is not a time."""
    try:
        return float(calendar.timegm(time.strptime(text, _TIME)))
    except (ValueError, OverflowError):
        return None
