"""A job's own optimizers: any torch.optim.Optimizer, or more than one, on cpu, cuda, torchneuron.

Every worker holds the complete optimizers. With zero1, they are divided over the workers by whole
parameters, because an optimizer such as Muon needs all of a matrix for each of its rows. A
parameter's owner updates it and sends it to the others. Checkpoints have the complete parameter and
its state in its owner's file, so that any number of workers can load them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.saves.memory import DTYPES
from trnslurm.train.checkpoint.manifest import shorten
from trnslurm.train.checkpoint.state import (
    OwnState,
    Read,
    ReadOwn,
    TensorShard,
    load_whole,
    num_rows,
)
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.optimizer import OptimizerSpec

Made = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizers = Callable[[dict[str, nn.Parameter]], Made]
"""Makes one or more optimizers for the tensors to train, given by the parameters' names."""

# Keys of a group that every start or step sets again.
_NOT_SAVED = ("params", "param_names", "lr", "initial_lr")
_PLAIN = (bool, int, float, str, type(None))


class OwnOptimizers(DataParallel):
    """A step of the optimizers that a job has made."""

    def __init__(
        self, device: Device, spec: OptimizerSpec, make: MakeOptimizers, *, peak: float, zero1: bool
    ) -> None:
        """Use the groups' learning rates if train.lr is `peak`; otherwise scale them with it."""
        self._make, self._peak, self._divided = make, peak, zero1 and device.world > 1
        sizes = {name: parameter.numel() for name, parameter in spec.named.items()}
        self._owners = share_out(sizes, device.world)
        self._checked = False
        super().__init__(device, spec)

    def _updates(self, name: str) -> bool:
        return not self._divided or self._owners[name] == self._device.rank

    def _make_inside(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        # What this worker does not update takes part only while groups are made: so every worker
        # has the same groups, if perhaps empty ones.
        named = {name: masters.get(each, each) for name, each in self._spec.named.items()}
        self._master_of = dict(masters)
        made = self._make(dict(named))
        self._inside = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        self._name_of: dict[Tensor, str] = {each: name for name, each in named.items()}
        self._check_made()
        for optimizer in self._inside:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if self._updates(self._name_of[p])]
            for foreign in [p for p in optimizer.state if not self._updates(self._name_of[p])]:
                del optimizer.state[foreign]
        self._rates = [[_number(g.get("lr")) for g in o.param_groups] for o in self._inside]
        self._first = [[_saved_part(g) for g in o.param_groups] for o in self._inside]
        self._kinds = tuple(type(optimizer).__name__ for optimizer in self._inside)

    def _check_made(self) -> None:
        """Refuse optimizers that cannot be stepped or that leave out parameters."""
        for each in self._inside:
            closure = inspect.signature(each.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise TrainError(
                    f"{type(each).__name__}.step needs a closure that recomputes the loss, which "
                    "does not work with more than one micro-batch per step: use another optimizer"
                )
        given = [p for o in self._inside for group in o.param_groups for p in group["params"]]
        left = [name for each, name in self._name_of.items() if all(each is not p for p in given)]
        if left or len(given) != len(self._name_of):
            wrong = f"gets {', '.join(shorten(left))}" if left else "gets a parameter twice"
            which = "no optimizer" if left else "an optimizer"
            raise TrainError(
                f"the job's own optimizers: {which} {wrong}: give each trained parameter to one "
                "optimizer, and freeze the others"
            )

    def _update(self, lr: float) -> None:
        """Update with every inner optimizer, at its groups' learning rates."""
        for optimizer, rates in zip(self._inside, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if rate is None:
                    continue  # the optimizer sets it by itself
                now = lr * (rate / self._peak) if self._peak else 0.0
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(now)
                else:
                    group["lr"] = now
            optimizer.step()
        if not self._checked:  # before hours of training, not at the first save
            self._checked = True
            list(self._states())

    @torch.no_grad()
    def _finish(self) -> None:
        """Broadcast each parameter from its owner, if parameters are divided."""
        super()._finish()
        if not self._divided:
            return
        with self._device.timer("collectives"):
            works = [
                dist.broadcast(each.detach(), self._owners[name], async_op=True)
                for name, each in self._spec.named.items()
            ]
            for work in works:
                work.wait()

    def owners(self) -> dict[str, int]:
        """Return the worker that saves each complete parameter and its state."""
        return dict(self._owners)

    def shards(self) -> list[TensorShard]:
        """Return the parameters that this worker owns, and the tensors of their state."""
        shards = self._frozen_shards()
        for parameter, master in self._master_of.items():
            name = self._name_of[master]
            if self._owners[name] == self._device.rank:
                saved = self._saved(parameter, master)
                shards.append(TensorShard(name, "parameter", range(num_rows(saved.shape)), saved))
        for name, key, value in self._states():
            if isinstance(value, Tensor) and self._owners[name] == self._device.rank:
                shards.append(TensorShard(name, key, range(num_rows(value.shape)), value.detach()))
        return shards

    def own_state(self) -> OwnState:
        """Return the numbers in the state, and what training has changed in groups."""
        of: dict[str, dict[str, Any]] = {}
        for name, key, value in self._states():
            if not isinstance(value, Tensor) and self._owners[name] == self._device.rank:
                of.setdefault(name, {})[key] = value
        groups = [
            [
                {k: v for k, v in _saved_part(group).items() if k not in old or old[k] != v}
                for group, old in zip(optimizer.param_groups, first, strict=True)
            ]
            for optimizer, first in zip(self._inside, self._first, strict=True)
        ]
        for optimizer, changed in zip(self._inside, groups, strict=True):
            for group in changed:
                for key, value in group.items():
                    parts = value if isinstance(value, list | tuple) else [value]
                    if not all(isinstance(part, _PLAIN) for part in parts):
                        raise TrainError(_unsavable(optimizer, f"its groups' {key}", value))
        return OwnState(of, groups)

    def _states(self) -> Iterator[tuple[str, str, Any]]:
        """Yield what the optimizers keep for each parameter: its name, the key and the value."""
        for optimizer in self._inside:
            for each, state in optimizer.state.items():
                name = self._name_of.get(each) if isinstance(each, Tensor) else None
                if name is None:
                    raise TrainError(_unsavable(optimizer, "state of no parameter", each))
                for key, value in state.items():
                    if not _is_savable(key, value):
                        raise TrainError(_unsavable(optimizer, f"{key!r} of {name}", value))
                    yield name, key, value

    @torch.no_grad()
    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place; load_own_state loads their state."""
        self._load_frozen(read)
        load_whole(self._spec.named, "parameter", read)
        if self._keeps_copies:
            copies = {self._name_of[master]: master for _, master in self._copies}
            load_whole(copies, "parameter", read)

    def load_own_state(self, read: ReadOwn) -> None:
        """Give each optimizer its state, through its own load_state_dict."""
        for number, optimizer in enumerate(self._inside):
            packed = optimizer.state_dict()
            holders = [p for group in optimizer.param_groups for p in group["params"]]
            places = [place for group in packed["param_groups"] for place in group["params"]]
            saved = read([self._name_of[each] for each in holders])
            states = {each: dict(saved.of[self._name_of[each]]) for each in holders}
            packed["state"] = {
                place: states[each]
                for place, each in zip(places, holders, strict=True)
                if states[each]
            }
            for group, changed in zip(packed["param_groups"], saved.groups[number], strict=True):
                for key, value in changed.items():
                    group[key] = tuple(value) if isinstance(value, list) else value
            optimizer.load_state_dict(packed)
            # It gives floating-point state the parameter's type; a class may keep more bits.
            for each, before in states.items():
                for key, value in optimizer.state[each].items():
                    if isinstance(value, Tensor) and value.dtype != before[key].dtype:
                        optimizer.state[each][key] = before[key].to(value.device)


def share_out(sizes: Mapping[str, int], workers: int) -> dict[str, int]:
    """Assign each parameter to a worker, the largest first, so that the load is balanced."""
    held = [0] * workers
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # equal ones in the model's order
        owners[name] = held.index(min(held))
        held[owners[name]] += sizes[name]
    return owners


def _number(rate: Any) -> float | None:
    return float(rate) if isinstance(rate, int | float | Tensor) else None


def _saved_part(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_SAVED}


def _is_savable(key: Any, value: Any) -> bool:
    """Check whether a checkpoint can store a value of the state; a tensor is kind/name there."""
    if not isinstance(key, str) or "/" in key or key == "parameter":
        return False
    if isinstance(value, Tensor):
        return value.layout == torch.strided and value.dtype in DTYPES
    return isinstance(value, _PLAIN)


def _unsavable(optimizer: torch.optim.Optimizer, what: str, value: Any) -> str:
    kind = type(optimizer).__name__
    return (
        f"{kind} keeps {what} as a {type(value).__name__}, which a checkpoint cannot store: the "
        "state of each parameter may contain only tensors, numbers, strings and None"
    )
