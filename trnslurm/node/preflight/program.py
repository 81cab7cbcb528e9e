"""Are all nodes fit for the job? They find out together, before its workers start.

    python -m trnslurm.node.preflight --device neuron --devices 16 --workers 32 --efa 8 --data DIR

Started on every node at the same time. Each looks at itself; node 0 listens on the master port, to
which the others report; it compares, writes state/preflight-PHASE-ATTEMPT.json, and answers. Every
node says what is wrong with it, and all exit with 1 if any is unfit, so that the step ends.

A node that cannot reach node 0 writes preflight-PHASE-ATTEMPT-nodeN.json of its own. From it node 0
knows why it was not heard; if node 0 itself is dead, it is the last word.
"""

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

from trnslurm.node.preflight.checks import CHECKS, owns
from trnslurm.node.preflight.devices import GPUS
from trnslurm.node.preflight.meeting import Host, MeetingError, report_to
from trnslurm.node.preflight.needs import MIB, Checked, Needs, run_all
from trnslurm.node.preflight.verdict import Node, judge
from trnslurm.rundir import PLAN, STRATEGY, RunFiles, load_json, write_json

WAIT_S = 20.0
"""How long node 0 waits for the others. They look for it a little less long, and then wait a little
longer for its answer, so that its word comes before they give up."""
GPU_WAIT_S = 60.0
"""The same on GPUs, whose driver may have to start."""
NODES_PER_S = 20
"""For so many nodes it is a second more: they are started one after another, and the file system
from which all of them read Python and the run's code answers each in turn."""
PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers")
_MOST_NAMED = 8
_DEVICES = ("neuron", "cuda", "xla-cuda", "xla-cpu", "cpu")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where the nodes of this attempt meet, and what they leave."""

    node: int
    hosts: tuple[str, ...]
    address: str
    port: int
    run: Path
    phase: str
    attempt: int

    @property
    def name(self) -> str:
        """What no other job has; not the directory's path, which one node may see elsewhere.

        Short whatever the number of hosts: it goes to and from every one of them.
        """
        hosts = hashlib.sha256(",".join(self.hosts).encode()).hexdigest()
        return f"{self.run.name} {self.phase} {self.attempt} {hosts}"

    @property
    def host(self) -> str:
        return os.environ.get("SLURMD_NODENAME") or self.hosts[self.node]

    def file(self, node: int | None = None) -> Path:
        """Return where node 0 writes its verdict, or a node that it cannot reach node 0."""
        return RunFiles(self.run).preflight_file(self.phase, self.attempt, node)


@dataclass
class NodeClock:
    """This node's, and how long we have been at it."""

    offset_s: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def read(self) -> float:
        return time.time() + self.offset_s

    def seconds(self) -> float:
        return round(time.monotonic() - self.started, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Take part; return the code to exit with."""
    options = parse(argv)
    try:
        job = read_job()
    except (KeyError, ValueError) as error:
        print(f"error: preflight: environment: {error}; node.sh starts it", file=sys.stderr)
        return 2
    clock, needs = NodeClock(options.clock_offset), read_needs(job, options)
    try:
        take_part = host_all if job.node == 0 else report
        answer = take_part(job, needs, clock, options.wait + len(job.hosts) // NODES_PER_S)
    except (MeetingError, OSError) as error:
        answer = {"problems": [str(error)], "warnings": [], "others": []}
    say(job, answer, clock)
    return int(bool(answer["problems"] or answer["others"]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line: what the job needs of a node."""
    parser = argparse.ArgumentParser(prog="preflight", allow_abbrev=False)
    parser.add_argument("--device", default="cpu", choices=_DEVICES)
    parser.add_argument("--devices", type=int, default=0, help="Neuron devices of a node")
    parser.add_argument("--workers", type=int, default=1, help="workers of a node")
    parser.add_argument("--efa", type=int, default=0, help="EFA interfaces of a node")
    parser.add_argument("--data", default="", help="dataset, a file or a directory")
    parser.add_argument("--min-free-mib", type=int, default=256, help="on every disk")
    parser.add_argument("--wait", type=float, help="seconds for a node to report, of few")
    parser.add_argument("--clock-offset", type=float, default=0.0, help="for tests: a wrong clock")
    options = parser.parse_args(argv)
    if options.wait is None:
        options.wait = GPU_WAIT_S if options.device in GPUS else WAIT_S
    return options


def read_job() -> Job:
    """Return what the batch script and srun say in the environment."""
    environ = os.environ
    return Job(
        node=int(environ["SLURM_NODEID"]),
        hosts=tuple(environ["TRNSLURM_HOSTS"].split(",")),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        run=Path(environ["TRNSLURM_RUN_DIR"]),
        phase=environ["TRNSLURM_PHASE"],
        attempt=int(environ["TRNSLURM_ATTEMPT"]),
    )


def read_needs(job: Job, options: argparse.Namespace) -> Needs:
    """Return what the job needs of this node."""
    words = [os.environ.get(n, "") for n in ("TRNSLURM_CACHE", "NEURON_COMPILE_CACHE_URL")]
    return Needs(
        run=job.run,
        phase=job.phase,
        nodes=len(job.hosts),
        device=options.device,
        devices=options.devices,
        workers=options.workers,
        efa=options.efa,
        data=options.data,
        caches=tuple(w for w in words if w and "://" not in w),
        min_free=options.min_free_mib * MIB,
    )


def host_all(job: Job, needs: Needs, clock: NodeClock, wait_s: float) -> dict[str, Any]:
    """Take node 0's part: listen, look at this node, wait for the others, judge, answer."""
    deadline = clock.started + wait_s
    try:
        meeting = Host(job.port, job.name, len(job.hosts))
    except MeetingError as error:
        alone = [look(job, needs, clock, wait_s) | {"problems": {"master port": str(error)}}]
        write(job, job.file(), [Node(**alone[0])], bad=[])
        return answer_of(Node(**alone[0]), [])
    meeting.open(deadline)
    own = Node(**look(job, needs, clock, wait_s))
    if not owns(job.address):
        own.problems["address"] = (
            f"the master address {job.address} is none of its addresses; correct its NodeAddr in "
            "slurm.conf"
        )
    meeting.wait(len(job.hosts) - 1, deadline)
    nodes = [own, *(Node(node=n, host=h, heard=False) for n, h in enumerate(job.hosts) if n)]
    for number, guest in list(meeting.guests.items()):
        nodes[number] = Node(**guest.report | {"clock_s": guest.clock_s})
    own.seconds = clock.seconds()
    bad = judge(nodes, read_silent(job, nodes), wait_s)
    write(job, job.file(), nodes, bad)
    unfit = named_of(nodes)
    meeting.tell({node.node: answer_of(node, unfit) for node in nodes})
    return answer_of(own, unfit)


def report(job: Job, needs: Needs, clock: NodeClock, wait_s: float) -> dict[str, Any]:
    """Take another node's part: look at it, report, and hear what node 0 says of all."""
    try:
        return report_to(
            job.address,
            job.port,
            {"job": job.name, "node": job.node},
            lambda: look(job, needs, clock, wait_s),
            clock=clock.read,
            reach_s=0.75 * wait_s,
            answer_s=1.25 * wait_s,
        )
    except MeetingError as error:
        own = Node(node=job.node, host=job.host, seconds=clock.seconds())
        own.problems["report"] = str(error)
        write(job, job.file(job.node), [own], bad=[job.hosts[0]])
        wait_for_the_end(job, clock.started + 1.25 * wait_s)
        return answer_of(own, [own])


def look(job: Job, needs: Needs, clock: NodeClock, wait_s: float) -> dict[str, Any]:
    """Return this node's report: the fields of a Node."""
    same: dict[str, str] = {}

    def software(_: Needs) -> Checked:
        same.update(identity(job.run))
        return Checked()

    found = run_all(needs, {**CHECKS, "software": software}, 0.6 * wait_s)
    return {
        "node": job.node,
        "host": job.host,
        "seconds": clock.seconds(),
        "facts": {name: f.fact for name, f in found.items() if f.fact},
        "problems": {name: f.problem for name, f in found.items() if f.problem},
        "warnings": [f.warning for f in found.values() if f.warning],
        "same": dict(same),
    }


def identity(run: Path) -> dict[str, str]:
    """Return what must be the same on all nodes: versions, code, plan and strategy."""
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


def read_silent(job: Job, nodes: Sequence[Node]) -> dict[int, str]:
    """Return what silent nodes wrote down, and remove these files: node 0's word replaces them."""
    said = {}
    for node in nodes:
        file = job.file(node.node)
        if not node.heard:
            with suppress(OSError, ValueError, LookupError, TypeError):
                said[node.node] = str(load_json(file)["nodes"][0]["problems"][0])
                file.unlink()
    return said


def wait_for_the_end(job: Job, deadline: float) -> None:
    """Leave node 0 the time to say it first; its word makes ours void."""
    while time.monotonic() < deadline:
        if job.file().exists():
            job.file(job.node).unlink(missing_ok=True)
            return
        time.sleep(0.2)


def write(job: Job, file: Path, nodes: Sequence[Node], bad: Sequence[str]) -> None:
    """Write the verdict, whole; where that fails, a problem of this node says why."""
    with suppress(OSError):
        write_json(file, {"nodes": [node.told() for node in nodes], "bad": list(bad)})


def named_of(nodes: Sequence[Node]) -> list[Node]:
    """Return the unfit nodes that the others may be told of, one more than they are."""
    return list(islice((node for node in nodes if node.problems), _MOST_NAMED + 1))


def answer_of(node: Node, unfit: Sequence[Node]) -> dict[str, Any]:
    """Return what a node is told: about itself, and in a line each about some of the others."""
    others = [f"{n.host}: {t}" for n in unfit if n is not node for t in n.problems.values()]
    return {
        "problems": list(node.problems.values()),
        "warnings": node.warnings,
        "others": others[:_MOST_NAMED],
    }


def say(job: Job, answer: Mapping[str, Any], clock: NodeClock) -> None:
    """Print what this node was told."""
    sys.stdout.flush()
    for text in answer["warnings"]:
        print(f"warning: preflight: {job.host}: {text}", file=sys.stderr)
    for text in answer["problems"]:
        print(f"error: preflight: {job.host}: {text}", file=sys.stderr)
    if answer["problems"]:
        return
    for text in answer["others"]:
        print(f"preflight: this node ends because of another: {text}")
    if not answer["others"]:
        count = len(job.hosts)
        nodes = "1 node fits" if count == 1 else f"{count} nodes fit"
        print(f"preflight: {nodes} in {clock.seconds():.1f} s")
