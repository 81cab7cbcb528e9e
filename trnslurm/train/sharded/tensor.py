"""Tensor parallelism within a node, and data parallelism with ZeRO-1 across groups."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trnslurm.train.checkpoint.state import Read, TensorShard, num_rows, own_rows
from trnslurm.train.devices.groups import Group, open_group
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.optimizer import update
from trnslurm.train.sharded.llama import Cut, TensorLlama, cut_of
from trnslurm.train.sharded.strategy import Sharded, ShardingRequest, own_part, spec_of


class TensorParallel(Sharded):
    """Each group of neighboring workers has the model once and computes a unit together.

    A worker keeps its pieces of the parameters in the type used for computation. The workers that
    have the same piece, one or more in each group, divide its optimizer state and its fp32 copy. So
    each element is stored exactly once across workers. The units' gradients add up in fp32.
    """

    def __init__(self, request: ShardingRequest) -> None:
        super().__init__(request)
        blueprint: Any = request.blueprint
        device, config = request.device, blueprint.config
        size, world = request.file["workers"], device.world
        _check(request, size)
        groups = range(0, world, size)
        self._group = open_group(device, [[first + n for n in range(size)] for first in groups])
        self._everyone = open_group(device, [[*range(world)]])
        with torch.device("meta"):
            llama: Any = request.make_model()
        dtype = torch.bfloat16 if request.plan.precision == "bf16" else torch.float32
        self._cuts = {name: cut_of(name, config, size) for name in self._shapes}
        self._owners: dict[int, Group] = {}
        """Number of pieces -> the group of workers with the same piece as this worker."""
        for number in sorted({cut.number for cut in self._cuts.values()}):
            alike = [
                [first + n for first in groups for n in range(piece, size, number)]
                for piece in range(number)
            ]
            self._owners[number] = open_group(device, alike)
        self._parameters: dict[str, nn.Parameter] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._masters: dict[str, nn.Parameter] = {}
        """This worker's part of the fp32 copy of each piece, laid end to end."""
        for name, shape in self._shapes.items():
            own = _piece_shape(shape, self._cuts[name])
            zeros = torch.zeros(own, dtype=dtype, device=device.torch_device)
            parameter = nn.Parameter(zeros, name not in self._frozen)
            place, _, kind = name.rpartition(".")
            setattr(llama.get_submodule(place), kind, parameter)
            self._parameters[name] = parameter
            if name in self._frozen:
                continue
            self._sums[parameter] = torch.zeros(own, device=device.torch_device)
            register: Any = parameter.register_post_accumulate_grad_hook  # not annotated
            register(self._add_up)
            length = -(-parameter.numel() // self._owners_of(name).size)
            part = torch.zeros(length, device=device.torch_device)
            self._masters[name] = nn.Parameter(part)
        spec = spec_of(request, self._masters.items())
        self._max_norm = spec.max_norm
        self._make_base(spec)
        recompute = device.checkpoint if request.settings.gradient_checkpointing else None
        vocabulary = config.vocab_size // size
        first = device.put(torch.tensor([self._group.index * vocabulary]))
        self._llama = TensorLlama(llama, self._group, first, recompute)
        self.model = self._llama

    def _make_base(self, spec: Any) -> None:
        if self._device.torch_device.type == "xla":
            from trnslurm.train.optim.xla import CAPTURABLE

            self._base = spec.make(self._rate(0.0), adam=CAPTURABLE, foreach=False)
        else:
            self._base = spec.make(0.0, adam={"fused": True})

    def backward(self, loss: Tensor) -> None:
        """Add a unit's gradient, given this worker's share of its loss."""
        loss.sum().backward()  # type: ignore[no-untyped-call]

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return this worker's share of the summed loss."""
        return self._llama.cross_entropy(logits, targets)

    @torch.no_grad()
    def _add_up(self, parameter: Tensor) -> None:
        """Add a unit's gradient to the sum as soon as the backward pass has computed it."""
        assert parameter.grad is not None
        self._sums[parameter].add_(parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Take one step."""
        gradients: dict[str, Tensor] = {}
        with self._device.timer("collectives"):
            for names, owners in self._by_owners():
                sums = [self._sums[self._parameters[name]] for name in names]
                parts = owners.reduce_scatter([_padded(each, owners.size) for each in sums])
                gradients |= zip(names, parts, strict=True)
            # All workers together have each number once, those of copied pieces too.
            squares = torch.stack([part.square().sum() for part in gradients.values()]).sum()
            norm = self._everyone.all_reduce(squares.reshape(1)).sqrt()
        scale = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, part in gradients.items():
            self._masters[name].grad = part * scale
        update(self._base, self._rate(lr))
        with self._device.timer("collectives"):
            for names, owners in self._by_owners():
                dtype = self._parameters[names[0]].dtype
                updated = [self._masters[name].detach().to(dtype) for name in names]
                for name, piece in zip(names, owners.all_gather(updated), strict=True):
                    parameter = self._parameters[name]
                    parameter.copy_(piece[: parameter.numel()].view(parameter.shape))
                    self._masters[name].grad = None
        for each in self._sums.values():
            each.zero_()
        return norm

    @torch.no_grad()
    def shards(self) -> list[TensorShard]:
        """Return this worker's rows, which takes gathering one tensor after another."""
        shards: list[TensorShard] = []
        rank, world = self._device.rank, self._device.world
        for name, shape in self._shapes.items():
            rows, each = own_rows(shape, rank, world), len(own_rows(shape, 0, world))
            # As a tensor, and equally many: the graph is then that of any worker.
            places = torch.arange(rows.start, rows.start + each).clamp(max=num_rows(shape) - 1)
            places = self._device.put(places)
            for kind in self.kinds_of(name):
                own = self._join(name, self._piece(name, kind)).index_select(0, places)
                if own.device.type == "xla":
                    self._device.sync()
                    own = own.cpu()
                if rows:
                    shards.append(TensorShard(name, kind, rows, own[: len(rows)]))
        return shards

    def _piece(self, name: str, kind: str) -> Tensor:
        """Return this worker's piece of a tensor, joined from the parts of its owners."""
        parameter = self._parameters[name]
        if name in self._frozen:
            return parameter.detach()
        master = self._masters[name]
        part = master.detach() if kind == "parameter" else self._base.state[master][kind]
        [flat] = self._owners_of(name).all_gather([part])
        return flat[: parameter.numel()].view(parameter.shape)

    def _join(self, name: str, piece: Tensor) -> Tensor:
        """Return a whole tensor, given this worker's piece."""
        cut = self._cuts[name]
        if cut.number == 1:
            return piece
        [whole] = self._group.all_gather([piece], cut.dim)
        if cut.pieces == tuple(range(self._group.size)):
            return whole
        chunks = whole.chunk(self._group.size, cut.dim)
        return torch.cat([chunks[cut.pieces.index(n)] for n in range(cut.number)], cut.dim)

    @torch.no_grad()
    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place, and create the state that the first step would create."""
        for name, parameter in self._parameters.items():
            if name in self._frozen:
                piece = self._read_piece(read, name, "parameter")
                parameter.data.copy_(piece.to(parameter.dtype))
                continue
            master, owners = self._masters[name], self._owners_of(name)
            state = self._base.state[master]
            if self._kinds:
                state["step"] = self._count(updates)
            for kind in self.kinds:
                piece = self._read_piece(read, name, kind)
                own = own_part([piece], len(master), owners.index)
                if kind == "parameter":
                    parameter.data.copy_(piece.to(parameter.dtype))
                    master.data.copy_(own)
                else:
                    state[kind] = self._device.put(own)
        if self._device.torch_device.type == "xla":
            self.shards()  # gathering takes graphs: compiled here, they delay no later save

    def _read_piece(self, read: Read, name: str, kind: str) -> Tensor:
        cut, rows = self._cuts[name], num_rows(self._shapes[name])
        piece = cut.pieces[self._group.index]
        if cut.dim == 0:
            each = rows // cut.number
            return read(name, kind, range(piece * each, (piece + 1) * each))
        return read(name, kind, range(rows)).chunk(cut.number, cut.dim)[piece]

    def _owners_of(self, name: str) -> Group:
        return self._owners[self._cuts[name].number]

    def _by_owners(self) -> list[tuple[list[str], Group]]:
        """Return the trained parameters' names, grouped by the workers with the same piece."""
        return [
            (names, owners)
            for number, owners in self._owners.items()
            if (names := [name for name in self._masters if self._cuts[name].number == number])
        ]

    def _count(self, updates: int) -> Tensor:
        """Return a number of steps in the form that the inner optimizer keeps."""
        if self._device.torch_device.type == "xla":
            from trnslurm.train.devices.xla import scalar_tensor

            return scalar_tensor(self._device, updates)
        return torch.tensor(float(updates), device=self._device.torch_device)

    def _rate(self, lr: float) -> Tensor | float:
        if self._device.torch_device.type == "xla":
            from trnslurm.train.devices.xla import rate_for

            return rate_for(self._device, lr, self._kinds)
        return lr


def _check(request: ShardingRequest, size: int) -> None:
    """Refuse what the group cannot divide, as the launcher does."""
    config: Any = request.blueprint.config
    if request.device.local_world % size:
        raise TrainError(
            f"strategy.tensor.workers is {size}, but {request.device.local_world} workers run on "
            "this node: a group must be within a node"
        )
    for key, number in (
        ("model.num_attention_heads", config.num_attention_heads),
        ("model.vocab_size", config.vocab_size),
        ("model.intermediate_size", config.intermediate_size),
        ("seq_len", request.plan.seq_len),
    ):
        if number % size:
            raise TrainError(f"strategy.tensor.workers is {size}, which does not divide {key}")
    keys = config.num_key_value_heads
    if keys % size and size % keys:
        raise TrainError(
            f"strategy.tensor.workers is {size}, which neither divides "
            f"model.num_key_value_heads nor is a multiple of it"
        )
    if config.attention_dropout:
        raise TrainError(
            "model.attention_dropout: with strategy.name=tensor, the workers of a group do not "
            "share random numbers: set it to 0"
        )


def _piece_shape(shape: tuple[int, ...], cut: Cut) -> list[int]:
    return [n // cut.number if dim == cut.dim else n for dim, n in enumerate(shape)]


def _padded(tensor: Tensor, parts: int) -> Tensor:
    """Lay a tensor end to end, padded with zeros so that it divides evenly."""
    flat = tensor.reshape(-1)
    return pad(flat, (0, -len(flat) % parts)) if len(flat) % parts else flat
