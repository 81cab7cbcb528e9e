"""Recipes and cluster profiles: YAML in, frozen dataclasses out."""

from trnslurm.config.load import (
    describe,
    presets_of,
    read_cluster,
    refuse_locked,
    resolve,
    resolve_cluster,
)
from trnslurm.config.schema import Batch, Cluster, Config, Origin, Recipe, Reference, Slurm
from trnslurm.config.search import Workspace, packaged_root, user_root
from trnslurm.config.tree import flatten

__all__ = [
    "Batch",
    "Cluster",
    "Config",
    "Origin",
    "Recipe",
    "Reference",
    "Slurm",
    "Workspace",
    "describe",
    "flatten",
    "packaged_root",
    "presets_of",
    "read_cluster",
    "refuse_locked",
    "resolve",
    "resolve_cluster",
    "user_root",
]
