"""Jobs that follow a training, under random faults: files are real, Slurm and the time are not.

The program is killed between any two of its writes, sbatch refuses or answers too late, checkpoints
come and are deleted, and jobs start and end at any time.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.rundir import RunFiles
from trnslurm.node import follow

from .world import BrokenError

_FORGETS_S = 3
"""After so many rounds Slurm has no trace of an ended job (MinJobAge)."""


class KilledError(BaseException):
    """The program is killed here."""


@dataclass
class Job:
    """A job of Slurm, from the directory of a run."""

    number: int
    place: Path
    waits_for: int
    state: str = "PENDING"
    ended: int = 0


@dataclass
class Follows:
    """A training that is followed, and what becomes of it."""

    root: Path
    seed: int
    jobs: dict[int, Job] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    """Checkpoint -> in how many whole looks it was there."""
    scores: dict[int, float] = field(default_factory=dict)
    """Checkpoint -> what its completed job has reported."""
    round: int = 0
    calm: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.files = RunFiles(self.root / "gpt")
        place = self.files.follow / "eval"
        (place / "code").mkdir(parents=True)
        for name in ("code/eval.py", "train.sbatch"):
            (place / name).write_text("x")
        (place / "run.json").write_text('{"run": "eval", "name": "eval", "jobs": {}}')
        self.every, self.at_most = self.random.choice([0, 0, 20, 30]), self.random.choice([1, 2, 3])
        self.highest = self.random.random() < 0.5
        rule = {"every": self.every, "at_most": self.at_most, "highest": self.highest}
        rule["metric"] = "f1" if self.seed % 2 else ""
        (place / "rule.json").write_text(json.dumps(rule))

    def run(self) -> Follows:
        step = 0
        for _ in range(self.random.randint(5, 25)):
            for _ in range(self.random.choice([0, 1, 1, 2])):
                step += 10
                self.save(step)
            if self.random.random() < 0.3:
                self.delete_oldest()
            self.play()
        self.calm = True
        for _ in range(4 + 2 * len(self.jobs)):
            self.play()
        self.check(step)
        return self

    def save(self, step: int) -> None:
        new = self.files.checkpoints / f".step-{step:08d}"
        new.mkdir(parents=True)
        (new / "weights").write_text(str(step))
        new.rename(new.with_name(new.name[1:]))

    def delete_oldest(self) -> None:
        for path in sorted(self.files.checkpoints.glob("step-*"))[:-1][:1]:
            shutil.rmtree(path)

    # -- one round: the program looks, and Slurm goes on

    def play(self) -> None:
        self.round += 1
        there = [int(path.name[5:]) for path in self.files.checkpoints.glob("step-*")]
        with suppress(KilledError), self.program():
            if follow.main([str(self.files.path)]):
                raise BrokenError("the program failed")
            if not (self.files.problem_file("eval").exists() and self.why()):
                for step in there:
                    self.seen[step] = self.seen.get(step, 0) + 1
        self.slurm_goes_on()

    def why(self) -> str:
        return str(json.loads(self.files.problem_file("eval").read_text()).get("why", ""))

    @contextmanager
    def program(self) -> Iterator[None]:
        """Put this Slurm in place, and kill the program after some of its writes."""
        left = 10**6 if self.calm or self.random.random() < 0.5 else self.random.randint(0, 25)

        def counted(does: Any) -> Any:
            def act(*words: Any, **more: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise KilledError
                return does(*words, **more)

            return act

        with pytest.MonkeyPatch.context() as patch:
            for name in ("write_json", "write_json_once"):
                patch.setattr(follow, name, counted(getattr(follow, name)))
            for name in ("mkdir", "rename", "symlink_to", "write_text", "unlink"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            for module, name in ((follow.os, "link"), (follow.shutil, "copy2")):
                patch.setattr(module, name, counted(getattr(module, name)))
            patch.setattr(follow, "run_slurm", counted(self.asked))
            patch.setattr(follow, "say", lambda text: None)
            yield

    def asked(self, *command: str, directory: Path | None = None, **_: Any) -> tuple[int, str]:
        """Answer a command of Slurm, or do not."""
        trouble = 0.0 if self.calm else 0.15
        if command[0] == "squeue":
            if self.random.random() < trouble:
                return 1, "slurm_load_jobs error: Unable to contact slurm controller"
            queued = (job for job in self.jobs.values() if not job.ended)
            return 0, "".join(f"{job.number} {job.place}\n" for job in queued)
        assert directory is not None
        if self.random.random() < trouble:
            return 1, "sbatch: error: Batch job submission failed: Socket timed out"
        waits = next((int(w.rpartition(":")[2]) for w in command if "dependency" in w), 0)
        other = self.jobs.get(waits)
        if other and other.ended and self.round - other.ended > _FORGETS_S:
            return 1, "sbatch: error: Batch job submission failed: Job dependency problem"
        job = Job(100 + len(self.jobs), directory, waits)
        self.jobs[job.number] = job
        if self.random.random() < trouble:
            raise KilledError  # it is queued, and nobody noted its number
        if self.random.random() < trouble:
            return 124, "sbatch: no answer in time"
        return 0, f"{job.number}\n"

    def slurm_goes_on(self) -> None:
        for job in self.jobs.values():
            if job.state == "PENDING" and self.random.random() < 0.6:
                other = self.jobs.get(job.waits_for)
                if not other or other.ended:
                    self.start(job)
            elif job.state == "RUNNING" and (self.calm or self.random.random() < 0.4):
                job.state, job.ended = self.random.choice(["COMPLETED", "FAILED"]), self.round
                self.report(job)
                self.record(job)
                with suppress(KilledError), self.program():
                    follow.main([str(self.files.path), "--score"])
        running = sum(job.state == "RUNNING" for job in self.jobs.values())
        if running > self.at_most:
            raise BrokenError(f"{running} jobs run, and {self.at_most} may")

    def start(self, job: Job) -> None:
        job.state = "RUNNING"
        step = int(job.place.name.rpartition("-")[2])
        taken = job.place / "followed/checkpoint/weights"
        if not taken.exists() or taken.read_text() != str(step):
            raise BrokenError(f"{job.place.name} starts without its checkpoint")
        self.record(job)

    def report(self, job: Job) -> None:
        """Report a metric, as most jobs do before they end."""
        if self.random.random() < 0.8:
            step, score = int(job.place.name.rpartition("-")[2]), self.random.choice([1, 2, 3])
            line = {"attempt": 1, "step": 1, "f1": score}
            RunFiles(job.place).metrics_file.write_text(json.dumps(line) + "\n")
            if job.state == "COMPLETED":
                self.scores[step] = score

    def record(self, job: Job) -> None:
        state = {"phase": "train", "attempt": 1, "state": job.state, "job_id": str(job.number)}
        place = RunFiles(job.place)
        place.state.mkdir(exist_ok=True)
        place.state_file("train", 1).write_text(json.dumps(state))

    # -- what must hold

    def check(self, last: int) -> None:
        names = [job.place.name for job in self.jobs.values()]
        if len(set(names)) < len(names):
            raise BrokenError(f"a checkpoint got two jobs: {sorted(names)}")
        got = {int(name.rpartition("-")[2]) for name in names}
        if not self.every and (lacks := {s for s, looks in self.seen.items() if looks > 1} - got):
            raise BrokenError(f"no job for {sorted(lacks)}")
        if self.every and last >= self.every and self.seen and not got:
            raise BrokenError("no job at all")
        marks = {step for step, file in self.files.mark_files("eval").items() if file.exists()}
        if not got <= marks:
            raise BrokenError(f"no mark for {sorted(got - marks)}")
        for job in self.jobs.values():
            mark = json.loads(self.files.mark_file("eval", int(job.place.name[9:])).read_text())
            if mark.get("job") != str(job.number):
                raise BrokenError(f"{job.place.name} is job {job.number}, and its mark says {mark}")
        best = min(self.scores.values(), default=0)
        best = max(self.scores.values(), default=0) if self.highest else best
        kept = self.files.best_checkpoints("eval")
        names_of_best = sorted(p.name for p in kept.iterdir()) if kept.is_dir() else []
        if self.seed % 2 and self.scores:
            steps = [int(name.rpartition("-")[2]) for name in names_of_best]
            if [self.scores.get(step) for step in steps] != [best]:
                raise BrokenError(f"kept {steps}, the scores are {self.scores}")
            if (kept / names_of_best[0] / "weights").read_text() != str(steps[0]):
                raise BrokenError(f"{names_of_best[0]} is damaged")
        elif names_of_best:
            raise BrokenError(f"kept {names_of_best} without a score")
        if left := [*self.root.glob(".gpt.eval-*")]:
            stale = [p for p in left if p.name[1:].removesuffix(".new") not in names]
            if stale and self.seen:
                raise BrokenError(f"left over: {stale}")


def check(seed: int, root: Path) -> Follows:
    """Play the world of a seed in an empty directory."""
    return Follows(root, seed).run()
