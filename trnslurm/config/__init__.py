"""Recipes and cluster profiles: YAML in, frozen dataclasses out."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trnslurm.config.load import (
        describe,
        read_cluster,
        read_config,
        refuse_locked,
        resolve,
        resolve_cluster,
    )
    from trnslurm.config.recipes import chain_of, preset_before, presets_of
    from trnslurm.config.schema import (
        Batch,
        Cluster,
        Config,
        Origin,
        Recipe,
        Reference,
        Slurm,
        Strategy,
    )
    from trnslurm.config.search import Workspace, packaged_root, parse_yaml, user_root
    from trnslurm.config.tree import flatten

__all__ = [
    "Batch",
    "Cluster",
    "Config",
    "Origin",
    "Recipe",
    "Reference",
    "Slurm",
    "Strategy",
    "Workspace",
    "chain_of",
    "describe",
    "flatten",
    "packaged_root",
    "parse_yaml",
    "preset_before",
    "presets_of",
    "read_cluster",
    "read_config",
    "refuse_locked",
    "resolve",
    "resolve_cluster",
    "user_root",
]

# Each is imported when it is first used: to find a run no recipe is needed.
_WHERE = {
    "load": (
        "describe", "read_cluster", "read_config", "refuse_locked", "resolve", "resolve_cluster",
    ),
    "recipes": ("chain_of", "preset_before", "presets_of"),
    "schema": ("Batch", "Cluster", "Config", "Origin", "Recipe", "Reference", "Slurm", "Strategy"),
    "search": ("Workspace", "packaged_root", "parse_yaml", "user_root"),
    "tree": ("flatten",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"trnslurm.config.{module}"), name)
    raise AttributeError(f"module 'trnslurm.config' has no attribute {name!r}")
