"""Sandboxes for the tests of the sandbox itself, each with its own base directory."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trnslurm

from ..processes import Done, processes_with, run_process
from ..waiting import eventually

CHECKOUT = Path(trnslurm.__file__).parent.parent
# Slurm starts a batch job at once: by default, the scheduler may be 3 seconds late for it.
AT_ONCE = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1"
_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "TRNSLURM_", "XDG_")


def line_of(process: subprocess.Popen[str], timeout_s: float = 600) -> str:
    """The next line that a process prints, waited for with a bound."""
    stdout = process.stdout.fileno()
    deadline = time.monotonic() + timeout_s
    said = b""
    while not said.endswith(b"\n"):
        left = max(0, deadline - time.monotonic())
        assert select.select([stdout], [], [], left)[0], f"no line in time, but {said!r}"
        if not (byte := os.read(stdout, 1)):
            break
        said += byte
    return said.decode()


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A sandbox, up or not, and its user."""

    base: Path
    name: str = "sandbox"
    environ: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its user's shell."""
    user: tuple[str, ...] = ()
    """The words that run a command as its user, if that is another one."""
    python: str = sys.executable

    @property
    def path(self) -> Path:
        return self.base / self.name

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
        own = {"TRNSLURM_SANDBOXES": str(self.base), "TRNSLURM_SANDBOX": self.name}
        # Of `make test-slurm`.
        slurm = {k: v for k, v in os.environ.items() if k == "TRNSLURM_SANDBOX_SLURM"}
        return kept | {"PYTHONPATH": str(CHECKOUT)} | own | slurm | self.environ

    def argv(self, *words: object) -> list[str]:
        """The command line of `trnslurm sandbox`."""
        return [*self.user, self.python, "-m", "trnslurm", "sandbox", *map(str, words)]

    def trnslurm(self, *words: object, timeout_s: float = 600, **more: Any) -> Done:
        """Run `trnslurm sandbox`."""
        return self.run(self.argv(*words), timeout_s=timeout_s, **more)

    def slurm(self, command: str, *words: object, timeout_s: float = 600, **more: Any) -> Done:
        """Run one of Slurm's commands through its wrapper."""
        argv = [*self.user, str(self.path / "bin" / command), *map(str, words)]
        return self.run(argv, timeout_s=timeout_s, **more)

    def run(
        self, argv: list[str], *, timeout_s: float = 600, feed: str = "",
        cwd: Path | None = None, environ: Mapping[str, str] | None = None,
    ) -> Done:  # fmt: skip
        """Run a command with the environment of this sandbox's user."""
        return run_process(
            argv, env=self.environment | (environ or {}), cwd=cwd or self.base.parent, feed=feed,
            timeout_s=timeout_s,
        )  # fmt: skip

    @contextmanager
    def running(
        self, argv: list[str], environ: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a command meanwhile; at the end it is killed if it still runs."""
        process = subprocess.Popen(
            argv, env=self.environment | (environ or {}), cwd=self.base.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                stream.close()  # what it started may hold the other end
            process.wait()

    def up(self, *options: object) -> Done:
        """Start it, or fail; jobs run under this interpreter."""
        done = self.trnslurm("up", "--python", sys.executable, *options)
        assert done.code == 0, done
        return done

    def fault(self, *words: object) -> str:
        """Inject a fault, and return what is printed."""
        return self.trnslurm("fault", *words).ok.rstrip("\n")

    def on_node(self, node: int, *command: str) -> Done:
        """Run a command on a node."""
        return self.trnslurm("exec", "--node", node, "--", *command)

    def state(self) -> dict[str, Any]:
        """What `trnslurm sandbox status --json` says."""
        return dict(json.loads(self.trnslurm("status", "--json").ok))

    def nodes(self) -> dict[int, str]:
        """The controller's state of each node, by number."""
        text = self.slurm("sinfo", "--noheader", "--Node", "--format=%N|%T").ok
        rows = [line.rpartition("-")[2].split("|") for line in text.splitlines()]
        return {int(number): state for number, state in rows}

    def until(self, node: int, *states: str, timeout_s: float = 600) -> None:
        """Wait until the controller reports one of these states of a node."""
        eventually(lambda: self.nodes()[node] in states, timeout_s, said=self.nodes)

    @property
    def holder(self) -> int:
        """The pid of the process that holds it."""
        return int((self.path / "entry").read_text().split()[0])

    def processes(self) -> list[str]:
        """Return its processes: those with its directory in the command line or the environment."""
        return processes_with(str(self.path))


@contextmanager
def sandbox(name: str = "sandbox", **fields: Any) -> Iterator[Sandbox]:
    """A sandbox that is not up yet; what a test leaves of it is taken down, and must be gone."""
    above = Path(tempfile.mkdtemp(dir="/tmp", prefix="tc-"))
    made = Sandbox(base=above / "b", name=name, **fields)
    try:
        yield made
    finally:
        made.trnslurm("down", "--all")
        left = made.base.exists(), processes_with(str(made.base))
        shutil.rmtree(above)
    assert left == (False, [])


@contextmanager
def sandbox_up(*options: object, name: str = "sandbox") -> Iterator[Sandbox]:
    """A sandbox that is up, for the tests of one file."""
    with sandbox(name) as made:
        made.up("-q", *options)
        yield made
