"""Starts the node programs as real processes and finds whatever they leave behind."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..waiting import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
MARKER = "TRNSLURM_TEST_MARKER"


class Workbench:
    """A directory with an awkward name, and the processes started from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        mark = uuid.uuid4().hex
        self.environ = os.environ | {MARKER: mark, "PYTHONPATH": str(REPOSITORY)}
        self._mark = f"{MARKER}={mark}".encode()
        self._started: list[subprocess.Popen[str]] = []

    def script(self, name: str, text: str) -> str:
        """Write a bash script; return its path relative to the directory."""
        (self.directory / name).write_text(text)
        return name

    def start(self, *command: str, stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        """Start a command in the directory; what descends from it can be found again."""
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env=self.environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def started(self, process: "subprocess.Popen[str]") -> None:
        """Have a process killed that a test leaves."""
        self._started.append(process)

    def program(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start `python -m trnslurm.node.<name>`."""
        return self.start(sys.executable, "-m", f"trnslurm.node.{name}", *arguments)

    def run(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a node program to its end."""
        process = self.program(name, *arguments)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def read(self, name: str) -> str:
        """A file of the directory."""
        return (self.directory / name).read_text()

    def pid_in(self, name: str) -> int:
        """The pid that a process is about to write into a file."""
        self.await_true(
            lambda: self.has(name) and self.read(name).endswith("\n"), f"{name} is there"
        )
        return int(self.read(name))

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        return (self.directory / name).exists()

    def await_files(self, *names: str) -> None:
        """Wait until all files are there."""
        for name in names:
            self.await_true(lambda name=name: self.has(name), f"{name} is there")

    def alive(self) -> list[str]:
        """Our processes that still run, zombies left out (they have no environment)."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._mark in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{entry.name}: {line.decode()}")
        return found

    def await_none_alive(self) -> None:
        """Wait until no process of ours is left."""
        self.await_true(lambda: not self.alive(), "no process left")

    def await_true(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition."""
        eventually(condition, said=lambda: f"{what}; {self.alive()}")

    def clear(self) -> None:
        """Kill what a failed test left."""
        while left := self.alive():
            for line in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        for process in self._started:
            process.communicate(timeout=600)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    directory = tmp_path / 'it\'s a "run" dir'
    directory.mkdir()
    workbench = Workbench(directory)
    yield workbench
    workbench.clear()


@pytest.fixture
def stubborn_tree(bench: Workbench) -> str:
    """Bash lines that start three processes which ignore TERM, and wait until they run:
    a child, a child of a killed parent, and a double-forked daemon in its own session.
    """
    bench.script(
        "stubborn.sh",
        "trap '' TERM INT HUP USR1 USR2\necho $$ > \"$1\"\nwhile :; do sleep 0.2; done\n",
    )
    (bench.directory / "daemon.py").write_text(
        "import os\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.execvp('bash', ['bash', 'stubborn.sh', 'daemon.pid'])\n"
    )
    return (
        "bash stubborn.sh child.pid &\n"
        "(bash stubborn.sh orphan.pid & )\n"
        f"'{sys.executable}' daemon.py\n"
        "until [ -s child.pid ] && [ -s orphan.pid ] && [ -s daemon.pid ]; do sleep 0.02; done\n"
    )
