"""Measures a node, together with the others, for `trnslurm doctor --run`.

    python -m trnslurm.node.preflight.checkup --device neuron --devices 16 --workers 32 \
        -- bash ranks.sh train

It starts on every node at the same time, instead of a job's node.sh. It measures, one after
another, this node's limits, EFA and versions; the preflight; the links to node 0; and on Neuron a
graph in the cache. Finally it runs the command, a job's real node.sh, whose workers measure
together. If a measurement fails, it records that and continues, because the launcher judges.

The graph is compiled like a precompile: on neuron by neuron_parallel_compile under the job's flags,
whose parser judges it; on torchneuron by a short run that leaves a file. Node 0 compiles the graph;
on another node the same command must find the graph in the cache. If that node had another cache,
or another key for the graph, the command would compile it again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.devices import device_named
from trnslurm.node.graphs import compile as compiling
from trnslurm.node.graphs import neuron
from trnslurm.node.meeting import (
    Connection,
    Meeting,
    MeetingError,
    Rendezvous,
    join,
    read_rendezvous,
)
from trnslurm.node.processes import ask_tool, handling, last_line, start_group

COMPILE_S = 180.0
_CACHE = "NEURON_COMPILE_CACHE_URL"
_NEFFS = "TORCH_NEURONX_NEFF_CACHE_DIR"
_STAND_IN = Variable.STAND_IN_DEVICE  # as in trnslurm.train.checkup
_GRAPH = ("-m", "trnslurm.train.checkup")
_MEET_S = 60.0
_ORDER_S = COMPILE_S + 60.0
RANKS_S = 240.0
"""How long the workers may take. On Neuron they first compile three small graphs."""
# Versions that the kernel modules and AWS's EFA installer record.
_FILES = {
    "neuron driver": (Path("/sys/module/neuron/version"), r"(\S+)"),
    "nvidia driver": (Path("/proc/driver/nvidia/version"), r"Kernel Module +(?:for \S+ +)?(\S+)"),
    "efa driver": (Path("/sys/module/efa/version"), r"(\S+)"),
    "EFA installer": (Path("/opt/amazon/efa_installed_packages"), r"version: *(\S+)"),
}
# The runtime, the collectives, the tools and the driver are system packages.
_SYSTEM_PACKAGES = (
    ("dpkg-query", "--show", "--showformat=${Package} ${Version}\n", "aws-neuronx-*"),
    ("rpm", "--query", "--all", "--queryformat=%{NAME} %{VERSION}-%{RELEASE}\n", "aws-neuronx-*"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything; return 0 even if something is wrong, because the launcher judges."""
    options = parse(argv)
    rendezvous = read_rendezvous("checkup")
    num_nodes, on_neuron = len(rendezvous.hosts), options.device.on_trainium
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    found: dict[str, Any] = {"node": rendezvous.node, "host": host}
    note = partial(measure, RunFiles(rendezvous.run).checkup_file("node", rendezvous.node), found)
    say("limits, EFA, versions")
    raise_open_files(num_nodes * options.workers)
    note("limits", limits)
    note("efa", efa)
    note("versions", versions)
    say("preflight")
    note("preflight", lambda: {"exit_code": preflight(options)})
    if num_nodes > 1 or on_neuron:
        say("links between the nodes" + (", a graph" if on_neuron else ""))
        note("meeting", lambda: meet(rendezvous, options))
    say(f"the workers: {' '.join(options.command)}")
    note("workers", lambda: run_workers(options.command, options.deadline))
    say("done")
    return 0


def measure(file: Path, found: dict[str, Any], name: str, measurement: Callable[[], Any]) -> None:
    """Measure something and record it at once, because a later step may hang."""
    start = time.monotonic()
    try:
        found[name] = measurement()
    except Exception as error:
        found[name] = {"problem": f"{type(error).__name__}: {error}"}
    found.setdefault("seconds", {})[name] = round(time.monotonic() - start, 2)
    write_json(file, found)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line: the preflight's options, and the workers' command."""
    parser = argparse.ArgumentParser(prog="checkup", allow_abbrev=False)
    parser.add_argument("--device", required=True, type=device_named)
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cache-layout", default="shared")
    parser.add_argument("--cache", default="", help="TorchNeuron's cache")
    parser.add_argument("--graph-size", type=int, default=1000, help="makes the graph new")
    parser.add_argument("--deadline", type=float, default=RANKS_S, help="seconds for the workers")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def preflight(options: argparse.Namespace) -> int:
    """Run the preflight, which writes its own file. fi_info checks EFA more thoroughly."""
    words = [f"--{name}={getattr(options, name)}" for name in ("device", "devices", "workers")]
    command = [sys.executable, "-m", "trnslurm.node.preflight", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def meet(rendezvous: Rendezvous, options: argparse.Namespace) -> dict[str, Any]:
    """Time the links. On Neuron, node 0 compiles a graph, and the others find it."""
    graph = graph_of(options)
    alone = graph.why_not_shared()
    found: dict[str, Any] = {}

    def obey(order: dict[str, Any]) -> None:
        if order.get("graph") and not order["graph"]["problem"] and not alone:
            found["graph"] = graph.find(order["graph"])

    if rendezvous.node:
        try:
            time_link(rendezvous, obey)
        except MeetingError as error:
            found["problem"] = str(error)
        return found
    meeting = Meeting(rendezvous, one_by_one())
    try:
        deadline = time.monotonic() + _MEET_S
        meeting.open(deadline)
        meeting.wait(deadline)
        found["rates"] = {str(node): rates for node, rates in sorted(meeting.heard.items())}
        if options.device.on_trainium:
            found["graph"] = graph.compile() | {"alone": alone}
        order = {"graph": found.get("graph")}
        meeting.answer(dict.fromkeys(range(len(rendezvous.hosts)), order), _ORDER_S)
    finally:
        meeting.close()
    return found


def one_by_one() -> Callable[[Connection, float], dict[str, float]]:
    """Return a function that times the links one at a time, in MB/s `to` and `from` a node."""
    turn = threading.Lock()

    def hear(connection: Connection, deadline: float) -> dict[str, float]:
        with turn:
            if time.monotonic() > deadline:
                raise TimeoutError
            connection.send({"stream": True})
            rate_from = connection.time_stream()
            connection.stream()
            return {"to": float(connection.receive(_MEET_S)["rate"]), "from": rate_from}

    return hear


def time_link(rendezvous: Rendezvous, obey: Callable[[dict[str, Any]], None]) -> None:
    """Time the link with node 0 when it is this node's turn, and follow node 0's order."""
    with join(rendezvous, _MEET_S) as node0:
        node0.receive(_ORDER_S)  # this node's turn has come
        node0.stream()
        node0.send({"rate": node0.time_stream()})
        obey(node0.receive(_ORDER_S))


def graph_of(options: argparse.Namespace) -> XlaGraph | NativeGraph:
    """Return the graph for the job's device."""
    if options.device.parallel_compile:
        return XlaGraph(options.graph_size, options.cache_layout)
    return NativeGraph(options.graph_size, options.cache)


class XlaGraph:
    """A small graph that neuron_parallel_compile compiles."""

    def __init__(self, size: int, layout: str) -> None:
        self._layout = layout
        self.command = self._command(size)
        """The trial run that has the graph: one worker, without a rendezvous."""

    def compile(self) -> dict[str, Any]:
        """Compile the graph; return its files, or what is wrong."""
        report, problem = self._run()
        graphs = sorted(report.compiled | report.reused)
        if problem is None and not graphs:
            problem = "it reports no compiled graphs"
        files: list[dict[str, Any]] = []
        for graph in [] if problem else graphs:
            if "://" in graph:
                continue  # files in S3 cannot be read here; a hit on another node is the proof
            try:
                files.append(describe(Path(graph) / neuron.NEFF))
            except OSError as error:
                problem = f"Neuron reports {error.filename} as compiled, but: {error.strerror}"
                break
        return {"graphs": graphs, "files": files, "problem": problem}

    def find(self, made: dict[str, Any]) -> dict[str, Any]:
        """Look for node 0's graph on this node; return what is wrong."""
        if problem := _differing(made["files"]):
            return {"problem": problem}
        report, problem = self._run()
        if problem is None and report.compiled:
            problem = f"it compiled {len(report.compiled)} graphs again instead of finding them"
        if problem is None and not set(made["graphs"]) <= report.reused:
            problem = "it does not report that it found the graph (Using a cached neff)"
        return {"problem": problem}

    def why_not_shared(self) -> str:
        """Return why nodes do not find each other's graphs, or "" if all share one cache."""
        if self._layout == "per-host":
            return "compile_layout: per-host"
        if not os.environ.get(_CACHE):
            return "compile_cache is not set: graphs are in each node's /var/tmp"
        return ""

    def _command(self, size: int) -> list[str]:
        environ = []
        cache = os.environ.get(_CACHE)
        if cache and self._layout == "per-host":  # as node.sh has it
            environ.append(f"{_CACHE}={cache}/hosts/{os.uname().nodename}")
        graph = (sys.executable, *_GRAPH, "--graph", str(size))
        return _alone(environ, ["neuron_parallel_compile", *graph])

    def _run(self) -> tuple[neuron.Report, str | None]:
        report = neuron.Report()
        code, problem = _run(self.command, report.read)
        if code == 127:
            return report, "neuron_parallel_compile is not on PATH"
        return report, problem or neuron.problem(report, code)


class NativeGraph:
    """A small graph that TorchNeuron compiles where it runs, into a directory of the cache."""

    def __init__(self, size: int, cache: str) -> None:
        self._size = size
        cache = cache or os.environ.get(_NEFFS) or "compiled"
        self._directory = Path(cache, f"checkup-{os.getuid()}").absolute()

    def compile(self) -> dict[str, Any]:
        """Compile the graph; return its files, or what is wrong."""
        if stand_in := os.environ.get(_STAND_IN):
            return {"skipped": stand_in, "files": [], "graphs": [], "problem": None}
        shutil.rmtree(self._directory, ignore_errors=True)  # from an earlier checkup
        made, problem = self._run()
        if problem is None and not made:
            problem = f"it left no graph in {self._directory}"
        files = [] if problem else [describe(file) for file in made]
        return {"graphs": [*map(str, made)], "files": files, "problem": problem}

    def find(self, made: dict[str, Any]) -> dict[str, Any]:
        """Look for node 0's graph on this node; return what is wrong."""
        if made.get("skipped"):
            return {"problem": None}
        if problem := _differing(made["files"]):
            return {"problem": problem}
        again, problem = self._run()
        if problem is None and again:
            problem = f"it compiled {len(again)} graphs again instead of finding them"
        return {"problem": problem}

    def why_not_shared(self) -> str:
        """Return no reason: all nodes share the directory, in the cache or the run directory."""
        return ""

    def _run(self) -> tuple[list[Path], str | None]:
        """Run the graph; return the files that are new or rewritten, and what is wrong."""
        before = self._seen()
        with tempfile.TemporaryDirectory(prefix="trnslurm-") as local:
            own = [f"{_NEFFS}={self._directory}", f"TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR={local}"]
            graph = [sys.executable, *_GRAPH, "--native-graph", str(self._size)]
            code, problem = _run(_alone(own, graph), lambda line: None)
        if code and problem is None:
            problem = f"its run failed (exit code {code}): the error is above"
        return sorted(file for file, at in self._seen().items() if before.get(file) != at), problem

    def _seen(self) -> dict[Path, tuple[int, int]]:
        seen = {}
        for file in self._directory.rglob("*.neff"):
            found = file.stat()
            seen[file] = (found.st_ino, found.st_mtime_ns)
        return seen


def _alone(environ: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command with a single core, no rendezvous, and a time limit."""
    own = ["--unset=NEURON_RT_ROOT_COMM_ID", "NEURON_RT_NUM_CORES=1", *environ]
    return ["env", *own, "timeout", "--kill-after=10", f"{COMPILE_S:g}", *command]


def _run(command: Sequence[str], read: Callable[[str], None]) -> tuple[int, str | None]:
    """Run a graph's command; return its exit code and, if only that shows one, a problem."""
    try:
        with Path(os.devnull).open("wb") as keep:
            code = compiling.run(command, read, keep)
    except OSError as error:
        return 1, f"{command[0]}: {error.strerror}"
    return code, f"did not finish within {COMPILE_S:g} s" if code == 124 else None


def _differing(files: Sequence[dict[str, Any]]) -> str | None:
    """Return how a file that node 0 has made differs on this node."""
    for file in files:
        try:
            if describe(Path(file["path"])) != file:
                return f"{file['path']} has different content here: are these two file systems?"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
    return None


def describe(path: Path) -> dict[str, Any]:
    """Return a file's path, size and checksum."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return {"path": str(path), "bytes": len(data), "sha256": digest}


def limits() -> dict[str, int | None]:
    """Return how much memory a worker may lock and how many files it may open; None is no limit."""
    found = {"memlock": resource.RLIMIT_MEMLOCK, "files": resource.RLIMIT_NOFILE}
    soft = {name: resource.getrlimit(which)[0] for name, which in found.items()}
    return {name: None if n == resource.RLIM_INFINITY else n for name, n in soft.items()}


def raise_open_files(workers: int) -> None:
    """Raise `ulimit -n` as node.sh does for a job with this number of workers."""
    wanted = max(65536, 256 + 4 * workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def efa() -> dict[str, Any]:
    """Return the domains that libfabric finds on EFA, or why there are none.

    An interface has a domain for each endpoint type, named after the type. libfabric 2 also lists
    the domains of its fabric efa-direct.
    """
    code, said = ask_tool("fi_info", "-p", "efa")
    if code is None:
        return {"domains": [], "said": "fi_info is not on PATH"}
    domains = set(re.findall(r"^\s*domain: (\S+?)(?:-(?:rdm|dgrm))?\s*$", said, re.MULTILINE))
    return {"domains": sorted(domains), "said": "" if domains else last_line(said)}


def versions() -> dict[str, str]:
    """Return the versions of software below Python, which must be the same on all nodes."""
    found = {"kernel": os.uname().release}
    for name, (file, pattern) in _FILES.items():
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(pattern, text):
            found[name] = match[1]
    for command in _SYSTEM_PACKAGES:
        code, said = ask_tool(*command)
        if code == 0:
            found |= {name: v for name, _, v in (li.partition(" ") for li in said.split("\n")) if v}
            break
    code, said = ask_tool("fi_info", "--version")
    if code == 0 and (match := re.search(r"^libfabric: *(\S+)", said, re.MULTILINE)):
        found["libfabric"] = match[1]
    return found


def run_workers(command: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Run the command. If it takes too long, end it and everything that it started."""
    # A process group but no session: Slurm finds a job's processes by their session.
    child = start_group(command, stdin=subprocess.DEVNULL)

    def forward(signum: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signum)

    with handling((signal.SIGTERM, signal.SIGINT), forward):
        try:
            return {"exit_code": child.wait(deadline_s), "late": False}
        except subprocess.TimeoutExpired:
            forward(signal.SIGTERM, None)
        try:
            child.wait(10.0)
        except subprocess.TimeoutExpired:
            forward(signal.SIGKILL, None)
            child.wait()
        return {"exit_code": child.returncode, "late": True}


def say(text: str) -> None:
    """Print a line for `doctor --run`, which follows the log."""
    print(f"checkup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
