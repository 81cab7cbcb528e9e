"""Training as one worker runs it: everything around the steps, whose arithmetic is the job's.

    for step in run.steps():                # resumed, watched, stopped
        for unit in run.units(step):
            share = unit_loss(model, device, text, unit)
            share.backward()
            run.add(share)                  # ends the unit's graph
        run.end(step, optimizer.step(run.lr(step)), evaluate=evaluate)
    run.close(model.parameters)

Steps count from 1 everywhere in this package: checkpoint N is saved after step N.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from trnslurm.contract.halving import rung_end
from trnslurm.tracing import Tracer
from trnslurm.train.checkpoint.checkpoints import CheckpointPolicy, Checkpoints
from trnslurm.train.checkpoint.state import TrainingState
from trnslurm.train.data.units import Unit, eval_units, worker_units
from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.job import TrainingJob
from trnslurm.train.loop.progress import Reporting, StepDone, StepReporter
from trnslurm.train.loop.reports import JsonLines
from trnslurm.train.loop.schedule import (
    PRECOMPILE_STEPS,
    SaveTimes,
    due,
    learning_rate,
    total_steps,
)
from trnslurm.train.loop.stopping import Stopping, follow_term
from trnslurm.train.loop.verify import Verification
from trnslurm.train.loop.watchdog import Watchdog
from trnslurm.train.plan import describe_plan
from trnslurm.train.settings import CommonSettings, ScoredSettings

# How often a worker handles what does not depend on its steps.
_LOOK_S = 2.0

Evaluate = Callable[[], Mapping[str, float]]
"""Returns the scores of held-out samples by name: eval_loss, eval_accuracy, …."""


class TrainingRun:
    """The steps from the newest checkpoint to the end, and what happens after each step."""

    def __init__(
        self,
        job: TrainingJob[CommonSettings],
        optimizer: TrainingState,
        *,
        data: str,
        samples_per_epoch: int,
        reporting: Reporting,
        scores: Sequence[str] = (),
    ) -> None:
        """Prepare to train what the job has built.

        `data` is the fingerprint of the training data. `scores` are the names of an evaluation's
        scores; train.keep_best names the score that selects the best checkpoint.
        """
        self._job = job
        self.plan = plan = job.plan
        self.settings = settings = job.settings
        self.environment = job.environment
        self.device = job.device
        self.optimizer = optimizer
        self.trains = job.environment.phase == "train"
        """False in a precompile, whose losses are not valid."""
        self.total, self._epochs = total_steps(
            plan, epochs=settings.epochs, samples_per_epoch=samples_per_epoch
        )
        """The total number of steps, over any number of runs. The schedule ends there."""
        self.over = False
        """Whether the workers have agreed to stop after the most recent step."""
        self._samples_per_epoch, self._data = samples_per_epoch, data
        self._logged: dict[str, float | Tensor] = {}
        self._next_look = 0.0
        self._reporting = reporting
        self._parts = len(reporting.parts)
        keep_best = settings.keep_best if isinstance(settings, ScoredSettings) else ""
        if keep_best and keep_best not in scores:
            raise TrainError(
                f"train.keep_best is {keep_best!r}, but it must be {', '.join(scores)}, or empty"
            )
        self._keep_best = keep_best
        self.device.sync()
        policy = CheckpointPolicy(
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=keep_best,
            save_optimizer=settings.save_optimizer,
        )
        self._checkpoints = Checkpoints(
            self.device, plan, self.environment, policy, facts={"data": data}
        )

    def keep(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Save these tensors with every checkpoint, and load them in place in a resumed run.

        All workers must have the same tensors, such as averages of the weights. Call this method
        before steps(). `trnslurm export --weights KIND` writes tensors that have parameters' names.
        """
        if not kind.isidentifier() or kind in self.optimizer.kinds:
            raise TrainError(f"run.keep: {kind!r} must be a name that is not in use, such as ema")
        self._checkpoints.keep(kind, tensors)

    def describe(self, num_parameters: int, *, each: str, **lines: str) -> None:
        """Print what will run: the plan, the model, the job's own lines, the steps."""
        plan, settings = self.plan, self.settings
        origin = settings.init_from or "new"
        number = self.optimizer.num_frozen
        frozen = f" ({number:,} of them frozen)" if number else ""
        model = f"{num_parameters:,} parameters{frozen}, {origin}, {plan.precision}, "
        model += settings.optimizer
        epochs = "1 epoch" if self._epochs == 1 else f"{self._epochs:,} epochs"
        lines = {"model": model, **lines, "steps": f"{self.total:,} of {each} each, {epochs}"}
        told = [f"  {label:<7} {line}" for label, line in lines.items()]
        self.device.say("\n".join([describe_plan(plan, self.environment), *told]))

    def begin(self) -> range:
        """Load the newest checkpoint, and start to watch; return the steps of this attempt."""
        # Made before the optimizer's state, which a first step makes later and a resumed run here:
        # torch_xla orders a graph's results by their age.
        self._sums = self.device.put(torch.zeros(self._parts))
        self._units = 0  # of the step so far
        self.optimizer.begin()
        done = self._checkpoints.resume(self.optimizer)
        stop_at = rung_end(str(self.environment.run_dir)) or self.settings.stop_at
        last = (stop_at or self.total) if self.trains else PRECOMPILE_STEPS
        steps = range(done + 1, min(last, self.total) + 1)
        self._first, self._last = steps.start, steps.stop - 1
        if self.trains and self.environment.rank == 0:
            self._note_order(done)
        self._saves = SaveTimes(self.settings, last=self._last)
        total = self.total if self.trains else 0
        self._reporter = StepReporter(self._job, self._reporting, steps=steps, total=total)
        self._watch(steps)
        self._verification = self._verifying() if self.trains else None
        self._expect_unit()
        return steps

    def _verifying(self) -> Verification | None:
        """Return the comparison of workers, if it is enabled."""
        every = self.settings.verify_every
        if not every or self.device.world == 1:
            return None
        gradients = self.optimizer.own_gradients()
        if gradients is None:
            raise TrainError(
                "train.verify_every compares whole gradients, which no worker of this strategy "
                "has: set it to 0"
            )
        return Verification(
            self.device,
            self.environment,
            gradients,
            lambda worker, step: worker_units(self.plan, worker=worker, step=step)[0],
            every=every,
            settle=self._checkpoints.wait,
        )

    def _note_order(self, done: int) -> None:
        """Note which samples this attempt begins with, for `trnslurm doctor RUN --order`."""
        plan = self.plan
        lines = JsonLines(self.environment.files.order_file)
        lines.write(
            {
                "attempt": self.environment.attempt,
                "begin": done,
                "step": done,
                "ahead": 0,
                "workers": plan.workers,
                "samples": self._samples_per_epoch,
                "global_batch": plan.batch.global_batch,
                "seed": plan.seed,
                "data": self._data,
                "joined": True,
            }
        )
        lines.close()

    def _watch(self, steps: range) -> None:
        """Start to watch for stop requests and stalls; a precompile has neither."""
        watches = self.trains and len(steps) > 0
        self._tracer = Tracer(self.environment.files, self.environment.rank)
        self._watchdog = Watchdog(
            self.device,
            self.environment,
            factor=self.settings.watchdog if watches else 0.0,
            least_s=self.settings.watchdog_min_s,
        )
        self._stopping: Stopping | None = None
        if watches:
            self._stopping = Stopping(
                self.environment,
                lead=self.device.steps_ahead(self.plan.batch.accumulation + 1),
                last=self._last,
                reported=self._reporter.due,
            )
            self.device.timer.begin(self._first)
            follow_term(self._stopping.asked)
            self._watchdog.start()

    def steps(self) -> Iterator[int]:
        """Yield the steps of this attempt until they are done or the workers are asked to stop."""
        for step in self.begin():
            yield step
            if self.over:
                return

    def units(self, step: int) -> Iterable[Unit]:
        """Return this worker's units of a step; all workers have the same number.

        They may be preceded by units whose gradients are only compared.
        """
        mine = worker_units(self.plan, worker=self.device.rank, step=step)
        if self._verification is None or not self._verification.due(step):
            return mine
        return chain(self._verification.units(step), mine)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(self.settings, step=step, steps=self.total)

    def add(self, share: Tensor) -> None:
        """Add a unit's share of each of the parts, and end the unit's graph."""
        if self._verification is not None and self._verification.busy:
            self.device.sync()
            return
        self._sums += share.detach()
        self.device.sync()
        self._units += 1
        self._expect_unit()

    def _expect_unit(self) -> None:
        if self.optimizer.overlaps and self._units == self.plan.batch.accumulation - 1:
            self.optimizer.begin_last_unit()

    def log(self, **values: float | Tensor) -> None:
        """Add the job's own numbers to the metrics of this step, as worker 0 has them.

        A tensor stays on its device until the step is reported. A tensor with more than one element
        becomes its mean, standard deviation, minimum and maximum, and a histogram in TensorBoard.
        On XLA devices, call this method in every step or in none, because the values are part of
        the step's graph.
        """
        self._logged |= {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    def end(self, step: int, grad_norm: Tensor, *, evaluate: Evaluate | None = None) -> None:
        """End the step's graph; evaluate, report, save and stop if they are due."""
        sums = self._sums.clone()
        self._sums.zero_()
        self.device.sync()
        self._units = 0
        self._expect_unit()
        scores: Mapping[str, float] = {}
        # Evaluate after the first step too, so that its graph is compiled early.
        ends = (self._first, self._last)
        if evaluate and due(self.settings.eval_every, step, also=ends):
            scores = evaluate()
        done = StepDone(
            step=step,
            loss=sums,
            grad_norm=grad_norm,
            lr=self.lr(step),
            spent=self.device.timer.end_step(),
            scores=scores,
            logged=self._logged,
        )
        self._logged = {}
        overdue = self._reporter.note(done, flag=self._saves.overdue())
        if self._stopping is not None:
            self.over = self._stopping.step_done(step)
            if not self.over:
                self.device.timer.step = min(step + 1, self._last)
        if self._saves.due(step, overdue=overdue or self.over):
            self._reporter.report()
            self._checkpoints.save(
                step, self.optimizer, score=scores.get(f"eval_{self._keep_best}")
            )
        if self._tracer.counts or time.monotonic() >= self._next_look:
            self._look()
        if self.over or step == self._last:
            self._watchdog.close()

    def _look(self) -> None:
        """Handle what does not depend on the step: finished saves, newer attempts, recordings."""
        self._next_look = time.monotonic() + _LOOK_S
        self._checkpoints.poll()
        self._tracer.step_done()
        self.device.timer.traces = self._tracer.records

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, numbers: Callable[[Unit], Tensor], *, samples: int, width: int = 0
    ) -> list[float]:
        """Sum numbers of held-out units over all workers: `width` of them, or one per part.

        The sums do not depend on the number of workers.
        """
        units = eval_units(self.plan, worker=self.device.rank, samples=samples)
        sums = self.device.put(torch.zeros(width or self._parts))
        model.eval()
        with self.device.timer("eval"):
            for unit in units:
                sums += numbers(unit)
                self.device.sync()
            totals = self.device.total(sums.tolist())
        model.train()
        return totals

    def close(self, tensors: Callable[[], Iterable[Tensor]], *, what: str = "parameters") -> None:
        """Wait for the last checkpoint, check that the tensors are equal on all workers, and close.

        After a stop nothing is compared, because every second may count.
        """
        self._checkpoints.require_last()
        self._reporter.close()
        if not self.over:
            conclude(self.device, tensors(), what, self.environment)
        self.device.close()
        if self.over and self._stopping is not None and self.device.rank == 0:
            self._stopping.note()


# The batch script sets it to 1 for parameters in bf16 that have no copy of more bits.
_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"


def conclude(
    device: Device, tensors: Iterable[Tensor], what: str, environment: Environment
) -> None:
    """Check that all workers have equal tensors at the end of a run; raise a TrainError if not.

    If devices round stochastically, the workers' parameters may differ.
    """
    precompile = environment.phase == "precompile"
    agree, rounds = all_equal(device, tensors), os.environ.get(_ROUNDING) == "1"
    if not (agree or rounds or precompile):
        raise TrainError(f"the workers' {what} differ at the end: this run is not valid")
    said = "ranks agree" if agree else f"ranks differ in {what}: they round stochastically"
    device.say("precompile done: losses above are invalid" if precompile else said)


def all_equal(device: Device, tensors: Iterable[Tensor]) -> bool:
    """Compare a checksum of tensors over all workers."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    # Three bytes are a whole number that single precision holds exactly. All are equal if the
    # largest is this worker's own, and so is the largest of the negatives.
    parts = [float(int.from_bytes(digest.digest()[i : i + 3], "big")) for i in range(0, 12, 3)]
    both = [*parts, *(-part for part in parts)]
    return device.largest(both) == both
