"""Joins a job's nodes into a Ray cluster, whose driver is the command on the first node.

    python -m trnslurm.node.ray NODES

The launcher's `--once --ray` does it. The command above waits until NODES nodes have joined.

A cluster without a token runs whatever anybody on the network sends it. Ray has tokens since 2.52
(RAY_AUTH_MODE in ray/_private/authentication/). Older versions do not read the variables. The first
node makes a token, and sends it to the others when the nodes meet. It is never stored in a file.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.once import Once

if TYPE_CHECKING:
    from trnslurm.node.launcher import Nodes

JOIN_S = 600.0
"""How long the nodes may take to join."""
_LOOK_S = 0.5
_LONGEST = 24
"""Leaves room for the paths of sockets below it, which have at most 107 characters (unix(7))."""
_SHOWN = 15
_TELLING = ("gcs_server.err", "gcs_server.out", "raylet.err", "raylet.out")
_ERROR = re.compile(r" [EF] \d+ |Check failed")
_FAILED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a Ray cluster's options."""
    parser.add_argument("--ray", action="store_true", help="the same, on a Ray cluster")
    parser.add_argument("--ray-option", action="append", default=[], help="options for `ray start`")


def new_cluster() -> dict[str, str]:
    """Return what all nodes of a new cluster must know. The first node creates it."""
    place = tempfile.gettempdir()
    parent = tempfile.mkdtemp(prefix="ray-", dir=place if len(place) <= _LONGEST else "/tmp")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ[Variable.DEVICE_PORT]}"
    return {"address": address, "token": secrets.token_hex(32), "directory": parent}


class RayNode:
    """This node's part of a cluster."""

    def __init__(self, cluster: Mapping[str, str], options: Sequence[str], *, first: bool) -> None:
        self._cluster, self._options, self._first = cluster, options, first
        self.environ = {
            "RAY_ADDRESS": cluster["address"], "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": cluster["token"], "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }  # fmt: skip
        self._pid = 0
        self._said = Path(cluster["directory"]) / f"start-{os.environ['SLURM_NODEID']}.log"

    def start(self) -> None:
        """Start Ray on this node."""
        host, _, port = self._cluster["address"].rpartition(":")
        words = ["--block", "--disable-usage-stats", "--log-color=false"]
        words += [f"--num-cpus={len(os.sched_getaffinity(0))}"]
        words += [f"--node-ip-address={host if self._first else _own_address(host)}"]
        if self._first:
            words += ["--head", f"--port={port}", "--include-dashboard=false"]
            words += [f"--temp-dir={self._cluster['directory']}/r"]
        else:
            words += [f"--address={self._cluster['address']}"]
        environ = {**os.environ, **self.environ}
        del environ["RAY_ADDRESS"]
        program = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        self._said.parent.mkdir(mode=0o700, exist_ok=True)  # of others the first one is not here
        log = processes.open_log(str(self._said))
        self._pid = processes.spawn(
            [*program, *words, *self._options], output_fd=log, environ=environ
        )
        os.close(log)

    def has_ended(self) -> bool:
        """Check whether Ray has ended here without being asked to."""
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
        return not self._pid

    def say_why(self) -> None:
        """Print the last lines of the logs of Ray's own programs."""
        logs = Path(self._cluster["directory"]) / "r/session_latest/logs"
        for file in (self._said, *(logs / name for name in _TELLING)):
            with suppress(OSError):
                lines = file.read_text(errors="replace").splitlines()
                if file.suffix == ".out":  # which dumps its whole state every minute
                    lines = [line for line in lines if _ERROR.search(line)]
                if lines := lines[-_SHOWN:]:
                    processes.say("\n".join([f"ray: the last lines of {file.name}:", *lines]))
        processes.say(f"error: Ray has ended on {os.uname().nodename}")

    def end(self) -> None:
        """End Ray on this node, and remove its directory."""
        if self._pid:
            processes.send(self._pid, signal.SIGTERM)
        processes.end_descendants(processes.TERM_WAIT_S * 3)
        self._pid = 0
        shutil.rmtree(self._cluster["directory"], ignore_errors=True)


def _own_address(master: str) -> str:
    """Return the address from which this node reaches the first node."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        return str(probe.getsockname()[0])


class OnRay(Once):
    """A command on the first node that is the driver of a Ray cluster of all nodes."""

    def __init__(self, nodes: Nodes, command: Sequence[str], options: argparse.Namespace) -> None:
        super().__init__(nodes, command, options)
        self._ray = RayNode(nodes.told, options.ray_option, first=nodes.number == 0)
        self._many = nodes.count

    def run(self) -> int:
        """Join the cluster. On the first node, run the command. Return the exit code."""
        processes.become_subreaper()
        try:
            if not find_spec("ray"):
                processes.say(f"error: {sys.executable} has no Ray: pip install ray")
                return _FAILED
            self._ray.start()
            if self._nodes.number:
                return self._run_other()
            waits = [sys.executable, "-m", "trnslurm.node.ray", str(self._many)]
            code = self._run_command(waits, {**os.environ, **self._ray.environ})
            if code == 0:
                code = self._run_here(self._ray.environ)
            if code == 0:
                self._nodes.leave()
            return code
        finally:
            self._ray.end()

    def _run_other(self) -> int:
        for signum in processes.heard_end_signals():
            signal.signal(signum, _fail)
        if self._nodes.leave(self._is_broken):
            return 0
        return _FAILED

    def _is_broken(self) -> bool:
        if not self._ray.has_ended():
            return False
        self._ray.say_why()
        return True


def _fail(*_: object) -> NoReturn:
    sys.exit(_FAILED)


def wait(nodes: int) -> int:
    """Wait until this many nodes have joined; return 0 if they have."""
    ray: Any = __import__("ray")
    deadline, alive = time.monotonic() + JOIN_S, 0
    while time.monotonic() < deadline:
        with suppress(Exception):  # the head may not listen yet
            ray.init(log_to_driver=False, logging_level="ERROR")
            while time.monotonic() < deadline:
                alive = sum(bool(node["Alive"]) for node in ray.nodes())
                if alive >= nodes:
                    return 0
                time.sleep(_LOOK_S)
        time.sleep(_LOOK_S)
    processes.say(f"error: only {alive} of {nodes} nodes joined the Ray cluster in {JOIN_S:.0f} s")
    return 1


if __name__ == "__main__":
    sys.exit(wait(int(sys.argv[1])))
