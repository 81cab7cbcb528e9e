"""One optimizer step over all workers: ZeRO-1 on XLA devices, plain data parallelism elsewhere.

Both expect gradients that add up, over workers and units, to the gradient of the global batch; both
clip by the global norm and return that norm as it was before. Both give their state, for saving, as
rows of named tensors, and take it back whatever number of workers wrote it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.train.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.state import Read, Shard, num_rows, own_rows

OPTIMIZERS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""What each keeps of every parameter, by the names that PyTorch gives it."""

# neuronx-distributed's default; it notes NaN at step 3 for reduce-scatter buckets over 140 MB.
REDUCE_SCATTER_BUCKET_MB = 130


class GlobalOptimizer(ABC):
    """A step that all workers take together."""

    _base: torch.optim.Optimizer
    """PyTorch's optimizer inside."""

    def __init__(
        self, device: Device, groups: list[dict[str, Any]], names: list[str], kinds: Sequence[str]
    ) -> None:
        self._device = device
        self._names = names
        self._kinds = kinds
        self._parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        # Made once and zeroed in place: a gradient that appears in the first backward pass would
        # make its graph, and that of the optimizer, differ from the next.
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def zero_grad(self) -> None:
        """Set the gradients to zero in place."""
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Reduce and clip the gradients, update the parameters, give the norm before clipping."""

    def shards(self) -> list[Shard]:
        """Give this worker's part of the state, parameters included; not before the first step.

        The tensors are the live ones: they are to be copied before the next step. Of what a model
        holds besides parameters (buffers) nothing is state here: it never changes.
        """
        shards = []
        for name, parameter, holder in self._triples():
            rows = own_rows(parameter.shape, self._device.rank, self._device.world)
            state = self._base.state[holder]
            tensors = {"parameter": holder.detach()} | {kind: state[kind] for kind in self._kinds}
            shards += [
                Shard(name=name, kind=kind, rows=rows, tensor=self._own_part(tensor, rows))
                for kind, tensor in tensors.items()
                if rows
            ]
        return shards

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shape of every parameter, by name."""
        names = zip(self._names, self._parameters, strict=True)
        return {name: tuple(parameter.shape) for name, parameter in names}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that the state has for each parameter."""
        return ("parameter", *self._kinds)

    @abstractmethod
    def load(self, read: Read, *, updates: int) -> None:
        """Go on from a saved state, which has seen so many steps; parameters are set too."""

    @abstractmethod
    def _holders(self) -> list[Tensor]:
        """Give the tensors that the optimizer inside updates, one for each parameter."""

    @abstractmethod
    def _own_part(self, tensor: Tensor, rows: range) -> Tensor:
        """Give this worker's rows of a holder or its state, or those and padding."""

    def _triples(self) -> Iterable[tuple[str, nn.Parameter, Tensor]]:
        return zip(self._names, self._parameters, self._holders(), strict=True)


class Zero1(GlobalOptimizer):
    """torch_xla's ZeroRedundancyOptimizer: every worker keeps the optimizer state of its shard."""

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
        from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

        super().__init__(device, groups, names, kinds)
        self._tensor_lr = cls is torch.optim.AdamW
        self._everyone = [list(range(device.world))]
        if self._tensor_lr:
            # As Python numbers, lr = 0 and a bias correction that rounds to 1 (k = 16628 at
            # beta2 = 0.999) are compiled in: a new graph in the middle of a run.
            options = {**options, "capturable": True}
        zero: Any = ZeroRedundancyOptimizer  # its own annotations are too narrow
        self._zero = zero(
            groups,
            cls,
            optimizer_dtype=torch.float32,
            grad_clipping=True,
            max_norm=max_norm,
            sharding_groups=self._everyone,
            pin_layout=False,
            bucket_cap_mb_reduce_scatter=REDUCE_SCATTER_BUCKET_MB,
            bucket_cap_mb_all_gather=max(1, REDUCE_SCATTER_BUCKET_MB // device.world),
            save_master_weights=True,
            higher_cc_precision=True,
            lr=self._rate(0.0),
            foreach=False,
            **options,
        )
        self._base = self._zero.base_optimizer

    def step(self, lr: float) -> Tensor:
        """Take one step; gradients are summed, so ZeRO's division by the world is undone."""
        rate = self._rate(lr)
        for group in self._zero.param_groups:
            group["lr"] = rate
        scheme = {
            "scale_factor": self._device.world,
            "sharding_group": self._everyone,
            "group_size": self._device.world,
        }
        self._zero.step(sharding_scheme=[scheme])
        norm: Tensor = self._zero.grad_norm
        return norm

    def load(self, read: Read, *, updates: int) -> None:
        """Transfer every tensor to the device without any graph.

        The first step then has the graph of any later one: the state is there already, and what was
        there before stays the same tensor, because torch_xla orders a graph's results by their age.
        """
        for name, parameter, holder in self._triples():
            rows = own_rows(parameter.shape, self._device.rank, self._device.world)
            whole = read(name, "parameter", range(parameter.shape[0]))
            # From the host, copy_ is a transfer if the types are the same.
            parameter.data.copy_(whole.to(parameter.dtype))
            holder.data.copy_(_padded(whole[rows.start : rows.stop], holder))
            for kind in self._kinds:
                padded = _padded(read(name, kind, rows), holder)
                self._base.state[holder][kind] = self._device.put(padded)
            if self._kinds:
                self._base.state[holder]["step"] = self._scalar(float(updates))

    def _holders(self) -> list[Tensor]:
        return [shard for group in self._base.param_groups for shard in group["params"]]

    def _own_part(self, tensor: Tensor, rows: range) -> Tensor:
        # Padding is cut off on the host: here it would take a graph.
        return tensor

    def _scalar(self, value: float) -> Tensor:
        # Not put(): torch_xla compiles a 0-dimensional 0 or 1 into the graph.
        import torch_xla.core.xla_model

        send: Any = torch_xla.core.xla_model.send_cpu_data_to_device  # annotated too narrowly
        scalar: Tensor = send([torch.tensor(value)], self._device.torch_device)[0]
        return scalar

    def _rate(self, lr: float) -> Tensor | float:
        # A vector of one, because torch_xla compiles 0-dimensional 0 and 1 in. SGD reads a tensor
        # back to the host, so it gets the number.
        return self._device.put(torch.tensor([lr])) if self._tensor_lr else lr


def _padded(rows: Tensor, holder: Tensor) -> Tensor:
    padding = rows.new_zeros(len(holder) - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding]).to(holder.dtype)


class DataParallel(GlobalOptimizer):
    """Gradients summed with all-reduce, the whole optimizer on every worker."""

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
        # All gradients in one piece, which takes one all-reduce instead of one each.
        sizes = [parameter.numel() for parameter in self._parameters]
        self._gradient = self._parameters[0].new_zeros(sum(sizes))
        parts = torch.split(self._gradient, sizes)
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        if cls is torch.optim.AdamW:
            # Goes through memory once, where the plain one does so for each of its operations.
            options = {**options, "fused": True}
        self._base = cls(groups, lr=0.0, **options)

    def step(self, lr: float) -> Tensor:
        """Take one step."""
        dist.all_reduce(self._gradient)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        for group in self._base.param_groups:
            group["lr"] = lr
        self._base.step()
        return norm

    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place and make the state that the first step would make."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            rows = range(num_rows(parameter.shape))
            parameter.data.copy_(read(name, "parameter", rows).view(parameter.shape))
            state = self._base.state[parameter]
            for kind in self._kinds:
                state[kind] = torch.empty_like(parameter, requires_grad=False)
                state[kind].copy_(read(name, kind, rows).view(parameter.shape))
            if self._kinds:
                # Where the fused AdamW expects it: beside the parameter.
                state["step"] = torch.tensor(float(updates), device=parameter.device)

    def _holders(self) -> list[Tensor]:
        return list(self._parameters)

    def _own_part(self, tensor: Tensor, rows: range) -> Tensor:
        # All workers have the whole state; each saves an equal part of it.
        return tensor.reshape(tensor.shape or (1,))[rows.start : rows.stop]


def make_optimizer(
    name: str,
    device: Device,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    max_norm: float,
    **adam: Any,
) -> GlobalOptimizer:
    """Make the optimizer for a device; betas and eps (adam) are for adamw alone.

    Matrices decay; biases and layer norms, which are vectors, do not.
    """
    if name not in OPTIMIZERS:
        raise TrainError(f"train.optimizer: {name!r} is not one of {', '.join(OPTIMIZERS)}")
    matrices: dict[str, nn.Parameter] = {}
    vectors: dict[str, nn.Parameter] = {}
    for key, parameter in named_parameters:
        (matrices if parameter.dim() > 1 else vectors)[key] = parameter
    names = [*matrices, *vectors]
    groups: list[dict[str, Any]] = [
        {"params": list(matrices.values()), "weight_decay": weight_decay},
        {"params": list(vectors.values()), "weight_decay": 0.0},
    ]
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = {}
    if name == "adamw":
        cls, options = torch.optim.AdamW, adam
    strategy = Zero1 if device.torch_device.type == "xla" else DataParallel
    return strategy(device, groups, names, OPTIMIZERS[name], cls, options, max_norm)
