"""A cluster's compile cache: which graphs it has, which of them are in use, and removing others.

A job's key needs the versions of the cluster's Python, and so a host that has it. Elsewhere the key
is known only on the cluster, where the precompile job looks for itself.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trnslurm.cluster.python import interpreter, versions_here
from trnslurm.config import Cluster
from trnslurm.config.load import read_cluster
from trnslurm.config.search import read_yaml
from trnslurm.errors import RunError, SlurmError, TrnslurmError
from trnslurm.node.graphs.claims import Claim, newest_claim
from trnslurm.node.graphs.contents import Entry, choose, read_entry, remove
from trnslurm.node.graphs.key import PACKAGES, content_key, differences
from trnslurm.node.graphs.manifest import (
    CacheError,
    Manifest,
    cache_root,
    find_damage,
    is_trusted,
    read_manifest,
    user_ids,
)
from trnslurm.rundir import RunFiles, load_json
from trnslurm.runs.find import find_run, list_runs
from trnslurm.runs.foreign import refuse_foreign
from trnslurm.runs.phase import is_live
from trnslurm.runs.process import process_alive
from trnslurm.runs.root import check_run_root
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import run_status, statuses_of
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
    """That of graphs which are all there; None if they are not: cold."""
    problem: str = ""
    """Why the key is not known here, or why the cached graphs cannot be used."""
    known: bool = True
    """Whether this host can tell."""

    @property
    def warm(self) -> bool:
        """Check whether nothing has to be compiled."""
        return self.manifest is not None


class CompileCache:
    """A cluster's compile cache, as this host sees it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        root = check_run_root(Path(cluster.expand(cluster.run_root)))
        self.root = Path(cluster.expand(cache_root(cluster.compile_cache, str(root))))
        self.trusted = user_ids(cluster.compile_trust)
        self.bin_dir = cluster.slurm.bin_dir

    @cached_property
    def _measured(self) -> tuple[dict[str, str], str]:
        if image := self._cluster.container.image:
            return {}, f"the packages are those of {image}"
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
        """Check whether graphs that a user compiled are trusted."""
        return is_trusted(uid, self.trusted)

    def look_up(self, ingredients: Mapping[str, Any]) -> Compiled:
        """Return what the cache has for the graphs of a job."""
        if problem := self.unknown:
            return Compiled(problem=problem, known=False)
        key = content_key(ingredients, self.versions)
        if ingredients.get("device") == "neuron":  # it may depend on the nodes of the job
            problem = ""
            if self._cluster.compile_cache is None:
                problem = "compile_cache is not set, so graphs lie on the nodes"
            elif self._cluster.compile_layout == "per-host":
                problem = "every host has its own graphs"
            if problem:
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

    def all_keys(self) -> list[str]:
        """Return every key that has a directory."""
        try:
            places = [d for d in (self.root / "trnslurm").iterdir() if d.is_dir()]
        except OSError:
            return []
        # A link is nothing of ours, and what it leads to is not ours to remove.
        return sorted(d.name for d in places if _KEY.fullmatch(d.name) and not d.is_symlink())

    def manifests(self) -> Iterator[Manifest]:
        """Yield the manifests that can be read and are trusted."""
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
    """Return how long the compilation took; its nodes worked side by side."""
    return max((node.seconds for node in manifest.nodes), default=0.0) / 3600


def still_compiles(claim: Claim, bin_dir: str | None) -> bool:
    """Check whether the run that took a claim may still compile.

    A job that ended without a manifest does not, nor does a submission that was killed.
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


def entries_of(cache: CompileCache) -> list[Entry]:
    """Return what the cache holds, the longest unused first."""
    entries = [read_entry(cache.root, key, trusted=cache.trusted) for key in cache.all_keys()]
    return sorted(entries, key=lambda entry: entry.used)


def users_of(cache: CompileCache, roots: Sequence[Path]) -> dict[str, str]:
    """Return who uses which key, as far as runs can be seen from here."""
    found = {}
    for key in cache.all_keys():
        claim = newest_claim(cache.root, key)
        try:
            compiling = claim is not None and still_compiles(claim, cache.bin_dir)
        except SlurmError:  # nobody to ask here
            compiling = True
        if claim and compiling:
            found[key] = claim.holder.run or "a submission"
    statuses, _ = statuses_of(list_runs(list(roots)))
    for status in statuses:
        if not status.final and "key" in status.precompile:
            found[status.precompile["key"]] = status.run
    return found


def prune(
    cache: CompileCache,
    in_use: Collection[str],
    *,
    unused_since: float | None,
    max_bytes: int | None,
) -> list[Entry]:
    """Return what pruning removes: never what is in use."""
    entries = entries_of(cache)
    free = [entry for entry in entries if entry.key not in in_use]
    busy = [entry for entry in entries if entry.key in in_use]
    return choose(free, busy, unused_since=unused_since, max_bytes=max_bytes)


def remove_all(cache: CompileCache, entries: Sequence[Entry]) -> int:
    """Remove these keys; return the bytes that this freed."""
    gone = {entry.key for entry in entries}
    kept = [entry for entry in entries_of(cache) if entry.key not in gone]
    try:
        return sum(
            remove(cache.root, entry, [*kept, *entries[number + 1 :]])
            for number, entry in enumerate(entries)
        )
    except OSError as error:
        raise TrnslurmError(f"{error.filename}: cannot be removed ({error.strerror})") from None


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
        try:
            manifest = read_manifest(cache.root, word, trusted=cache.trusted)
        except CacheError as error:
            raise RunError(str(error)) from None
        if manifest is None:
            raise RunError(f"{word} has no manifest in {cache.root}: it is not compiled")
        return GraphSource(ingredients=manifest.ingredients, versions=manifest.versions)
    bundle = RunFiles(Path(word))
    if bundle.ingredients_file.is_file() and not bundle.record_file.is_file():
        for path in (bundle.path, bundle.config_file):  # the Python that it names will be started
            refuse_foreign(path, "compare")
        try:
            saved = read_yaml(bundle.config_file)["config"]
            own = CompileCache(read_cluster(saved, str(bundle.config_file)))
        except (KeyError, TypeError, ValueError):
            raise RunError(
                f"{bundle.config_file}: damaged; make a bundle with `trnslurm render -o DIR`"
            ) from None
        versions, unknown = own.versions, own.unknown
    else:
        run = find_run(word, list(roots))
        bundle, versions = run, run.record().precompile.get("versions", {})
        unknown = "" if versions else "not known where it was submitted"
    file = bundle.ingredients_file
    try:
        ingredients = load_json(file)
    except FileNotFoundError:
        raise RunError(
            f"{bundle.path} has no {file.name}: it was made by an older version, or prepares data"
        ) from None
    except (OSError, ValueError):
        raise RunError(f"{file}: damaged or unreadable") from None
    return GraphSource(ingredients=ingredients, versions=versions, unknown=unknown)
