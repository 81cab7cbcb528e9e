"""From the death of a worker to the first new step: ours beside others, round by round.

    .venv/bin/python benchmarks/restart_peer.py --peer .venv-resiliency/bin/ft_launcher --rounds 3

The same script trains on two nodes of one worker, with gloo on the CPU, and one worker is killed:
- ours: a job on a sandbox, cold, by our own launcher and by torchrun, and warm, when the next
  workers have been started ahead;
- ft_launcher of nvidia-resiliency-ext, with its defaults: two launchers on this machine, without
  Slurm, which restart all workers. Without `--peer` it is left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reporting
import restart
import scale

SCRIPT = Path(__file__).with_name("restart_script.py")
WAIT_S = 240.0


def main() -> None:
    """Kill a worker of each kind in every round, and print the medians."""
    parser = reporting.make_parser("Measure the way back after a worker's death.", rounds=3)
    parser.add_argument("--peer", type=Path, help="ft_launcher of its environment")
    options = parser.parse_args()
    reporting.require("torch", "transformers")
    kinds: dict[str, Callable[[Path], float]] = {
        "trnslurm, cold": lambda place: ours(place, "trnslurm", warm=False),
        "by torchrun, cold": lambda place: ours(place, "torchrun", warm=False),
        "trnslurm, warm": lambda place: ours(place, "trnslurm", warm=True),
    }
    if options.peer:
        kinds["ft_launcher"] = lambda place: theirs(place, options.peer.absolute())
    kinds[restart.IMPORT] = lambda _: restart.time_imports()
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind, measure in kinds.items():
            print(f"round {number + 1}: {kind} …", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="peer-", dir="/tmp") as directory:
                found[kind].append(measure(Path(directory)))
    alone = statistics.median(found[restart.IMPORT])
    rows = []
    for kind, seconds in found.items():
        middle = statistics.median(seconds)
        spread = {"least": min(seconds), "most": max(seconds)}
        rows.append({"name": kind, "s": middle, **spread, "imports": middle / alone})
    columns = {"name": ("", ""), "s": ("median s", ".2f"), "least": ("least", ".2f"),
               "most": ("most", ".2f"), "imports": ("to imports", ".2f")}  # fmt: skip
    title = f"From a worker's death to the first new step, {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)


def ours(place: Path, launcher: str, *, warm: bool) -> float:
    """Train on a sandbox, and return the seconds."""
    site = scale.Site(place, 2)
    shutil.copy(SCRIPT, place / "project/train.py")
    settings = [word for setting in scale.SETTINGS for word in ("--set", setting)]
    up = ["sandbox", "up", "--nodes", "2", *settings, "--owner", str(os.getpid()), "--quiet"]
    site.trnslurm(*up)
    try:
        site.enter()
        words = ["submit", "./train.py", "--nodes", "2", "--workers", "1", "--time", "30", "--yes"]
        for setting in ("device=cpu", f"run_root={place / 'runs'}"):
            words += ["--set", setting]
        words += ["--launcher", launcher]
        site.trnslurm(*words, "--", "{checkpoints}")
        (out,) = until(lambda: [*place.glob("runs/2*/checkpoints")])
        return death(out, place, ahead=2 if warm else 0)
    finally:
        site.trnslurm("sandbox", "down")


def theirs(place: Path, launcher: Path) -> float:
    """Train with two launchers that meet at a free port, and return the seconds."""
    (out := place / "checkpoints").mkdir()
    shutil.copy(SCRIPT, place / "train.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        str(launcher), "--ignore-missing-fault-tol-cfg", "--nnodes=2", "--nproc-per-node=1",
        "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=peer", "train.py", str(out),
    ]  # fmt: skip
    environ = os.environ | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(SCRIPT.parents[1]), "TMPDIR": str(place), "USE_TORCH_XLA": "0",
    }  # fmt: skip
    with (place / "log").open("w") as log:
        nodes = [
            subprocess.Popen(words, cwd=place, env=environ, stdout=log, stderr=subprocess.STDOUT,
                             start_new_session=True)
            for _ in range(2)
        ]  # fmt: skip
        try:
            return death(out, place)
        finally:
            for node in nodes:
                os.killpg(node.pid, signal.SIGTERM)
            for node in nodes:
                node.wait(WAIT_S)
            for pid in workers(place):
                os.kill(pid, signal.SIGKILL)


def death(out: Path, place: Path, *, ahead: int = 0) -> float:
    """Kill a worker once something is saved; return the seconds until the next process's step."""
    until(lambda: [*out.glob("step-*.pt")])
    done = len(steps(out))
    until(lambda: len(steps(out)) > done)  # by then the checkpoint has been reported
    victim = workers(place)[-1]
    if ahead:
        until(lambda: len(workers(place)) == 2 + ahead)
        time.sleep(restart.IMPORTED_S)
    first = steps(out)[0][0]
    os.kill(victim, signal.SIGKILL)
    begun = time.time()
    again = until(lambda: [when for began, when in steps(out) if began != first])
    return again[0] - begun


def workers(place: Path) -> list[int]:
    """Return the processes that run the script for one launcher, those of a node in order."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
            if b"-u" in words[1:2] and (file.parent / "cwd").readlink().is_relative_to(place):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return sorted(found)


def steps(out: Path) -> list[tuple[str, float]]:
    """Return each step: when its process began, and when it was done."""
    lines = (out / "steps").read_text().splitlines()
    words = [line.split() for line in lines]
    return [(word[0], float(word[2])) for word in words if len(word) == 3]


def until(there: Callable[[], Any]) -> Any:
    """Wait for something, and return it."""
    deadline = time.monotonic() + WAIT_S
    while not (found := there()):
        if time.monotonic() > deadline:
            sys.exit(f"error: nothing after {WAIT_S:g} s")
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    main()
