"""Starts standby workers for the next attempt, up to the point at which they would train.

    python -m trnslurm.node.standby --workers=32 -- python -m trnslurm.node.launcher …

node.sh becomes this program in a second job step on the training nodes. It starts the launcher,
whose workers import what their script imports, and then wait at the gate: a file that this program
keeps locked. They touch no device. When a line of JSON arrives on stdin, which srun passes on from
the attempt program, this program opens the gate, and ends when the launcher does. End of file on
stdin means that the attempt program has ended. Then the workers are ended.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.memory import available_gib

RESUME = "@resume@"
"""The placeholder for the newest checkpoint in the workers' arguments, until it is known."""
# Measured with torch and transformers on a CPU: 0.5 GiB, of which half is shared.
_GIB_PER_WORKER = 1.0
_KEEPS_FREE = 0.1
_MOST_BYTES = 1 << 16


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers, and open the gate on request; return the launcher's exit code."""
    signals = processes.SignalQueue()
    parser = argparse.ArgumentParser(prog="standby", allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True, help="on this node")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(argv)
    if lacks := memory_lacks(options.workers):
        processes.say(f"standby: no workers on {os.uname().nodename}, {lacks}")
        return 0
    processes.become_subreaper()
    return _Gate(options.command, signals).run()


def memory_lacks(workers: int) -> str:
    """Return why there is too little memory for so many more workers, or "" if there is enough."""
    known = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")))
    total, available = int(known["MemTotal"]) / (1 << 20), available_gib()
    needs = workers * _GIB_PER_WORKER + _KEEPS_FREE * total
    if available >= needs:
        return ""
    return f"which has {available:.0f} GiB of memory available, but needs {needs:.0f}"


class _Gate:
    """The gate, and the launcher whose workers wait at it."""

    def __init__(self, command: Sequence[str], signals: processes.SignalQueue) -> None:
        self._signals = signals
        self._file = os.memfd_create("trnslurm-gate")  # in memory: SIGKILL leaves no file behind
        fcntl.flock(self._file, fcntl.LOCK_EX)
        environ = os.environ | {Variable.GATE: f"/proc/{os.getpid()}/fd/{self._file}"}
        # Slurm finds a job's processes by their session.
        self._launcher = processes.spawn(command, environ=environ, own_session=False)
        self._open = False

    def run(self) -> int:
        """Wait for the order to start or end; return the launcher's exit code."""
        told = b""
        while True:
            arrived, ready = self._signals.wait(None, () if self._open else (0,))
            code = dict(processes.reap()).get(self._launcher)
            if code is not None:
                return code
            part = os.read(0, _MOST_BYTES) if ready else b""
            told += part
            if self._open:
                continue  # Slurm signals the launcher and its workers as well
            if (ready and not part) or arrived & processes.END_SIGNALS:
                processes.end_descendants()
                return 0
            if told.endswith(b"\n"):
                os.write(self._file, told)
                fcntl.flock(self._file, fcntl.LOCK_UN)
                self._open = True


def wait() -> None:
    """Import what the script imports first, and wait at the gate; called by sitecustomize.py."""
    try:
        _wait()
    except Exception as error:
        # Not an exception, after which Python would continue with the script.
        processes.say(f"standby: {error}")
        os._exit(1)


def _wait() -> None:
    # A process that an import starts must not wait.
    gate = Path(os.environ.pop(Variable.GATE))
    with suppress(Exception):  # the script itself will report it
        for name, parts in leading_imports(*_script()):
            # As the import statement does: transformers loads a model's code only when it is named.
            __import__(name, fromlist=parts)
    torch: Any = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        raise RuntimeError("one of the script's imports uses a GPU, so no workers can stand by")
    with gate.open(encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        environ: dict[str, str] = json.loads(stream.read())
    os.environ.pop(Variable.STANDBY, None)
    os.environ.update(environ)
    sys.argv[:] = [word.replace(RESUME, environ[Variable.RESUME]) for word in sys.argv]


def _script() -> tuple[Path, Path]:
    """Return the file that Python runs, and the directory that Python adds to the path for it."""
    if sys.argv[0] != "-m":
        return Path(sys.argv[0]), Path(sys.argv[0]).absolute().parent
    # Not by importlib, which would import the module's package, nor by sys.orig_argv, which is new
    # in Python 3.10.
    words = os.fsdecode(Path("/proc/self/cmdline").read_bytes()).split("\0")
    name = words[words.index("-m") + 1].replace(".", "/")
    places = [Path(entry or ".", f"{name}.py") for entry in ["", *sys.path]]
    return next(place for place in places if place.exists()), Path.cwd()


def leading_imports(script: Path, directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what a script imports first, up to a module of its project.

    Each item is a module, and the names that the script imports from it.

    Later imports may depend on what the script does first, such as set a variable.
    """
    for statement in ast.parse(script.read_bytes()).body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        found: list[tuple[str, list[str]]]
        if isinstance(statement, ast.Import):
            found = [(alias.name, []) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            found = [(statement.module, [alias.name for alias in statement.names])]
        else:
            return
        for name, parts in found:
            if _is_own(name.partition(".")[0], directory):
                return
            yield name, parts


def _is_own(package: str, directory: Path) -> bool:
    """Check whether a package is next to the script, or elsewhere in the copy of its project."""
    if any((directory / f"{package}{end}").exists() for end in ("", ".py")):
        return True
    spec = importlib.util.find_spec(package)
    project = f"{os.environ.get(Variable.RUN_DIR, '')}/work/"
    return bool(spec and spec.origin and spec.origin.startswith(project))


if __name__ == "__main__":
    sys.exit(main())
