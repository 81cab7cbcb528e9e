"""Plain data parallelism, on the devices cpu and cuda."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.train.device import Device
from trnslurm.train.optimizer import GlobalOptimizer
from trnslurm.train.state import Read, num_rows


class DataParallel(GlobalOptimizer):
    """Gradients summed with all-reduce, the whole optimizer on every worker.

    It updates parameters in single precision: those of the model, or copies where it has fewer bits
    and would lose small updates.
    """

    def __init__(
        self,
        device: Device,
        groups: list[dict[str, Any]],
        names: list[str],
        kinds: Sequence[str],
        cls: Callable[..., torch.optim.Optimizer],
        options: dict[str, Any],
        max_norm: float,
    ) -> None:
        super().__init__(device, groups, names, kinds)
        self._max_norm = max_norm
        masters = {
            parameter: parameter
            if parameter.dtype == torch.float32
            else nn.Parameter(parameter.detach().float())
            for parameter in self._parameters
        }
        self._masters = list(masters.values())
        groups = [
            {**group, "params": [masters[parameter] for parameter in group["params"]]}
            for group in groups
        ]
        self._base = cls(groups, lr=0.0, **options)

    def _make_gradients(self) -> list[Tensor]:
        # In one piece, which is summed over the workers at once: a message each takes far longer.
        like = self._parameters[0]
        sizes = [parameter.numel() for parameter in self._parameters]
        whole = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        for parameter, piece in zip(self._parameters, torch.split(whole, sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        return [whole]

    def step(self, lr: float) -> Tensor:
        """Take one step."""
        with self._device.clock("collectives"):
            dist.all_reduce(self._gradients[0])
        copies = [
            (parameter, master)
            for parameter, master in zip(self._parameters, self._masters, strict=True)
            if parameter is not master
        ]
        for parameter, master in copies:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(self._masters, self._max_norm)
        for group in self._base.param_groups:
            group["lr"] = lr
        self._base.step()
        with torch.no_grad():
            for parameter, master in copies:
                parameter.copy_(master)
        return norm

    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place and make the state that the first step would make."""
        for name, parameter, master in self._triples():
            rows = range(num_rows(parameter.shape))
            master.data.copy_(read(name, "parameter", rows).view(parameter.shape))
            parameter.data.copy_(master.data)
            state = self._base.state[master]
            for kind in self._kinds:
                state[kind] = torch.empty_like(master, requires_grad=False)
                state[kind].copy_(read(name, kind, rows).view(parameter.shape))
            if self._kinds:
                state["step"] = torch.tensor(float(updates))

    def _holders(self) -> list[Tensor]:
        return list(self._masters)

    def _own_part(self, tensor: Tensor, rows: range) -> Tensor:
        # All workers have the whole state; each saves an equal part of it.
        return tensor.reshape(tensor.shape or (1,))[rows.start : rows.stop]
