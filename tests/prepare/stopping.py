"""Starting a run that a test will stop in the middle of its work."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# The finished pieces in the directory of an unfinished run.
CHUNKS = "chunks/*.npz"
# A run is stopped after the third piece.
PIECES_BEFORE = 3
DEADLINE_S = 600


@contextlib.contextmanager
def started(output, command, files=CHUNKS):
    """A run halted in the middle of its work: some more pieces are finished than before.

    The test kills it, or lets it `go_on`; all of it is gone afterwards.
    """
    before = len(finished(output, files))
    arguments = [str(argument) for argument in (*command, "--output", output)]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "2"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trnslurm.prepare", *arguments],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(
            lambda: (
                process.poll() is not None or len(finished(output, files)) >= before + PIECES_BEFORE
            )
        )
        os.killpg(process.pid, signal.SIGSTOP)
        assert process.poll() is None
        yield process
    finally:
        # Halted workers, and its session if a test fails, outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        wait_for(lambda: not session(process.pid))


def go_on(process):
    """Continue a run that `started` has halted; a signal sent meanwhile arrives now."""
    os.killpg(process.pid, signal.SIGCONT)


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def finished(output, files=CHUNKS):
    """The finished pieces, with what changes if one is written again."""
    found = {}
    for path in output.parent.glob(f".{output.name}.partial-*/{files}"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def session(pid):
    """The processes of a session, zombies aside."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == pid and state != "Z":
                pids.append(int(stat.parent.name))
    return pids
