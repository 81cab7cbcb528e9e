"""Measures a node, with the others, for `trnslurm doctor --run`.

    python -m trnslurm.node.checkup --device neuron --devices 16 --workers 32 -- bash ranks.sh train

Started on every node at the same time, in the place of a job's node.sh. What fails is written down
and the next thing is measured: the launcher judges. In turn: this node's limits, EFA and versions;
the preflight; the links to node 0; on Neuron a graph in the cache; then the command, a job's real
node.sh, whose workers measure what takes all of them.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.node.checkup import facts, graph
from trnslurm.node.checkup.links import Host, LinkError, take_part
from trnslurm.rundir import RunFiles, write_json

_MEET_S = 60.0
_ORDER_S = graph.COMPILE_S + 60.0
RANKS_S = 240.0
"""How long the workers have: on Neuron they compile three small graphs first."""


class Node:
    """This node, and what is known of it so far."""

    def __init__(self, run: Path, node: int) -> None:
        self.number = node
        self._file = RunFiles(run).checkup_file("node", node)
        host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.known: dict[str, Any] = {"node": node, "host": host}

    def note(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure something and write it down at once: a later step may hang."""
        start = time.monotonic()
        try:
            self.known[name] = measure()
        except Exception as error:
            self.known[name] = {"problem": f"{type(error).__name__}: {error}"}
        self.known.setdefault("seconds", {})[name] = round(time.monotonic() - start, 2)
        write_json(self._file, self.known)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything; 0 even if something is wrong, as the launcher says so."""
    options = parse(argv)
    environ = os.environ
    hosts = environ["TRNSLURM_HOSTS"].split(",")
    node = Node(Path(environ["TRNSLURM_RUN_DIR"]), int(environ["SLURM_NODEID"]))
    say("limits, EFA, versions")
    facts.raise_open_files(len(hosts) * options.workers)
    node.note("limits", facts.limits)
    node.note("efa", facts.efa)
    node.note("versions", facts.versions)
    say("preflight")
    node.note("preflight", lambda: {"exit_code": preflight(options)})
    if len(hosts) > 1 or options.device == "neuron":
        say("links between the nodes" + (", a graph" if options.device == "neuron" else ""))
        node.note("meeting", lambda: meet(node, len(hosts), options))
    say(f"the workers: {' '.join(options.command)}")
    node.note("workers", lambda: run_workers(options.command, options.deadline))
    say("done")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line: what the preflight takes, and the command of the workers."""
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
    """Run the preflight, which writes its own file. EFA is left to fi_info, which sees more."""
    words = [f"--{name}={getattr(options, name)}" for name in ("device", "devices", "workers")]
    command = [sys.executable, "-m", "trnslurm.node.preflight", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def meet(node: Node, num_nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time the links; on Neuron have node 0 compile a graph, and the others find it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    command = graph.command_of(options.graph_size, options.cache_layout)
    on_neuron = options.device == "neuron"
    alone = graph.shared_cache(options.cache_layout)
    found: dict[str, Any] = {}

    def obey(order: dict[str, Any]) -> None:
        if order.get("graph") and not order["graph"]["problem"] and not alone:
            found["graph"] = graph.find_again(command, order["graph"])

    if node.number:
        try:
            take_part(address, port, node.number, obey, reach_s=_MEET_S, order_s=_ORDER_S)
        except LinkError as error:
            found["problem"] = str(error)
        return found
    host = Host(port, num_nodes)
    try:
        host.meet(_MEET_S)
        found["rates"] = host.rates
        if on_neuron:
            found["graph"] = graph.compile_new(command) | {"alone": alone}
        host.ask_all({"graph": found.get("graph")}, _ORDER_S)
    finally:
        host.close()
    return found


def run_workers(command: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Run the command; end it, and all that it started, if it has not ended by then."""
    # A group of its own, and no session: Slurm finds a job's processes by their session.
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
    """Print a line for whoever follows the log."""
    print(f"checkup: {text}", flush=True)
