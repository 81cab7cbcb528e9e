"""A script's state: models and optimizers by the names of their parameters, and other values."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.saves.pieces import Files, parts_of
from trnslurm.saves.values import decode, encode, tensors_in


def saved_of(value: Any, state: Mapping[str, Any]) -> Any:
    """Return what to save for a part of a state."""
    if isinstance(value, nn.Module):
        return _of_dcp().get_model_state_dict(value)
    if isinstance(value, torch.optim.Optimizer) and (model := _model_of(value, state)):
        if not value.state:  # it has made no step, or keeps no state
            return {"state": {}, "param_groups": _groups(value)}
        return _of_dcp().get_optimizer_state_dict(model, value)
    return value.state_dict() if _is_stateful(value) else value


def load_part(
    name: str, value: Any, state: MutableMapping[str, Any], saved: Mapping[str, Any], files: Files
) -> list[str]:
    """Load a part of a state; return what does not fit."""
    if name not in saved:
        return [f"it contains no {name}, only {', '.join(saved)}"]
    told = saved[name]
    model = None
    if isinstance(value, torch.optim.Optimizer) and not told.get("state"):
        for group, values in zip(value.param_groups, told.get("param_groups", ())):
            group.update({k: v for k, v in decode(values, files.whole).items() if k != "params"})
        return []
    if isinstance(value, nn.Module):
        now = _of_dcp().get_model_state_dict(value)
    elif isinstance(value, torch.optim.Optimizer) and (model := _model_of(value, state)):
        now = _of_dcp().get_optimizer_state_dict(model, value)
    elif isinstance(value, Tensor):
        now = value
    else:
        read = decode(told, files.whole)
        if _is_stateful(value):
            value.load_state_dict(read)
        elif isinstance(value, dict):
            value.clear()
            value.update(read)
        else:
            state[name] = read
        return []
    live: dict[str, Tensor] = {}
    encode(now, name, live)
    there = tensors_in(told)
    # A parameter that never had a gradient has no state.
    missing = live.keys() - there if model is None else ()
    wrong = [f"{each} is missing" for each in sorted(missing)]
    wrong += [f"{each} is not in the current state" for each in sorted(there - live.keys())]
    if wrong:
        return wrong
    # The number of workers and this worker's rank do not matter: each fills what it has.
    parts = parts_of({each: live[each] for each in sorted(there)}, 0, 1)
    wrong = [problem for each, part in parts.items() if (problem := files.fill(each, part))]
    if not wrong and isinstance(value, nn.Module):
        _of_dcp().set_model_state_dict(value, now)
    elif not wrong and model is not None:
        _of_dcp().set_optimizer_state_dict(model, value, decode(told, live.__getitem__))
    return wrong


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k != "params"} for each in optimizer.param_groups]


def _model_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> nn.Module | None:
    """Return the model that an optimizer updates, whose parameter names key the state."""
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for value in state.values():
        if isinstance(value, nn.Module) and stepped <= {id(one) for one in value.parameters()}:
            return value
    return None


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _of_dcp() -> Any:
    from torch.distributed.checkpoint import state_dict

    return state_dict
