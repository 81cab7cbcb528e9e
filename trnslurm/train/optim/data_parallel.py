"""Plain data parallelism on cpu and cuda. XLA devices share most of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.train.checkpoint.state import Read, cut_rows, num_rows
from trnslurm.train.devices.device import Device
from trnslurm.train.optim.gradients import Buckets, SharedGradients
from trnslurm.train.optim.optimizer import GlobalOptimizer, OptimizerSpec


class DataParallel(GlobalOptimizer):
    """Gradients are summed over the workers, and every worker has the complete optimizer.

    The inner optimizer updates masters. These are the model's parameters or, if the parameters have
    fewer bits, copies in single precision, which are kept (fp32_copy) or made for each step
    (fp32_state). With copies, the units' gradients also add up in single precision. In fewer bits,
    a sum of hundreds would depend on how many of them a worker has.
    """

    def __init__(self, device: Device, spec: OptimizerSpec) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        super().__init__(device, spec)
        self._keeps_copies = spec.precision == "fp32_copy"
        masters = {
            parameter: parameter
            if spec.precision == "as_model" or parameter.dtype == torch.float32
            else nn.Parameter(
                parameter.detach().float() if self._keeps_copies else _nothing(parameter)
            )
            for name, parameter in zip(self._names, self._parameters, strict=True)
            if self._updates(name)
        }
        self._masters = list(masters.values())
        self._copies = [
            (parameter, master) for parameter, master in masters.items() if parameter is not master
        ]
        self._make_inside(masters)

    def own_gradients(self) -> list[Tensor]:
        """Return what a unit adds its gradients to."""
        return self._gradients

    def _updates(self, name: str) -> bool:
        """Check whether this worker updates a parameter."""
        return True

    def _make_inside(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Make PyTorch's optimizer for the masters."""
        self._base = self._make_base(self._spec.with_masters(masters))

    def _make_base(self, spec: OptimizerSpec) -> torch.optim.Optimizer:
        # The fused AdamW reads memory once; the plain one reads it for each of its operations.
        return spec.make(0.0, adam={"fused": True})

    def _make_gradients(self) -> list[Tensor]:
        dtype = self._parameters[0].dtype
        adds_up = self._spec.precision != "as_model" and dtype != torch.float32
        if adds_up:
            super()._make_gradients()  # of one unit
            for parameter in self._parameters:
                # Registered before the buckets' hooks, which send these sums.
                register: Any = parameter.register_post_accumulate_grad_hook  # not annotated
                register(self._add_up)
        zeroed, gradients = self._allocate(torch.float32 if adds_up else dtype)
        if adds_up:
            self._sums = gradients
        else:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        self._whole = [gradients[parameter] for parameter in self._parameters]
        return zeroed

    def _allocate(self, dtype: torch.dtype) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        """Return zeros for the gradients: the tensors to set to zero, and a view per parameter."""
        in_order = list(self._spec.named.values())
        self._summed: Buckets | SharedGradients
        if SharedGradients.fit(self._device):
            self._summed = SharedGradients(in_order, dtype, self._device)
        else:
            self._summed = Buckets(in_order, dtype)
            self.overlaps = True
        return [self._summed.whole], self._summed.gradients

    @torch.no_grad()
    def _add_up(self, parameter: Tensor) -> None:
        """Add a unit's gradient to the sum as soon as the backward pass has computed it."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        self._sums[parameter].add_(parameter.grad)
        parameter.grad.zero_()

    def begin_last_unit(self) -> None:
        """Send sums of gradients while the next backward pass computes the rest."""
        assert isinstance(self._summed, Buckets)
        self._summed.begin_last_unit()

    def step(self, lr: float) -> Tensor:
        """Sum the gradients over the workers, clip them by their global norm, and update."""
        self._reduce()
        for parameter, master in self._copies:
            if not self._keeps_copies:
                master.data = parameter.detach().float()
            master.grad = self._sums[parameter]
        norm = nn.utils.get_total_norm(self._whole)
        nn.utils.clip_grads_with_norm_(self._masters, self._spec.max_norm, norm)
        self._update(lr)
        self._finish()
        torch._foreach_zero_(self._gradients)
        return norm

    def _update(self, lr: float) -> None:
        """Update the masters."""
        for group in self._base.param_groups:
            group["lr"] = lr
        self._base.step()

    @torch.no_grad()
    def _finish(self) -> None:
        """Copy the masters to the parameters."""
        for parameter, master in self._copies:
            parameter.copy_(master)
            master.grad = None
            if not self._keeps_copies:
                master.data = _nothing(parameter)

    def _reduce(self) -> None:
        """Wait until the gradients are summed over all workers."""
        with self._device.timer("collectives"):
            self._summed.all_reduce()

    def _count(self, updates: int, parameter: Tensor) -> Tensor:
        """Return a number of steps in the form that the inner optimizer keeps."""
        # The fused AdamW expects the step on the parameter's device.
        return torch.tensor(float(updates), device=parameter.device)

    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place, and create the state as the first step would, in its order."""
        self._load_frozen(read)
        for name, parameter, master in self._triples():
            rows = range(num_rows(parameter.shape))
            whole = read(name, "parameter", rows).view(parameter.shape)
            # From the host, copy_ is a transfer if the types are the same, and no graph.
            parameter.data.copy_(whole.to(parameter.dtype))
            if master is not parameter and self._keeps_copies:
                master.data.copy_(whole)
            state = self._base.state[master]
            if self._kinds:
                state["step"] = self._count(updates, parameter)
            for kind in self._kinds:
                saved = read(name, kind, rows).view(parameter.shape)
                dtype = parameter.dtype if master is parameter else torch.float32
                state[kind] = saved.to(dtype).to(master.device)

    def _holders(self) -> list[Tensor]:
        return list(self._masters)

    def _saved(self, parameter: Tensor, holder: Tensor) -> Tensor:
        return (holder if self._keeps_copies else parameter).detach()

    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        # All workers have the whole state; each saves an equal part of it.
        return cut_rows(tensor, rows)


def _nothing(parameter: Tensor) -> Tensor:
    """Return a placeholder for a master between steps, which takes up no memory."""
    # Not parameter.detach(): on Neuron, where torch_xla does without functionalization, the next
    # step's copy in fp32 would be written into the parameter as well, which stayed in fp32.
    return torch.zeros(1, device=parameter.device)
