"""The tutorial: a reader who types its commands, in order, sees what it shows.

Its trainings have few steps here, too few for a reader to look at: the second is held once it has
come to the step from which the page turns a node off.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trnslurm.records.run import RunDir

from ..processes import processes_with
from ..waiting import eventually
from .cluster import CHECKOUT

pytestmark = pytest.mark.rest

PAGE = CHECKOUT / "docs/tutorial.md"
BOUND_S = 600
STEPS = {"page": "500", "here": "40"}
# A reader looks again, until there is something to see.
_LOOKS = re.compile(r"sinfo|squeue|trnslurm (status|logs)\b")
# What differs from run to run, in this order.
_VARIES = (
    (r"/home/ada\b", "HOME"),
    (r"\b\d{8}-\d{6}\b", "RUN"),
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
    (r"\b[0-9a-f]{16}\b", "KEY"),
    (r"\b\d{7,}\b", "JOB"),
    (r"\d[\d,]*(\.\d+)? (tokens/s|s)\b", "N"),
    (r"(\d\.\d{4} +)[\d,]+(?= )", r"\1N"),  # tokens/s in a table, fast or slow
    (r"\b\d+\.\d+(e-\d+)?\b", "N"),
    (r"\b\d{1,3},\d{3}\b", "N"),
    (r"\bstep \d+\b", "step N"),
    (r"\btokens/s \d+", "tokens/s N"),
)


@dataclass(frozen=True)
class Step:
    """A command of the page, and what it shows of its output."""

    command: str
    shown: list[str]

    def matches(self, printed: str) -> bool:
        """Check whether that was printed; `...` is any text, and alone on a line any lines."""
        lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in plain(self.shown)]
        pattern = "".join(r"(?:.*\n)*" if line == ".*" else rf"{line}\n" for line in lines)
        # A node tells its use some seconds after the page's moment, and a reader may be slower.
        told = [li for li in printed.strip("\n").splitlines() if not li.startswith("use: ")]
        said = "".join(f"{line}\n" for line in plain(told))
        return not self.shown or bool(re.fullmatch(pattern, said))


def plain(lines: list[str]) -> list[str]:
    """Return lines without what differs from run to run, nor the blanks that follow its width."""
    found = []
    for line in lines:
        for pattern, name in _VARIES:
            line = re.sub(pattern, name, line)
        found.append(" ".join(line.split()))
    return found


def steps() -> list[Step]:
    """Return every command of the page with the lines below it."""
    found: list[Step] = []
    page = re.sub(rf"\b{STEPS['page']}\b", STEPS["here"], PAGE.read_text(encoding="utf-8"))
    for line in page.splitlines():
        if line.startswith("    $ "):
            found.append(Step(line.removeprefix("    $ "), []))
            inside = True
        elif line and not line.startswith("    "):
            inside = False
        elif found and inside:
            found[-1].shown.append(line.removeprefix("    "))
    for step in found:
        while step.shown and not step.shown[-1]:
            step.shown.pop()
    return found


class Shell:
    """The reader's shell, in a home of its own."""

    def __init__(self, home: Path, environ: dict[str, str]) -> None:
        self.home = home
        self._process = subprocess.Popen(
            ["bash", "--norc"], env=environ, cwd=home, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, command: str) -> tuple[str, int]:
        """Return what a command printed, and its exit code."""
        self._process.stdin.write(f'{{ {command}\n}} < /dev/null; echo "@ended $?"\n')
        lines = []
        for line in self._process.stdout:
            if ended := re.fullmatch(r"(.*)@ended (\d+)\n", line):
                lines += [ended[1]] if ended[1] else []
                return "".join(lines).replace(str(self.home), "/home/ada"), int(ended[2])
            lines.append(line)
        raise AssertionError(f"the shell ended in {command!r}: {lines}")

    def top(self, command: str) -> None:
        """Run a command in a terminal until it shows the run, then leave it."""
        tmux = f"tmux -S {self.home}/t -f /dev/null"
        self.run(f"{tmux} new-session -d -x 80 -y 24 {shlex.quote(command)}")
        self.until(f"{tmux} capture-pane -p", lambda seen: "gpt2_zero1 (tiny)" in seen)
        self.run(f"{tmux} send-keys q")
        self.until(f"{tmux} has-session", lambda seen: "no server" in seen or "error" in seen)

    def until(self, command: str, seen: Callable[[str], bool]) -> str:
        """Run a command again until what it prints is as asked."""
        printed = [""]

        def as_asked() -> bool:
            printed[0] = self.run(command)[0]
            return seen(printed[0])

        eventually(as_asked, BOUND_S, said=lambda: f"{command} still prints:\n{printed[0]}")
        return printed[0]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(BOUND_S)
        self._process.stdout.close()


@pytest.fixture
def shell(path_without_slurm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    base = Path(tempfile.mkdtemp(dir="/tmp", prefix="tt-"))  # short: sockets lie below
    own = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "TRNSLURM_", "XDG_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    # Of `make test-slurm`.
    kept |= {k: v for k, v in os.environ.items() if k == "TRNSLURM_SANDBOX_SLURM"}
    bin_dir = Path(sys.executable).parent
    shell = Shell(
        base,
        kept | {
            "HOME": str(base), "PATH": f"{bin_dir}:{path_without_slurm}", "LC_ALL": "C.UTF-8",
            "TRNSLURM_SANDBOXES": str(base / "sandboxes"), "PYTHONPATH": str(CHECKOUT),
        },
    )  # fmt: skip
    try:
        yield shell
    finally:
        shell.run("trnslurm sandbox down --all; tmux -S ~/t kill-server")
        shell.close()
        shutil.rmtree(base)


def workers(run: RunDir) -> list[int]:
    """Give the process ids of a run's workers, wherever they run."""
    processes = [line.partition(": ") for line in processes_with(str(run.path))]
    return [
        int(pid)
        for pid, _, command in processes
        if "train.py plan.json" in command and "torch.distributed" not in command
    ]


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def has_stopped(pid: int) -> bool:
    """Tell whether each thread has: all go on until one of them has met the signal."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
        return False
    return {stat.rpartition(")")[2].split()[0] for stat in stats} <= {"T"}


def hold(shell: Shell, run: RunDir) -> None:
    """Stop its workers where the page turns a node off, and the log is as the page shows it."""
    logs = next(step for step in steps() if step.command.startswith("trnslurm logs"))

    def held() -> bool:
        """a checkpoint is whole, and the two newest lines of the log are of steps"""
        if not [*run.path.glob("checkpoints/step-*/manifest.json")]:
            return False
        send(signal.SIGSTOP, pids := workers(run))
        eventually(lambda: all(map(has_stopped, pids)))
        if logs.matches(shell.run(logs.command)[0]):
            return True
        send(signal.SIGCONT, pids)
        return False

    eventually(held)


def test_its_commands_in_order(shell: Shell) -> None:
    assert len(steps()) > 20
    losses = []
    for step in steps():
        if step.command.startswith("trnslurm top"):
            shell.top(step.command)
        elif _LOOKS.match(step.command):
            shell.until(step.command, step.matches)
        else:
            if "trnslurm rm" in step.command:
                runs = sorted((shell.home / "trnslurm-runs").iterdir())
                losses = [RunDir(run).steps()[-1]["loss"] for run in runs]
            printed, code = shell.run(step.command)
            assert code == 0 and step.matches(printed), f"{step.command} printed:\n{printed}"
            if "Submitted" in printed and "COMPLETED" not in printed:
                hold(shell, RunDir(max((shell.home / "trnslurm-runs").iterdir())))
            elif "power-off" in step.command:
                send(signal.SIGCONT, workers(RunDir(max((shell.home / "trnslurm-runs").iterdir()))))
    assert len(losses) == 2 and losses[0] == losses[1]
    assert not [*(shell.home / "trnslurm-runs").iterdir()]


def test_a_slow_machine_prints_what_the_page_shows() -> None:
    fast, slow = (
        "COMPLETED  2  500  2.4614  2.3869" + f"{rate:>14}  0.049" for rate in ("3,663", "87")
    )
    assert plain([fast]) == plain([slow])
