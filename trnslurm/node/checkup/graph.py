"""One small graph of Neuron's: node 0 compiles it into the cache, every other node finds it there.

Compiled as a precompile does it, by neuron_parallel_compile and under the job's own flags, and
judged by the parser that judges precompiles. On another node the same command must find the graph
compiled: it would compile it again if its cache were another, or the key of a graph were.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trnslurm.node.graphs import compile as compiling
from trnslurm.node.graphs import neuron

COMPILE_S = 180.0
_CACHE = "NEURON_COMPILE_CACHE_URL"
_GRAPH = ("-m", "trnslurm.train.checkup", "--graph")


def command_of(size: int, layout: str) -> list[str]:
    """Return the command that meets the graph: alone, so without the job's meeting point."""
    environ = ["--unset=NEURON_RT_ROOT_COMM_ID", "NEURON_RT_NUM_CORES=1"]
    cache = os.environ.get(_CACHE)
    if cache and layout == "per-host":  # as node.sh has it
        environ.append(f"{_CACHE}={cache}/hosts/{os.uname().nodename}")
    end = ["timeout", "--kill-after=10", f"{COMPILE_S:g}"]
    return ["env", *environ, *end, "neuron_parallel_compile", sys.executable, *_GRAPH, str(size)]


def compile_new(command: Sequence[str]) -> dict[str, Any]:
    """Compile the graph; return its files, or what is wrong."""
    report, problem = _run(command)
    graphs = sorted(report.compiled | report.reused)
    if problem is None and not graphs:
        problem = "it names no graph that it compiled"
    files: list[dict[str, Any]] = []
    for graph in [] if problem else graphs:
        if "://" in graph:
            continue  # S3 has its own word for what is there: a hit on another node
        try:
            files.append(describe(Path(graph) / neuron.NEFF))
        except OSError as error:
            problem = f"{error.filename} is said to be compiled, but: {error.strerror}"
            break
    return {"graphs": graphs, "files": files, "problem": problem}


def find_again(command: Sequence[str], made: dict[str, Any]) -> dict[str, Any]:
    """Look for node 0's graph on this node; return what is wrong."""
    for file in made["files"]:
        try:
            if describe(Path(file["path"])) != file:
                return {"problem": f"{file['path']} has other content here: two file systems?"}
        except OSError as error:
            return {"problem": f"{error.filename}: {error.strerror}"}
    report, problem = _run(command)
    if problem is None and report.compiled:
        problem = f"it compiled {len(report.compiled)} graphs again instead of finding them"
    if problem is None and not set(made["graphs"]) <= report.reused:
        problem = "it did not say that it found the graph (Using a cached neff)"
    return {"problem": problem}


def describe(path: Path) -> dict[str, Any]:
    """Read a file whole."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return {"path": str(path), "bytes": len(data), "sha256": digest}


def shared_cache(layout: str) -> str:
    """Return why no node finds what another has compiled; empty if all have one cache."""
    if layout == "per-host":
        return "compile_layout: per-host"
    if not os.environ.get(_CACHE):
        return "compile_cache is not set: graphs lie in /var/tmp of each node"
    return ""


def _run(command: Sequence[str]) -> tuple[neuron.Report, str | None]:
    report = neuron.Report()
    try:
        with Path(os.devnull).open("wb") as keep:
            code = compiling.run(command, report.read, keep)
    except OSError as error:
        return report, f"{command[0]}: {error.strerror}"
    if code == 127:
        return report, "neuron_parallel_compile is not on PATH"
    if code == 124:
        return report, f"no end after {COMPILE_S:g} s"
    return report, neuron.problem(report, code)
