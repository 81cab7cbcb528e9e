"""Weights & Biases. Offline (WANDB_MODE=offline), it writes to wandb/ in the run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb
import wandb.errors

from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import State
from trnslurm.trackers.send import LATE, Subject, numbers_of, remote_name

REFUSALS = (wandb.errors.Error, OSError)
_LAST = "trnslurm_step"
_OFFLINE = ("offline", "dryrun")


class Run:
    """A Weights & Biases run: the existing one with this run's name, or a new one.

    It accepts steps only in ascending order. So the metrics of a checkpoint, NAME/METRIC, also get
    a NAME/step, over which Weights & Biases plots them.
    """

    takes_late = True

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._sent_file = RunFiles(subject.directory).sent_file
        self._project = subject.project or os.environ.get("WANDB_PROJECT") or subject.recipe
        self._offline = wandb.setup().settings.mode in _OFFLINE
        self._open: Any = None  # its config is not annotated
        self._followers = {*RunFiles(subject.directory).followers}
        self._defined: set[str] = set()
        # The server knows what it has. Offline there is no server, so a file records what was sent.
        self._sent = read_json(self._sent_file) if self._offline else {}
        known = self._sent.get(self._project)
        self.last = known if isinstance(known, int) else 0
        if not self._offline:
            # Lines of late metrics have steps of their own after the last one.
            sent = self._run.summary.get(_LAST)
            begun = self._run.starting_step - 1
            self.last = max(0, min(begun, sent) if isinstance(sent, int) else begun)

    @property
    def _run(self) -> Any:
        """The run, which is created or resumed when it is first needed."""
        if self._open is None:
            self._open = self._begin()
        return self._open

    def _begin(self) -> Any:
        subject = self._subject
        # wandb would record the machine, packages and repository of this host, not of the run.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        run: Any = wandb.init(
            project=self._project,
            id=remote_name(subject.name),
            name=subject.name,
            resume="allow",
            config=dict(subject.config),
            tags=[*dict.fromkeys(subject.tags.values())],
            notes=subject.note or None,
            group=subject.sweep or None,
            settings=settings,
            dir=None if os.environ.get("WANDB_DIR") else str(subject.directory),
        )
        run.config.update(
            dict(subject.config), allow_val_change=True
        )  # a resume may change the nodes
        return run

    def log(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Log these steps."""
        for step in steps:
            numbers, late = numbers_of(step), step.get(LATE)
            at = step["step"] if numbers else self._run.step + 1
            self._run.log(
                self._with_own_step(numbers, step["step"])
                | (self._with_own_step(numbers_of(late), late["step"]) if late else {}),
                step=at,
            )
            self.last = step["step"]

    def _with_own_step(self, numbers: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return metrics, with the checkpoint's step for those of the jobs that follow the run."""
        own = {name.partition("/")[0] for name in numbers} & self._followers
        for follower in own - self._defined:
            self._run.define_metric(f"{follower}/*", step_metric=f"{follower}/step")
        self._defined |= own
        return {**numbers, **{f"{follower}/step": step for follower in own}}

    def close(self, state: State) -> str:
        """Record the state of the run, and return where its steps can be seen."""
        if self._offline and self._open is None:
            return f"project {self._project}"
        self._run.summary.update({"state": state, _LAST: self.last})
        where: str = self._run.settings.sync_dir if self._offline else self._run.url
        self._run.finish(exit_code=0 if state in (State.COMPLETED, State.RUNNING) else 1)
        if self._offline:
            write_json(self._sent_file, self._sent | {self._project: self.last})
        return where
