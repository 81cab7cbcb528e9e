"""The stacks of a run's processes on one node, written by the processes or by py-spy.

    python -m trnslurm.node.stacks RUN PHASE ATTEMPT

As a program, it prints what each worker of an attempt does, as JSON. `trnslurm stacks` runs it on
all nodes through srun. srun passes on at most 1024 bytes of a task's output at a time
(SLURM_IO_MAX_MSG_LEN in io_hdr.h), so longer lines from several nodes would mix. Therefore a
worker's JSON comes in parts, each with the worker's name.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.contract.variables import Variable
from trnslurm.node import processes

# The same name as in startup/sitecustomize.py, which this program must not import.
STACKS_FILE = "trnslurm-stacks"
# How long a process may take to write its stacks.
_STACKS_S = 2.0
# How long py-spy may take for a process, and all processes together.
_PY_SPY_S, ALL_STACKS_S = 5.0, 45.0
_MOST_FRAMES = 40
_PARTS, _PART = "part-of-stacks", 800
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+.*\(most recent call first\):$", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_WAITS = re.compile(
    r"/(torch/(distributed|cuda|autograd|nn/parallel)|torch_xla|deepspeed/comm|mpi4py)/"
)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<")


def main(argv: Sequence[str]) -> int:
    """Print what the workers of an attempt do on this host."""
    run, phase, attempt = argv
    names = {Variable.RUN_DIR: run, Variable.PHASE: phase, Variable.ATTEMPT: attempt}
    running = processes_with(f"{name}={value}".encode() for name, value in names.items())
    until = time.monotonic() + ALL_STACKS_S
    for process in workers_of([p for p in running if p.rank is not None] or running):
        text = "" if process.state in "Tt" else stacks_of(process.pid, until)
        facts = facts_of(process, text) | {"pid": process.pid, "text": text}
        for line in in_parts(f"{os.uname().nodename}:{process.pid}", json.dumps(facts)):
            print(line, flush=True)
    return 0


def in_parts(who: str, text: str) -> Iterator[str]:
    """Yield ASCII text in lines short enough for srun, each with the worker and its part number."""
    parts = [text[at : at + _PART] for at in range(0, len(text), _PART)]
    for number, part in enumerate(parts):
        yield f"{_PARTS} {who} {number} {len(parts)} {part}"


def joined(lines: Iterable[str]) -> list[str]:
    """Return the texts whose parts are all among these lines."""
    found: dict[str, dict[int, str]] = {}
    whole: dict[str, int] = {}
    for line in lines:
        words = line.split(" ", 4)
        if len(words) == 5 and words[0] == _PARTS and words[2].isdigit() and words[3].isdigit():
            found.setdefault(words[1], {})[int(words[2])] = words[4]
            whole[words[1]] = int(words[3])
    return [
        "".join(parts[number] for number in sorted(parts))
        for who, parts in found.items()
        if len(parts) == whole[who]
    ]


class Process(NamedTuple):
    """A process of the job on this node."""

    pid: int
    parent: int
    state: str
    rank: int | None
    step: str = ""
    """The Slurm job step that started it, or an empty string if no variable says so."""
    task: int | None = None
    """The number of its task in that step."""


def processes_with(wanted: Iterable[bytes], also: bytes = b"") -> list[Process]:
    """Return the processes that have all these variables, `NAME=VALUE`, and `NAME` of any value."""
    needed, found = set(wanted), []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it has ended
            continue
        stat = processes.read_stat(int(entry.name))
        if stat and stat.state not in "ZX" and needed.issubset(variables):
            if also and _value(variables, also) is None:
                continue
            rank, task = _number(variables, b"RANK"), _number(variables, b"SLURM_PROCID")
            step = (_value(variables, b"SLURM_STEP_ID") or b"").decode(errors="replace")
            found.append(Process(int(entry.name), stat.parent, stat.state, rank, step, task))
    return sorted(found)


def _number(variables: Sequence[bytes], name: bytes) -> int | None:
    """Return the value of a numeric variable, or None without one."""
    value = _value(variables, name)
    return int(value) if value and value.isdigit() else None


def _value(variables: Sequence[bytes], name: bytes) -> bytes | None:
    values = [v[len(name) + 1 :] for v in variables if v.startswith(name + b"=")]
    return values[-1] if values else None


def workers_of(running: list[Process], otherwise: Sequence[Process] = ()) -> list[Process]:
    """Return each rank's topmost process, or from `otherwise` for ranks that have none.

    Without ranks, return the node's topmost process.
    """
    ranks = {process.pid: process.rank for process in running}
    found = [p for p in running if p.rank is not None and ranks.get(p.parent) != p.rank]
    found = found or [p for p in running if p.parent not in ranks][:1]
    there = {process.rank for process in found}
    return [*found, *(p for p in otherwise if p.rank not in there)]


def name_of(pid: int, file: str = "comm") -> str:
    """Return the name of a process's program, or another line of /proc; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").strip()
    return ""


def what_is(process: Process) -> str:
    """Return a process's program, its state, and where it waits in the kernel."""
    waits = name_of(process.pid, "wchan")
    return f"{name_of(process.pid)}: state {process.state}, {waits or '-'}"


def stacks_of(pid: int, until: float = math.inf) -> str:
    """Return a Python process's stacks, or an empty string if there are none.

    If a process does not offer its stacks or does not respond, py-spy gets them, if the node has it
    and the time limit permits.
    """
    return _own_stacks(pid) or (_stacks_by_py_spy(pid) if time.monotonic() < until else "")


def _stacks_by_py_spy(pid: int) -> str:
    """Return the stacks from py-spy's dump, in faulthandler's format."""
    code, said = processes.ask_tool(
        "py-spy", "dump", "--json", "--pid", str(pid), limit_s=_PY_SPY_S
    )
    try:
        threads = json.loads(said) if code == 0 else []
        lines = []
        for thread in threads:
            is_main = thread["os_thread_id"] == pid
            head = f"{'Current thread' if is_main else 'Thread'} 0x{thread['os_thread_id']:016x}"
            lines += ["", f"{head} (most recent call first):"]
            lines += [
                '  File "{filename}", line {line} in {name}'.format(**frame)
                for frame in thread["frames"]
            ]
    except (ValueError, LookupError, TypeError):
        return ""
    return "\n".join(lines[1:])


def _own_stacks(pid: int) -> str:
    """Return the stacks that a process writes itself, through startup/sitecustomize.py."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            links = [(entry.path, Path(entry.path).readlink().name) for entry in entries]
        file = next(path for path, name in links if name.startswith(f"memfd:{STACKS_FILE} "))
        with open(file, "rb") as stream:  # noqa: PTH123
            begin = stream.seek(0, os.SEEK_END)
            # Without a handler the signal would end the process.
            if not _catches(pid, signal.SIGRTMAX):
                return ""
            os.kill(pid, signal.SIGRTMAX)
            return _read_on(stream.fileno(), begin)
    except (OSError, StopIteration):
        return ""


def _catches(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.M)
    return bool(found and int(found[1], 16) >> (signum - 1) & 1)


def _read_on(fd: int, begin: int) -> str:
    """Return what is written to a file, as soon as the file stops growing."""
    end = time.monotonic() + _STACKS_S
    size = begin
    while time.monotonic() < end:
        time.sleep(0.05)
        before, size = size, os.fstat(fd).st_size
        if size == before > begin:
            break
    return os.pread(fd, size - begin, begin).decode(errors="replace").rstrip()


def facts_of(process: Process, text: str) -> dict[str, Any]:
    """Return what a process does, according to its stacks."""
    return {
        "rank": process.rank,
        "state": process.state,
        "program": what_is(process),
        "host": os.uname().nodename,
        "frames": main_frames(text),
    }


def main_frames(text: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of the main thread's frames, innermost first."""
    heads = list(_THREAD.finditer(text))
    if not heads:
        return []
    # The main thread handles the signal if it can. Otherwise it is the last one.
    head = next((h for h in heads if h[1] == "Current thread"), heads[-1])
    end = next((h.start() for h in heads if h.start() > head.start()), len(text))
    frames = _FRAME.findall(text, head.end(), end)
    return [(file, int(line), name) for file, line, name in frames[:_MOST_FRAMES]]


def waits_in(frames: Sequence[tuple[str, int, str]]) -> bool:
    """Check whether a main thread waits for others: it is in a collectives library."""
    return bool(frames and _WAITS.search(frames[0][0]))


def place_of(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return the innermost line of the script's own code, and the function that it called."""
    own = next((f for f in frames if not _LIBRARY.search(f[0])), frames[0])
    file, line, function = own
    text = f"{Path(file).name}:{line} ({function})"
    if any(f[0].endswith("torch/utils/data/dataloader.py") for f in frames):
        return f"{text}, waiting for the data loader"
    return text if own is frames[0] else f"{text}, in {frames[0][2]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
