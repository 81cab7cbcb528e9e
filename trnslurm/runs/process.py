"""The controller process of a local run, identified by pid and start time."""

from __future__ import annotations

import os

from trnslurm.runs.run import Record


def local_job_alive(record: Record) -> bool:
    """Check whether the local job's controller still runs."""
    return process_alive(record.jobs.get("local", ""))


def local_job(record: Record) -> tuple[int, str]:
    """Return pid and start time of the local job's controller."""
    pid, _, start = record.jobs.get("local", "").partition("@")
    return (int(pid), start) if pid.isdigit() and start else (0, "")


def own_process() -> str:
    """Return this process as pid@start."""
    return f"{os.getpid()}@{process_start(os.getpid())}"


def process_alive(word: str) -> bool:
    """Check whether the process pid@start still runs: pids are reused, start times are not."""
    pid, _, start = word.partition("@")
    return pid.isdigit() and bool(start) and process_start(int(pid)) == start


def process_start(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, or an empty string."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
