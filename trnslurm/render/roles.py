"""Renders the roles of a job: what a node of each runs, and what the nodes' programs read."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trnslurm.config.command import read_command
from trnslurm.config.entry import Entry
from trnslurm.contract.roles import Role
from trnslurm.errors import RenderError
from trnslurm.plan.spec import JobSpec
from trnslurm.render.project import PROJECT_CODE


def server_spec(spec: JobSpec, role: Role, code: Mapping[str, bytes]) -> JobSpec:
    """Return a server of a role as a job of its own on one node, whose script is its command."""
    config, recipe = spec.config, spec.config.recipe
    command = read_command(recipe.roles[role.name].command, by_plugins=False)
    entry = Entry(command.recipe)
    if entry.is_file and f"{PROJECT_CODE}{posixpath.normpath(entry.name)}" not in code:
        raise RenderError(f"roles.{role.name}.command: {entry.name} is not in the project")
    own = replace(
        recipe,
        entry=entry.text,
        arguments=command.arguments,
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
    return replace(
        spec,
        config=replace(config, recipe=own, cluster=cluster),
        nodes=1,
        batch=replace(spec.batch, nodes=1, workers=spec.batch.workers_per_node),
        phases=("train",),
        role=role.name,
    )


def roles_json(spec: JobSpec) -> dict[str, Any]:
    """Return roles.json."""
    return {
        role.name: {
            "nodes": role.nodes, "spares": role.spares, "ready": role.ready,
            "ready_s": role.ready_s, "restart": role.restart, "needs": [*role.needs],
        }
        for role in spec.roles
    }  # fmt: skip


def fields_of(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """Return which of the job's nodes each role has, as `cut` counts them from 1."""
    at, found = spec.nodes + spec.spares, []
    for role in spec.roles:
        found.append((role.name, f"{at + 1}-{at + role.all_nodes}"))
        at += role.all_nodes
    return tuple(found)


def local_hosts(spec: JobSpec) -> Mapping[str, str]:
    """Return the emulated nodes of each role."""
    at, found = spec.nodes, {}
    for role in spec.roles:
        found[role.name] = ",".join(f"local-{n}" for n in range(at, at + role.all_nodes))
        at += role.all_nodes
    return found
