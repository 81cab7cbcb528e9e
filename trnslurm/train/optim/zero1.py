"""ZeRO-1 with PyTorch's collectives: every worker updates some rows of each parameter.

PyTorch's ZeroRedundancyOptimizer is not used, because it gives whole parameters to workers.
Checkpoints have equal rows of each parameter (checkpoint.state.own_rows), and workers would wait
for the largest parameter.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.train.checkpoint.state import Read, num_rows, own_rows
from trnslurm.train.devices.device import Device
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.optimizer import GlobalOptimizer, OptimizerSpec

# As for torch_xla's ZeRO-1, whose limit is neuronx-distributed's.
_BUCKET_BYTES = 130 << 20
# PyTorch 2.13 has renamed them.
_dist: Any = dist
_reduce_scatter = getattr(_dist, "reduce_scatter_single", _dist.reduce_scatter_tensor)
_all_gather = getattr(_dist, "all_gather_single", _dist.all_gather_into_tensor)


class _Bucket:
    """Parameters whose rows are sent together.

    In transit, a bucket is a matrix with a line for each worker: the worker's rows of each
    parameter, one parameter after another, padded with zeros if a parameter's rows do not divide
    evenly.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: int) -> None:
        self.parameters = parameters
        self._world = world
        self._lengths = [_padded(parameter, world) // world for parameter in parameters]

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return whole tensors as the matrix."""
        lines = tensors[0].new_zeros(self._world, sum(self._lengths), dtype=dtype)
        for tensor, part in zip(tensors, self._parts(lines), strict=True):
            flat = tensor.reshape(-1).to(dtype)
            whole, rest = divmod(len(flat), part.shape[1])
            part[:whole].copy_(flat[: whole * part.shape[1]].view(whole, -1))
            if rest:
                part[whole, :rest].copy_(flat[whole * part.shape[1] :])
        return lines

    @torch.no_grad()
    def unpack(self, lines: Tensor) -> None:
        """Set the parameters from a matrix."""
        for parameter, part in zip(self.parameters, self._parts(lines), strict=True):
            flat = part.reshape(-1)[: parameter.numel()]
            parameter.copy_(flat.view(parameter.shape))

    def split(self, line: Tensor) -> Iterator[Tensor]:
        """Return one worker's rows of each parameter, as views with its other dimensions."""
        for parameter, piece in zip(self.parameters, torch.split(line, self._lengths), strict=True):
            yield piece.view(-1, *parameter.shape[1:])

    def _parts(self, lines: Tensor) -> Sequence[Tensor]:
        return torch.split(lines, self._lengths, dim=1)


class Zero1(DataParallel):
    """Every worker has all gradients and parameters, but only its rows of the optimizer's state.

    The optimizer's copy of the parameters is divided by rows as well.
    """

    def __init__(self, device: Device, spec: OptimizerSpec) -> None:
        assert spec.precision != "fp32_state"
        self._sums: dict[nn.Parameter, Tensor] = {}
        GlobalOptimizer.__init__(self, device, spec)
        as_model = spec.precision == "as_model"
        self._dtype = self._parameters[0].dtype if as_model else torch.float32
        self._cut = list(_cut(self._parameters, self._dtype.itemsize, device.world))
        self._masters = []
        for bucket in self._cut:
            line = bucket.pack([p.detach() for p in bucket.parameters], self._dtype)[device.rank]
            # Copies: the others' lines need not be kept.
            self._masters += [nn.Parameter(rows) for rows in bucket.split(line.clone())]
        masters = dict(zip(self._parameters, self._masters, strict=True))
        self._base = self._make_base(spec.with_masters(masters))

    def _allocate(self, dtype: torch.dtype) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        zeros = {each: torch.zeros_like(each, dtype=dtype) for each in self._parameters}
        return list(zeros.values()), zeros

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Take one step: reduce-scatter the gradients, update own rows, gather parameters."""
        with self._device.timer("collectives"):
            self._scatter_gradients()
        norm = nn.utils.get_total_norm([m.grad for m in self._masters if m.grad is not None])
        squares = norm.float().square()
        with self._device.timer("collectives"):
            dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self._masters, self._spec.max_norm, norm)
        self._update(lr)
        for master in self._masters:
            master.grad = None
        with self._device.timer("collectives"):
            self._gather_parameters()
        torch._foreach_zero_(self._gradients)
        return norm

    def _scatter_gradients(self) -> None:
        masters = iter(self._masters)
        for bucket in self._cut:
            gradients = [self._sums.get(p, p.grad) for p in bucket.parameters]
            lines = bucket.pack([g for g in gradients if g is not None], self._dtype)
            own = torch.empty_like(lines[0])
            _reduce_scatter(own, lines.view(-1))
            for rows in bucket.split(own):
                next(masters).grad = rows

    def _gather_parameters(self) -> None:
        masters = iter(self._masters)
        for bucket in self._cut:
            dtype = bucket.parameters[0].dtype
            own = torch.cat([next(masters).reshape(-1).to(dtype) for _ in bucket.parameters])
            lines = own.new_empty(self._device.world, len(own))
            _all_gather(lines.view(-1), own)
            bucket.unpack(lines)

    @torch.no_grad()
    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place, and create the state as the first step would, in its order."""
        self._load_frozen(read)
        for name, parameter, master in self._triples():
            whole = read(name, "parameter", range(num_rows(parameter.shape)))
            whole = whole.view(parameter.shape)
            parameter.copy_(whole.to(parameter.dtype))
            rows = own_rows(parameter.shape, self._device.rank, self._device.world)
            own = whole.reshape(whole.shape or (1,))[rows.start : rows.stop]
            _fill(master, own)
            state = self._base.state[master]
            if self._kinds:
                state["step"] = self._count(updates, parameter)
            for kind in self._kinds:
                state[kind] = torch.zeros_like(master)
                _fill(state[kind], read(name, kind, rows).view(own.shape))

    def _saved(self, parameter: Tensor, holder: Tensor) -> Tensor:
        return holder.detach()

    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        return tensor[: len(rows)], 0


def _cut(parameters: Sequence[nn.Parameter], itemsize: int, world: int) -> Iterator[_Bucket]:
    """Yield buckets of about the same size, in the parameters' order."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += _padded(parameter, world) * itemsize
        if size >= _BUCKET_BYTES:
            yield _Bucket(bucket, world)
            bucket, size = [], 0
    if bucket:
        yield _Bucket(bucket, world)


def _padded(parameter: nn.Parameter, world: int) -> int:
    """Return the number of a parameter's values, padded so that rows divide evenly."""
    rows = num_rows(parameter.shape)
    return parameter.numel() // rows * -(-rows // world) * world


def _fill(tensor: Tensor, rows: Tensor) -> None:
    """Set the first rows of a tensor, whose other rows are padding."""
    tensor.detach()[: len(rows)].copy_(rows)
