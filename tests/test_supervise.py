"""`make test` leaves no process behind, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .processes import alive
from .waiting import eventually

SUPERVISE = Path(__file__).with_name("supervise.py")
# A command that starts a server in a session of its own, which no signal to the group reaches.
COMMAND = """
import subprocess, sys, time
server = subprocess.Popen(["sleep", "inf"], start_new_session=True)
try:
    print(server.pid, flush=True)
    if "wait" in sys.argv:
        time.sleep(3600)
    sys.exit(5)
except KeyboardInterrupt:
    sys.exit(2)  # as pytest
"""


@pytest.mark.parametrize(
    ("sent", "code"), [(None, 5), (signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGHUP, 2)]
)
def test_nothing_is_left_of_a_command(sent: signal.Signals | None, code: int) -> None:
    words = [sys.executable, "-c", COMMAND, *(["wait"] if sent else [])]
    supervisor = subprocess.Popen(
        [sys.executable, SUPERVISE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with supervisor:
        assert supervisor.stdout and supervisor.stderr
        server = int(supervisor.stdout.readline())
        if sent:
            supervisor.send_signal(sent)
        assert f"left behind: {server} sleep inf" in supervisor.stderr.read()
    assert supervisor.returncode == code
    eventually(lambda: not alive(server))
