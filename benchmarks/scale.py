"""What a job costs on more and more nodes: seconds, and what is asked of Slurm and the files.

    .venv/bin/python benchmarks/scale.py --nodes 2 8 32 128

A sandbox, a real Slurm of that many nodes on this machine, runs a script of the standard library,
one worker per node, by way of the same scripts as any job: preflight, a meeting of all workers at
the master's address, a requeue by Slurm, an end; then a second job of which a node loses its power,
and which is cancelled. All nodes share this machine's cores, so seconds grow with the number of
nodes where a cluster's do not; the counts are those of a cluster.

RPCs are the messages that slurmctld takes, as `sdiag` counts them, but for those by which nodes
register now and then, job or none. Files are opened below the run directory, which on a cluster is
on a shared file system: inotify counts them, for all nodes.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reporting

NODES = (2, 8, 32, 128)
# ParallelCluster's timers make a drill take minutes; these wait the same on any number of nodes.
SETTINGS = ("SlurmdTimeout=10", "KillWait=5", "AuthInfo=cred_expire=5",
            "SchedulerParameters=sched_interval=2")  # fmt: skip
WAIT_S = 240
# One worker per node: they meet at the master, then wait to be told to end.
WORKER = """
import os, socket, sys, time
from pathlib import Path
import trnslurm

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(("", address[1]), backlog=4096) as server:
        peers = [server.accept()[0] for _ in range(world - 1)]
    for peer in peers:
        peer.sendall(b"1")
    Path(f"met-{os.environ['TRNSLURM_ATTEMPT']}").touch()
else:
    while True:
        try:
            peer = socket.create_connection(address, timeout=60)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    peer.settimeout(None)
    assert peer.recv(1) == b"1"
step = 0
while not Path("end").exists():
    step += 1
    trnslurm.report(step=step, steps=1000)
    if trnslurm.should_stop():
        trnslurm.saved(step)
        break
    time.sleep(0.5)
"""
_RPC = re.compile(r"^\t([A-Z_]+) +\( *\d+\) count:(\d+)", re.MULTILINE)
_OF_NO_JOB = ("REQUEST_STATS_INFO", "MESSAGE_NODE_REGISTRATION_STATUS")
_SETTLED_S = 1.0
_IN_OPEN, _IN_CREATE, _IN_ISDIR = 0x20, 0x100, 0x40000000


def main() -> None:
    """Measure each number of nodes in turn, and print a column for each."""
    parser = reporting.make_parser("Measure a job on more and more nodes.", rounds=1)
    at_least_one = reporting.at_least_one
    parser.add_argument("--nodes", type=at_least_one, nargs="+", default=NODES, metavar="N",
                        help="numbers of nodes (2 8 32 128)")  # fmt: skip
    options = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {n: [] for n in options.nodes}
    for _ in range(options.rounds):
        for nodes in options.nodes:
            print(f"{nodes} nodes …", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="scale-", dir="/tmp") as directory:
                found[nodes].append(measure(Path(directory), nodes))
    rows = []
    for name in next(iter(found.values()))[0]:
        values = {str(n): statistics.median(one[name] for one in found[n]) for n in found}
        rows.append({"name": name} | {n: shown(value) for n, value in values.items()})
    columns = {"name": ("nodes", "")} | {str(n): (str(n), ",") for n in found}
    reporting.report("A job on a sandbox", rows, columns, options.json)


def shown(value: float) -> float:
    """Return a value without digits that mean nothing."""
    return round(value) if value >= 100 else round(value, 1 if value >= 1 else 2)


def measure(place: Path, nodes: int) -> dict[str, float]:
    """Run both jobs on a sandbox of so many nodes; return what each part of it took."""
    site = Site(place, nodes)
    took: dict[str, float] = {}

    def timed(name: str, action: Callable[[], Any]) -> None:
        start = time.monotonic()
        action()
        took[name] = time.monotonic() - start

    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    up = ["sandbox", "up", "--nodes", str(nodes), *settings, "--owner", str(os.getpid()), "--quiet"]
    timed("sandbox up, s", lambda: site.trnslurm(*up))
    try:
        site.enter()
        job(site, timed, took)
        lost_node(site, timed, nodes)
        took["memory, MiB"] = site.memory_mib
    finally:
        timed("sandbox down, s", lambda: site.trnslurm("sandbox", "down"))
    return took


def job(site: Site, timed: Callable[..., None], took: dict[str, float]) -> None:
    """Run a job that is requeued and then ends by itself."""
    nodes = site.nodes
    timed("submit, s", site.submit)
    begun = site.rpcs(), site.started_on(nodes)
    with Opens(site.run) as opens:
        timed("start to RUNNING, s", lambda: (site.release(), site.await_state(1, "RUNNING")))
        timed("preflight and meeting, s", lambda: site.await_file("work/met-1"))
    took["RPCs to start"] = site.rpcs() - begun[0]
    took["processes and threads per node"] = site.started_on(nodes) - begun[1]
    took["files opened per node"] = opens.count / nodes
    site.note_memory()
    before = site.rpcs()
    timed("status, s", lambda: site.trnslurm("status", "last"))
    took["RPCs of status"] = site.rpcs() - before
    before = site.rpcs()
    timed("requeue until all have met, s", lambda: (site.requeue(), site.await_file("work/met-2")))
    took["RPCs of a requeue"] = site.rpcs() - before
    before = site.rpcs()
    (site.run / "work/end").touch()
    timed("end to COMPLETED, s", lambda: site.await_state(2, "COMPLETED"))
    took["RPCs to end"] = site.rpcs() - before
    for name in ("state", "logs"):
        sizes = [file.stat().st_size for file in (site.run / name).rglob("*") if file.is_file()]
        took[f"KiB in {name}/ per node and start"] = sum(sizes) / 2048 / nodes


def lost_node(site: Site, timed: Callable[..., None], nodes: int) -> None:
    """Run a job of which a node dies, comes back, and which is cancelled."""
    site.submit()
    site.release()
    site.await_file("work/met-1")
    lost = str(nodes)
    timed("node dead to REQUEUED, s", lambda: (site.trnslurm("sandbox", "fault", lost, "power-off"),
                                               site.await_state(1, "REQUEUED")))  # fmt: skip
    site.trnslurm("sandbox", "fault", lost, "power-on")
    timed("node back until all have met, s", lambda: (site.resume_node(),
                                                      site.await_file("work/met-2")))  # fmt: skip
    timed("cancel to CANCELLED, s", lambda: (site.trnslurm("cancel", "last"),
                                             site.await_state(2, "CANCELLED")))  # fmt: skip


class Site:
    """A sandbox, and a project with the worker in it."""

    def __init__(self, place: Path, nodes: int) -> None:
        self.nodes = nodes
        self.run = place
        self.memory_mib = 0.0
        self._job = ""
        self._sandbox = place / "sandboxes" / "sandbox"
        self._project = place / "project"
        self._project.mkdir()
        (self._project / "worker.py").write_text(WORKER)
        self._runs = place / "runs"
        hidden = ("TRNSLURM_", "SLURM_", "SBATCH_", "XDG_")
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {
            "TRNSLURM_SANDBOXES": str(self._sandbox.parent), "HOME": str(place),
        }  # fmt: skip

    def call(self, *words: str) -> str:
        """Run a command of Slurm or this program's Python; return what it printed."""
        done = subprocess.run(
            words, env=self._environ, cwd=self._project, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"error: {' '.join(words[-4:])}: {(done.stdout + done.stderr).strip()}")
        return done.stdout

    def trnslurm(self, *words: str) -> str:
        """Run a command of trnslurm."""
        return self.call(sys.executable, "-m", "trnslurm", *words)

    def enter(self) -> None:
        """Have later commands find the sandbox, as `sandbox env` does for a shell."""
        for line in self.trnslurm("sandbox", "env").splitlines():
            for name, value in re.findall(r"(\w+)=(\S+)", line.removeprefix("export ")):
                self._environ[name] = value

    def submit(self) -> None:
        """Submit a job that Slurm holds."""
        words = ["./worker.py", "--nodes", str(self.nodes), "--workers", "1", "--launcher", "srun"]
        words += ["--time", "30", "--sbatch=--hold", "--set", f"run_root={self._runs}", "--json"]
        said = json.loads(self.trnslurm("submit", *words))
        self.run, self._job = Path(said["directory"]), str(said["jobs"]["train"])

    def release(self) -> None:
        self.call("scontrol", "release", self._job)

    def requeue(self) -> None:
        self.call("scontrol", "requeue", self._job)

    def resume_node(self) -> None:
        """Give Slurm its last node back."""
        node = self.call("scontrol", "show", "nodes", "-o").splitlines()[-1].split()[0]
        self.call("scontrol", "update", node, "State=RESUME")

    def rpcs(self) -> int:
        """Return how many messages of jobs slurmctld has taken, once no more come.

        When a job ends, its nodes tell that one after the other.
        """
        count, before = 0, -1
        while count != before:
            time.sleep(_SETTLED_S if before >= 0 else 0)
            said = _RPC.findall(self.call("sdiag"))
            before, count = count, sum(int(n) for name, n in said if name not in _OF_NO_JOB)
        return count

    def started_on(self, node: int) -> int:
        """Return how many processes and threads a node has started."""
        words = ["sandbox", "exec", "--node", str(node), "--", "cat"]
        return int(self.trnslurm(*words, "/proc/sys/kernel/ns_last_pid"))

    def note_memory(self) -> None:
        """Note what all processes of the sandbox have, shared pages divided among them."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        below = [int((self._sandbox / "entry").read_text().split()[0])]
        kib = 0
        for pid in below:  # grows
            below += children.get(pid, [])
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            kib += int(text.partition("\nPss:")[2].split()[0])
        self.memory_mib = kib / 1024

    def await_state(self, attempt: int, word: str) -> None:
        """Wait for what an attempt writes of itself."""
        file = self.run / f"state/train-{attempt}.json"

        def state() -> str:
            try:
                return str(json.loads(file.read_text()).get("state"))
            except (OSError, ValueError):
                return ""

        self.wait(f"attempt {attempt} to be {word}", lambda: state() == word)

    def await_file(self, name: str) -> None:
        self.wait(name, (self.run / name).exists)

    def wait(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not there():
            if time.monotonic() > deadline:
                state = self.trnslurm("status", "last").partition("\n")[0]
                sys.exit(f"error: {self.nodes} nodes: no {what} after {WAIT_S} s; {state}")
            time.sleep(0.02)


class Opens:
    """Counts how often files below a directory are opened, by whichever process."""

    def __init__(self, directory: Path) -> None:
        self.count = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC)
        self._places: dict[int, Path] = {}
        for path in [directory, *filter(Path.is_dir, directory.rglob("*"))]:
            self._watch(path)

    def __enter__(self) -> Opens:
        self._ending, self._end = os.pipe()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._end, b".")
        self._thread.join()
        for fd in (self._fd, self._ending, self._end):
            os.close(fd)

    def _watch(self, path: Path) -> None:
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_OPEN | _IN_CREATE)
        self._places[watch] = path

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._fd, self._ending], [], [])
            if self._fd not in ready:
                return
            data = os.read(self._fd, 1 << 20)
            at = 0
            while at < len(data):
                watch, mask, _, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16 : at + 16 + length].rstrip(b"\0")
                at += 16 + length
                if mask & _IN_ISDIR:
                    if mask & _IN_CREATE:
                        self._watch(self._places[watch] / os.fsdecode(name))
                elif mask & _IN_OPEN:
                    self.count += 1


if __name__ == "__main__":
    main()
