"""Random plans: a job, and what befalls it. A seed gives the same plan for ever."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from trnslurm.contract.states import State
from trnslurm.node.attempt.machine import Stage

from .world import BrokenError, Plan, World

FAULTS = {
    "crash": 4, "off": 6, "freeze": 1, "away": 2, "stall": 1, "cancel": 1, "preempt": 1,
    "requeue": 1, "limit": 1, "grow": 1,
}  # fmt: skip
BACK_S = 90.0
"""From its last checkpoint, a training that can go on in its job does so within this, per fault."""


def plan_of(seed: int, most: int = 16) -> Plan:
    """Return the plan of a seed."""
    rng = random.Random(seed)
    nodes = rng.choice([1, 2, 2, 3, 4, 8, 16, most])
    nodes = min(nodes, most)
    spares = rng.choice([0, 0, 1, 1, 2, max(1, nodes // 4)])
    fewest = rng.choice([0, 0, max(1, nodes // 2)])
    faults = []
    at = 0.0
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3, 5])):
        at += rng.choice([rng.uniform(0, 8), rng.uniform(0, 60), rng.uniform(20, 200)])
        what = rng.choices([*FAULTS], [*FAULTS.values()])[0]
        number = 1 if rng.random() < 0.6 else rng.randint(1, max(1, spares))
        every = range(nodes + spares if what in ("off", "freeze") else nodes)
        which = tuple(rng.sample([*every], min(number, len(every)))) if every else ()
        faults.append((at, what, which))
    second = None
    if faults and rng.random() < 0.6:
        what = rng.choice(
            ["off", "off", "crash", "away", "cancel", "cancel", "limit", "limit", "stall"]
        )
        second = (str(rng.choice([*Stage])), what)
    plan = Plan(
        seed=seed, nodes=nodes, spares=spares, fewest=fewest, standby=rng.random() < 0.4,
        faults=tuple(faults), second=second, slow_disk=rng.random() < 0.1,
        loses=rng.choice([0.0, 0.0, 0.0, 0.05, 0.3]), ends_at=rng.choice([200.0, 600.0]),
        **_beginning(rng), no_index=rng.random() < 0.3,
    )  # fmt: skip
    return plan if plan.compiles or plan.fewest or rng.random() < 0.75 else _with_roles(plan, rng)


def _with_roles(plan: Plan, rng: random.Random) -> Plan:
    """Return a plan with servers beside the training, which may fail as well."""
    times = [
        rng.choice([rng.uniform(0, 30), rng.uniform(0, 300)]) for _ in range(rng.randint(0, 4))
    ]
    failing = tuple((at, "server", (rng.randint(0, 11),)) for at in times)
    return replace(plan, roles=True, standby=False, faults=(*plan.faults, *failing))


def _beginning(rng: random.Random) -> dict[str, Any]:
    """What comes before the step, and may fail: seldom, for it is soon over."""
    if rng.random() < 0.8:
        return {}
    compiles = rng.random() < 0.4
    return {
        "graphs": rng.random() < 0.6, "compiles": compiles,
        "elsewhere": not compiles and rng.random() < 0.5,
        "refused": rng.choice(["", "", "checking", "fetching", "keying", "verifying"]),
    }  # fmt: skip


def must_complete(world: World) -> bool:
    """Check whether a job has no reason to leave its nodes: only nodes went off, few enough."""
    plan = world.plan
    what = {trail.split()[2] for trail in world.trail if " FAULT " in trail}
    off = sum(node.state == "off" for node in world.nodes)
    least = plan.fewest or plan.nodes
    replaced = bool(plan.spares or plan.fewest) and len(world.nodes) - off >= least
    train = not (plan.compiles or plan.refused)
    replaced &= not world.counted["requeued for the first node"]
    return train and what <= {"off", "stall"} and (replaced or not off)


def check(plan: Plan, covered: Counter[tuple[str, str]] | None = None) -> World:
    """Run a plan, and check what must hold."""
    world = World(plan, covered).run()
    state = world.machine.state.state
    if must_complete(world) and state is not State.COMPLETED:
        raise BrokenError(f"{state}: {world.machine.state.reason}, though enough nodes were left")
    questions = world.counted["AskNodes"]
    most = 4 * len(world.attempts) + 8 * len(world.faults_at) + world.now / 30
    if not plan.loses and questions > most:
        raise BrokenError(f"{questions} questions about nodes in {len(world.attempts)} attempts")
    for seconds, faults in world.gaps if must_complete(world) and not plan.slow_disk else ():
        if seconds > BACK_S * max(1, faults) * (1 + plan.loses):
            raise BrokenError(f"nothing was trained for {seconds:.0f} s, with {faults} faults")
    return world


def shrunk(plan: Plan, why: str) -> tuple[Plan, str]:
    """Return the smallest plan that still breaks something: without faults that it needs not."""
    while True:
        smaller = [
            replace(plan, faults=plan.faults[:i] + plan.faults[i + 1 :])
            for i in range(len(plan.faults))
        ]
        smaller += [replace(plan, second=None)] if plan.second else []
        smaller += [replace(plan, slow_disk=False)] if plan.slow_disk else []
        smaller += [replace(plan, loses=0.0)] if plan.loses else []
        smaller += [replace(plan, standby=False)] if plan.standby else []
        smaller += [replace(plan, no_index=False)] if plan.no_index else []
        for each in smaller:
            try:
                check(each)
            except AssertionError as error:
                plan, why = each, str(error)
                break
        else:
            return plan, why
