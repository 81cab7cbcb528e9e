"""Runs a compile on one node, reads its output, and records the compiled graphs.

    python -m trnslurm.node.graphs compile -- neuron_parallel_compile python … train.py plan.json

The compile's output passes through unchanged, and signals are forwarded to the compile. If the
trial run fails, this program fails too, so that srun ends the other nodes, whose workers would wait
for this node's workers. After the trial run the exit code is 0, because srun would otherwise end
the other nodes while they compile. Missing graphs are recorded, and make the precompile fail when
all nodes have ended. On xla-cpu and torchneuron the command is the trial run itself, and the graphs
are files: TorchNeuron compiles only on the machine where it runs.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trnslurm.contract.files import load_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import State
from trnslurm.contract.variables import Variable
from trnslurm.devices import DeviceType, device_named
from trnslurm.frozen import Frozen
from trnslurm.node.graphs import locks, neuron
from trnslurm.node.graphs.manifest import CacheError, GraphCache, user_ids
from trnslurm.node.processes import handling

_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Processes that the command leaves behind may hold its output open forever.
_LAST_WORDS_S = 2.0
_NOTE_S = 10.0


class GraphPlace(Frozen):
    """The location of a job's graphs, from the environment that the batch script sets."""

    run: Path
    cache: GraphCache
    key: str
    device: DeviceType
    per_host: bool
    on_nodes: bool
    """Whether graphs are on the nodes' own disks, so that another run's nodes may have none."""
    attempt: int
    node: int
    host: str

    @property
    def directory(self) -> Path:
        return self.cache.directory(self.key)

    @property
    def compile_command(self) -> str:
        """The command that compiles the missing graphs."""
        script = RunFiles(self.run).script("precompile").name
        start = "sbatch" if script.endswith(".sbatch") else "bash"
        return f"cd {shlex.quote(str(self.run))} && {start} {script}"

    def say(self, state: str) -> None:
        """Print the state of the graphs."""
        print(f"graphs of key {self.key}: {state}")

    def results(self) -> list[dict[str, Any]]:
        """Read the results of all nodes in this attempt."""
        nodes = load_json(RunFiles(self.run).plan_file)["nodes"]
        found = []
        for node in range(nodes):
            try:
                found.append(load_json(self.result_path(node)))
            except (OSError, ValueError) as error:
                raise CacheError(f"node {node} has not written its result ({error})") from None
        return found

    def result_path(self, node: int) -> Path:
        """Return the file for the results of one node in this attempt."""
        return RunFiles(self.run).graphs_file(self.attempt, node)

    def has_ended(self, taker: dict[str, Any]) -> bool:
        """Check whether the precompile that left locks has ended. An unknown precompile has not."""
        try:
            run, attempt = Path(taker["run"]), int(taker["attempt"])
            if run == self.run and attempt < self.attempt:
                return True  # it may not have recorded its end, as when its node rebooted
            state = State(load_json(RunFiles(run).state_file("precompile", attempt))["state"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return not state.under_way

    def job_id(self) -> str:
        """Return the job id of this attempt, from its state file."""
        return str(load_json(RunFiles(self.run).state_file("precompile", self.attempt))["job_id"])


def read_place() -> GraphPlace:
    """Read a job's location in the cache from the environment."""
    environ = os.environ
    device = device_named(environ[Variable.DEVICE])
    per_host = environ[Variable.CACHE_LAYOUT] == "per-host"
    return GraphPlace(
        run=Path(environ[Variable.RUN_DIR]),
        cache=GraphCache(
            Path(environ[Variable.CACHE]).expanduser().absolute(),
            user_ids(environ[Variable.CACHE_TRUST].split()),
        ),
        key=environ[Variable.GRAPH_KEY],
        device=device,
        per_host=per_host,
        # Without a URL, Neuron keeps graphs in /var/tmp.
        on_nodes=per_host or (device.cache_on_nodes and "NEURON_COMPILE_CACHE_URL" not in environ),
        attempt=int(environ[Variable.ATTEMPT]),
        node=int(environ.get("SLURM_NODEID", "0")),
        host=os.uname().nodename,
    )


def run_compile(command: Sequence[str]) -> int:
    """Run the command. A nonzero exit code means that srun must end the other nodes."""
    exit_code, reason = 1, None
    try:
        place = read_place()
        compile_graphs = run_on_neuron if place.device.parallel_compile else run_trial
        with place.cache.shared_with_others():
            exit_code, result = compile_graphs(place, command)
        reason = result["problem"]
        place.result_path(place.node).write_text(json.dumps(result, indent=1), encoding="utf-8")
    except CacheError as error:
        exit_code, reason = 1, str(error)
    except OSError as error:
        exit_code, reason = 1, f"{error.filename}: {error.strerror}"
    if reason:
        print(f"error: precompile on {os.uname().nodename}: {reason}", file=sys.stderr, flush=True)
    return 128 - exit_code if exit_code < 0 else exit_code


def run_on_neuron(place: GraphPlace, command: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run neuron_parallel_compile, and read its output."""
    report, start = neuron.Report(), time.monotonic()
    taker = {"run": str(place.run), "attempt": place.attempt, "node": place.node}
    held = locks.HeldLocks(place.cache.root, place.directory, taker | {"job": place.job_id()})
    due = start

    def read(line: str) -> None:
        nonlocal due
        report.read(line)
        if time.monotonic() >= due:  # a node that is switched off cannot record anything
            with suppress(OSError):  # for example on a full disk; the next try may succeed
                held.note(report.graphs)
            due = time.monotonic() + _NOTE_S

    with output_file(place) as keep:
        exit_code = run(command, read, keep)
    problem = neuron.problem(report, exit_code)
    held.note(report.graphs if problem else ())
    settled = report.compiled | report.reused
    here = [graph for graph in sorted(settled) if graph.startswith("/")]  # this host's files
    missing = [graph for graph in here if not (Path(graph) / neuron.NEFF).is_file()]
    if missing and not problem:
        problem = f"Neuron reports {missing[0]} as compiled, but it has no {neuron.NEFF}"
    neffs = [] if problem else [Path(graph) / neuron.NEFF for graph in sorted(settled)]
    result = {
        "found": max(len(report.graphs), report.totals.get("graphs", 0)),
        "compiled": report.totals.get("successful compilations", 0),
        "failed": report.totals.get("failed compilations", 0),
        "graphs": sorted(report.graphs),
        "settled": sorted(settled),
    }
    if problem and -exit_code not in _FORWARDED:
        exit_code = 0 if report.trial_ended else exit_code or 1
    return exit_code, result | common(place, start, problem, neffs)


def run_trial(place: GraphPlace, command: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run the trial, in which the workers fill their own caches."""
    caches = open_caches(place)
    start = time.monotonic()
    with output_file(place) as keep:
        exit_code = run(command, lambda line: None, keep)
    found = [sorted(file for file in cache.rglob("*") if is_graph(file)) for cache in caches]
    files = [file for each in found for file in each]
    problem = None
    if exit_code:
        problem = f"the trial run failed (exit code {exit_code}): its error is above"
    elif not all(found):
        problem = "the trial run compiled no graphs: does the job train on its device?"
    counts = {"found": len(files), "compiled": len(files), "failed": 0}
    no_names: dict[str, Any] = {"graphs": [], "settled": []}
    own = common(place, start, problem, [] if problem else files)
    return exit_code or int(bool(problem)), counts | no_names | own


def open_caches(place: GraphPlace) -> list[Path]:
    """Make the directories that this node's workers fill."""
    cache = place.directory / place.device.cache_name
    if not place.device.cache_per_worker:
        cache.mkdir(parents=True, exist_ok=True)  # other nodes use it, too
        return [cache]
    workers = load_json(RunFiles(place.run).plan_file)["workers_per_node"]
    caches = [cache / str(rank) for rank in range(place.node * workers, (place.node + 1) * workers)]
    for each in caches:
        shutil.rmtree(each, ignore_errors=True)  # left by an earlier compile that failed
        each.mkdir(parents=True)
    return caches


def is_graph(file: Path) -> bool:
    """Check whether a graph file is complete. TorchNeuron writes to a temporary name first."""
    return file.is_file() and (file.suffix == ".neff" or file.parent.parent.name == "xla")


def common(
    place: GraphPlace, start: float, problem: str | None, paths: Sequence[Path]
) -> dict[str, Any]:
    """Return the facts that every compile records, without files outside the cache."""
    inside = [path for path in paths if path.is_relative_to(place.cache.root)]
    return {
        "node": place.node,
        "host": place.host,
        "seconds": round(time.monotonic() - start, 1),
        "problem": problem,
        "files": [asdict(place.cache.describe(path)) for path in inside],
    }


@contextmanager
def output_file(place: GraphPlace) -> Iterator[Any]:
    """Open the log of the compile, which stays next to the graphs."""
    directory = place.directory / "output"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"node{place.node}.log").open("wb", buffering=0) as file:
        yield file


def run(command: Sequence[str], read: Callable[[str], None], keep: Any) -> int:
    """Run the command to completion. Pass on its output, and forward signals to it."""
    came: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(signum: int, _frame: object) -> None:
        came.append(signum)
        if child:
            child.send_signal(signum)

    with handling(_FORWARDED, forward):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for early in tuple(came):
            child.send_signal(early)
        assert child.stdout
        for line in lines(child, child.stdout.fileno(), keep):
            read(line)
        child.stdout.close()
        return child.wait()


def lines(child: subprocess.Popen[bytes], source: int, keep: Any) -> Iterator[str]:
    """Copy a command's output at once, and yield its lines, or empty lines while it is silent."""
    rest = b""
    while True:
        readable, _, _ = select.select([source], [], [], _LAST_WORDS_S)
        if not readable and child.poll() is not None:
            break
        if not readable:
            yield ""
        piece = os.read(source, 65536) if readable else None
        if piece == b"":
            break
        if piece:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            keep.write(piece)
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
