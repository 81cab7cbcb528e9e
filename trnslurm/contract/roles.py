"""The roles of a run: servers beside its training, and where each of them is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from trnslurm.contract.files import read_json
from trnslurm.contract.meant import Meant
from trnslurm.contract.variables import Variable
from trnslurm.frozen import Frozen

NAME = r"[a-z]{1,20}"
"""What a role may be called: its name is part of the names of logs."""
RESERVED = ("train", "precompile", "prepare", "spares", "standby")
PLACES = ("url", "urls", "address", "addresses")
"""What an argument may have of a role, as in {rollout.urls}."""
TCP = "tcp"
"""A server is ready once it listens on its port."""
Restart = Literal["alone", "all"]


class Role(Frozen):
    """Servers of one kind, one on each of their nodes: an entry of roles.json."""

    name: str
    nodes: int
    spares: int = 0
    ready: str = ""
    """What tells that a server is ready: an address of HTTP, TCP, a file; empty: that it runs."""
    ready_s: float = 600.0
    """How long a server may take until it is ready, and how long it may not answer later."""
    restart: Restart = "alone"
    needs: tuple[str, ...] = ()
    """The roles whose addresses it gets, and which must be ready before it starts."""
    partition: str = ""
    """The partition of its nodes; empty: they are like those of the training."""
    component: int = 0
    """The part of a heterogeneous job that has its nodes; 0: that of the training."""

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.spares


class Stand(Meant):
    """How a server stands."""

    WAITING = "waiting", "for another role"
    STARTING = "starting", "until it is ready"
    READY = "ready", "and answers"
    UNWELL = "unwell", "was ready, and does not answer now"
    ENDING = "ending", "is told to end"
    PAUSING = "pausing", "ended, and starts again soon"
    DOWN = "down", "ended, and does not start again"


def read_roles(file: Path) -> list[Role]:
    """Return the roles of a run, in the order in which they start; none without a file."""
    return roles_in(read_json(file))


def roles_in(told: Mapping[str, Any]) -> list[Role]:
    """Return the roles of which roles.json tells, without those that are damaged."""
    found = []
    for name, values in told.items():
        with suppress(LookupError, TypeError):
            role = Role(name=name, **{**values, "needs": tuple(values["needs"])})
            whole = isinstance(role.nodes, int) and isinstance(role.spares, int)
            found += [role] if whole and re.fullmatch(NAME, name) else []
    return found


def variables_of(role: str, addresses: Iterable[str]) -> dict[str, str]:
    """Return the variables that tell where the servers of a role are."""
    known = [*addresses]
    urls = [f"http://{address}" for address in known]
    values = {"url": urls[0], "urls": ",".join(urls)}
    values |= {"address": known[0], "addresses": ",".join(known)}
    return {variable_of(role, place): value for place, value in values.items()}


def variable_of(role: str, place: str) -> str:
    """Return the variable that has a place of a role."""
    return f"{Variable.OF_ROLE}_{role.upper()}_{place.upper()}"
