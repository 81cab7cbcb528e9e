"""A cluster's compile cache: looks up the graphs of a job.

A job's key depends on package versions in the cluster's Python, so only a host with that Python
knows the key. For other hosts, the precompile job looks up the graphs on the cluster.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from trnslurm.cluster.claims import Claim, Holder, newest_in, take_next
from trnslurm.cluster.python import interpreter, versions_here
from trnslurm.config.schema import Cluster
from trnslurm.devices import DEVICES
from trnslurm.errors import TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.node.graphs.key import PACKAGES, content_key, differences
from trnslurm.node.graphs.manifest import (
    COMPILED,
    NOT_COMPILED,
    CacheError,
    GraphCache,
    GraphManifest,
    cache_root,
    user_ids,
)
from trnslurm.runs.root import check_run_root
from trnslurm.schedulers.choice import scheduler_of

PRECOMPILE = "precompile"
_KEY = r"[0-9a-f]{16}"
_RECIPE = r"jobs/([^/]+)/"


class Compiled(Frozen):
    """The state of a job's graphs in the cache."""

    key: str = ""
    """The graph key; empty if this host does not know it."""
    manifest: GraphManifest | None = None
    """The manifest if all graphs are cached (warm), or None if not (cold)."""
    problem: str = ""
    """Why this host does not know the key, or why the cached graphs cannot be used."""
    known: bool = True
    """Whether this host knows the state of the graphs."""

    @property
    def warm(self) -> bool:
        """Check whether there is nothing to compile."""
        return self.manifest is not None

    @property
    def words(self) -> str:
        """The state of the job's graphs in words."""
        if not self.known:
            return f"whether they are compiled is known only on the cluster ({self.problem})"
        if self.manifest:
            run = str(self.manifest.made.get("run", ""))
            return f"{COMPILED} (key {self.key}{f', by {Path(run).name}' if run else ''})"
        return f"{NOT_COMPILED} (key {self.key}{f': {self.problem}' if self.problem else ''})"


class CompileCache(GraphCache):
    """A cluster's compile cache, as this host sees it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.scheduler = scheduler_of(cluster)
        runs = check_run_root(Path(self.scheduler.expand(cluster.run_root)))
        root = Path(self.scheduler.expand(cache_root(cluster.compile_cache, str(runs))))
        super().__init__(root, user_ids(cluster.compile_trust))
        self._one_asks = threading.Lock()

    def ask_ahead(self) -> None:
        """Start querying the versions in a thread, because starting Python takes a moment."""
        threading.Thread(target=lambda: self._measured, daemon=True).start()

    @property
    def is_asking(self) -> bool:
        """Check whether a query for the versions is running, so that a caller must wait."""
        return self._one_asks.locked()

    @property
    def _measured(self) -> tuple[dict[str, str], str]:
        with self._one_asks:
            return self._answer

    @cached_property
    def _answer(self) -> tuple[dict[str, str], str]:
        if image := self._cluster.container.image:
            return {}, f"the packages are in the image {image}"
        try:
            found = versions_here(self._cluster, PACKAGES)
        except TrnslurmError as error:
            return {}, str(error)
        missing = "" if "torch" in found else "has no torch on this host"
        return found, missing and f"{interpreter(self._cluster)} {missing}"

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that compile, as far as this host knows them."""
        return self._measured[0]

    @property
    def unknown(self) -> str:
        """Why this host does not know any keys, or empty if it does."""
        return self._measured[1]

    def newest_claim(self, key: str) -> Claim | None:
        """Return the newest claim of a key, the only one that counts, or None."""
        return newest_in(self.directory(key))

    def take_claim(self, key: str, holder: Holder, after: Claim | None) -> Claim | None:
        """Take the claim that follows a stale one, or return None if another process was faster."""
        return take_next(self.open(key), holder, after, readers=self.root)

    def look_up(self, ingredients: Mapping[str, Any]) -> Compiled:
        """Return the state of a job's graphs in the cache."""
        if problem := self.unknown:
            return Compiled(problem=problem, known=False)
        key = content_key(ingredients, self.versions)
        device = DEVICES.get(str(ingredients.get("device")))
        if device and device.cache_on_nodes:
            problem = ""
            if self._cluster.compile_cache is None:
                problem = "compile_cache is not set, so the graphs are on the nodes"
            elif self._cluster.compile_layout == "per-host":
                problem = "every host has its own graphs"
            if problem:
                return Compiled(key=key, problem=problem, known=False)
        try:
            manifest = self.read(key)
        except CacheError as error:
            return Compiled(key=key, problem=str(error))
        if manifest and (damage := self.first_damage(manifest, hashes=False)):
            return Compiled(key=key, problem=damage)
        return Compiled(key=key, manifest=manifest)

    def all_keys(self) -> list[str]:
        """Return every key that has a directory."""
        try:
            places = [d for d in (self.root / "trnslurm").iterdir() if d.is_dir()]
        except OSError:
            return []
        # trnslurm does not create links here, and must not remove a link's target.
        return sorted(d.name for d in places if re.fullmatch(_KEY, d.name) and not d.is_symlink())

    def manifests(self) -> Iterator[GraphManifest]:
        """Yield the manifests that are readable and trusted."""
        for key in self.all_keys():
            try:
                manifest = self.read(key)
            except CacheError:
                continue
            if manifest:
                yield manifest

    def most_alike(self, ingredients: Mapping[str, Any]) -> GraphManifest | None:
        """Return the manifest for the same recipe that differs least from these ingredients."""
        same = [m for m in self.manifests() if recipe_of(m.ingredients) == recipe_of(ingredients)]
        return min(
            same, key=lambda m: len([*differences(m.ingredients, ingredients)]), default=None
        )


def recipe_of(ingredients: Mapping[str, Any]) -> str:
    """Return the recipe whose code is among the ingredients."""
    names = ingredients.get("source", {})
    return next((match[1] for name in names if (match := re.match(_RECIPE, name))), "")


def compile_hours(manifest: GraphManifest) -> float:
    """Return how long the compilation took; the nodes worked in parallel."""
    return max((node.seconds for node in manifest.nodes), default=0.0) / 3600
