"""The command line: python -m trnslurm.prepare [bert|labelled|fetch|model|download|s3|verify] …."""

import importlib
import os
import signal
import sys
import threading
from typing import NoReturn

from trnslurm.prepare.errors import FETCHING, LEARNING, KeptError, PrepareError

_KEPT = "finished work is kept; run the command again to resume"
# Functions of fetch.command. Modules are imported only when needed, because each process of a
# preparation imports this one too.
_COMMANDS = {
    "fetch": "dataset",
    "download": "published_file",
    "s3": "objects",
    "model": "model",
    "verify": "verify",
}


class _Stopped(BaseException):
    """Raised by a signal that asks to stop."""


def main() -> None:
    """Run a command; print an error that the user can fix on one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    # Otherwise NumPy starts threads for matrix products, which are not needed here, and a process
    # with threads cannot be forked.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = sys.argv[1:]
    try:
        command = arguments[0] if arguments else ""
        if command in _COMMANDS:
            commands = importlib.import_module("trnslurm.prepare.fetch.command")
            getattr(commands, _COMMANDS[command])(arguments[1:])
            return
        run = importlib.import_module("trnslurm.prepare.pipeline").run
        if command in ("bert", "labelled"):
            run(command, arguments[1:])
        else:
            run("tokens", arguments)
    except PrepareError as error:
        sys.exit(f"error: {error}")
    except KeptError as error:
        sys.exit(f"error: {error}: {_KEPT}")
    except OSError as error:
        sys.exit(f"error: {error.filename or 'output'}: {error.strerror}")
    except _Stopped as stopped:
        print(f"\nstopped: {_KEPT}", file=sys.stderr, flush=True)
        code = 128 + stopped.args[0]
        if any(thread.name.startswith((LEARNING, FETCHING)) for thread in threading.enumerate()):
            os._exit(code)  # a normal exit would abort the first and wait for the second
        sys.exit(code)


def _stop(number: int, frame: object) -> NoReturn:
    raise _Stopped(number)


if __name__ == "__main__":
    main()
