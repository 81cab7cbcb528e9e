"""The plan of a job: plan.json. The launcher computes it, and the job reads and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trnslurm.frozen import Frozen

FORMAT = 1
"""A format that older versions cannot read gets a higher number, which covers the entire bundle."""
# In plan.json these are next to the batch, because a custom script has no other batch numbers.
_WORKERS = ("nodes", "workers_per_node", "workers")


class BatchPlan(Frozen):
    """One optimizer step on W workers, divided into units: canonical micro-batches."""

    mode: str
    global_batch: int
    micro_batch: int
    nodes: int
    workers_per_node: int
    workers: int
    units: int
    """Canonical micro-batches in a step."""
    groups: int
    """How many workers, or groups of workers, run different micro-batches. The workers of a group
    are neighbors, and run each unit together."""
    accumulation: int
    """Units that each group runs in a step, padding included."""
    padding_units: int
    """Units of weight zero over all groups, so that all groups run the same number."""

    @property
    def padding(self) -> float:
        """Return the fraction of units that have weight zero."""
        return self.padding_units / (self.accumulation * self.groups)


class JobPlan(Frozen):
    """The numbers of one run."""

    format: int = FORMAT
    recipe: str
    preset: str
    cluster: str
    instance_type: str
    peak_tflops: float
    """Peak of the planned nodes in dense bf16, or 0 if unknown."""
    device: str
    batch: BatchPlan
    seq_len: int
    steps: int
    precision: str
    seed: int
    data: str
    """Path of the training data; empty for the data that comes with the job."""
    model: dict[str, Any]
    train: dict[str, Any]

    @property
    def nodes(self) -> int:
        return self.batch.nodes

    @property
    def workers_per_node(self) -> int:
        return self.batch.workers_per_node

    @property
    def workers(self) -> int:
        return self.batch.workers


def to_json(plan: JobPlan, *, own_batch: bool = False, own_steps: bool = False) -> dict[str, Any]:
    """Return plan.json; a custom script can choose its batch and its steps itself."""
    found = {name: getattr(plan, name) for name in (field.name for field in fields(plan))}
    batch = {name: getattr(plan.batch, name) for name in (f.name for f in fields(plan.batch))}
    beside = {name: batch.pop(name) for name in _WORKERS}
    told: dict[str, Any] = {}
    for name, value in found.items():
        if name == "batch":
            told |= beside | {"batch": None if own_batch else batch}
        else:
            told[name] = value
    return told | ({"steps": None} if own_steps else {})


def to_fields(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of plan.json as the fields of a JobPlan, unchecked."""
    batch = told.get("batch")
    beside = {name: told[name] for name in _WORKERS if name in told}
    rest = {name: value for name, value in told.items() if name not in _WORKERS}
    return rest | {"batch": {**batch, **beside} if isinstance(batch, Mapping) else batch}
