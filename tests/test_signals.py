"""Signals inherited as ignored, as from `nohup make test &`: by the tests, and by trnslurm."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from trnslurm.schedulers.interrupts import interrupts_deferred

from .processes import run_process

ROOT = Path(__file__).parents[1]
# What bash starts after the trap inherits these as ignored, and so does what that starts.
PROGRAM = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.conftest import undo_ignored_signals
undo_ignored_signals()
print(open("/proc/self/status").read(), flush=True)
subprocess.run(["cat", "/proc/self/status"])
"""


def masks(name: str, statuses: str) -> list[int]:
    """The signal masks of a name in the text of some processes' status, in order."""
    words = [line.split() for line in statuses.splitlines()]
    return [int(line[1], 16) for line in words if line and line[0] == f"{name}:"]


def holds(mask: int, number: signal.Signals) -> bool:
    return bool(mask & 1 << number - 1)


def test_what_tests_start_ignores_no_signal_and_the_tests_outlive_a_terminal() -> None:
    script = 'trap \'\' HUP INT TERM; exec "$0" -c "$1"'
    done = run_process(["bash", "-c", script, sys.executable, PROGRAM])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        assert [holds(mask, number) for mask in masks("SigIgn", done.ok)] == [False, False]
    assert [holds(mask, signal.SIGHUP) for mask in masks("SigCgt", done.ok)] == [True, False]


def test_a_submit_that_ignores_ctrl_c_is_not_interrupted_by_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_deferred() as seen:
            os.kill(os.getpid(), signal.SIGINT)
        assert seen == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
