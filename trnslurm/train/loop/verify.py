"""Finds a worker that computes wrong numbers, by letting two workers compute a micro-batch.

Now and then, before a step, each worker computes its own first micro-batch and that of the next
worker, and the gradients are compared bit for bit. These gradients are then discarded. If two
workers differ, all compute again, and a third worker computes the same micro-batch. The worker that
differs from itself or from the two others is wrong. If no gradients are ever equal, kernels do not
add up in a fixed order, and the comparison ends.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trnslurm.contract.checkpoints import checkpoints_in, step_of
from trnslurm.contract.files import write_json_once
from trnslurm.saves import directory
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.store import Store, open_store
from trnslurm.train.environment import Environment
from trnslurm.train.loop.stopping import leave

EXIT_CODE = 70
_PATIENCE_S = 3600.0
_BLOCK = 1 << 22
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Verdict(NamedTuple):
    """What a comparison has found."""

    wrong: int | None = None
    """The worker that computes wrong numbers."""
    others: tuple[int, ...] = ()
    """The workers that agree with each other, or the pair that disagrees."""
    ends: bool = False
    """Whether no gradients are equal, so that nothing can be compared."""


class Verification:
    """One worker's comparisons. All workers make the same calls."""

    def __init__(
        self,
        device: Device,
        environment: Environment,
        gradients: Sequence[Tensor],
        first_unit: Callable[[int, int], Unit],
        *,
        every: int,
        settle: Callable[[], None],
        store: Store | None = None,
    ) -> None:
        """Prepare to compare every so many steps.

        `gradients` are zero between steps. `first_unit` returns a worker's first unit of a step.
        `settle` waits for the checkpoint that is being written.
        """
        self._device = device
        self._environment = environment
        self._gradients = gradients
        self._first_unit = first_unit
        self._every = every
        self._settle = settle
        self._store = open_store("verify", store)
        self._last = 0
        """The latest step before which all workers were equal."""
        self.busy = False
        """Whether the current unit is only compared."""

    def due(self, step: int) -> bool:
        """Check whether the workers are compared before a step."""
        return self._every > 0 and step % self._every == 0 and self._device.world > 1

    def units(self, step: int) -> Iterator[Unit]:
        """Yield the units to compute; leave the process if a worker is wrong."""
        rank, world = self._device.rank, self._device.world
        once: list[str] = []
        yield from self._compute(step, (rank, rank + 1), once)
        if self._judge(f"{step}/1", once, _differ) != []:
            twice: list[str] = []
            yield from self._compute(step, (rank, rank + 1, rank + 2), twice)
            told = self._judge(f"{step}/2", [*once, *twice], lambda all_: judge(all_)._asdict())
            self._end(step, Verdict(told["wrong"], tuple(told["others"]), told["ends"]), world)
        else:
            self._last = step

    def _compute(self, step: int, workers: Sequence[int], digests: list[str]) -> Iterator[Unit]:
        self.busy = True
        for worker in workers:
            yield self._first_unit(worker % self._device.world, step)
            digests.append(digest(self._gradients))
            for gradient in self._gradients:
                gradient.zero_()
        self.busy = False

    def _judge(self, topic: str, mine: list[str], decide: Callable[[list[list[str]]], Any]) -> Any:
        """Send all digests to worker 0, and return its decision."""
        rank, patience = self._device.rank, timedelta(seconds=_PATIENCE_S)
        self._store.set(f"{topic}/{rank}", json.dumps(mine))
        if rank == 0:
            keys = [f"{topic}/{worker}" for worker in range(self._device.world)]
            self._store.wait(keys, patience)
            decided = decide([json.loads(self._store.get(key)) for key in keys])
            for key in keys:
                self._store.delete_key(key)
            self._store.set(f"{topic}/all", json.dumps(decided))
        self._store.wait([f"{topic}/all"], patience)
        return json.loads(self._store.get(f"{topic}/all"))

    def _end(self, step: int, verdict: Verdict, world: int) -> None:
        """Print what was found; end the run if a worker is wrong."""
        if verdict.ends:
            self._every = 0
            self._device.say(
                "warning: train.verify_every: gradients are no longer compared, because no two "
                "workers have equal gradients: their kernels do not add up in a fixed order"
            )
            return
        since = f"; all were equal before step {self._last}" if self._last else ""
        if verdict.wrong is None:
            pair = " and ".join(f"worker {each}" for each in verdict.others)
            line = f"{pair} compute different gradients before step {step}{since}"
            self._leave(step, line, None)
            return
        here = self._environment
        node = verdict.wrong // here.local_world
        others = " and ".join(map(str, verdict.others))
        line = (
            f"worker {verdict.wrong} (node {node}) computes wrong gradients before step {step}: "
            f"worker {others} computed different ones from the same micro-batch{since}"
        )
        self._leave(step, line, node)

    def _leave(self, step: int, line: str, node: int | None) -> None:
        here = self._environment
        self._settle()
        if here.rank == 0:
            with suppress(OSError):
                self._set_aside()
            facts: dict[str, Any] = {"time": time.time(), "line": line, "step": step}
            facts |= {} if node is None else {"node": node}
            with suppress(OSError):
                write_json_once(here.files.stuck_file(here.phase, here.attempt), facts)
            self._device.say(f"error: {line}")
            self._store.set("written", "")
        self._store.wait(["written"], timedelta(seconds=60))
        leave(EXIT_CODE)

    def _set_aside(self) -> None:
        """Set aside checkpoints that may be wrong, if there is an older one to resume from."""
        saved = checkpoints_in(self._environment.files.checkpoints)
        if any((step_of(path.name) or 0) < self._last for path in saved):
            for path in saved:
                if (step_of(path.name) or 0) >= self._last:
                    aside = directory.set_aside(path, self._environment.attempt)
                    self._device.say(f"warning: {path} may be wrong: kept as {aside.name}")


def _differ(all_: list[list[str]]) -> list[int]:
    """Return the workers whose first unit has a different gradient on the previous worker."""
    return [worker for worker, (own, _) in enumerate(all_) if own != all_[worker - 1][1]]


def judge(all_: list[list[str]]) -> Verdict:
    """Decide which worker is wrong.

    `all_` has each worker's digests of the first units of a step: own and next; then, in the second
    round, own, next, and the one after that.
    """
    world = len(all_)
    for worker in range(world):
        before = (worker - 1) % world
        own, other = {all_[worker][0], all_[worker][2]}, {all_[before][1], all_[before][3]}
        if own == other and len(own) == 1:
            continue
        if len(own) > 1 and len(other) > 1:
            continue  # neither can repeat itself
        third = all_[worker - 2][4] if world > 2 else None
        if len(own) > 1 or third in other:
            return Verdict(worker, _agreed(before, worker - 2, world, third in other))
        if len(other) > 1 or third in own:
            return Verdict(before, _agreed(worker, worker - 2, world, third in own))
        if third is None:
            return Verdict(None, (before, worker))
    return Verdict(ends=True)


def _agreed(one: int, other: int, world: int, both: bool) -> tuple[int, ...]:
    return (one, other % world) if both else (one,)


@torch.no_grad()
def digest(tensors: Sequence[Tensor]) -> str:
    """Return a string that changes if any bit of the tensors changes."""
    parts: list[Tensor] = []
    for tensor in tensors:
        bits = tensor.reshape(-1).view(_WHOLE[tensor.element_size()])
        for begin in range(0, len(bits), _BLOCK):
            block = bits[begin : begin + _BLOCK].to(torch.int64)
            places = torch.arange(1, len(block) + 1, device=block.device)
            # An odd factor: a changed bit changes the product, also modulo 2 ** 64.
            parts.append((block * (2 * places + 1)).sum())
    return ",".join(map(str, torch.stack(parts).tolist())) if parts else ""
