"""Starts a job for each checkpoint of a run, using only Slurm: evaluations, exports, tests.

    python -m trnslurm.node.follow RUN [--score]

`trnslurm submit --each-checkpoint-of RUN` has put a bundle into the run's follow/NAME. For each
checkpoint, this program makes a run from the bundle next to the training run, with the checkpoint
in followed/, and passes its script to sbatch. The program on the first node starts this program
every few seconds, and once more when an attempt ends. This program looks once and ends. It keeps
all its knowledge in files.

A mark in follow/NAME precedes the run, so that no checkpoint is used twice. The run's job waits for
the job that is `at_most` places before it, so Slurm itself limits how many run at a time.

If the rule names a metric, the mark of a completed run gets its score, and follow/NAME/best gets
the checkpoint with the best score. If newer checkpoints are no better, training is asked to end.
Each run does this part when it ends (--score), because training may have ended before it.
"""

from __future__ import annotations

import fcntl
import math
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
from trnslurm.contract.files import last_lines, read_json, write_json, write_json_once
from trnslurm.contract.rundir import PLAN, RECORD, RunFiles
from trnslurm.contract.states import State
from trnslurm.contract.times import utc_time
from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.controller import run_slurm
from trnslurm.node.processes import say

_EVERY_S = 15.0
_ANSWER_S = 60.0
_LINKING_S = 3600.0
_SCRIPT = "train.sbatch"
# As in trnslurm/slurm/commands.py: these would override the script's options.
_OF_THIS_JOB = re.compile(r"(SLURM|SBATCH|SRUN|TRNSLURM)_(?!CONF$)\w+")


def main(argv: list[str]) -> int:
    """Look once."""
    run = RunFiles(Path(argv[0]).absolute())
    code = 0
    with _alone(run.follow) as alone:
        for directory in sorted(run.follow.iterdir()) if alone else ():
            if (directory / RECORD).is_file():
                try:
                    Follower(run, directory).look(starts="--score" not in argv)
                except Exception:  # training must not depend on it
                    say(traceback.format_exc())
                    code = 1
    return code


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Allow one look at a time on this host. The marks protect against other hosts."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


class Mark(NamedTuple):
    """The run that follows one checkpoint."""

    step: int
    run: str
    job: str
    """Its job id; empty if sbatch has not accepted it."""
    score: float | None
    """The score of a completed run, if the run has reported the rule's metric."""
    scored: bool
    """Whether the score was looked up."""
    checkpoint: str
    """The checkpoint's name."""


class Follower:
    """A bundle in follow/NAME, from which each checkpoint gets a run."""

    def __init__(self, run: RunFiles, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._problem = run.problem_file(directory.name)
        rule = read_json(run.rule_file(directory.name))
        self._every, self._at_most = int(rule["every"]), int(rule["at_most"])
        self._metric, self._sign = str(rule.get("metric", "")), -1 if rule.get("highest") else 1
        self._patience = int(rule.get("patience", 0))

    def look(self, *, starts: bool) -> None:
        """Start what is due, and release checkpoints that are no longer needed."""
        for mark in self._marks():
            self._score(mark)
        self._keep_best()
        for mark in self._marks():
            self._let_go(mark)
        self._end_early()
        if starts:
            self._start_due()

    def _start_due(self) -> None:
        for mark in self._marks():
            if not mark.job and not self._again(mark):
                return  # Slurm accepts none
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
        return [
            Mark(
                step,
                str(mark.get("run", "")),
                str(mark.get("job", "")),
                mark.get("score"),
                "score" in mark,
                str(mark.get("checkpoint", "")),
            )
            for step, mark in told.items()
        ]

    def _mark_file(self, step: int) -> Path:
        return self._run.mark_file(self._directory.name, step)

    def _start(self, step: int, path: Path) -> bool:
        """Make a checkpoint's run, and submit it to Slurm; return whether to continue."""
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
            if path.exists():  # otherwise training has deleted it meanwhile
                say(f"follow: {name}: {error.filename or new}: {error.strerror}")
            return not path.exists()
        return self._submit(Mark(step, name, "", None, False, ""))

    def _make(self, new: Path, step: int, path: Path) -> None:
        """Make the directory of a run, with links to files that never change."""
        shutil.rmtree(new, ignore_errors=True)
        code = RunFiles(self._directory).code
        for entry in self._directory.iterdir():
            if entry == code:
                _link(code, RunFiles(new).code)
            elif entry == self._run.best_checkpoints(self._directory.name):
                continue
            elif entry.is_dir():
                shutil.copytree(entry, new / entry.name)
            elif not re.fullmatch(r"(rule|problem|asked|step-\d+)\.json|\..*", entry.name):
                new.mkdir(exist_ok=True)
                shutil.copy2(entry, new / entry.name)
        followed = RunFiles(new).followed
        _link(path, followed / path.name)
        (followed / "checkpoint").symlink_to(path.name)
        if exported(RunFiles(self._directory), Variable.EXPORT):
            self._add_exporter(RunFiles(followed / "run"), path.name)
        (followed / "step").write_text(f"{step}\n", encoding="ascii")
        (followed / "of").symlink_to(f"../../{self._run.path.name}")
        shutil.copymode(self._directory, new)
        record = read_json(new / RECORD)
        group = f"{self._run.path.name}.{self._directory.name}"
        own = {"run": new.name[1:].removesuffix(".new"), "created": utc_time(), "group": group}
        write_json(new / RECORD, record | own | {"values": {"step": str(step)}})

    def _add_exporter(self, alone: RunFiles, name: str) -> None:
        """Make what export.py needs from the training run: its code, and only this checkpoint."""
        _link(self._run.code, alone.code)
        shutil.copy2(self._run.path / PLAN, alone.path)
        alone.checkpoints.mkdir()
        (alone.checkpoints / name).symlink_to(Path("../..", name))

    def _submit(self, mark: Mark) -> bool:
        """Submit a run's script with sbatch; return whether sbatch accepted it."""
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
                self._taken(mark, found[1])
                say(f"follow: submitted {mark.run} as job {found[1]}")
                return True
            # Slurm forgets a job some minutes after its end (ESLURM_DEPENDENCY). After any other
            # error the job may be queued.
            if not waits or "dependency" not in said.lower():
                break
        return self._refused(mark, said)

    def _refused(self, mark: Mark, said: str) -> bool:
        """Record once why Slurm has not accepted a run's job; return False."""
        why = (said.strip().splitlines() or ["no answer"])[-1]
        if read_json(self._problem).get("why") != why:
            say(f"follow: {mark.run}: {why}; will try again")
            write_json(self._problem, {"why": why, "time": time.time()})
        return False

    def _again(self, mark: Mark) -> bool:
        """Resubmit a run that Slurm has refused, or whose job id was never recorded.

        Return whether to continue.
        """
        place = self._run.path.with_name(mark.run)
        if not place.is_dir():  # it died before the run was complete
            shutil.rmtree(place.with_name(f".{mark.run}.new"), ignore_errors=True)
            self._mark_file(mark.step).unlink(missing_ok=True)
            return True
        code, said = run_slurm("squeue", "-h", "--me", "-o", "%i %Z", timeout_s=_ANSWER_S)
        if code:
            return self._refused(mark, said)
        queued = [
            line.partition(" ")[0] for line in said.splitlines() if line.endswith(f" {place}")
        ]
        begun = RunFiles(place).all_attempts()
        if not queued and not begun:
            return self._submit(mark)
        job = queued[0] if queued else str(read_json(_last_state(place)).get("job_id", ""))
        write_json(place / RECORD, read_json(place / RECORD) | {"jobs": {"train": job}})
        self._taken(mark, job)
        return True

    def _taken(self, mark: Mark, job: str) -> None:
        self._note(mark, job=job)
        if self._problem.exists():
            write_json(self._problem, {})

    def _note(self, mark: Mark, **facts: Any) -> None:
        file = self._mark_file(mark.step)
        write_json(file, {"run": mark.run, **read_json(file), **facts})

    def _score(self, mark: Mark) -> None:
        """Record the score of a completed run."""
        place = self._run.path.with_name(mark.run)
        if not self._metric or mark.scored or _state(place) != State.COMPLETED:
            return
        score = _last_value(RunFiles(place), self._metric)
        if score is None:
            say(f"follow: {mark.run} has not reported {self._metric}")
        checkpoint = str((RunFiles(place).followed / "checkpoint").readlink())
        self._note(mark, score=score, checkpoint=checkpoint)

    def _keep_best(self) -> None:
        """Link the checkpoint with the best score, and delete earlier best checkpoints.

        Another host may do the same. Its links already have scores, so the best score is determined
        after the links are listed.
        """
        kept = self._run.best_checkpoints(self._directory.name)
        entries = [*kept.iterdir()] if kept.is_dir() else []
        if best := self._best():
            own = kept / best.checkpoint
            followed = RunFiles(self._run.path.with_name(best.run)).followed
            if not own.exists() and (followed / own.name).exists():
                new = own.with_name(f".{own.name}.{os.getpid()}")
                _delete(new)
                _link(followed / own.name, new)
                new.rename(own)
            for entry in entries if own.exists() else ():
                if entry.name != own.name and not _is_being_linked(entry):
                    _delete(entry)

    def _best(self) -> Mark | None:
        """Return the mark with the best score, or the earliest of several."""
        scored = [mark for mark in self._marks() if mark.score is not None]
        return min(scored, key=lambda mark: self._sign * (mark.score or 0.0), default=None)

    def _end_early(self) -> None:
        """Ask the training to end if newer checkpoints are no better."""
        best = self._best()
        if not (self._patience and best) or self._run.enough_file.exists():
            return
        # After an early end that the user undid, wait for as many more scores.
        since = max(best.step, int(read_json(self._asked_file).get("step", 0)))
        after = [m.step for m in self._marks() if m.score is not None and m.step > since]
        if len(after) >= self._patience:
            write_json(self._asked_file, {"step": max(after)})
            name = f"{self._directory.name}/{self._metric}"
            why = f"{name} was best at step {best.step}: {best.score:.4g}"
            write_json(self._run.enough_file, {"why": why, "time": utc_time()})
            say(f"follow: asking the training to end: {why}")

    @property
    def _asked_file(self) -> Path:
        return self._directory / "asked.json"

    def _let_go(self, mark: Mark) -> None:
        """Delete a run's link to its checkpoint, and its export, when the run has completed."""
        place = self._run.path.with_name(mark.run)
        followed = RunFiles(place).followed
        best = self._best()
        kept = self._run.best_checkpoints(self._directory.name)
        unkept = best and best.step == mark.step and not (kept / best.checkpoint).exists()
        if self._metric and (unkept or not mark.scored):
            return
        if (followed / "checkpoint").exists() and _state(place) == State.COMPLETED:
            shutil.rmtree(RunFiles(place).exports, ignore_errors=True)
            for entry in followed.iterdir():
                if entry.name not in ("checkpoint", "step", "of"):
                    _delete(entry)


def _last_state(place: Path) -> Path:
    files = RunFiles(place)
    return files.state_file("train", max(files.attempt_numbers("train"), default=1))


def _state(place: Path) -> Any:
    return read_json(_last_state(place)).get("state")


def _last_value(run: RunFiles, metric: str) -> float | None:
    """Return a metric's last finite value in a run, or None without one."""
    try:
        for line in last_lines(run.metrics_file):
            value = line.get(metric)
            if isinstance(value, (int, float)) and math.isfinite(value):
                return float(value)
    except OSError:
        pass
    return None


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _is_being_linked(entry: Path) -> bool:
    try:
        return entry.name[0] == "." and time.time() - entry.lstat().st_mtime < _LINKING_S
    except FileNotFoundError:
        return True


def _link(source: Path, target: Path) -> None:
    """Link a file, or all files of a directory. Copy what cannot be linked."""
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
    """Starts this program alongside training, or for the run whose checkpoint this job uses."""

    def __init__(self, run: RunFiles, *, wanted: bool) -> None:
        self._run, self.wanted = run, wanted
        self._pid, self._at = 0, 0.0

    def look(self) -> None:
        """Start the program if something follows the training and it is time."""
        if self._is_over() and self.wanted and time.monotonic() >= self._at:
            self._at = time.monotonic() + _EVERY_S
            self._start(self._run)

    def finish(self, within_s: float) -> None:
        """Let the program look again: at the last checkpoint, or at this run's new score."""
        deadline = time.monotonic() + within_s
        while not self._is_over() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._is_over() and self.wanted:
            self._start(self._run)
        of = self._run.followed / "of"
        if self._is_over() and self.wanted and of.exists():
            self._start(RunFiles(of.resolve()), "--score")
        while not self._is_over() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _start(self, run: RunFiles, *options: str) -> None:
        if run.follow.is_dir():
            place = str(run.path.absolute())
            command = [os.environ[Variable.PYTHON], "-m", "trnslurm.node.follow", place, *options]
            self._pid = processes.spawn(command, output_fd=2, own_session=False)

    def _is_over(self) -> bool:
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
        return not self._pid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
