"""The roles of a run: servers alongside training, and where each of them is."""

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
"""The name of a role, which is part of the names of logs."""
RESERVED = ("train", "precompile", "prepare", "spares", "standby")
PLACES = ("url", "urls", "address", "addresses")
"""What an argument can refer to in a role, as in {rollout.urls}."""
TCP = "tcp"
"""Means that a server is ready when it listens on its port."""
Restart = Literal["alone", "all"]


class Role(Frozen):
    """Servers of one kind, one on each of their nodes: an entry in roles.json."""

    name: str
    nodes: int
    spares: int = 0
    ready: str = ""
    """What shows that a server is ready: an HTTP address, TCP, or a file; empty: that it runs."""
    ready_s: float = 600.0
    """How long a server has to become ready, and how long it can later go without answering."""
    restart: Restart = "alone"
    needs: tuple[str, ...] = ()
    """The roles whose addresses it gets, and which must be ready before it starts."""
    partition: str = ""
    """The partition of its nodes; empty if they are like those for training."""
    component: int = 0
    """The component of a heterogeneous job that contains its nodes. Training has component 0."""

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.spares


class Stand(Meant):
    """The state of a server."""

    WAITING = "waiting", "for another role"
    STARTING = "starting", "until it is ready"
    READY = "ready", "and answers"
    UNWELL = "unwell", "was ready, but does not answer now"
    ENDING = "ending", "has been asked to end"
    PAUSING = "pausing", "ended, and starts again soon"
    DOWN = "down", "ended, and does not start again"


def read_roles(file: Path) -> list[Role]:
    """Return the roles of a run, in the order in which they start; empty without a file."""
    return roles_in(read_json(file))


def roles_in(told: Mapping[str, Any]) -> list[Role]:
    """Return the roles in roles.json, without damaged ones."""
    found = []
    for name, values in told.items():
        with suppress(LookupError, TypeError):
            role = Role(name=name, **{**values, "needs": tuple(values["needs"])})
            whole = isinstance(role.nodes, int) and isinstance(role.spares, int)
            found += [role] if whole and re.fullmatch(NAME, name) else []
    return found


def variables_of(role: str, addresses: Iterable[str]) -> dict[str, str]:
    """Return the variables with the addresses of a role's servers."""
    known = [*addresses]
    urls = [f"http://{address}" for address in known]
    values = {"url": urls[0], "urls": ",".join(urls)}
    values |= {"address": known[0], "addresses": ",".join(known)}
    return {variable_of(role, place): value for place, value in values.items()}


def variable_of(role: str, place: str) -> str:
    """Return the variable that holds one of a role's addresses."""
    return f"{Variable.OF_ROLE}_{role.upper()}_{place.upper()}"
