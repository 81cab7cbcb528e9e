"""The checks of a node before a job starts: disks, data, cache, memory and limits."""

import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import islice
from pathlib import Path

from trnslurm.contract.checkpoints import newest_checkpoint
from trnslurm.contract.rundir import RunFiles
from trnslurm.node.memory import available_gib
from trnslurm.node.preflight.needs import GIB, MIB, Checked, Needs

_MEMORY_PER_WORKER = 256 * MIB
"""A Python process that imports torch needs more."""
_FILES_PER_NODE = 256
_MAX_FILES_COUNTED = 10_000


Check = Callable[[Needs], Checked]


def run_all(needs: Needs, checks: Mapping[str, Check], timeout_s: float) -> dict[str, Checked]:
    """Run the checks in parallel. A check that exceeds the time limit is also a problem."""
    found: dict[str, Checked] = {}

    def run(name: str, check: Check) -> None:
        try:
            found[name] = check(needs)
        except OSError as error:
            found[name] = Checked(problem=f"{error.filename or name}: {error.strerror}")
        except Exception as error:  # then it is unknown whether this node is fit
            found[name] = Checked(problem=f"the check of its {name} failed ({error!r})")

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hung = Checked(problem=f"its check took over {timeout_s:g} s: is a file system hanging?")
    return {name: found.get(name, hung) for name in checks}


def run_directory(needs: Needs) -> Checked:
    """Check that the run directory is writable and has room for a checkpoint."""
    run = RunFiles(needs.run)
    state, checkpoints = run.state, run.checkpoints
    if error := _cannot_write(state):
        return Checked(problem=f"{error}; is the shared file system mounted here, and not full?")
    newest = newest_checkpoint(run)
    size = _bytes_in(newest) if newest else 0
    place = checkpoints if checkpoints.is_dir() else needs.run
    free, room = shutil.disk_usage(place).free, shutil.disk_usage(needs.run).free
    if free < size:
        text = f"{place} has {_size(free)} free, but the next checkpoint needs {_size(size)}"
        return Checked(fact=_size(free), problem=f"{text}; make room")
    return _with_room(needs.run, room, needs)


def _bytes_in(checkpoint: Path) -> int:
    """Return a checkpoint's size. It may be a single file if a custom script made it."""
    files = checkpoint.rglob("*") if checkpoint.is_dir() else [checkpoint]
    some = islice(files, _MAX_FILES_COUNTED)
    return sum(file.stat().st_size for file in some if file.is_file())


def temporary_directory(needs: Needs) -> Checked:
    """Check that the node's own disk is writable and not full."""
    try:
        directory = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Checked(problem="cannot write in /tmp or $TMPDIR; fix the node's own disk")
    if error := _cannot_write(directory):
        return Checked(problem=f"{error}; fix the node's own disk")
    return _with_room(directory, shutil.disk_usage(directory).free, needs)


def cache(needs: Needs) -> Checked:
    """Check that the cache of compiled graphs is readable and, for a precompile, writable."""
    for directory in (Path(word).expanduser() for word in needs.caches):
        if needs.phase == "precompile":
            directory.mkdir(parents=True, exist_ok=True)
        elif not directory.is_dir():
            continue  # trnslurm.node.graphs reports that
        with os.scandir(directory) as entries:
            next(entries, None)
        error = _cannot_write(directory)
        if error and needs.phase == "precompile":
            return Checked(problem=f"{error}; correct its owner, or compile_cache in the profile")
        if error:
            return Checked(warning=f"{error}: missing graphs could not be cached")
    return Checked(fact="ok" if needs.caches else "")


def dataset(needs: Needs) -> Checked:
    """Check that the data can be read."""
    if not needs.data:
        return Checked()
    path = Path(needs.data).expanduser()
    try:
        files = sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path]
        for file in files[:1] + files[-1:]:
            with file.open("rb") as source:
                source.read(1)
    except OSError as error:
        text = (
            f"dataset {error.filename}: {error.strerror}; mount its file system on this node, "
            "or create the dataset"
        )
        text += " with trnslurm data prepare"
        precompiling = needs.phase == "precompile"  # it reads no data
        return Checked(warning=text) if precompiling else Checked(problem=text)
    return Checked(fact="ok")


def memory(needs: Needs) -> Checked:
    """Check that the job has enough memory for its workers."""
    available = int(available_gib() * (1 << 30))
    needed = _MEMORY_PER_WORKER * (1 + needs.workers)
    if available < needed:
        return Checked(
            fact=_size(available),
            problem=f"{_size(available)} of memory available, {needs.workers} workers need at least"
            f" {_size(needed)}; end the programs that use it, or raise slurm.mem_per_node_mib",
        )
    return Checked(fact=_size(available))


def open_files(needs: Needs) -> Checked:
    """Check that a worker may open enough files, because collectives need one per peer."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_PER_NODE + 4 * needs.nodes * needs.workers
    if limit < needed:
        return Checked(
            fact=str(limit),
            problem=f"ulimit -n is {limit}, but the job needs {needed}; raise slurmd's LimitNOFILE",
        )
    return Checked(fact=str(limit))


def own_name(needs: Needs) -> Checked:
    """Check that the node's name resolves to the node. This is only a warning: we do not use it."""
    name = socket.gethostname()
    if needs.nodes == 1 or not needs.device.on_trainium:
        return Checked()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Checked(warning=f"its own name has no address ({error}): fix /etc/hosts or DNS")
    if not owns(address):
        text = f"its own name resolves to {address}, which is another host: fix /etc/hosts"
        return Checked(warning=text)
    return Checked(fact=address)


def torch_xla(needs: Needs) -> Checked:
    """Check that torch_xla supports GPUs. Since 2.8, PyTorch/XLA has built no such version."""
    if not needs.device.one_of:
        return Checked()
    builds = needs.device.one_of
    for name in builds:
        try:
            return Checked(fact=f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return Checked(
        problem=f"neither {' nor '.join(builds)} is in its Python, and torch_xla needs "
        "one of them for GPUs; install TorchAcc's build, or use a strategy for cuda"
    )


def owns(address: str) -> bool:
    """Check whether an address belongs to this host."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _with_room(directory: Path, free: int, needs: Needs) -> Checked:
    if free >= needs.min_free:
        return Checked(fact=_size(free))
    text = f"{directory} has {_size(free)} free, a job needs at least {_size(needs.min_free)}"
    return Checked(fact=_size(free), problem=f"{text}; make room")


def _cannot_write(directory: Path) -> str:
    """Write a file; return what is wrong, or an empty string."""
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".preflight-") as file:
            file.write(b"preflight\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot write in {directory}: {error.strerror}"
    return ""


def _size(number: int) -> str:
    if number < 10 * MIB:
        return f"{number / MIB:.1f} MiB"
    return f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
