"""The command line: python -m trnslurm.prepare [bert|labelled|fetch|model|download|verify] …."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from trnslurm.prepare.bert import command as bert
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.fetch import command as fetch
from trnslurm.prepare.fetch import published
from trnslurm.prepare.labelled import command as labelled
from trnslurm.prepare.options import as_path
from trnslurm.prepare.prepared import INDEX, find_damage, read_index
from trnslurm.prepare.tokens import command as tokens

_KEPT = "what is finished is kept, run again to resume"


class _Stopped(BaseException):
    """Raised by a signal that asks to stop."""


def main() -> None:
    """Run a command; an error that the user can fix is one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    commands = {
        "bert": bert.run,
        "labelled": labelled.run,
        "fetch": fetch.dataset,
        "download": fetch.published_file,
        "model": fetch.model,
        "verify": _verify,
    }
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in commands:
            commands[arguments[0]](arguments[1:])
        else:
            tokens.run(arguments)
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
    print(f"{directory}: as its index says")


if __name__ == "__main__":
    main()
