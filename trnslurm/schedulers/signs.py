"""The heartbeat of a run whose scheduler has none of its jobs."""

from __future__ import annotations

import time

from trnslurm.contract.attempt import Attempt

STALE_S = 120  # four missed heartbeats


def silent_since(age_s: float | None) -> str:
    """Return when the heartbeat stopped, based on its age, or that there never was one."""
    if age_s is None:
        return "it ended before its first heartbeat, without recording its state"
    then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age_s))
    return f"no heartbeat since {then}"


def died(attempt: Attempt) -> str:
    """Return in words why an attempt is over although it recorded no final state."""
    first = attempt.hosts.partition(",")[0]
    return (
        f"it ended without recording its state, which happens when {first or 'its first node'} "
        "fails"
    )
