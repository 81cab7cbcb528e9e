"""Lets one process at a time submit a run, on whichever host, so that a run never has two jobs.

    RUN/state/turns/3.json    the highest number counts

A turn is taken by creating the file of the next number, which only one process can do, on NFS too.
The file with the highest number is never removed, only marked as over: no number is used twice, and
who looked long ago cannot take a turn that others have had since.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trnslurm.errors import NotYetError, RunError
from trnslurm.rundir import read_json, write_json
from trnslurm.runs.process import own_process, process_alive
from trnslurm.runs.run import RunDir

_ELSEWHERE_S = 900  # no submission takes longer; on another host nobody can be asked


@contextlib.contextmanager
def lock_run(run: RunDir) -> Iterator[None]:
    """Keep everybody else from submitting the run; if somebody does already, say who."""
    try:
        file = _take_turn(run)
    except OSError as error:
        raise RunError(f"{run.turns}: cannot be written ({error.strerror})") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # deleted meanwhile: there is nothing left to submit
            write_json(file, _holder() | {"over": True})


def _take_turn(run: RunDir) -> Path:
    run.turns.mkdir(exist_ok=True)
    newest = max(_numbers(run.turns), default=0)
    if newest and (holder := _who_has(run.turns / f"{newest}.json")):
        raise NotYetError(f"{run.name} is being submitted by {holder}: look at its status")
    file = run.turns / f"{newest + 1}.json"
    try:
        with file.open("x", encoding="utf-8") as stream:
            json.dump(_holder(), stream)
    except FileExistsError:
        raise NotYetError(
            f"{run.name} was submitted by somebody else just now: look at its status"
        ) from None
    for number in _numbers(run.turns):
        if number > newest + 1:  # we looked long ago: others came since
            file.unlink()
            raise NotYetError(f"{run.name} was submitted by somebody else: look at its status")
        if number < newest + 1:
            (run.turns / f"{number}.json").unlink(missing_ok=True)
    return file


def _who_has(file: Path) -> str:
    """Return whose turn it is; empty if it is over, or its process has ended."""
    try:
        age_s = time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return "somebody else"
    holder = read_json(file)  # empty: not written yet, or never
    if holder.get("over"):
        return ""
    if holder.get("host") == socket.gethostname():
        alive = process_alive(str(holder.get("process", "")))
    else:
        alive = age_s < _ELSEWHERE_S
    where = f"{holder.get('user', 'somebody')} on {holder.get('host', 'another host')}"
    return f"{where} (process {str(holder.get('process', '?')).partition('@')[0]})" if alive else ""


def _holder() -> dict[str, Any]:
    return {"user": getpass.getuser(), "host": socket.gethostname(), "process": own_process()}


def _numbers(directory: Path) -> list[int]:
    return [int(file.stem) for file in directory.glob("*.json") if file.stem.isdigit()]
