"""Gives orders to the holder of a sandbox, and reads the sandbox's state."""

from __future__ import annotations

import json
import socket
from typing import Any

from trnslurm.errors import SandboxError, SlurmError
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.machine import SandboxHost
from trnslurm.sandbox.namespaces import up_command
from trnslurm.sandbox.settings import node_address, settings_of
from trnslurm.slurm.commands import Slurm

_ANSWER_S = 150
_CONTROLLER_S = 10


def ask(layout: Layout, **order: Any) -> Any:
    """Give the holder an order; return its answer, or raise its error."""
    if not layout.is_up():
        raise SandboxError(
            f"sandbox {layout.name} is not running: start it with `{up_command(layout)}`"
        )
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(layout.socket))
            with connection.makefile("rw", encoding="utf-8") as stream:
                stream.write(json.dumps(order) + "\n")
                stream.flush()
                line = stream.readline()
    except OSError as error:
        raise SandboxError(
            f"sandbox {layout.name} does not answer ({error}): use trnslurm sandbox down"
        ) from None
    answer = json.loads(line) if line else {"error": "the holder ended before it answered"}
    if "error" in answer:
        raise SandboxError(f"sandbox {layout.name}: {answer['error']}")
    return answer["ok"]


def look(layout: Layout) -> dict[str, Any]:
    """Return the state of a sandbox, from its holder and, if it answers, from slurmctld.

    `power` is a node's state according to the holder; `state` and `reason` are slurmctld's.
    `controller` is empty, or the reason slurmctld does not answer.
    """
    held = ask(layout, do="state")
    settings = settings_of(layout)
    states: dict[str, list[str]] = {}
    controller = ""
    try:
        sinfo = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%E")
        for line in Slurm(str(layout.bin)).call(*sinfo, timeout_s=_CONTROLLER_S).splitlines():
            name, *words = line.split("|", 2)
            states[name] = words
    except SlurmError as error:
        controller = str(error)
    nodes = []
    for number, (name, power) in enumerate(zip(settings.node_names, held["nodes"], strict=True), 1):
        state, reason = states.get(name, ["?", ""])
        nodes.append(
            {
                "number": number,
                "name": name,
                "address": node_address(number),
                "power": power,
                "state": state,
                "reason": "" if reason == "none" else reason,
            }
        )
    return {
        "name": layout.name,
        "cluster": layout.cluster,
        "like": settings.like,
        "slurm": SandboxHost.of(layout).release,
        "daemons": held["daemons"],
        "nodes": nodes,
        "controller": controller,
    }
