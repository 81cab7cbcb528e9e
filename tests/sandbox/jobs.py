"""Users of a sandbox, the runs that they submit, and what one looks for after them."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status

from ..processes import run_process
from ..waiting import eventually
from .cluster import Sandbox

SITE = Path(__file__).parent / "site"
# Lists the working directory and the command line of every process.
_LIST = """
for p in /proc/[0-9]*; do
  d=$(readlink "$p/cwd") && echo "$d $(tr '\\0' ' ' < "$p/cmdline")"
done 2> /dev/null
"""


class JobSandbox(Sandbox):
    """A sandbox like trn1, in which jobs run."""

    @property
    def cluster(self) -> str:
        """The name of its cluster profile."""
        return f"sandbox-{self.name}"

    def node_name(self, number: int) -> str:
        return f"compute-dy-trn1-{number}"

    def processes_of(self, run: Run) -> list[str]:
        """The processes on any node that work in a run's directory or name it."""
        lines = []
        for number in self.nodes():
            seen = self.on_node(number, "sh", "-c", _LIST).out.splitlines()
            assert seen, f"node {number} shows not a single process"
            lines += [f"{number}: {line}" for line in seen]
        mentions = re.compile(rf"{re.escape(str(run.path))}(?![\w.-])")  # not another run's
        return [line for line in lines if mentions.search(line)]

    def queue(self) -> list[str]:
        """The jobs that have not ended."""
        return self.slurm("squeue", "--noheader", "--format=%A %j %T %r").ok.splitlines()

    def resume_nodes(self) -> None:
        """Put the nodes back into service that Slurm has taken out of it."""
        for number, state in self.nodes().items():
            if state.startswith(("drain", "down")):
                name = f"NodeName={self.node_name(number)}"
                self.slurm("scontrol", "update", name, "State=RESUME")

    def clean(self) -> None:
        """End every job, and have every node idle again: the next test finds what this one did."""

        def is_clean() -> bool:
            """no job is left, and every node is idle"""
            self.resume_nodes()
            states = self.nodes()
            for number in (n for n, state in states.items() if state.endswith("*")):
                if self.state()["nodes"][number - 1]["power"] == "off":  # a test has failed
                    self.fault(str(number), "power-on")
            return not self.queue() and set(states.values()) == {"idle"}

        if jobs := [line.split()[0] for line in self.queue()]:
            self.slurm("scancel", *jobs)
        eventually(is_clean)


@contextmanager
def started_sandbox(path: str, settings: Sequence[str], *options: str) -> Iterator[JobSandbox]:
    """A sandbox with lines of slurm.conf and options of `up`, for users of this PATH."""
    base = Path(tempfile.mkdtemp(dir="/tmp", prefix="ts-"))  # short: sockets lie below
    sandbox = JobSandbox(base=base, name="jobs", environ={"PATH": path})
    words = [word for setting in settings for word in ("--set", setting)]
    try:
        sandbox.up("-q", "--owner", os.getpid(), *words, *options)
        yield sandbox
    finally:
        said = sandbox.trnslurm("down")
    assert not base.exists(), (said, sorted(base.rglob("*")))


@dataclass
class Run:
    """One submitted run."""

    user: User
    path: Path
    jobs: dict[str, str]

    @property
    def state(self) -> str:
        """The word that `trnslurm status` begins with, asked in this process to be quick."""
        return run_status(RunDir(self.path)).state

    def until(self, state: str, timeout_s: float = 600) -> None:
        """Wait until the run is in a state; one that has ended stays in its own."""
        deadline = time.monotonic() + timeout_s
        while (seen := self.state) != state:
            ended = seen in ("COMPLETED", "FAILED")
            assert not ended and time.monotonic() < deadline, f"not {state}: {self.story()}"
            time.sleep(0.1)

    def status(self) -> dict[str, Any]:
        """What `trnslurm status --json` says."""
        return dict(json.loads(self.user.trnslurm("status", str(self.path), "--json")))

    def phase(self, name: str) -> dict[str, Any]:
        """What it says of one phase."""
        (found,) = [p for p in self.status()["phases"] if p["phase"] == name]
        return dict(found)

    def shown(self) -> str:
        """What `trnslurm status` prints."""
        return self.user.trnslurm("status", str(self.path))

    def logs(self, *options: str) -> str:
        """What `trnslurm logs` prints."""
        return self.user.trnslurm("logs", str(self.path), *options)

    def facts(self, phase: str = "train", attempt: int = 1) -> dict[int, dict[str, Any]]:
        """What the workers of one attempt wrote down, by rank."""
        files = self.path.glob(f"facts-{phase}-{attempt}-*.json")
        facts = {int(f.stem.rpartition("-")[2]): json.loads(f.read_text()) for f in files}
        return dict(sorted(facts.items()))

    def until_there(
        self, workers: int, *, phase: str = "train", attempt: int = 1
    ) -> dict[int, dict[str, Any]]:
        """Wait until all workers have written their facts."""
        eventually(lambda: len(self.facts(phase, attempt)) >= workers, said=self.story)
        return self.facts(phase, attempt)

    def go(self, attempt: int | None = None) -> None:
        """Let the workers that wait go on, or only those of one attempt."""
        (self.path / ("go" if attempt is None else f"go-{attempt}")).touch()

    def job(self, phase: str = "train") -> dict[str, str]:
        """What the controller says of a phase's job."""
        text = self.user.sandbox.slurm("scontrol", "show", "job", "-o", self.jobs[phase]).ok
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def story(self) -> str:
        """Everything that helps to understand a failure."""
        logs = sorted((self.path / "logs").glob("*.log"))
        texts = [f"==> {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs]
        return "\n".join([self.shown(), *self.user.sandbox.queue(), *texts])


@dataclass
class User:
    """Someone with a home, a run root and a shell environment of their own."""

    sandbox: JobSandbox
    home: Path
    environ: dict[str, str] = field(default_factory=dict)
    """What else their shell has exported."""
    site: Path = SITE
    """The search path that has the recipe `probe`."""

    @property
    def run_root(self) -> Path:
        return self.home / "runs"

    @property
    def environment(self) -> dict[str, str]:
        return {**self.sandbox.environment, "HOME": str(self.home), **self.environ}

    def trnslurm(self, *arguments: str | Path) -> str:
        """Run a command, which must succeed, and return what it printed."""
        command = [sys.executable, "-m", "trnslurm", *map(str, arguments)]
        return self._run(command, self.home)

    def differing(self, *arguments: str) -> str:
        """Run a command that says what differs, and ends with 1 like diff."""
        command = [sys.executable, "-m", "trnslurm", *arguments]
        return self._run(command, self.home, code=1)

    def shell(self, script: str, directory: Path) -> str:
        """Run a shell script as one types it after `trnslurm sandbox env`."""
        env = f"eval \"$('{sys.executable}' -m trnslurm sandbox env)\"\n"
        return self._run(["bash", "-euc", env + script], directory)

    def options(self, nodes: int, *sets: str) -> list[str]:
        """Options of submit and render; those of `--set` are given without it."""
        words = ["--cluster", self.sandbox.cluster, "--nodes", str(nodes), "--path", str(self.site)]
        every = [f"run_root={self.run_root}", *sets]
        return words + [word for setting in every for word in ("--set", setting)]

    def submit(
        self, *sets: str, nodes: int = 1, recipe: str = "probe", more: tuple[str, ...] = ()
    ) -> Run:
        """Submit a recipe."""
        return self._submit(recipe, *self.options(nodes, *sets), *more)

    def submit_chain(self, recipe: str, *sets: str, nodes: int = 1) -> list[Run]:
        """Submit a recipe's preset tiny, and what follows it."""
        options = [*self.options(nodes, *sets), "--preset", "tiny", "--chain"]
        said = json.loads(self.trnslurm("submit", recipe, *options, "--json"))
        return [Run(self, Path(run["directory"]), run["jobs"]) for run in said]

    def submit_rendered(self, bundle: Path) -> Run:
        """Submit a reviewed bundle."""
        return self._submit("--rendered", str(bundle))

    def _submit(self, *arguments: str) -> Run:
        said = json.loads(self.trnslurm("submit", "--json", *arguments))
        return Run(self, Path(said["directory"]), said["jobs"])

    def _run(self, command: list[str], directory: Path, *, code: int = 0) -> str:
        done = run_process(command, env=self.environment, cwd=directory)
        assert done.code == code, f"{command}: {done}"
        return done.out
