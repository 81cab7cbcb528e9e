"""The roles of a training: which servers run beside it, on how many nodes, in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trnslurm.config.schema import Config, Recipe, Servers
from trnslurm.contract.roles import NAME, PLACES, RESERVED, TCP, Role
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.schedulers.choice import scheduler_of

_OF_ROLE = r"(?<![{$])\{([a-z]+)\.(\w+)\}"


def roles_of(recipe: Recipe) -> list[Role]:
    """Return the roles of a recipe, each after those that it needs; refuse what cannot be."""
    if recipe.roles and not recipe.project:
        raise ConfigError("roles: only a custom script has servers beside it: docs/roles.md")
    waiting = {name: _role(name, told, recipe.roles) for name, told in recipe.roles.items()}
    found: list[Role] = []
    while waiting:
        there = {role.name for role in found}
        free = [role for role in waiting.values() if there.issuperset(role.needs)]
        if not free:
            raise ConfigError(f"roles: {' and '.join(waiting)} wait for each other's addresses")
        found.append(waiting.pop(free[0].name))
    return found


def nodes_of_roles(recipe: Recipe) -> int:
    """Return how many nodes the servers of a recipe have, spares included."""
    return sum(role.all_nodes for role in roles_of(recipe))


def beside(config: Config) -> int:
    """Return how many nodes a job has beside those of its training: spares, and those of roles."""
    spares = scheduler_of(config.cluster).spare_nodes(config.cluster)
    return spares + nodes_of_roles(config.recipe)


def places_in(text: str, roles: Mapping[str, object], where: str) -> Iterator[tuple[str, str]]:
    """Yield each role and place, such as rollout and urls, that a text has; refuse unknown ones."""
    for name, place in re.findall(_OF_ROLE, text):
        if name not in roles:  # other braces have no meaning
            continue
        if place not in PLACES:
            known = ", ".join(f"{{{name}.{each}}}" for each in PLACES)
            hint = did_you_mean(place, PLACES) or f": there are {known}"
            raise ConfigError(f"{where}: no place {{{name}.{place}}}{hint}")
        yield name, place


def _role(name: str, told: Servers, roles: Mapping[str, Servers]) -> Role:
    where = f"roles.{name}"
    if not re.fullmatch(NAME, name) or name in RESERVED:
        reserved = f", and not {', '.join(RESERVED)}" if name in RESERVED else ""
        raise ConfigError(f"{where}: a role's name has 1 to 20 lowercase letters{reserved}")
    if not told.command:
        raise ConfigError(
            f"{where} has no command: set {where}.command, such as "
            '[python, serve.py, --port, "{port}"]'
        )
    needs: dict[str, None] = {}
    for word in told.command:
        for other, _ in places_in(word, roles, f"{where}.command"):
            if other == name:
                raise ConfigError(f"{where}.command: its own address is {{host}} and {{port}}")
            needs[other] = None
    listens = any("{port}" in word for word in told.command)
    if told.ready.partition(":")[0] in ("http", "https", TCP) and not listens:
        raise ConfigError(f"{where}.ready: the command has no {{port}} on which it would listen")
    return Role(
        name=name,
        nodes=told.nodes,
        spares=told.spares,
        ready=told.ready or (TCP if listens else ""),
        ready_s=60 * told.ready_min,
        restart=told.restart,
        needs=tuple(needs),
    )
