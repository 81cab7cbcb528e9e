"""Finds, compiles and verifies a job's graphs on its nodes.

The batch script's node computes the key, looks the graphs up in the cache, and commits the results
of a precompile. Every node runs these in the run directory:

    python -m trnslurm.node.graphs compile -- COMMAND ...    the precompile
    python -m trnslurm.node.graphs verify                    before training

A job's container runs this before the key is known:

    python -m trnslurm.node.graphs versions
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.contract.files import load_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.times import utc_time
from trnslurm.node.graphs import locks
from trnslurm.node.graphs.compile import GraphPlace, read_place, run_compile
from trnslurm.node.graphs.key import content_key, own_versions
from trnslurm.node.graphs.manifest import (
    COMPILED,
    NOT_COMPILED,
    USED,
    CachedFile,
    CacheError,
    GraphCache,
    GraphManifest,
    NodeResult,
    user_name,
)
from trnslurm.node.graphs.neuron import NEFF


def main(argv: Sequence[str] | None = None) -> int:
    """Run the given command, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:2] == ["compile", "--"] and words[2:]:
            return run_compile(words[2:])
        if words == ["verify"]:
            verify(read_place())
            return 0
        if words == ["versions"]:
            print(json.dumps(own_versions()))
            return 0
    except CacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(
        "usage: graphs verify | graphs versions | graphs compile -- COMMAND [ARGUMENT ...]",
        file=sys.stderr,
    )
    return 2


def own_key(run: Path) -> str:
    """Return the key of this job's graphs for the package versions of this Python environment."""
    return content_key(read_ingredients(run), own_versions())


def are_compiled(ingredients: Path) -> bool:
    """Check whether the cache has the graphs for other ingredients, such as for fewer nodes."""
    try:
        key = content_key(load_json(ingredients), own_versions())
        return read_place().cache.read(key) is not None
    except (CacheError, OSError, ValueError):
        return False


def read_ingredients(run: Path) -> dict[str, Any]:
    """Read the settings of this job that determine its graphs."""
    try:
        return load_json(RunFiles(run).ingredients_file)
    except ValueError as error:
        raise CacheError(f"{RunFiles(run).ingredients_file}: {error}") from None


def is_warm(place: GraphPlace) -> bool:
    """Check whether all graphs are compiled. If not, prepare the cache for the compile."""
    try:
        manifest = place.cache.read(place.key)
    except CacheError as error:
        manifest = None
        print(f"compiling again: {error}")
    if manifest is None:
        place.say(NOT_COMPILED)
    elif place.on_nodes:
        place.say(f"{COMPILED} by an earlier job, possibly on other nodes")
    elif not _discard_damaged(place, manifest):
        place.say(f"{COMPILED} by {manifest.made.get('by')}")
        return True
    place.cache.open(place.key)
    for lock in locks.clear_stale(place.directory, place.has_ended):
        print(f"removed a lock left by a compile that has ended: {lock}")
    for lock in locks.all_locks(place.cache.root):
        print(f"note: a graph is locked. If no process is compiling it, remove {lock}")
    return False


def _discard_damaged(place: GraphPlace, manifest: GraphManifest) -> bool:
    """Remove damaged files, because the compiler would use them without a check."""
    found = list(place.cache.damaged(manifest.files.values(), hashes=True))
    for path, reason in found:
        print(f"compiling again: {reason}")
        path.unlink(missing_ok=True)
        path.with_name("model.done").unlink(missing_ok=True)  # marks a compiled graph for Neuron
    return bool(found)


def commit(place: GraphPlace) -> None:
    """Join the nodes' results, check that no graph is missing, and write the manifest."""
    results = place.results()
    if bad := [result for result in results if result["problem"]]:
        more = f" (and {len(bad) - 1} more nodes)" if len(bad) > 1 else ""
        raise CacheError(f"precompile on {bad[0]['host']}: {bad[0]['problem']}{more}")
    nodes = join(place.cache, results)
    if not any(node.graphs for node in nodes):
        raise CacheError("no node found a graph to compile")
    if place.per_host:
        nodes += _other_hosts(place, {node.host for node in nodes})
    manifest = GraphManifest(
        key=place.key,
        ingredients=read_ingredients(place.run),
        versions=own_versions(),
        made={
            "by": user_name(os.getuid()),
            "run": str(place.run),
            "attempt": place.attempt,
            "job": place.job_id(),
            "at": utc_time(),
        },
        nodes=nodes,
    )
    if damage := place.cache.first_damage(manifest, hashes=False):
        raise CacheError(damage)
    with place.cache.shared_with_others():
        path = place.cache.write(manifest)
    listed = (
        f"{len(manifest.files)} files" if manifest.files else "files not visible from this node"
    )
    place.say(f"{sum(n.compiled for n in nodes)} {COMPILED}, {listed}, {path}")


def _other_hosts(place: GraphPlace, hosts: Collection[str]) -> tuple[NodeResult, ...]:
    """Return the results of earlier precompiles on other hosts, if all their files exist."""
    try:
        before = place.cache.read(place.key)
    except CacheError:
        before = None
    return tuple(
        node
        for node in (before.nodes if before else ())
        if node.host not in hosts and not any(place.cache.damaged(node.files, hashes=False))
    )


def join(cache: GraphCache, results: Collection[dict[str, Any]]) -> tuple[NodeResult, ...]:
    """Return the manifest's entries. Refuse a graph that no node compiled.

    A graph that was locked has been compiled by another node. It exists now, because all nodes have
    ended.
    """
    settled = {graph for result in results for graph in result["settled"]}
    nodes = []
    for result in results:
        files = [CachedFile(**file) for file in result["files"]]
        known = {file.name for file in files}
        for graph in set(result["graphs"]) - set(result["settled"]):
            neff = Path(graph) / NEFF
            if not (graph in settled or neff.is_file()):
                raise CacheError(f"node {result['node']} needs {graph}, which no node has compiled")
            inside = neff.is_relative_to(cache.root)
            if inside and str(neff.relative_to(cache.root)) not in known:
                files.append(cache.describe(neff))
        words = ("node", "host", "compiled", "failed", "seconds")
        facts = {word: result[word] for word in words} | {"graphs": result["found"]}
        nodes.append(NodeResult(**facts, files=tuple(sorted(files, key=lambda f: f.name))))
    return tuple(nodes)


def verify(place: GraphPlace) -> None:
    """Refuse to train on this node unless all graphs are present and unchanged.

    Every node checks the sizes of all files, and the contents of its share of them.
    """
    start = time.monotonic()
    try:
        manifest = place.cache.read(place.key)
        if manifest is None:
            raise CacheError(f"nothing is compiled for key {place.key} in {place.cache.root}")
        files = _files_for(place, manifest)
        whole = place.cache.damaged(files, hashes=False)
        parts = 1 if place.per_host else len(manifest.nodes)
        mine = files[0 if place.per_host else place.node :: parts]
        read = place.cache.damaged(mine, hashes=True)
        for _, reason in (*whole, *read):
            raise CacheError(f"the graphs of key {place.key} are damaged: {reason}")
    except CacheError as error:
        raise CacheError(f"{error}: run {place.compile_command}, then start this again") from None
    if place.node == 0:
        # In a team's cache the file may belong to another user.
        with suppress(OSError), place.cache.shared_with_others():
            (place.directory / USED).touch()
    seen = f"{len(files)} files" if files else "files not visible from this node"
    place.say(f"complete, {seen}, {time.monotonic() - start:.1f} s")


def _files_for(place: GraphPlace, manifest: GraphManifest) -> list[CachedFile]:
    """Return the files that this host's workers will load."""
    if not place.per_host:
        return list(manifest.files.values())
    own = [node for node in manifest.nodes if node.host == place.host]
    if not own:
        raise CacheError(f"nothing is compiled for key {place.key} on {place.host}")
    return list({file.name: file for node in own for file in node.files}.values())
