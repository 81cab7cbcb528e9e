"""Starts a job for each checkpoint of a training, by Slurm alone: evaluations, exports, tests.

    python -m trnslurm.node.follow RUN

`trnslurm submit --each-checkpoint-of RUN` has put a bundle into follow/NAME of the run. For each
checkpoint this program makes a run of it beside the training's, with the checkpoint in followed/,
and gives its script to sbatch. The program on the first node starts it every few seconds, and once
more as an attempt ends. It looks once and ends: all that it knows is in the files.

A run has a mark in follow/NAME before it exists, so that no checkpoint is taken twice. Its job
waits for the one that is `at_most` before it: Slurm itself lets no more run at a time.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.contract.checkpoints import exported, whole_steps
from trnslurm.contract.files import read_json, write_json, write_json_once
from trnslurm.contract.rundir import PLAN, RECORD, RunFiles
from trnslurm.contract.states import State
from trnslurm.contract.times import utc_time
from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.controller import run_slurm
from trnslurm.node.processes import say

_EVERY_S = 15.0
_ANSWER_S = 60.0
_SCRIPT = "train.sbatch"
# As in trnslurm/slurm/commands.py: they would override the options of the script.
_OF_THIS_JOB = re.compile(r"(SLURM|SBATCH|SRUN|TRNSLURM)_(?!CONF$)\w+")


def main(argv: list[str]) -> int:
    """Look once."""
    run = RunFiles(Path(argv[0]).absolute())
    code = 0
    with _alone(run.follow) as alone:
        for directory in sorted(run.follow.iterdir()) if alone else ():
            if (directory / RECORD).is_file():
                try:
                    Follower(run, directory).look()
                except Exception:  # the training has nothing to do with it
                    say(traceback.format_exc())
                    code = 1
    return code


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Have one look at a time, on this host; another host's finds the marks."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


class Mark(NamedTuple):
    """What follows one checkpoint."""

    step: int
    run: str
    job: str
    """Its number; empty: sbatch has not taken it."""


class Follower:
    """A bundle in follow/NAME, of which each checkpoint gets a run."""

    def __init__(self, run: RunFiles, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._problem = run.problem_file(directory.name)
        rule = read_json(run.rule_file(directory.name))
        self._every, self._at_most = int(rule["every"]), int(rule["at_most"])

    def look(self) -> None:
        """Start what is due, and let go of checkpoints that nobody needs any more."""
        for mark in self._marks():
            self._let_go(mark)
            if not mark.job and not self._again(mark):
                return  # Slurm takes none
        last = max((mark.step for mark in self._marks()), default=-1)
        for step, path in whole_steps(self._run):
            due = (
                step > last
                if not self._every
                else step // self._every > max(last, 0) // self._every
            )
            if not due:
                continue
            last = step
            if not self._start(step, path):
                break

    def _marks(self) -> list[Mark]:
        files = self._run.mark_files(self._directory.name)
        told = {step: read_json(file) for step, file in files.items()}
        return [Mark(n, str(t.get("run", "")), str(t.get("job", ""))) for n, t in told.items()]

    def _mark_file(self, step: int) -> Path:
        return self._run.mark_file(self._directory.name, step)

    def _start(self, step: int, path: Path) -> bool:
        """Make the run of a checkpoint, and give it to Slurm; return whether to go on."""
        name = f"{self._run.path.name}.{self._directory.name}-{step}"
        place = self._run.path.with_name(name)
        if place.exists() or not write_json_once(self._mark_file(step), {"run": name}):
            return True
        new = place.with_name(f".{name}.new")
        try:
            self._make(new, step, path)
            new.rename(place)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            self._mark_file(step).unlink()
            if path.exists():  # else the training has deleted it meanwhile
                say(f"follow: {name}: {error.filename or new}: {error.strerror}")
            return not path.exists()
        return self._submit(Mark(step, name, ""))

    def _make(self, new: Path, step: int, path: Path) -> None:
        """Make the directory of a run, with links to what never changes."""
        shutil.rmtree(new, ignore_errors=True)
        code = RunFiles(self._directory).code
        for entry in self._directory.iterdir():
            if entry == code:
                _link(code, RunFiles(new).code)
            elif entry.is_dir():
                shutil.copytree(entry, new / entry.name)
            elif not re.fullmatch(r"(rule|problem|step-\d+)\.json|\..*", entry.name):
                new.mkdir(exist_ok=True)
                shutil.copy2(entry, new / entry.name)
        followed = RunFiles(new).followed
        _link(path, followed / path.name)
        (followed / "checkpoint").symlink_to(path.name)
        if exported(RunFiles(self._directory), Variable.EXPORT):
            self._add_exporter(RunFiles(followed / "run"), path.name)
        (followed / "step").write_text(f"{step}\n", encoding="ascii")
        shutil.copymode(self._directory, new)
        record = read_json(new / RECORD)
        group = f"{self._run.path.name}.{self._directory.name}"
        own = {"run": new.name[1:].removesuffix(".new"), "created": utc_time(), "group": group}
        write_json(new / RECORD, record | own | {"values": {"step": str(step)}})

    def _add_exporter(self, alone: RunFiles, name: str) -> None:
        """Make what export.py takes for the training's run: its code, and this checkpoint alone."""
        _link(self._run.code, alone.code)
        shutil.copy2(self._run.path / PLAN, alone.path)
        alone.checkpoints.mkdir()
        (alone.checkpoints / name).symlink_to(Path("../..", name))

    def _submit(self, mark: Mark) -> bool:
        """Give a run's script to sbatch; return whether it took it."""
        place = self._run.path.with_name(mark.run)
        before = [other for other in self._marks() if other.step < mark.step and other.job]
        waits = [f"--dependency=afterany:{other.job}" for other in before[-self._at_most :][:1]]
        if len(before) < self._at_most:
            waits = []
        environ = {k: v for k, v in os.environ.items() if not _OF_THIS_JOB.fullmatch(k)}
        said = ""
        for more in (waits, []):
            command = ("sbatch", "--parsable", *more, _SCRIPT)
            code, said = run_slurm(*command, timeout_s=_ANSWER_S, directory=place, environ=environ)
            if found := re.search(r"(?m)^(\d+)(;\S+)?$", said) if code == 0 else None:
                record = read_json(place / RECORD)
                write_json(place / RECORD, record | {"jobs": {"train": found[1]}})
                write_json(self._mark_file(mark.step), {"run": mark.run, "job": found[1]})
                write_json(self._problem, {})
                say(f"follow: {mark.run} is job {found[1]}")
                return True
            # Slurm forgets a job some minutes after its end (ESLURM_DEPENDENCY). After any other
            # error the job may be queued.
            if not waits or "dependency" not in said.lower():
                break
        why = (said.strip().splitlines() or ["sbatch failed"])[-1]
        if read_json(self._problem).get("why") != why:
            say(f"follow: {mark.run}: {why}; tried again")
            write_json(self._problem, {"why": why, "time": time.time()})
        return False

    def _again(self, mark: Mark) -> bool:
        """Give a run to Slurm that it has refused, or whose job this program died to note.

        Return whether to go on.
        """
        place = self._run.path.with_name(mark.run)
        if not place.is_dir():  # it died before the run was whole
            shutil.rmtree(place.with_name(f".{mark.run}.new"), ignore_errors=True)
            self._mark_file(mark.step).unlink(missing_ok=True)
            return True
        code, said = run_slurm("squeue", "-h", "--me", "-o", "%i %Z", timeout_s=_ANSWER_S)
        if code:
            return False
        queued = [
            line.partition(" ")[0] for line in said.splitlines() if line.endswith(f" {place}")
        ]
        begun = RunFiles(place).all_attempts()
        if not queued and not begun:
            return self._submit(mark)
        job = queued[0] if queued else str(read_json(_last_state(place)).get("job_id", ""))
        write_json(place / RECORD, read_json(place / RECORD) | {"jobs": {"train": job}})
        write_json(self._mark_file(mark.step), {"run": mark.run, "job": job})
        return True

    def _let_go(self, mark: Mark) -> None:
        """Delete a run's link to its checkpoint, and its export, once it has completed."""
        place = self._run.path.with_name(mark.run)
        followed = RunFiles(place).followed
        if (followed / "checkpoint").exists() and _state(place) == State.COMPLETED:
            shutil.rmtree(RunFiles(place).exports, ignore_errors=True)
            for entry in followed.iterdir():
                if entry.name not in ("checkpoint", "step"):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _last_state(place: Path) -> Path:
    files = RunFiles(place)
    return files.state_file("train", max(files.attempt_numbers("train"), default=1))


def _state(place: Path) -> Any:
    return read_json(_last_state(place)).get("state")


def _link(source: Path, target: Path) -> None:
    """Link a file, or all files of a directory; copy what cannot be linked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_dir():
        _link_file(source, target)
        return
    target.mkdir()
    for entry in source.iterdir():
        _link(entry, target / entry.name)


def _link_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


class Follow:
    """Starts this program beside a training."""

    def __init__(self, run: RunFiles, *, wanted: bool) -> None:
        self._run, self._wanted = run, wanted
        self._pid, self._at = 0, 0.0

    def look(self) -> None:
        """Start it, if something follows the training and it is time."""
        if self._is_over() and self._wanted and time.monotonic() >= self._at:
            self._at = time.monotonic() + _EVERY_S
            if self._run.follow.is_dir():
                place = str(self._run.path.absolute())
                command = [os.environ[Variable.PYTHON], "-m", "trnslurm.node.follow", place]
                self._pid = processes.spawn(command, output_fd=2, own_session=False)

    def finish(self, within_s: float) -> None:
        """Let it look once more, at the last checkpoint."""
        deadline = time.monotonic() + within_s
        while not self._is_over() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._at = 0.0
        self.look()
        while not self._is_over() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _is_over(self) -> bool:
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
        return not self._pid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
