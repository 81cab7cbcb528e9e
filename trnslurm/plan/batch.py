"""The exact batch plan: how one global batch is divided among W groups, in whole micro-batches.

Pure arithmetic. A group is one worker, or several workers that divide each layer (tensor
parallelism). A step has U = G/m canonical micro-batches, and each of the W groups runs A =
ceil(U/W) of them. The A*W - U extra ones have weight zero, so the gradient is exactly that of G
samples on any number of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trnslurm.config.schema import Reference
from trnslurm.contract.plan import BatchPlan
from trnslurm.errors import PlanError
from trnslurm.frozen import Frozen

_MOST_SAMPLES = 2**40  # in a step; finding divisors of larger numbers would take long


class Estimate(Frozen):
    """The time and cost of the whole run."""

    samples_per_s: float
    hours: float
    node_hours: float
    cost: float | None
    basis: str
    """The source of the throughput."""
    guess: bool = False
    """Whether the throughput is scaled from another instance type."""


def plan_batch(
    *,
    mode: str = "fixed",
    global_batch: int | None = None,
    per_worker: int | None = None,
    micro_batch: int,
    nodes: int,
    workers_per_node: int,
    group_size: int = 1,
    allow_idle: bool = False,
    padding: str = "allow",
) -> BatchPlan:
    """Lay out the global batch on nodes x workers, or raise an error with the nearest choices."""
    if nodes < 1:
        raise PlanError(f"--nodes {nodes}: a job needs at least one node")
    if micro_batch < 1:
        raise PlanError(f"batch.micro_batch is {micro_batch}, but it must be at least 1")
    workers = nodes * workers_per_node
    groups = workers // group_size
    size = _global_batch(mode, global_batch, per_worker, groups)
    units, rest = divmod(size, micro_batch)
    if rest:
        near = _nearest_divisors(size, micro_batch)
        below = units * micro_batch
        batches = " or ".join(str(b) for b in (below, below + micro_batch) if b > 0)
        raise PlanError(
            f"global batch {size} is not a whole number of micro-batches of {micro_batch}; "
            f"nearest: micro-batch {' or '.join(map(str, near))}, or global batch {batches}"
        )
    if units < groups and not allow_idle:
        _refuse_idle(size, micro_batch, nodes, workers_per_node // group_size, group_size)
    accumulation = -(-units // groups)
    plan = BatchPlan(
        mode=mode,
        global_batch=size,
        micro_batch=micro_batch,
        nodes=nodes,
        workers_per_node=workers_per_node,
        workers=workers,
        units=units,
        groups=groups,
        accumulation=accumulation,
        padding_units=accumulation * groups - units,
    )
    if plan.padding_units and padding == "refuse":
        raise PlanError(
            f"{plan.padding_units} of each step's {accumulation * groups} micro-batches would "
            "have weight zero, which batch.padding=refuse does not allow: "
            f"{without_padding(plan)}"
        )
    return plan


def even_nodes(plan: BatchPlan) -> list[int]:
    """Return the nearest smaller and larger node counts without padding."""
    whole, rest = divmod(plan.units, plan.groups // plan.nodes)
    return [] if rest else _nearest_divisors(whole, plan.nodes)


def _nearest_divisors(number: int, here: int) -> list[int]:
    """Return the divisors of a number that are nearest below and above `here`, if any."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = [*small, *(number // d for d in reversed(small))]
    return [d for d in divisors if d < here][-1:] + [d for d in divisors if d > here][:1]


def without_padding(plan: BatchPlan) -> str:
    """Return the part of a message that lists the nearest node counts without padding."""
    counts = even_nodes(plan)
    if not counts:
        return "every node count has padding"
    return f"none with {' or '.join(map(str, counts))} {'node' if counts == [1] else 'nodes'}"


def formulas(plan: BatchPlan) -> tuple[tuple[str, int, str], ...]:
    """Return the formulas that divide a step, each with its value and the arithmetic."""
    size, workers, groups = plan.global_batch, plan.workers, plan.groups
    each = "W" if groups == workers else "D"
    found = [("W = nodes x workers per node", workers, f"{plan.nodes} x {plan.workers_per_node}")]
    if groups != workers:
        found.append(("D = W / workers per group", groups, f"{workers} / {workers // groups}"))
    if plan.mode == "per_worker":
        found.append((f"G = samples of each x {each}", size, f"{size // groups} x {groups}"))
    share = f"ceil({size} / ({plan.micro_batch} x {groups}))"
    found.append((f"A = ceil(G / (m x {each}))", plan.accumulation, share))
    rest = f"{plan.accumulation} x {groups} - {size} / {plan.micro_batch}"
    percent = f"{100 * plan.padding:.1f} % of a step's micro-batches"
    zero = (f"zero-weight = A x {each} - G / m", plan.padding_units, f"{rest}, {percent}")
    return (*found, zero)


def estimate(
    plan: BatchPlan,
    *,
    steps: int,
    known: Sequence[Reference],
    price_per_hour: float | None,
    beside: int = 0,
    apart: int = 0,
) -> Estimate | None:
    """Return hours, node-hours and cost from known throughputs, or None if none is known.

    `beside` is the number of nodes that do not train. The price of the `apart` nodes is unknown.
    """
    if not known or steps < 1:
        return None
    full_speed, basis = _throughput(plan.nodes, sorted(known, key=lambda t: t.nodes))
    # Zero-weight units take as long as others.
    speed = full_speed * (1 - plan.padding)
    hours = steps * plan.global_batch / speed / 3600
    node_hours = hours * (plan.nodes + beside)
    return Estimate(
        samples_per_s=speed,
        hours=hours,
        node_hours=node_hours,
        cost=None if price_per_hour is None else (node_hours - hours * apart) * price_per_hour,
        basis=basis,
    )


def _global_batch(mode: str, fixed: int | None, per_worker: int | None, groups: int) -> int:
    if mode == "per_worker":
        if per_worker is None or per_worker < 1:
            raise PlanError("batch.mode per_worker requires batch.per_worker, at least 1")
        size = per_worker * groups
    elif fixed is None or fixed < 1:
        raise PlanError("batch.mode fixed requires batch.global_batch, at least 1")
    else:
        size = fixed
    if size > _MOST_SAMPLES:
        raise PlanError(
            f"global batch {size} is more than {_MOST_SAMPLES}, the largest that can be planned"
        )
    return size


def _refuse_idle(
    size: int, micro_batch: int, nodes: int, groups_per_node: int, group_size: int
) -> None:
    units, groups = size // micro_batch, nodes * groups_per_node
    who = "workers" if group_size == 1 else f"groups of {group_size} workers"
    choices = []
    if fitting := units // groups_per_node:
        choices.append(f"{fitting} node{'s' if fitting > 1 else ''}")
    most = min(micro_batch, size // groups + 1)
    if smaller := [m for m in _nearest_divisors(size, most) if m < most]:
        choices.append(f"micro-batch {smaller[0]}")
    choices.append(f"global batch {groups * micro_batch}")
    raise PlanError(
        f"global batch {size} at micro-batch {micro_batch} is {units} "
        f"micro-batch{'es' if units > 1 else ''} per step, fewer than {nodes} x {groups_per_node} "
        f"{who}; nearest: {', '.join(choices)}, or --allow-idle"
    )


def _throughput(nodes: int, known: Sequence[Reference]) -> tuple[float, str]:
    """Return samples/s at `nodes`: published, interpolated, or extrapolated from one value."""
    by_nodes = {t.nodes: t for t in known}
    if nodes in by_nodes:
        return by_nodes[nodes].samples_per_s, by_nodes[nodes].source or f"known at {_count(nodes)}"
    below = [t for t in known if t.nodes < nodes][-1:]
    above = [t for t in known if t.nodes > nodes][:1]
    if below and above:
        low, high = below[0], above[0]
        exponent = math.log(high.samples_per_s / low.samples_per_s) / math.log(
            high.nodes / low.nodes
        )
        speed = low.samples_per_s * (nodes / low.nodes) ** exponent
        return speed, f"between {low.nodes} and {high.nodes} nodes"
    nearest = (below or above)[0]
    return nearest.samples_per_s * nodes / nearest.nodes, f"linear from {_count(nearest.nodes)}"


def _count(nodes: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''}"
