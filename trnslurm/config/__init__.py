"""Recipes and cluster profiles: YAML in, frozen dataclasses out."""

from trnslurm.config.load import describe, presets_of, resolve, resolve_cluster
from trnslurm.config.schema import Batch, Cluster, Config, Origin, Recipe, Reference, Slurm
from trnslurm.config.search import Workspace, packaged_root, user_root

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
    "packaged_root",
    "presets_of",
    "resolve",
    "resolve_cluster",
    "user_root",
]
