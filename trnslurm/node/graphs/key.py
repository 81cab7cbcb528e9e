"""The content key, which is the same for all jobs that have the same graphs."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from trnslurm.contract.variables import Variable

FORMAT = 1
# Packages that turn a program into graphs, or graphs into machine code.
PACKAGES = (
    "torch",
    "torch-xla",
    "torch-neuronx",
    "libneuronxla",
    "neuronx-cc",
    "nki",
    "transformers",
    "timm",
)


def content_key(ingredients: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Return the key of these ingredients, compiled by these package versions."""
    whole = json.dumps([FORMAT, ingredients, versions], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def own_versions() -> dict[str, str]:
    """Return the versions of PACKAGES in this Python environment, or in the job's container."""
    from importlib import metadata  # takes 35 ms, and the launcher does not call this

    if measured := os.environ.get(Variable.VERSIONS):
        return dict(json.loads(measured))
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield every dotted name whose values differ, and both values; None if it is missing."""
    left, right = dict(leaves(a)), dict(leaves(b))
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield name, left.get(name), right.get(name)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for everything that is not a mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
