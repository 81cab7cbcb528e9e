"""Checks that all nodes are fit for the job, before its workers start.

    python -m trnslurm.node.preflight --device neuron --devices 16 --workers 32 --efa 8 --data DIR

It starts on every node at the same time. Each node checks itself and reports to node 0
(meeting.py). Node 0 compares the reports, writes state/preflight-PHASE-ATTEMPT.json, and answers.
Every node prints its own problems, and all exit with 1 if any node is unfit, so that the step ends.

A node that cannot reach node 0 writes preflight-PHASE-ATTEMPT-nodeN.json. Node 0 adds the reason in
it to its verdict. If node 0 itself is dead, this file remains.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from trnslurm.contract.files import load_json, write_json
from trnslurm.contract.rundir import PLAN, STRATEGY, RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.devices import CPU, DEVICES, device_named
from trnslurm.node.meeting import (
    MESSAGE_S,
    Connection,
    Meeting,
    MeetingError,
    Rendezvous,
    join,
    read_rendezvous,
)
from trnslurm.node.preflight import checks, devices
from trnslurm.node.preflight.checks import Check, owns, run_all
from trnslurm.node.preflight.needs import MIB, Checked, Needs
from trnslurm.node.preflight.verdict import NodeReport, judge

NODES_PER_S = 20
"""Every 20 nodes add a second to the time limit.

Nodes start one after another, and all read Python and the run's code from one file system.
"""
PACKAGES = (
    "torch",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
    "nki",
    "transformers",
)
CHECKS: dict[str, Check] = {
    "devices": devices.devices,
    "EFA": devices.efa,
    "run directory": checks.run_directory,
    "temporary directory": checks.temporary_directory,
    "cache": checks.cache,
    "dataset": checks.dataset,
    "memory": checks.memory,
    "open files": checks.open_files,
    "own name": checks.own_name,
    "torch_xla": checks.torch_xla,
}
_MAX_NAMED = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Take part in the preflight; return the exit code."""
    options = parse(argv)
    try:
        rendezvous = read_rendezvous("preflight")
    except (KeyError, ValueError) as error:
        print(f"error: preflight: environment: {error}; only node.sh starts this", file=sys.stderr)
        return 2
    preflight = Preflight(
        rendezvous,
        read_needs(rendezvous, options),
        wait_s=options.wait + len(rendezvous.hosts) // NODES_PER_S,
        clock_offset_s=options.clock_offset,
    )
    try:
        answer = preflight.report() if rendezvous.node else preflight.compare()
    except (MeetingError, OSError) as error:
        answer = {"problems": [str(error)], "warnings": [], "others": []}
    preflight.say(answer)
    return int(bool(answer["problems"] or answer["others"]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line: what the job needs from a node."""
    parser = argparse.ArgumentParser(prog="preflight", allow_abbrev=False)
    parser.add_argument("--device", default=CPU.name, choices=[*DEVICES])
    parser.add_argument("--devices", type=int, default=0, help="Neuron devices per node")
    parser.add_argument("--workers", type=int, default=1, help="workers per node")
    parser.add_argument("--efa", type=int, default=0, help="EFA interfaces per node")
    parser.add_argument("--data", default="", help="dataset: a file or a directory")
    parser.add_argument("--min-free-mib", type=int, default=256, help="free MiB on every disk")
    parser.add_argument("--wait", type=float, help="seconds in which a few nodes must report")
    parser.add_argument("--clock-offset", type=float, default=0.0, help="for tests: a wrong clock")
    options = parser.parse_args(argv)
    if options.wait is None:
        options.wait = device_named(options.device).preflight_wait_s
    return options


def read_needs(rendezvous: Rendezvous, options: argparse.Namespace) -> Needs:
    """Read what the job needs on this node."""
    words = [os.environ.get(n, "") for n in (Variable.CACHE, "NEURON_COMPILE_CACHE_URL")]
    return Needs(
        run=rendezvous.run,
        phase=rendezvous.phase,
        nodes=len(rendezvous.hosts),
        device=device_named(options.device),
        devices=options.devices,
        workers=options.workers,
        efa=options.efa,
        data=options.data,
        caches=tuple(w for w in words if w and "://" not in w),
        min_free=options.min_free_mib * MIB,
    )


@dataclass
class Preflight:
    """This node's part in a preflight."""

    rendezvous: Rendezvous
    needs: Needs
    wait_s: float
    clock_offset_s: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def host(self) -> str:
        return os.environ.get("SLURMD_NODENAME") or self.rendezvous.hosts[self.rendezvous.node]

    def file(self, node: int | None = None) -> Path:
        """Return the file for node 0's verdict, or for a node that cannot reach node 0."""
        at = self.rendezvous
        return RunFiles(at.run).preflight_file(at.phase, at.attempt, node)

    def seconds(self) -> float:
        """Return the seconds since this node has started."""
        return round(time.monotonic() - self.started, 2)

    def compare(self) -> dict[str, Any]:
        """Act as node 0: check this node, hear the others, judge, and answer them all."""
        hosts, deadline = self.rendezvous.hosts, self.started + self.wait_s
        try:
            meeting = Meeting(self.rendezvous, hear)
        except MeetingError as error:
            own = NodeReport(**self.look() | {"problems": {"master port": str(error)}})
            write(self.file(), [own], bad=[])
            return answer_to(own, [])
        meeting.open(deadline)
        own = NodeReport(**self.look())
        if not owns(self.rendezvous.address):
            own.problems["address"] = (
                f"the master address {self.rendezvous.address} is not one of its addresses; "
                "correct its NodeAddr in slurm.conf"
            )
        meeting.wait(deadline)
        nodes = [
            own,
            *(NodeReport(node=n, host=hosts[n], heard=False) for n in range(1, len(hosts))),
        ]
        for number, fields in list(meeting.heard.items()):
            nodes[number] = NodeReport(**fields)
        own.seconds = self.seconds()
        bad = judge(nodes, self.read_silent(nodes), self.wait_s)
        write(self.file(), nodes, bad)
        unfit = some_unfit(nodes)
        meeting.answer({node.node: answer_to(node, unfit) for node in nodes})
        return answer_to(own, unfit)

    def report(self) -> dict[str, Any]:
        """Act as another node: check this node, report to node 0, and return node 0's answer."""
        try:
            with join(self.rendezvous, reach_s=0.75 * self.wait_s) as node0:
                node0.receive(MESSAGE_S)
                node0.send({"time": time.time() + self.clock_offset_s})
                node0.send(self.look())
                return node0.receive(1.25 * self.wait_s)
        except MeetingError as error:
            at = self.rendezvous
            own = NodeReport(node=at.node, host=self.host, seconds=self.seconds())
            own.problems["report"] = str(error)
            write(self.file(at.node), [own], bad=[at.hosts[0]])
            self.wait_for_verdict()
            return answer_to(own, [own])

    def look(self) -> dict[str, Any]:
        """Check this node; return the fields of its NodeReport."""
        same: dict[str, str] = {}

        def software(_: Needs) -> Checked:
            same.update(identity(self.rendezvous.run))
            return Checked()

        found = run_all(self.needs, {**CHECKS, "software": software}, 0.6 * self.wait_s)
        return {
            "node": self.rendezvous.node,
            "host": self.host,
            "seconds": self.seconds(),
            "facts": {name: f.fact for name, f in found.items() if f.fact},
            "problems": {name: f.problem for name, f in found.items() if f.problem},
            "warnings": [f.warning for f in found.values() if f.warning],
            "same": dict(same),
        }

    def read_silent(self, nodes: Sequence[NodeReport]) -> dict[int, str]:
        """Return the reasons that silent nodes have written, and remove their files."""
        said = {}
        for node in nodes:
            file = self.file(node.node)
            if not node.heard:
                with suppress(OSError, ValueError, LookupError, TypeError):
                    said[node.node] = str(load_json(file)["nodes"][0]["problems"][0])
                    file.unlink()
        return said

    def wait_for_verdict(self) -> None:
        """Wait for node 0's verdict, which replaces this node's file."""
        while self.seconds() < 1.25 * self.wait_s:
            if self.file().exists():
                self.file(self.rendezvous.node).unlink(missing_ok=True)
                return
            time.sleep(0.2)

    def say(self, answer: Mapping[str, Any]) -> None:
        """Print node 0's answer to this node."""
        sys.stdout.flush()
        for text in answer["warnings"]:
            print(f"warning: preflight: {self.host}: {text}", file=sys.stderr)
        for text in answer["problems"]:
            print(f"error: preflight: {self.host}: {text}", file=sys.stderr)
        if answer["problems"]:
            return
        for text in answer["others"]:
            print(f"preflight: this node ends because of another node: {text}")
        if not answer["others"]:
            count = len(self.rendezvous.hosts)
            nodes = "1 node fits" if count == 1 else f"{count} nodes fit"
            print(f"preflight: {nodes} in {self.seconds():.1f} s")


def hear(connection: Connection, deadline: float) -> dict[str, Any]:
    """Compare another node's clock with this one's; return that and the node's report fields."""
    sent = time.time()
    connection.send({"time": sent})
    then = float(connection.receive(MESSAGE_S)["time"])
    clock_s = _ahead(then, sent, time.time())
    return connection.receive(deadline - time.monotonic()) | {"clock_s": clock_s}


def _ahead(then: float, sent: float, received: float) -> float:
    """Return how far a clock is ahead, from a reading between two readings of node 0's clock.

    Several values are possible within the round trip. The smallest is returned.
    """
    if sent <= then <= received:
        return 0.0
    return then - received if then > received else then - sent


def identity(run: Path) -> dict[str, str]:
    """Return the facts that must be the same on all nodes: versions, code, plan and strategy."""
    same = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            same[package] = metadata.version(package)
    whole = hashlib.sha256()
    for file in sorted(run.joinpath("code").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            whole.update(f"{file.relative_to(run)}\0{file.stat().st_size}\0".encode())
            whole.update(file.read_bytes())
    same["code/"] = whole.hexdigest()
    for name in (PLAN, STRATEGY):
        file = run / name
        same[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
    return same


def write(file: Path, nodes: Sequence[NodeReport], bad: Sequence[str]) -> None:
    """Write the verdict. If that fails, this node's check of the run directory says why."""
    with suppress(OSError):
        write_json(file, {"nodes": [node.record() for node in nodes], "bad": list(bad)})


def some_unfit(nodes: Sequence[NodeReport]) -> list[NodeReport]:
    """Return up to nine unfit nodes, so that the answer to each can list eight others."""
    return list(islice((node for node in nodes if node.problems), _MAX_NAMED + 1))


def answer_to(node: NodeReport, unfit: Sequence[NodeReport]) -> dict[str, Any]:
    """Return the lines that a node prints: its own problems, and those of some other nodes."""
    others = [f"{n.host}: {t}" for n in unfit if n is not node for t in n.problems.values()]
    return {
        "problems": list(node.problems.values()),
        "warnings": node.warnings,
        "others": others[:_MAX_NAMED],
    }
