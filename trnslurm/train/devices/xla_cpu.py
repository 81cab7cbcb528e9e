"""torch_xla's collectives over gloo, through host memory: a stand-in for the transport only.

torch_xla's CPU client has no collectives between processes: every process sees a world of one. With
these functions instead, torch_xla's ZeroRedundancyOptimizer and all other callers run unchanged in
many processes with one CPU device each. Every call ends the graph, so there are more and smaller
graphs than on Trainium.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from trnslurm.train.devices.device import Timer

_OPS = {xm.REDUCE_SUM: dist.ReduceOp.SUM, xm.REDUCE_MAX: dist.ReduceOp.MAX}


_timer = Timer()
_subgroups: dict[str, Any] = {}
"""gloo's group of this worker, by the groups that a caller names."""


def install(timer: Timer) -> None:
    """Replace torch_xla's functions with those of this module; gloo must be initialized.

    The timer measures the time in collectives, including the wait for slower workers.
    """
    global _timer
    _timer = timer
    for function in (all_reduce, reduce_scatter, all_gather, rendezvous):
        setattr(xm, function.__name__, function)
    for name in ("world_size", "global_device_count"):
        setattr(xr, name, dist.get_world_size)
    xr.global_ordinal = dist.get_rank


def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, **options: Any) -> Any:
    """Reduce over a group: a list of tensors in place, a single tensor into a new one."""
    tensors = _as_list(inputs)
    results = _reduce(reduce_type, tensors, scale, _group_of(options))
    if isinstance(inputs, Tensor):
        return _to_device(results[0], inputs.device)
    for tensor, result in zip(tensors, results, strict=True):
        tensor.copy_(_to_device(result, tensor.device))
    return inputs


def reduce_scatter(
    reduce_type: str,
    input: Any,  # noqa: A002  (torch_xla passes it by this name)
    scale: float,
    scatter_dim: int,
    shard_count: int,
    **options: Any,
) -> Any:
    """Reduce a tensor, or each in a list, over a group, and keep this worker's shard."""
    group = _group_of(options)
    assert shard_count == dist.get_world_size(group)
    tensors = _as_list(input)
    shards = [
        _to_device(result.chunk(shard_count, scatter_dim)[dist.get_rank(group)], tensor.device)
        for tensor, result in zip(tensors, _reduce(reduce_type, tensors, scale, group), strict=True)
    ]
    return shards[0] if isinstance(input, Tensor) else shards


def all_gather(value: Any, dim: int = 0, **options: Any) -> Any:
    """Join a group's tensors along a dimension, for a single tensor or for each in a list."""
    group = _group_of(options)
    tensors = _as_list(value)
    hosts = _to_host(tensors)
    # As bytes, because gloo does not know every type, and in one piece, because it is faster.
    mine = torch.cat([host.reshape(-1).view(torch.uint8) for host in hosts])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with _timer("collectives"):
        dist.all_gather(rows, mine, group=group)
    sizes = [host.numel() * host.element_size() for host in hosts]
    pieces = zip(*(torch.split(row, sizes) for row in rows), strict=True)
    gathered = [
        _to_device(
            torch.cat([piece.clone().view(host.dtype).view(host.shape) for piece in parts], dim),
            tensor.device,
        )
        for tensor, host, parts in zip(tensors, hosts, pieces, strict=True)
    ]
    return gathered[0] if isinstance(value, Tensor) else gathered


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait for all workers and return the payload of each."""
    torch_xla.sync()
    payloads: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(payloads, payload)
    return payloads


def _reduce(reduce_type: str, tensors: list[Tensor], scale: float, group: Any) -> list[Tensor]:
    hosts = _to_host(tensors)
    flat = torch.cat([host.reshape(-1).float() for host in hosts])
    with _timer("collectives"):
        dist.all_reduce(flat, op=_OPS[reduce_type], group=group)
    pieces = torch.split(flat * scale, [host.numel() for host in hosts])
    return [
        piece.view(host.shape).to(host.dtype) for piece, host in zip(pieces, hosts, strict=True)
    ]


def _to_host(tensors: list[Tensor]) -> list[Tensor]:
    # One sync for all of them; .cpu() on pending tensors would make a graph of each.
    torch_xla.sync()
    return [tensor.detach().cpu() for tensor in tensors]


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    # As a vector: torch_xla compiles a 0-dimensional tensor of exactly 0 or 1 into the graph.
    return host.reshape(-1).to(device).reshape(host.shape)


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _group_of(options: dict[str, Any]) -> Any:
    """Return gloo's group for the groups that a call names, or None for all workers.

    All workers make the same calls, so the first call with a division creates its groups
    everywhere.
    """
    assert options.get("output") is None, "only results as new tensors"
    groups = options.get("groups") or []
    if len(groups) <= 1:
        return None
    if str(groups) not in _subgroups:
        divide: Any = dist.new_subgroups_by_enumeration  # not annotated
        _subgroups[str(groups)] = divide(groups)[0]
    return _subgroups[str(groups)]
