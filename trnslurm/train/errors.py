"""Errors that a user can mend: one line on stderr and exit code 1, never a traceback."""

import os
import sys
import time
from collections.abc import Callable


class TrainError(Exception):
    """Something the user can mend; the message is one line that says where, what and what to do."""


def run_job(main: Callable[[], None]) -> None:
    """Run a job's main function and turn a TrainError into one line and exit code 1."""
    try:
        main()
    except TrainError as error:
        # Nearly always every worker meets the same error. Local rank 0 says it once for its node
        # and torchrun then ends the others in their sleep; one that fails alone speaks late.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(20)
        # One write: a library of another worker may print into the same pipe at any moment.
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
