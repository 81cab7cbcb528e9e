"""Records a command for another host on this host until its end is known.

`trnslurm reconnect` can then continue it in another process.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trnslurm.contract.files import make_private, read_json, write_file, write_json
from trnslurm.errors import RemoteError
from trnslurm.records.run import own_process, process_alive
from trnslurm.remote.ssh import Place
from trnslurm.runs.find import state_home


@dataclass(frozen=True, kw_only=True)
class RemoteCommand:
    """A command and the data sent with it."""

    place: Place
    argv: Sequence[str]
    shows: bool
    """Whether it is read-only: it may be sent again, and ends when nobody reads its output."""
    site: Mapping[str, str] = field(default_factory=dict)
    """Files for the search path on the other host: the cluster profile and templates."""
    cluster: str = ""
    parcel: bytes | None = None
    what: str = ""
    """What the command does, for messages, such as `the submission of gpt2_zero1`."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    begun: bool = False
    """Whether it has begun. If the other host does not know it, its record was removed there."""


def _folder() -> Path:
    return state_home() / "remote"


def keep(request: RemoteCommand, process: str | None = None) -> None:
    """Keep a record of a request, and of the process that waits for its end, if any."""
    directory = _folder() / request.token
    try:
        make_private(directory)
        if request.parcel is not None:
            write_file(directory / "parcel", request.parcel)
        facts = {k: v for k, v in asdict(request).items() if k != "parcel"}
        facts |= {"time": time.time(), "process": own_process() if process is None else process}
        write_json(directory / "request.json", facts)
    except OSError as error:
        raise RemoteError(f"cannot write {directory} ({error.strerror})") from None


def forget(request: RemoteCommand) -> None:
    """Remove the record of a request."""
    shutil.rmtree(_folder() / request.token, ignore_errors=True)


def refuse_again(request: RemoteCommand) -> None:
    """Refuse to repeat a submission that was sent before and may have been started."""
    for other in unfinished() if request.parcel else ():
        if (other.place.host, other.parcel) == (request.place.host, request.parcel):
            raise RemoteError(
                f"{request.place.host}: this was already sent, but its result is unknown: run "
                "`trnslurm reconnect`, or `trnslurm reconnect --forget`"
            )


def unfinished() -> list[RemoteCommand]:
    """Return the requests whose outcome is unknown, oldest first.

    Requests whose process is alive are left out, because it is still waiting for the end.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        for directory in _folder().iterdir():
            facts = read_json(directory / "request.json")
            parcel = directory / "parcel"
            try:
                when = float(facts.pop("time"))
                if process_alive(str(facts.pop("process"))):
                    continue
                place = Place(**facts.pop("place"))
                data = parcel.read_bytes() if parcel.exists() else None
                found.append((when, RemoteCommand(place=place, parcel=data, **facts)))
            except (KeyError, TypeError, ValueError, OSError):
                continue
    return [request for _, request in sorted(found, key=lambda each: each[0])]
