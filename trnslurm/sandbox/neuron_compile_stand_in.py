"""Stands in for neuron_parallel_compile: runs a command, and reports on its graphs."""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

# In NEURON_CC_FLAGS: recompile graphs that failed or were interrupted before.
_RETRY = "--retry_failed_compilation"
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def neuron_parallel_compile(
    home: Path, behaviour: str, arguments: Sequence[str], behaviour_now: Callable[[], str]
) -> int:
    """Run a command in graph extraction mode, then pretend to compile its graphs."""
    parser = argparse.ArgumentParser(prog="neuron_parallel_compile", allow_abbrev=False)
    parser.add_argument("--command", choices=("collect-and-compile", "collect", "compile"))
    parser.add_argument("run", nargs=argparse.REMAINDER, metavar="CMD ...")
    options = parser.parse_args(arguments)
    workdir = home / socket.gethostname() / os.environ.get("USER", "no-user") / "workdir"
    shutil.rmtree(workdir, ignore_errors=True)  # so a second run on this node breaks the first
    workdir.mkdir(parents=True)
    if options.command != "compile" and not options.run:
        parser.print_help()
        return 0  # the real tool does the same
    if options.command != "compile" and not trial_run(options.run, workdir, behaviour):
        return 1
    if options.command == "collect":
        return 0
    return compile_graphs(behaviour, behaviour_now, options.run)


def trial_run(command: list[str], workdir: Path, behaviour: str) -> bool:
    """Run the command; return whether its graphs can be compiled."""
    trial_log = workdir / f"trial_run_pid{os.getpid()}_log.txt"
    trial_log.touch()
    if run(command) != 0 or behaviour == "script-error":
        log("There was an error in the training script.", "ERROR")
        if not os.environ.get("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE"):
            return False
    if not trial_log.exists():
        log(f"{trial_log} was deleted by a second run on this node", "ERROR")
    return trial_log.exists()


def run(command: list[str]) -> int:
    """Run a command and forward signals to it; a signal that ends this process ends it first."""
    came: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(signum: int, _frame: object) -> None:
        came.append(signum)
        if child:
            child.send_signal(signum)

    every = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
    heard = [signum for signum in every if signal.getsignal(signum) is not signal.SIG_IGN]
    for signum in heard:
        signal.signal(signum, forward)
    environ = os.environ | {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}
    try:  # the real tool, too, merges stderr into stdout
        child = subprocess.Popen(command, env=environ, stderr=subprocess.STDOUT)
        for early in tuple(came):
            child.send_signal(early)
        return child.wait()
    except OSError as error:
        log(str(error), "ERROR")
        return 1
    finally:
        for signum in heard:
            signal.signal(signum, signal.SIG_DFL)
        for ending in set(came) & set(_ENDING):
            os.kill(os.getpid(), ending)


def compile_graphs(behaviour: str, behaviour_now: Callable[[], str], command: Sequence[str]) -> int:
    """Report on the graphs, and write the compiled ones; return the number of failed graphs.

    A command that ends with `--graph N` has only graph N, and finds it if it is in the cache.
    """
    cache = os.environ.get("NEURON_COMPILE_CACHE_URL") or "/var/tmp/neuron-compile-cache"
    numbers = range(1, 257 if behaviour == "failed-256" else 5)
    if named := "--graph" in command[-2:-1]:
        numbers = range(int(command[-1]), int(command[-1]) + 1)
    graphs = [f"{cache}/neuronxcc-0/MODULE_{n}+standin/model.hlo_module.pb" for n in numbers]
    graphs = [graph for graph in graphs if not given_up(graph)]
    found = graphs and Path(neff := graphs[0].replace("hlo_module.pb", "neff")).is_file()
    if named and found:
        print(f"Using a cached neff at {neff}", flush=True)
        graphs = []
    if behaviour == "no-graphs" or not graphs:
        log("No todo hlos found in cache or hlo_tasklist")
        return 0
    for graph in graphs:  # the trial run of the real tool prints this
        print(f"Extracting graphs ({graph}) for ahead-of-time parallel compilation.", flush=True)
    log(f"New graph list from script {len(graphs)}: ")
    if behaviour == "locked":
        graphs = []
    if behaviour == "slow":
        behaviour = compile_slowly(graphs, behaviour_now)
    while behaviour in ("hang", "stale-lock"):
        if behaviour == "stale-lock":
            write(graphs[0] + ".lock")
            print(f"[INFO]: Another process must be compiling {graphs[0]}", flush=True)
        time.sleep(60)
    failing = ("failed-graphs", "failed-old", "killed")
    num_failed = 256 if behaviour == "failed-256" else 2 * (behaviour in failing)
    for graph in graphs[:num_failed]:
        text = f"Subprocess {os.getpid()} encountered error: neuronx-cc {graph}: exit status 70"
        if behaviour == "killed":
            text = "parallel compilation with neuronx-cc exited with error.Received error code: -9"
        log(text, "ERROR")
        write(memory_of(graph))
    if behaviour == "exception":
        log("sub-process 1 got exception: None")
        del graphs[2:]  # no report has the graphs of that process
    for graph in graphs[num_failed:]:
        write(graph.replace("hlo_module.pb", "neff"))
        Path(memory_of(graph)).unlink(missing_ok=True)
    status = [index >= num_failed for index in range(len(graphs))]
    summary = {word: status.count(word) for word in (True, False) if word in status}
    results = ({"status": word, "retry": 0, "compile_time": 0.0} for word in status)
    report = dict(zip(graphs, results, strict=True))
    log(json.dumps({"compilation_summary": summary, "compilation_report": report}, indent=4))
    log(f"Total graphs: {len(graphs)}")
    log(f"Total successful compilations: {status.count(True)}")
    log(f"Total failed compilations: {status.count(False)}")
    return 0 if behaviour == "failed-old" else num_failed


def compile_slowly(graphs: list[str], behaviour_now: Callable[[], str]) -> str:
    """Compile until the behavior changes, and return the new one; a signal fails the graphs."""

    def interrupted(signum: int, _frame: object) -> None:
        for graph in graphs:
            write(memory_of(graph))
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    for signum in _ENDING:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, interrupted)
    print("Compiling", flush=True)
    while (behaviour := behaviour_now()) == "slow":
        time.sleep(0.1)
    return behaviour


def given_up(graph: str) -> bool:
    """Return whether a graph's compilation failed before and must not be retried."""
    if not Path(memory_of(graph)).exists() or _RETRY in os.environ.get("NEURON_CC_FLAGS", ""):
        return False
    neff = graph.replace("hlo_module.pb", "neff")
    log(f"Got a cached failed neff at {neff}. Will skip compilation, please set {_RETRY}", "ERROR")
    return True


def memory_of(graph: str) -> str:
    """Return the file that records a graph's failed compilation."""
    return graph.replace("hlo_module.pb", "log")


def write(path: str) -> None:
    """Write a small file, if the cache is a directory."""
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(f"{path}: written by a stand-in\n", encoding="utf-8")


def log(text: str, level: str = "INFO") -> None:
    """Print a log line of neuron_parallel_compile."""
    head = f"{datetime.now():%F %T.%f}:  {os.getpid()}  {level} ||NEURON_PARALLEL_COMPILE||"
    print(f"{head}: {text}", flush=True)
