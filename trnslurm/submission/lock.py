"""Lets only one process submit a run, across all hosts, so that a run never has two jobs.

    RUN/state/turns/3.json    the highest number counts (trnslurm/cluster/claims.py)

The file with the highest number is never removed, only marked as finished.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

from trnslurm.cluster.claims import Claim, Holder, newest_in, take_next, update_claim
from trnslurm.contract.files import make_directory
from trnslurm.errors import NotYetError, RunError
from trnslurm.records.foreign import this_user
from trnslurm.records.run import RunDir, own_process, process_alive

_REMOTE_S = 900  # no submission takes longer; a process on another host cannot be checked
_WRITING_S = 30  # a claim is written at once; an older version left an empty one on a full disk


@contextlib.contextmanager
def lock_run(run: RunDir) -> Iterator[None]:
    """Keep other processes from submitting the run. Raise if another process is submitting it."""
    try:
        make_directory(run.turns)
        newest = newest_in(run.turns, prefix="")
        if newest and (holder := _submitting(newest)):
            raise NotYetError(f"{run.name} is being submitted by {holder}: check its status")
        claim = take_next(run.turns, this_holder(), newest, readers=run.path, prefix="")
    except OSError as error:
        raise RunError(f"cannot write {run.turns} ({error.strerror})") from None
    if claim is None:
        raise NotYetError(f"{run.name} was submitted by another process: check its status")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the run was deleted meanwhile
            update_claim(claim, replace(claim.holder, over=True))


def this_holder(run: str = "") -> Holder:
    """Return a claim holder that stands for this process."""
    user, host = this_user(), socket.gethostname()
    return Holder(user=user, host=host, process=own_process(), run=run)


def _submitting(claim: Claim) -> str:
    """Return who is submitting the run, or empty if the submission or its process has ended."""
    holder = claim.holder
    if holder == Holder():
        return "another process" if claim.age_s < _WRITING_S else ""
    if holder.host == socket.gethostname():
        alive = process_alive(holder.process)
    else:
        alive = claim.age_s < _REMOTE_S
    if holder.over or not alive:
        return ""
    process = f" (process {holder.process.partition('@')[0]})" if holder.process else ""
    return f"{holder.user or 'a user'} on {holder.host or 'another host'}{process}"
