"""Measures a node, together with the others, for `trnslurm doctor --run`.

    python -m trnslurm.node.checkup --device neuron --devices 16 --workers 32 -- bash ranks.sh train

Started on every node at the same time, in place of a job's node.sh. A measurement that fails is
recorded and the next one follows: the launcher judges. In turn: this node's limits, EFA and
versions; the preflight; the links to node 0; on Neuron a graph in the cache; then the command, a
job's real node.sh, whose workers measure what takes all of them.

The graph is compiled as a precompile does it, by neuron_parallel_compile and under the job's own
flags, and judged by the parser that judges precompiles. Node 0 compiles it; on another node the
same command must find it in the cache: it would compile the graph again if that node's cache were
another one, or the graph's key differed there.
"""

import argparse
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from trnslurm.rundir import RunFiles, write_json

COMPILE_S = 180.0
_CACHE = "NEURON_COMPILE_CACHE_URL"
_GRAPH = ("-m", "trnslurm.train.checkup", "--graph")
_MEET_S = 60.0
_ORDER_S = COMPILE_S + 60.0
RANKS_S = 240.0
"""How long the workers have: on Neuron they compile three small graphs first."""
_TOOL_S = 20
# What the kernel's modules, and AWS's installer of EFA, say of themselves.
_FILES = {
    "neuron driver": (Path("/sys/module/neuron/version"), r"(\S+)"),
    "nvidia driver": (Path("/proc/driver/nvidia/version"), r"Kernel Module +(?:for \S+ +)?(\S+)"),
    "efa driver": (Path("/sys/module/efa/version"), r"(\S+)"),
    "EFA installer": (Path("/opt/amazon/efa_installed_packages"), r"version: *(\S+)"),
}
# The runtime, the collectives, the tools and the driver are packages of the system.
_SYSTEM_PACKAGES = (
    ("dpkg-query", "--show", "--showformat=${Package} ${Version}\n", "aws-neuronx-*"),
    ("rpm", "--query", "--all", "--queryformat=%{NAME} %{VERSION}-%{RELEASE}\n", "aws-neuronx-*"),
)


class Measurements:
    """What is known of this node so far."""

    def __init__(self, run: Path, node: int) -> None:
        self._file = RunFiles(run).checkup_file("node", node)
        host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.known: dict[str, Any] = {"node": node, "host": host}

    def note(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure something and record it at once: a later step may hang."""
        start = time.monotonic()
        try:
            self.known[name] = measure()
        except Exception as error:
            self.known[name] = {"problem": f"{type(error).__name__}: {error}"}
        self.known.setdefault("seconds", {})[name] = round(time.monotonic() - start, 2)
        write_json(self._file, self.known)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything; return 0 even if something is wrong, because the launcher judges."""
    options = parse(argv)
    rendezvous = read_rendezvous("checkup")
    num_nodes, on_neuron = len(rendezvous.hosts), options.device == "neuron"
    measurements = Measurements(rendezvous.run, rendezvous.node)
    say("limits, EFA, versions")
    raise_open_files(num_nodes * options.workers)
    measurements.note("limits", limits)
    measurements.note("efa", efa)
    measurements.note("versions", versions)
    say("preflight")
    measurements.note("preflight", lambda: {"exit_code": preflight(options)})
    if num_nodes > 1 or on_neuron:
        say("links between the nodes" + (", a graph" if on_neuron else ""))
        measurements.note("meeting", lambda: meet(rendezvous, options))
    say(f"the workers: {' '.join(options.command)}")
    measurements.note("workers", lambda: run_workers(options.command, options.deadline))
    say("done")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line: the preflight's options, and the command of the workers."""
    parser = argparse.ArgumentParser(prog="checkup", allow_abbrev=False)
    parser.add_argument("--device", required=True)
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cache-layout", default="shared")
    parser.add_argument("--graph-size", type=int, default=1000, help="makes the graph a new one")
    parser.add_argument("--deadline", type=float, default=RANKS_S, help="seconds of the workers")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def preflight(options: argparse.Namespace) -> int:
    """Run the preflight, which writes its own file; fi_info checks EFA, and sees more."""
    words = [f"--{name}={getattr(options, name)}" for name in ("device", "devices", "workers")]
    command = [sys.executable, "-m", "trnslurm.node.preflight", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def meet(rendezvous: Rendezvous, options: argparse.Namespace) -> dict[str, Any]:
    """Time the links; on Neuron have node 0 compile a graph, and the others find it."""
    command = graph_command(options.graph_size, options.cache_layout)
    alone = why_not_shared(options.cache_layout)
    found: dict[str, Any] = {}

    def obey(order: dict[str, Any]) -> None:
        if order.get("graph") and not order["graph"]["problem"] and not alone:
            found["graph"] = find_graph(command, order["graph"])

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
        if options.device == "neuron":
            found["graph"] = compile_graph(command) | {"alone": alone}
        order = {"graph": found.get("graph")}
        meeting.answer(dict.fromkeys(range(len(rendezvous.hosts)), order), _ORDER_S)
    finally:
        meeting.close()
    return found


def one_by_one() -> Callable[[Connection, float], dict[str, float]]:
    """Return what times the link to one node after the other, in MB/s `to` it and `from` it."""
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
    """Have node 0 time the link to this node, and carry out node 0's order."""
    with join(rendezvous, _MEET_S) as node0:
        node0.receive(_ORDER_S)  # this node's turn has come
        node0.stream()
        node0.send({"rate": node0.time_stream()})
        obey(node0.receive(_ORDER_S))


def graph_command(size: int, layout: str) -> list[str]:
    """Return the command whose trial run has the graph: one worker, so without a rendezvous."""
    environ = ["--unset=NEURON_RT_ROOT_COMM_ID", "NEURON_RT_NUM_CORES=1"]
    cache = os.environ.get(_CACHE)
    if cache and layout == "per-host":  # as node.sh has it
        environ.append(f"{_CACHE}={cache}/hosts/{os.uname().nodename}")
    end = ["timeout", "--kill-after=10", f"{COMPILE_S:g}"]
    return ["env", *environ, *end, "neuron_parallel_compile", sys.executable, *_GRAPH, str(size)]


def compile_graph(command: Sequence[str]) -> dict[str, Any]:
    """Compile the graph; return its files, or what is wrong."""
    report, problem = _run_compile(command)
    graphs = sorted(report.compiled | report.reused)
    if problem is None and not graphs:
        problem = "it names no graph that it compiled"
    files: list[dict[str, Any]] = []
    for graph in [] if problem else graphs:
        if "://" in graph:
            continue  # in S3 no file can be read here; a hit on another node shows it
        try:
            files.append(describe(Path(graph) / neuron.NEFF))
        except OSError as error:
            problem = f"{error.filename} is said to be compiled, but: {error.strerror}"
            break
    return {"graphs": graphs, "files": files, "problem": problem}


def find_graph(command: Sequence[str], made: dict[str, Any]) -> dict[str, Any]:
    """Look for node 0's graph on this node; return what is wrong."""
    for file in made["files"]:
        try:
            if describe(Path(file["path"])) != file:
                return {"problem": f"{file['path']} has other content here: two file systems?"}
        except OSError as error:
            return {"problem": f"{error.filename}: {error.strerror}"}
    report, problem = _run_compile(command)
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


def why_not_shared(layout: str) -> str:
    """Return why nodes do not find what another node compiled; empty if all share one cache."""
    if layout == "per-host":
        return "compile_layout: per-host"
    if not os.environ.get(_CACHE):
        return "compile_cache is not set: graphs lie in /var/tmp of each node"
    return ""


def _run_compile(command: Sequence[str]) -> tuple[neuron.Report, str | None]:
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


def limits() -> dict[str, int | None]:
    """Return how many bytes a worker may lock in memory, and how many files it may open.

    None: no limit.
    """
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

    An interface has a domain for each endpoint type, named after that type; libfabric 2 lists the
    domains of its fabric efa-direct, too.
    """
    code, said = _tool("fi_info", "-p", "efa")
    if code is None:
        return {"domains": [], "said": "fi_info is not on PATH"}
    domains = set(re.findall(r"^\s*domain: (\S+?)(?:-(?:rdm|dgrm))?\s*$", said, re.MULTILINE))
    return {"domains": sorted(domains), "said": "" if domains else _last_line(said)}


def versions() -> dict[str, str]:
    """Return the versions below Python, which must be the same on all nodes."""
    found = {"kernel": os.uname().release}
    for name, (file, pattern) in _FILES.items():
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(pattern, text):
            found[name] = match[1]
    for command in _SYSTEM_PACKAGES:
        code, said = _tool(*command)
        if code == 0:
            found |= {name: v for name, _, v in (li.partition(" ") for li in said.split("\n")) if v}
            break
    code, said = _tool("fi_info", "--version")
    if code == 0 and (match := re.search(r"^libfabric: *(\S+)", said, re.MULTILINE)):
        found["libfabric"] = match[1]
    return found


def _tool(*command: str) -> tuple[int | None, str]:
    """Return a tool's exit code and what it said; None: there is no such tool."""
    if not shutil.which(command[0]):
        return None, ""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TOOL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {_TOOL_S} s"
    return done.returncode, done.stdout + ("" if done.stdout else done.stderr)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1][:200]


def run_workers(command: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Run the command; end it and all that it started if it takes longer."""
    # A process group but no session: Slurm finds a job's processes by their session.
    child = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, process_group=0)

    def hand_on(signum: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signum)

    before = {s: signal.signal(s, hand_on) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        return {"exit_code": child.wait(deadline_s), "late": False}
    except subprocess.TimeoutExpired:
        hand_on(signal.SIGTERM, None)
        try:
            child.wait(10.0)
        except subprocess.TimeoutExpired:
            hand_on(signal.SIGKILL, None)
            child.wait()
        return {"exit_code": child.returncode, "late": True}
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def say(text: str) -> None:
    """Print a line for those who follow the log."""
    print(f"checkup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
