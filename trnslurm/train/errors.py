"""Errors that a user can mend: one line on stderr and exit code 1, never a traceback."""

import os
import sys
import time
from collections.abc import Callable

from trnslurm.train.records import note_failure

# Of the same error, by which the workers of a node may meet it later than the first of them.
APART_S = 5


class TrainError(Exception):
    """Something the user can mend; the message is one line that says where, what and what to do."""


def run_job(main: Callable[[], None]) -> None:
    """Run a job's main function and turn a TrainError into one line and exit code 1."""
    try:
        main()
    except TrainError as error:
        note_failure(error, str(error))
        # Nearly always every worker meets the same error. Local rank 0 says it once for its node
        # and torchrun then ends the others in their sleep; one that fails alone speaks late.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(APART_S)
        # One write: a library of another worker may print into the same pipe at any moment.
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except Exception as error:
        note_failure(error, f"{type(error).__name__}: {error}".strip().partition("\n")[0])
        raise
