"""Lightning's Trainer in a run: one callback that reports, stops on request and saves.

    trainer = Trainer(callbacks=[RunCallback()], num_nodes=options.nodes, devices=options.devices)
    trainer.fit(module, data, ckpt_path=options.resume)

with `--resume {resume} --nodes {nodes} --devices {workers_per_node}` among the script's arguments.
Facts about Lightning are from version 2.6.6.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

import trnslurm
from trnslurm.contract.halving import rung_end
from trnslurm.contract.variables import Variable
from trnslurm.samples.loader import Loader

_REPORT_S = 10.0
_STOPPED = "stopped-step-"


class RunCallback(Callback):
    """Lets a Lightning script report its metrics, stop on request and save.

    It reports what ModelCheckpoint saves. When asked to stop, it saves to {checkpoints} itself.
    """

    def __init__(self) -> None:
        self._step, self._numbers = 0, dict[str, float]()
        self._reported, self._reported_step = 0.0, 0
        self._told = 0
        self._rung_end = rung_end(os.environ.get(Variable.RUN_DIR, ""))

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Start after the restored step, which an earlier attempt has reported.

        Otherwise the first batch of a step with more than one batch would count as that step.
        """
        self._step = self._reported_step = trainer.global_step
        if isinstance(loader := trainer.train_dataloader, Loader):
            _align(trainer.fit_loop, loader)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Report the previous step, which is complete now, with its validation."""
        self._report(trainer)
        self._tell_saved(trainer)  # ModelCheckpoint comes after all other callbacks

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Read the metrics when due; save and end if a stop is requested.

        A step of the optimizer may take more than one batch.
        """
        if (step := trainer.global_step) == self._step:
            return
        self._step = step
        due = step % max(1, trainer.log_every_n_steps) == 0
        if due or time.monotonic() - self._reported > _REPORT_S:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            # Lightning has divided it by the batches of a step: Callback.on_train_batch_end.
            whole = {} if loss is None else {"loss": float(loss) * trainer.accumulate_grad_batches}
            self._numbers = whole | _numbers(trainer)
        if trnslurm.should_stop() or 0 < self._rung_end <= step:
            self._stop(trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Keep the validation's metrics."""
        if not trainer.sanity_checking:
            self._numbers |= _numbers(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Report the last step, even if the module logs nothing, and the last checkpoint."""
        self._numbers = self._numbers or _numbers(trainer)
        self._report(trainer, last=self._step > self._reported_step)
        self._tell_saved(trainer)

    def _report(self, trainer: Any, *, last: bool = False) -> None:
        if not (self._numbers or last) or not self._step:
            return
        steps = trainer.estimated_stepping_batches  # inf: unknown
        known = int(steps) if 0 < steps < float("inf") else None
        trnslurm.report(step=self._step, steps=known, **self._numbers)
        self._numbers, self._reported = {}, time.monotonic()
        self._reported_step = self._step

    def _stop(self, trainer: Any) -> None:
        directory = Path(os.environ[Variable.CHECKPOINTS])
        path = directory / f"{_STOPPED}{self._step}.ckpt"
        trainer.save_checkpoint(path)  # by all workers; worker 0 writes, or all where it is sharded
        trnslurm.saved(self._step, path)
        if trainer.is_global_zero:
            _remove_others(directory, path)
        trainer.should_stop = True
        # Else Lightning first runs to these, and validates: fit_loop.done, _should_check_val_fx.
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
        trainer.limit_val_batches = 0

    def _tell_saved(self, trainer: Any) -> None:
        """Report what ModelCheckpoint has saved, if a run can resume from it.

        A run cannot resume from what is saved when a stop ends the epoch early, because there the
        epoch counts as done.
        """
        for callback in trainer.checkpoint_callbacks if not trainer.should_stop else ():
            path = getattr(callback, "_last_checkpoint_saved", "")
            whole = not getattr(callback, "save_weights_only", False)
            step = getattr(callback, "_last_global_step_saved", 0)
            if path and whole and step > self._told:
                self._told = step
                trnslurm.saved(step, path)


def _align(fit_loop: Any, loader: Loader) -> None:
    """Set Lightning's count of an epoch's batches to where the loader is.

    A checkpoint has the count of its number of workers. On another number, Lightning would step
    after too few batches, and end the epoch too early or too late.
    """
    epoch_loop, epochs = fit_loop.epoch_loop, fit_loop.epoch_progress.current
    done = loader.state_dict()["step"] % loader.steps_per_epoch * loader.accumulation
    count = epoch_loop.batch_progress.current
    count.ready = count.started = count.processed = done
    # TrainingEpochLoop.reset adds the batch in whose end the checkpoint was saved.
    count.completed = done - epoch_loop.restarted_on_train_batch_end
    epoch_loop.batch_progress.is_last_batch = False
    epochs.processed = loader.epoch


def _numbers(trainer: Any) -> dict[str, float]:
    """Return the metrics that the module has logged, by name."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _remove_others(directory: Path, path: Path) -> None:
    """Remove the checkpoints of earlier stops."""
    for other in directory.glob(f"{_STOPPED}*"):
        if other != path:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
