"""The roles of a job: its servers, their nodes, and the order in which they start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trnslurm.config.schema import Config, Recipe, Servers
from trnslurm.contract.roles import NAME, PLACES, RESERVED, TCP, Role
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.schedulers.choice import scheduler_of

_OF_ROLE = r"(?<![{$])\{([a-z]+)\.(\w+)\}"


def roles_of(config: Config) -> list[Role]:
    """Return the roles of a recipe, each after those that it needs. Reject impossible ones."""
    recipe = config.recipe
    if recipe.roles and not recipe.project:
        raise ConfigError("roles: only a custom script can have servers: see docs/roles.md")
    waiting = {name: _role(name, told, recipe.roles) for name, told in recipe.roles.items()}
    found: list[Role] = []
    while waiting:
        there = {role.name for role in found}
        free = [role for role in waiting.values() if there.issuperset(role.needs)]
        if not free:
            raise ConfigError(
                f"roles: {' and '.join(waiting)} are waiting for each other's addresses"
            )
        found.append(waiting.pop(free[0].name))
    # Without a queue there are no partitions: all servers run on this machine.
    return _in_components(found, recipe) if scheduler_of(config.cluster).has_queue else found


def _in_components(roles: Sequence[Role], recipe: Recipe) -> list[Role]:
    """Return the roles, assigned to the components of a heterogeneous job.

    Roles with the same partition and options share a component.
    """
    kinds: list[object] = [(None, ())]
    found = []
    for role in roles:
        told = recipe.roles[role.name]
        kind = (told.partition, told.sbatch)
        kinds += [] if kind in kinds else [kind]
        number = kinds.index(kind)
        found.append(replace(role, component=number, partition=told.partition or ""))
    return found


def nodes_of_roles(config: Config, *, apart: bool | None = None) -> int:
    """Return the number of nodes for servers, including spares.

    `apart` selects only nodes in the roles' own partitions, or only those like the training nodes.
    """
    roles = [r for r in roles_of(config) if apart is None or bool(r.component) is apart]
    return sum(role.all_nodes for role in roles)


def beside(config: Config, *, apart: bool | None = None) -> int:
    """Return the number of nodes that do not train: spares and nodes of roles."""
    spares = 0 if apart else scheduler_of(config.cluster).spare_nodes(config.cluster)
    return spares + nodes_of_roles(config, apart=apart)


def places_in(text: str, roles: Mapping[str, object], where: str) -> Iterator[tuple[str, str]]:
    """Yield each role and placeholder in a text, such as rollout and urls. Reject unknown ones."""
    for name, place in re.findall(_OF_ROLE, text):
        if name not in roles:  # other braces have no meaning
            continue
        if place not in PLACES:
            known = ", ".join(f"{{{name}.{each}}}" for each in PLACES)
            hint = did_you_mean(place, PLACES) or f": use one of {known}"
            raise ConfigError(f"{where}: unknown placeholder {{{name}.{place}}}{hint}")
        yield name, place


def _role(name: str, told: Servers, roles: Mapping[str, Servers]) -> Role:
    where = f"roles.{name}"
    if not re.fullmatch(NAME, name) or name in RESERVED:
        reserved = f" and must not be one of {', '.join(RESERVED)}" if name in RESERVED else ""
        raise ConfigError(f"{where}: a role name must be 1 to 20 lowercase letters{reserved}")
    if not told.command:
        raise ConfigError(
            f"{where} has no command: set {where}.command, such as "
            '[python, serve.py, --port, "{port}"]'
        )
    if told.sbatch and not told.partition:
        raise ConfigError(
            f"{where}.sbatch: only nodes in another partition can have their own options: set "
            f"{where}.partition"
        )
    needs: dict[str, None] = {}
    for word in told.command:
        for other, _ in places_in(word, roles, f"{where}.command"):
            if other == name:
                raise ConfigError(
                    f"{where}.command: a role must refer to its own address as {{host}} and "
                    "{port}"
                )
            needs[other] = None
    listens = any("{port}" in word for word in told.command)
    if told.ready.partition(":")[0] in ("http", "https", TCP) and not listens:
        raise ConfigError(
            f"{where}.ready: the command does not use {{port}}, so it cannot listen on it"
        )
    return Role(
        name=name,
        nodes=told.nodes,
        spares=told.spares,
        ready=told.ready or (TCP if listens else ""),
        ready_s=60 * told.ready_min,
        restart=told.restart,
        needs=tuple(needs),
    )
