"""What a node can find out about itself before a job starts on it, each check in a few words.

A check that hangs, as one of a dead file system does, is given up: each has a thread of its own.
"""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30
INFINIBAND = Path("/sys/class/infiniband")
_TOOL_S = 10
_BUSY_S = 5.0
"""How long processes that an earlier job left on the devices have to end."""
_MEMORY_PER_WORKER = 256 * MIB
"""A Python with torch in it needs more."""
_FILES = 256


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the job needs of a node."""

    run: Path
    phase: str
    nodes: int = 1
    device: str = "cpu"
    devices: int = 0
    """Neuron devices of the instance type."""
    workers: int = 1
    """Workers on this node: each needs a NeuronCore or a GPU."""
    efa: int = 0
    data: str = ""
    caches: tuple[str, ...] = ()
    min_free: int = 256 * MIB
    """Bytes that must be free where something is written."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found: a fact for a table, and what is wrong and what to do about it."""

    fact: str = ""
    problem: str = ""
    warning: str = ""


Check = Callable[[Needs], Finding]


def run_all(needs: Needs, checks: Mapping[str, Check], timeout_s: float) -> dict[str, Finding]:
    """Run the checks side by side; what has not ended by then is a problem of its own."""
    found: dict[str, Finding] = {}

    def run(name: str, check: Check) -> None:
        try:
            found[name] = check(needs)
        except OSError as error:
            found[name] = Finding(problem=f"{error.filename or name}: {error.strerror}")
        except Exception as error:  # whatever it was, this node could not say that it is fit
            found[name] = Finding(problem=f"looking at its {name} failed ({error!r})")

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hung = Finding(problem=f"looking at it took over {timeout_s:g} s: is a file system dead?")
    return {name: found.get(name, hung) for name in checks}


def devices(needs: Needs) -> Finding:
    """All devices are there, and enough of them are free."""
    if needs.device == "neuron":
        return _neuron_devices(needs)
    if needs.device == "cuda":
        return _gpus(needs)
    return Finding()


def _neuron_devices(needs: Needs) -> Finding:
    deadline = time.monotonic() + _BUSY_S
    while True:
        listed = _neuron_ls()
        if isinstance(listed, str):
            return Finding(problem=f"{listed}; look at the driver (modinfo neuron) and the image")
        if len(listed) < needs.devices:
            return Finding(
                fact=str(len(listed)),
                problem=f"neuron-ls shows {len(listed)} of {needs.devices} devices; "
                "replace the instance, or correct instance_type in the cluster profile",
            )
        holders = [p for device in listed for p in device.get("neuron_processes") or ()]
        free = sum(d["nc_count"] for d in listed if not d.get("neuron_processes"))
        if free >= needs.workers:
            return Finding(fact=str(len(listed)))
        if not holders:
            text = f"its devices have {free} NeuronCores, the job needs {needs.workers}; "
            return Finding(problem=f"{text}correct workers_per_node in the cluster profile")
        if time.monotonic() > deadline:
            first = f"pid {holders[0].get('pid')}, {holders[0].get('command')}"
            text = f"{free} of the {needs.workers} NeuronCores it needs are free; end what holds"
            return Finding(fact=str(len(listed)), problem=f"{text} the others ({first})")
        time.sleep(0.5)


def _neuron_ls() -> list[dict[str, Any]] | str:
    """The devices; without the tool the device files are counted; or what is wrong."""
    said = _tool("neuron-ls", "--json-output")
    if said is None:
        files = [f for f in Path("/dev").glob("neuron*") if re.fullmatch(r"neuron\d+", f.name)]
        if files:
            return [{"nc_count": GIB} for _ in files]  # how many cores they have is not known
        return "neuron-ls is not on PATH, and there is no /dev/neuron0"
    try:
        return [dict(device) | {"nc_count": int(device["nc_count"])} for device in json.loads(said)]
    except (ValueError, LookupError, TypeError):
        return f"neuron-ls finds no devices ({_last_line(said)})"


def _gpus(needs: Needs) -> Finding:
    said = _tool("nvidia-smi", "-L")
    if said is None:
        return Finding(problem="nvidia-smi is not on PATH; install the NVIDIA driver on the node")
    number = sum(line.startswith("GPU ") for line in said.splitlines())
    if number < needs.workers:
        text = f"nvidia-smi shows {number} GPUs, the job needs {needs.workers} ({_last_line(said)})"
        return Finding(fact=str(number), problem=f"{text}; look at dmesg, replace the instance")
    return Finding(fact=str(number))


def _tool(*command: str) -> str | None:
    """What a tool says on stdout, or on stderr where it fails; None: there is no such tool."""
    if not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            errors="replace", timeout=_TOOL_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer in {_TOOL_S} s"
    return done.stdout if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1][:200]


def efa(needs: Needs, directory: Path = INFINIBAND) -> Finding:
    """The network cards are there."""
    if not needs.efa:
        return Finding()
    number = len(list(directory.iterdir())) if directory.is_dir() else 0
    if number >= needs.efa:
        return Finding(fact=str(number))
    return Finding(
        fact=str(number),
        problem=f"{number} of {needs.efa} EFA interfaces in {directory}; enable EFA in its compute "
        "resource, use an image with the driver (modinfo efa), or replace the instance",
    )


def run_directory(needs: Needs) -> Finding:
    """It can be written, and has room for a checkpoint."""
    state, checkpoints = needs.run / "state", needs.run / "checkpoints"
    if error := _cannot_write(state):
        return Finding(problem=f"{error}; is the shared file system mounted here, and not full?")
    newest = max(checkpoints.glob("step-" + "[0-9]" * 8), default=None)
    size = sum(f.stat().st_size for f in newest.iterdir()) if newest else 0
    place = checkpoints if checkpoints.is_dir() else needs.run
    free, room = shutil.disk_usage(place).free, shutil.disk_usage(needs.run).free
    if free < size:
        text = f"{place} has {_size(free)} free, the next checkpoint needs {_size(size)}"
        return Finding(fact=_size(free), problem=f"{text}; make room")
    return _with_room(needs.run, room, needs)


def temporary_directory(needs: Needs) -> Finding:
    """The node's own disk can be written, and is not full."""
    try:
        directory = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Finding(problem="cannot write in /tmp, nor in $TMPDIR; mend the node's own disk")
    if error := _cannot_write(directory):
        return Finding(problem=f"{error}; mend the node's own disk")
    return _with_room(directory, shutil.disk_usage(directory).free, needs)


def cache(needs: Needs) -> Finding:
    """Compiled graphs can be read, and written where they are made."""
    for directory in (Path(word).expanduser() for word in needs.caches):
        if needs.phase == "precompile":
            directory.mkdir(parents=True, exist_ok=True)
        elif not directory.is_dir():
            continue  # what that means is for trnslurm.node.graphs to say
        with os.scandir(directory) as entries:
            next(entries, None)
        error = _cannot_write(directory)
        if error and needs.phase == "precompile":
            return Finding(problem=f"{error}; correct its owner, or compile_cache in the profile")
        if error:
            return Finding(warning=f"{error}: a graph that is missing could not be kept")
    return Finding(fact="ok" if needs.caches else "")


def dataset(needs: Needs) -> Finding:
    """The data can be read."""
    if not needs.data:
        return Finding()
    path = Path(needs.data).expanduser()
    try:
        files = sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path]
        for file in files[:1] + files[-1:]:
            with file.open("rb") as source:
                source.read(1)
    except OSError as error:
        text = f"dataset {error.filename}: {error.strerror}; mount its file system here, or make it"
        text += " with trnslurm data prepare"
        precompiling = needs.phase == "precompile"  # which reads none
        return Finding(warning=text) if precompiling else Finding(problem=text)
    return Finding(fact="ok")


def memory(needs: Needs) -> Finding:
    """Some is left."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    needed = _MEMORY_PER_WORKER * (1 + needs.workers)
    if available < needed:
        return Finding(
            fact=_size(available),
            problem=f"{_size(available)} of memory available, {needs.workers} workers need at least"
            f" {_size(needed)}; end what uses it",
        )
    return Finding(fact=_size(available))


def open_files(needs: Needs) -> Finding:
    """A worker may open enough of them: collectives need one per peer."""
    limit, needed = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _FILES + 4 * needs.nodes * needs.workers,
    )
    if limit < needed:
        return Finding(
            fact=str(limit),
            problem=f"ulimit -n is {limit}, the job needs {needed}; raise LimitNOFILE of slurmd",
        )
    return Finding(fact=str(limit))


def own_name(needs: Needs) -> Finding:
    """Its own name means itself; only a warning, as nothing of ours depends on it."""
    name = socket.gethostname()
    if needs.nodes == 1 or needs.device != "neuron":
        return Finding()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(warning=f"its own name has no address ({error}): correct /etc/hosts or DNS")
    if not owns(address):
        text = f"its own name means {address}, which is none of its addresses: correct /etc/hosts"
        return Finding(warning=text)
    return Finding(fact=address)


def owns(address: str) -> bool:
    """Whether an address is one of this host's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _with_room(directory: Path, free: int, needs: Needs) -> Finding:
    if free >= needs.min_free:
        return Finding(fact=_size(free))
    text = f"{directory} has {_size(free)} free, a job needs at least {_size(needs.min_free)}"
    return Finding(fact=_size(free), problem=f"{text}; make room")


def _cannot_write(directory: Path) -> str:
    """Write a file for real; return what is wrong."""
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".preflight-") as file:
            file.write(b"preflight\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot write in {directory}: {error.strerror}"
    return ""


def _size(number: int) -> str:
    return f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


CHECKS: dict[str, Check] = {
    "devices": devices,
    "EFA": efa,
    "run directory": run_directory,
    "temporary directory": temporary_directory,
    "cache": cache,
    "dataset": dataset,
    "memory": memory,
    "open files": open_files,
    "own name": own_name,
}
