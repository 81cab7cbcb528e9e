"""Non-tensor values as JSON: numbers, strings, and lists, tuples and dicts of them.

Nothing is pickled. Tensors and NumPy arrays among the values are saved under their own names.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# The key that marks what JSON has no form for.
_KIND, _OF = "$", "of"


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; add its tensors to `tensors`, under names that begin with `name`.

    Raise a TypeError that names a value that cannot be saved.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {_KIND: "tensor", _OF: name}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) for key in value) and _KIND not in value
        if plain:
            return {key: encode(each, f"{name}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [encode(key, name, tensors), encode(each, f"{name}.{key}", tensors)]
            for key, each in value.items()
        ]
        return {_KIND: "dict", _OF: pairs}
    if isinstance(value, (list, tuple)):
        found = [encode(each, f"{name}.{place}", tensors) for place, each in enumerate(value)]
        return found if isinstance(value, list) else {_KIND: "tuple", _OF: found}
    if isinstance(value, bytes):
        return {_KIND: "bytes", _OF: base64.b64encode(value).decode()}
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        array = numpy.ascontiguousarray(value)
        tensors[name] = torch.from_numpy(array.reshape(-1).view(numpy.uint8).copy())
        facts = {"dtype": array.dtype.str, "shape": list(numpy.shape(value))}
        return {_KIND: "array", _OF: name, **facts}
    raise TypeError(
        f"trnslurm.save: {name} is a {type(value).__name__}: only tensors, arrays, numbers, "
        "strings, and lists, tuples and dicts of them can be saved"
    )


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the original value; `tensor` returns a saved tensor by its name."""
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(each, tensor) for key, each in value.items()}
    of = value[_OF]
    if kind == "tensor":
        return tensor(of)
    if kind == "tuple":
        return tuple(decode(each, tensor) for each in of)
    if kind == "dict":
        return {decode(key, tensor): decode(each, tensor) for key, each in of}
    if kind == "bytes":
        return base64.b64decode(of)
    import numpy

    array = numpy.frombuffer(tensor(of).numpy().tobytes(), dtype=value["dtype"])
    shaped = array.reshape(value["shape"])
    return shaped.copy() if value["shape"] else shaped[()]


def tensors_in(value: Any) -> set[str]:
    """Return the names of the tensors in an encoded value."""
    if isinstance(value, list):
        return set().union(*map(tensors_in, value))
    if not isinstance(value, dict):
        return set()
    if value.get(_KIND) in ("tensor", "array"):
        return {value[_OF]}
    if value.get(_KIND) == "bytes":
        return set()
    return set().union(*map(tensors_in, value.values()))
