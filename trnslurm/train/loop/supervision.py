"""What looks after a training while its steps run: the graceful stop, and the watchdog."""

from types import TracebackType
from typing import Self

from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.loop.progress import Progress
from trnslurm.train.loop.records import begin_step
from trnslurm.train.loop.stopping import Stopping, heed_term, note_stop
from trnslurm.train.loop.watchdog import Watchdog
from trnslurm.train.plan import Plan
from trnslurm.train.settings import CommonSettings


class Supervision:
    """One worker's. A precompile has none: step_done then always says to go on."""

    def __init__(
        self,
        plan: Plan,
        settings: CommonSettings,
        device: Device,
        environment: Environment,
        progress: Progress,
    ) -> None:
        self._environment = environment
        self._steps = progress.steps
        self._stopped_after: int | None = None
        self._active = environment.phase == "train" and len(self._steps) > 0
        if not self._active:
            return
        self._stopping = Stopping(
            environment,
            lead=device.steps_ahead(plan.batch.accumulation + 1),
            last=self._steps.stop,
            reported=progress.due,
        )
        self._watchdog = Watchdog(
            device,
            environment,
            first=self._steps.start + 1,
            factor=settings.watchdog,
            least_s=settings.watchdog_min_s,
        )

    def __enter__(self) -> Self:
        if self._active:
            begin_step(self._steps.start + 1)
            heed_term(self._stopping.asked)
            self._watchdog.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active:
            self._watchdog.close()

    @property
    def stopped(self) -> bool:
        """Whether training ended early because it was asked to."""
        return self._stopped_after is not None

    def note_stop(self) -> None:
        """If it did, say so for the batch script: after the last thing that can go wrong."""
        if self._stopped_after is not None and self._environment.rank == 0:
            note_stop(self._environment, self._stopped_after)

    def step_done(self, step: int) -> bool:
        """Tell, after every step (counted from 1), whether all workers stop after it."""
        if not self._active:
            return False
        self._watchdog.step_done(step)
        if self._stopping.step_done(step):
            self._stopped_after = step
            return True
        begin_step(min(step + 1, self._steps.stop))
        return False
