"""The command line: python -m trnslurm.prepare [bert|labelled|fetch|model|download|verify] …."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from trnslurm.prepare.errors import KeptError, PrepareError

_KEPT = "finished work is kept, run again to resume"
# Functions of fetch.command. Modules are imported when named: each process of a preparation imports
# this one too.
_FETCH = {"fetch": "dataset", "download": "published_file", "model": "model"}


class _Stopped(BaseException):
    """Raised by a signal that asks to stop."""


def main() -> None:
    """Run a command; an error that the user can fix is one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    # Otherwise NumPy starts threads for matrix products, which nothing here needs; and a process
    # that has threads cannot be forked.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["verify"]:
            _verify(arguments[1:])
            return
        if arguments[:1] and (function := _FETCH.get(arguments[0])):
            module = importlib.import_module("trnslurm.prepare.fetch.command")
            getattr(module, function)(arguments[1:])
            return
        from trnslurm.prepare.pipeline import run

        if arguments[:1] in (["bert"], ["labelled"]):
            run(arguments[0], arguments[1:])
        else:
            run("tokens", arguments)
    except PrepareError as error:
        sys.exit(f"error: {error}")
    except KeptError as error:
        sys.exit(f"error: {error}: {_KEPT}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except _Stopped as stopped:
        print(f"\nstopped: {_KEPT}", file=sys.stderr)
        sys.exit(128 + stopped.args[0])


def _stop(number: int, frame: object) -> NoReturn:
    raise _Stopped(number)


def _verify(arguments: Sequence[str]) -> None:
    from trnslurm.prepare.arguments import as_path
    from trnslurm.prepare.fetch import published
    from trnslurm.prepare.prepared import INDEX, find_damage, read_index

    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare verify", description="Read prepared data whole."
    )
    parser.add_argument("directory", type=as_path)
    directory = parser.parse_args(arguments).directory
    index = read_index(directory)
    if index is None:
        if (directory / INDEX).exists() or not any(directory.glob(f"*{published.SHARD}")):
            raise PrepareError(f"{directory}: no prepared data")
        print(f"{directory}: {published.verify(directory)}, each read whole")
        return
    if damaged := find_damage(directory, index):
        raise PrepareError(f"{directory}: {damaged} is damaged: make it again with --force")
    print(f"{directory}: whole, as in its index")


if __name__ == "__main__":
    main()
