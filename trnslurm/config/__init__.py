"""Recipes and cluster profiles: YAML in, frozen dataclasses out."""

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
