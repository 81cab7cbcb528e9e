"""The keys of profiles, recipes and settings, as users' files have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trnslurm.config.load import resolve
from trnslurm.config.recipes import RECIPE_KEYS
from trnslurm.config.schema import Cluster, Recipe
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.config.tree import fields_of
from trnslurm.plan.keys import keys_of

JOBS = packaged_root() / "jobs"


def keys_in(cls: Any, above: str = "") -> Iterator[str]:
    """Each key with what it accepts, and its default."""
    for field in dataclasses.fields(cls):
        hint = fields_of(cls)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from keys_in(hint, f"{above}{field.name}.")
            continue
        words = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        plain = field.default is not dataclasses.MISSING
        yield f"{above}{field.name}, {words}{f' = {field.default!r}' if plain else ''}"


def test_every_key(stable) -> None:
    workspace = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")
    of_profiles = [*RECIPE_KEYS.keys() - fields_of(Recipe).keys()]
    found = {
        "profile": ["description", "remote", *keys_in(Cluster)],
        "recipe": ["description", "presets", *keys_in(Recipe)],
        "recipe, as in a profile": sorted(of_profiles),
        "preset": ["description", "then", "as in a recipe"],
    }
    for file in sorted(JOBS.glob("*/recipe.yaml")):
        config = resolve(workspace, file.parent.name, cluster="local")
        own = [key for key in keys_of(config) if key.key.startswith(("model.", "train."))]
        found[f"{config.title}"] = [f"{k.key}, {k.accepts} = {k.default!r}" for k in own]
    stable.compare("keys.txt", found)
