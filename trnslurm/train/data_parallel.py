"""Plain data parallelism: on cpu and cuda, and what of it is the same on XLA devices."""

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

    The optimizer inside updates masters: the model's parameters themselves, or where these have
    fewer bits, copies in single precision that it keeps (fp32_copy) or has for a step (fp32_state).
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
        precision: str,
    ) -> None:
        super().__init__(device, groups, names, kinds)
        self._max_norm = max_norm
        self._keeps_copies = precision == "fp32_copy"
        masters = {
            parameter: parameter
            if precision == "as_model" or parameter.dtype == torch.float32
            else nn.Parameter(self._copy(parameter))
            for parameter in self._parameters
        }
        self._masters = list(masters.values())
        self._copies = [
            (parameter, master) for parameter, master in masters.items() if parameter is not master
        ]
        groups = [
            {**group, "params": [masters[parameter] for parameter in group["params"]]}
            for group in groups
        ]
        self._base = self._make_base(cls, groups, options)

    def _copy(self, parameter: Tensor) -> Tensor:
        """Give what a master is between steps; a copy that is not kept takes no memory then."""
        return parameter.detach().float() if self._keeps_copies else parameter.detach()

    def _make_base(
        self,
        cls: Callable[..., torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        options: dict[str, Any],
    ) -> torch.optim.Optimizer:
        if cls is torch.optim.AdamW:
            # Goes through memory once, where the plain one does so for each of its operations.
            options = {**options, "fused": True}
        return cls(groups, lr=0.0, **options)

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
        self._reduce()
        for parameter, master in self._copies:
            assert parameter.grad is not None
            if not self._keeps_copies:
                master.data = parameter.detach().float()
            master.grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(self._masters, self._max_norm)
        rate = self._rate(lr)
        for group in self._base.param_groups:
            group["lr"] = rate
        self._base.step()
        with torch.no_grad():
            for parameter, master in self._copies:
                parameter.copy_(master)
                master.grad = None
                if not self._keeps_copies:
                    master.data = self._copy(parameter)
        return norm

    def _reduce(self) -> None:
        """Sum the gradients over all workers."""
        with self._device.clock("collectives"):
            dist.all_reduce(self._gradients[0])

    def _rate(self, lr: float) -> Tensor | float:
        """Give a learning rate as the optimizer inside takes it."""
        return lr

    def _count(self, updates: int, parameter: Tensor) -> Tensor:
        """Give a number of steps as the optimizer inside keeps it."""
        # The fused AdamW expects it beside the parameter.
        return torch.tensor(float(updates), device=parameter.device)

    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place and make the state that the first step would make."""
        for name, parameter, master in self._triples():
            rows = range(num_rows(parameter.shape))
            whole = read(name, "parameter", rows).view(parameter.shape)
            # From the host, copy_ is a transfer if the types are the same, and no graph.
            parameter.data.copy_(whole.to(parameter.dtype))
            if master is not parameter and self._keeps_copies:
                master.data.copy_(whole)
            state = self._base.state[master]
            for kind in self._kinds:
                saved = read(name, kind, rows).view(parameter.shape)
                dtype = parameter.dtype if master is parameter else torch.float32
                state[kind] = saved.to(dtype).to(master.device)
            if self._kinds:
                state["step"] = self._count(updates, parameter)

    def _holders(self) -> list[Tensor]:
        return list(self._masters)

    def _saved(self, parameter: Tensor, holder: Tensor) -> Tensor:
        return (holder if self._keeps_copies else parameter).detach()

    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        # All workers have the whole state; each saves an equal part of it.
        return tensor.reshape(tensor.shape or (1,))[rows.start : rows.stop], 0
