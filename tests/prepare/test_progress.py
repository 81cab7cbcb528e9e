"""Progress: a bar on a terminal, whole lines in a log."""

import io

import pytest

from trnslurm.prepare import progress
from trnslurm.prepare.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stops until it is set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_few_seconds(monkeypatch, clock):
    log = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", log)
    shown = Progress("tokenizing", 40_000_000, before=10_000_000)
    for second in range(1, 11):
        clock[0] = 100.0 + second
        shown.show(10_000_000 + 2_000_000 * second)
    clock[0] = 116.0
    shown.finish()
    assert log.getvalue().splitlines() == [
        "tokenizing: 50%, 20.00 of 40.00 MB, 2.00 MB/s, 0:10 left",
        "tokenizing: 75%, 30.00 of 40.00 MB, 2.00 MB/s, 0:05 left",
        "tokenizing: 100%, 40.00 of 40.00 MB, 1.88 MB/s",
    ]


def test_a_terminal_gets_one_line_that_grows(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    shown = Progress("reading", 50_000_000_000)
    shown.show(1)  # too early
    clock[0] = 110.0
    shown.show(5_000_000_000)
    clock[0] = 200.0
    shown.finish()
    assert terminal.getvalue() == (
        "\rreading [##----------------------]  10% 5.00 of 50.00 GB, 500.00 MB/s, 1:30 left\x1b[K"
        "\rreading [########################] 100% 50.00 of 50.00 GB, 500.00 MB/s\x1b[K\n"
    )


def test_nothing_to_do_is_all_of_it(monkeypatch, clock):
    log = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", log)
    Progress("reading", 0).finish()
    assert log.getvalue() == "reading: 100%, 0.00 of 0.00 MB, 0.00 MB/s\n"
