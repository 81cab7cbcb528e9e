"""Which graphs are compiled already: a job's key, and what the cluster's cache has for it.

The key needs the versions of the cluster's Python, and so a host that has it. Elsewhere a key is
known only on the cluster, where the precompile job looks for itself.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trnslurm.cluster.python import interpreter, versions_here
from trnslurm.config import Cluster
from trnslurm.errors import RunError, TrnslurmError
from trnslurm.node.graphs.claims import Claim
from trnslurm.node.graphs.key import PACKAGES, content_key, differences
from trnslurm.node.graphs.manifest import (
    CacheError,
    Manifest,
    cache_root,
    find_damage,
    read_manifest,
    user_ids,
)
from trnslurm.runs.phase import is_live
from trnslurm.runs.process import process_alive
from trnslurm.runs.root import check_run_root
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import run_status
from trnslurm.slurm.commands import Slurm, find_job

PRECOMPILE = "precompile"
_SUBMITTING_S = 180  # no sbatch, with all that is tried after it, takes longer
_KEY = re.compile(r"[0-9a-f]{16}")
_RECIPE = re.compile(r"jobs/([^/]+)/")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the cache has for one job."""

    key: str = ""
    """Empty: not known here."""
    manifest: Manifest | None = None
    """Of graphs that are all there; None: cold."""
    problem: str = ""
    """Why the key is not known here, or why what lies in the cache does not serve."""

    known: bool = True
    """Whether this host can tell."""

    @property
    def warm(self) -> bool:
        """Whether nothing has to be compiled."""
        return self.manifest is not None


class CompileCache:
    """A cluster's compile cache, as this host sees it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        root = check_run_root(Path(cluster.run_root))
        self.root = Path(cache_root(cluster.compile_cache, str(root))).expanduser()
        self.trusted = user_ids(cluster.compile_trust)
        self.bin_dir = cluster.slurm.bin_dir

    @cached_property
    def _measured(self) -> tuple[dict[str, str], str]:
        try:
            found = versions_here(self._cluster, PACKAGES)
        except TrnslurmError as error:
            return {}, str(error)
        missing = "" if "torch" in found else "has no torch on this host"
        return found, missing and f"{interpreter(self._cluster)} {missing}"

    @property
    def versions(self) -> dict[str, str]:
        """The versions of what compiles, as far as this host has them."""
        return self._measured[0]

    @property
    def unknown(self) -> str:
        """Why no key is known on this host; empty if they are."""
        return self._measured[1]

    def trusts(self, uid: int) -> bool:
        """Whether graphs that a user compiled are believed."""
        return uid in {0, os.getuid(), *self.trusted}

    def look_up(self, ingredients: Mapping[str, Any]) -> Compiled:
        """Return what there is for the graphs of a job."""
        if problem := self.unknown:
            return Compiled(problem=problem, known=False)
        key = content_key(ingredients, self.versions)
        if problem := self._on_nodes(ingredients):
            return Compiled(key=key, problem=problem, known=False)
        try:
            manifest = read_manifest(self.root, key, trusted=self.trusted)
            damage = manifest and find_damage(
                self.root, manifest, hashes=False, trusted=self.trusted
            )
        except CacheError as error:
            return Compiled(key=key, problem=str(error))
        if damage:
            return Compiled(key=key, problem=damage)
        return Compiled(key=key, manifest=manifest)

    def _on_nodes(self, ingredients: Mapping[str, Any]) -> str:
        """Say why it depends on the nodes of a job whether its graphs are there."""
        if ingredients.get("device") != "neuron":
            return ""
        if self._cluster.compile_cache is None:
            return "compile_cache is not set, so graphs lie on the nodes"
        return "every host has its own graphs" if self._cluster.compile_layout == "per-host" else ""

    def all_keys(self) -> list[str]:
        """Return every key that has a directory."""
        try:
            names = [d.name for d in (self.root / "trnslurm").iterdir() if d.is_dir()]
        except OSError:
            return []
        return sorted(name for name in names if _KEY.fullmatch(name))

    def manifests(self) -> Iterator[Manifest]:
        """Yield the manifests that can be read and believed."""
        for key in self.all_keys():
            try:
                manifest = read_manifest(self.root, key, trusted=self.trusted)
            except CacheError:
                continue
            if manifest:
                yield manifest

    def most_alike(self, ingredients: Mapping[str, Any]) -> Manifest | None:
        """Return what was compiled for the same recipe with the fewest differences."""
        same = [m for m in self.manifests() if recipe_of(m.ingredients) == recipe_of(ingredients)]
        return min(
            same, key=lambda m: len([*differences(m.ingredients, ingredients)]), default=None
        )


def recipe_of(ingredients: Mapping[str, Any]) -> str:
    """Return the recipe whose code is among the ingredients."""
    names = ingredients.get("source", {})
    return next((match[1] for name in names if (match := _RECIPE.match(name))), "")


def compile_hours(manifest: Manifest) -> float:
    """Return how long its compilation took: its nodes worked side by side."""
    return max((node.seconds for node in manifest.nodes), default=0.0) / 3600


def still_compiles(claim: Claim, bin_dir: str | None) -> bool:
    """Whether the run that took a claim may still compile; a job that ended without a manifest, or
    a submission that was killed, does not.
    """
    holder = claim.holder
    if not holder.job:
        here = holder.host == socket.gethostname()
        return process_alive(holder.process) if here else claim.age_s < _SUBMITTING_S
    if "@" not in holder.job:
        queue = Slurm(bin_dir).queue([holder.user])
        return is_live(find_job(queue, holder.job, Path(holder.run)))
    try:
        status = run_status(RunDir(Path(holder.run)))
    except RunError:  # deleted, or not for us to read
        return holder.host == socket.gethostname() and process_alive(holder.job)
    return not any(p.final for p in status.phases if p.phase == PRECOMPILE)
