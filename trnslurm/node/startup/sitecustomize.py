"""Python runs this in every process of a training job, so that a signal yields its stacks.

The first of several workers also reports if it has not joined the others, while it works and when
it ends. If it keeps the store of all workers, it ends after them.

The stacks go to a file in memory, which node/stacks.py finds among the process's open files. Python
runs only the first sitecustomize on its path, so this one runs the next one, such as a site's own.
A batch script may start any Python 3, so nothing here is newer than 3.6.
"""

import _thread
import atexit
import contextlib
import faulthandler
import importlib.machinery
import importlib.util
import os
import select
import signal
import sys
import time

_FIRST_LOOK_S = 20.0


def _offer_stacks() -> None:
    """Register the highest signal, which hardly any program uses."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not on Linux, or no memory
        file = os.memfd_create("trnslurm-stacks")
        faulthandler.register(signal.SIGRTMAX, file=file, all_threads=True)


def _run_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec and spec.loader:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _wait_at_gate() -> None:
    """Let a standby worker wait until it is needed."""
    if "TRNSLURM_GATE" in os.environ and "RANK" in os.environ:
        from trnslurm.node.standby import wait

        wait()


def _is_first_of_several() -> bool:
    """Check whether this is worker 0, and not a process started by worker 0."""
    values = os.environ
    if values.get("RANK") != "0" or values.get("WORLD_SIZE", "1") == "1":
        return False
    environ = f"/proc/{os.getppid()}/environ"
    with contextlib.suppress(OSError), open(environ, "rb") as file:  # noqa: PTH123
        return not any(word.startswith(b"RANK=") for word in file.read().split(b"\0"))
    return False


def _tell_if_alone() -> None:
    if hasattr(sys, "last_value"):  # an exception has ended the worker, maybe before it joined
        return
    with contextlib.suppress(Exception):  # the worker has finished its work
        from trnslurm.node.alone import tell

        tell()


def _watch_if_alone() -> None:
    with contextlib.suppress(Exception):  # no error here may affect the worker
        time.sleep(_FIRST_LOOK_S)
        from trnslurm.node.alone import watch

        watch()


def _end_last() -> None:
    """Make worker 0 wait at its end until the launcher says that all other workers have ended.

    A worker whose store has gone prints errors, as NCCL's threads do. A worker that failed does not
    wait. At exit Python does not reveal whether a worker failed, so a patched sys.exit records it.
    """
    given = os.environ.pop("TRNSLURM_OTHERS", "")
    if not given:
        return
    owner, leave = os.getpid(), sys.exit
    codes: list[object] = [None]

    def note(*code: object) -> None:
        codes.extend(code or [None])
        leave(*code)  # type: ignore[arg-type]

    def wait() -> None:
        if os.getpid() == owner and not codes[-1] and not hasattr(sys, "last_value"):
            select.select([int(given)], [], [], 5.0)

    sys.exit = note  # type: ignore[assignment]
    atexit.register(wait)


_offer_stacks()
_end_last()
_first = _is_first_of_several()
if _first:
    atexit.register(_tell_if_alone)
_run_next()
_wait_at_gate()
if _first:
    # Unlike one of threading, a script that joins all threads does not wait for it.
    _thread.start_new_thread(_watch_if_alone, ())
