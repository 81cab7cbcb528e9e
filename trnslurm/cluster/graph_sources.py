"""Finds what shapes the graphs of a run, a bundle or a key, to compare them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trnslurm.cluster.cache import CompileCache
from trnslurm.config import Cluster
from trnslurm.config.load import read_cluster
from trnslurm.errors import RunError
from trnslurm.node.graphs.key import INGREDIENTS
from trnslurm.node.graphs.manifest import CacheError, read_manifest
from trnslurm.runs.find import find_run
from trnslurm.runs.foreign import refuse_foreign
from trnslurm.runs.run import RunDir


@dataclass(frozen=True, kw_only=True)
class GraphSource:
    """The ingredients of a key, and the versions if they are known."""

    ingredients: Mapping[str, Any]
    versions: Mapping[str, str]
    unknown: str = ""
    """Why the versions are not known."""


def find_source(word: str, cache: CompileCache, roots: Sequence[Path]) -> GraphSource:
    """Return what a word names: a key of the cache, a bundle's directory, or a run."""
    if word in cache.all_keys():
        return _of_key(word, cache)
    path = Path(word)
    if (path / INGREDIENTS).is_file() and not (path / "run.json").is_file():
        own = CompileCache(_profile_of(path))
        return GraphSource(ingredients=_read(path), versions=own.versions, unknown=own.unknown)
    return _of_run(find_run(word, list(roots)))


def _profile_of(bundle: Path) -> Cluster:
    """Return the cluster that a bundle was rendered for; its Python will be started."""
    file = bundle / "config.yaml"
    for path in (bundle, file):
        refuse_foreign(path, "compare")
    try:
        return read_cluster(yaml.safe_load(file.read_bytes())["config"], str(file))
    except (KeyError, TypeError, ValueError, yaml.YAMLError):
        raise RunError(f"{file}: damaged; make a bundle with `trnslurm render -o DIR`") from None


def _of_key(key: str, cache: CompileCache) -> GraphSource:
    try:
        manifest = read_manifest(cache.root, key, trusted=cache.trusted)
    except CacheError as error:
        raise RunError(str(error)) from None
    if manifest is None:
        raise RunError(f"{key} has no manifest in {cache.root}: it is not compiled")
    return GraphSource(ingredients=manifest.ingredients, versions=manifest.versions)


def _of_run(run: RunDir) -> GraphSource:
    ingredients, versions = _read(run.path), run.record().precompile.get("versions", {})
    unknown = "" if versions else "not known where it was submitted"
    return GraphSource(ingredients=ingredients, versions=versions, unknown=unknown)


def _read(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / INGREDIENTS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunError(
            f"{directory} has no {INGREDIENTS}: it was made by an older version, or prepares data"
        ) from None
    except (OSError, ValueError, TypeError):
        raise RunError(f"{directory / INGREDIENTS}: damaged or unreadable") from None
