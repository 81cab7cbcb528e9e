"""Renders the roles of a job: what each role's nodes run, and what the nodes' programs read."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trnslurm.config.entry import Entry
from trnslurm.config.schema import Container
from trnslurm.contract.roles import Role
from trnslurm.devices import CPU
from trnslurm.errors import RenderError
from trnslurm.plan.spec import JobSpec
from trnslurm.render.project import PROJECT_CODE


def server_spec(spec: JobSpec, role: Role, code: Mapping[str, bytes]) -> JobSpec:
    """Return a role's server as a separate job on one node, with its command as the script."""
    config, recipe = spec.config, spec.config.recipe
    entry, arguments = _started(role.name, recipe.roles[role.name].command)
    if entry.is_file and f"{PROJECT_CODE}{posixpath.normpath(entry.name)}" not in code:
        raise RenderError(f"roles.{role.name}.command: {entry.name} is not in the project")
    own = replace(
        recipe,
        entry=entry.text,
        arguments=tuple(arguments),
        resume_arguments=(),
        launcher="python" if entry.is_python else "script",
        launcher_arguments=(),
        places={},
        checkpoint_glob="",
        keep_last=0,
        hang_minutes=0.0,
        standby=False,
    )
    slurm = replace(config.cluster.slurm, spares=0, min_nodes=None)
    cluster = replace(config.cluster, slurm=slurm)
    batch = replace(spec.batch, nodes=1, workers=spec.batch.workers_per_node)
    server = replace(spec, nodes=1, batch=batch, phases=("train",), role=role.name)
    if role.component:
        # It is unknown what its nodes have, except that it is nothing of the training nodes'.
        name = f"node of partition {role.partition}"
        instance = replace(spec.instance, name=name, device=CPU, efa=0, lnc=0)
        cluster = replace(cluster, container=Container(), stage_python=None)
        batch = replace(batch, workers=1, workers_per_node=1)
        server = replace(server, instance=instance, device=CPU, batch=batch)
    return replace(server, config=replace(config, recipe=own, cluster=cluster))


def _started(role: str, words: Sequence[str]) -> tuple[Entry, Sequence[str]]:
    """Return what a command starts, and its arguments; python is the nodes' own interpreter.

    A launcher such as torchrun is a program like any other, because a server is alone on its node.
    """
    head, rest = words[0], [*words[1:]]
    if re.fullmatch(r"python3?(\.\d+)?", head):
        while rest[:1] == ["-u"]:
            del rest[0]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return Entry.module(rest[1]), rest[2:]
        if rest and rest[0] and not rest[0].startswith("-"):
            return Entry(rest[0]), rest[1:]
        raise RenderError(f"roles.{role}.command: {head} can start only a script or -m MODULE here")
    if not head:
        raise RenderError(f"roles.{role}.command: its first word is empty")
    in_project = not head.startswith("/") and ("/" in head or head.endswith(".py"))
    return Entry(head.removeprefix("./")) if in_project else Entry.program(head), rest


def roles_json(spec: JobSpec) -> dict[str, Any]:
    """Return roles.json."""
    return {
        role.name: {
            "nodes": role.nodes, "spares": role.spares, "ready": role.ready,
            "ready_s": role.ready_s, "restart": role.restart, "needs": [*role.needs],
            "partition": role.partition, "component": role.component,
        }
        for role in spec.roles
    }  # fmt: skip


def fields_of(spec: JobSpec) -> list[tuple[tuple[str, str], ...]]:
    """Return the nodes of each role in each component, counted from 1 as in `cut`."""
    many = 1 + max((role.component for role in spec.roles), default=0)
    found: list[list[tuple[str, str]]] = [[] for _ in range(many)]
    taken = [spec.nodes + spec.spares, *[0] * many]
    for role in spec.roles:
        at = taken[role.component] + 1
        taken[role.component] += role.all_nodes
        found[role.component].append((role.name, f"{at}-{taken[role.component]}"))
    return [*map(tuple, found)]


def local_hosts(spec: JobSpec) -> Mapping[str, str]:
    """Return the emulated nodes of each role."""
    at, found = spec.nodes, {}
    for role in spec.roles:
        found[role.name] = ",".join(f"local-{n}" for n in range(at, at + role.all_nodes))
        at += role.all_nodes
    return found
