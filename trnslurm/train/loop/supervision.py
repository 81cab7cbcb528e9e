"""What supervises a training while its steps run: the graceful stop, and the watchdog."""

from collections.abc import Callable

from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.loop.records import begin_step
from trnslurm.train.loop.stopping import Stopping, follow_term, note_stop
from trnslurm.train.loop.watchdog import Watchdog
from trnslurm.train.plan import Plan
from trnslurm.train.settings import CommonSettings


class Supervision:
    """One worker's, from here to the last step. A precompile has none, and never stops early."""

    def __init__(
        self,
        plan: Plan,
        settings: CommonSettings,
        device: Device,
        environment: Environment,
        steps: range,
        *,
        reported: Callable[[int], bool],
    ) -> None:
        """Watch these steps; `reported` tells which of them bring all workers together."""
        self._environment = environment
        self._last = steps.stop - 1
        self._stopped_after: int | None = None
        self._active = environment.phase == "train" and len(steps) > 0
        if not self._active:
            return
        self._stopping = Stopping(
            environment,
            lead=device.steps_ahead(plan.batch.accumulation + 1),
            last=self._last,
            reported=reported,
        )
        self._watchdog = Watchdog(
            device,
            environment,
            first=steps.start,
            factor=settings.watchdog,
            least_s=settings.watchdog_min_s,
        )
        begin_step(steps.start)
        follow_term(self._stopping.asked)
        self._watchdog.start()

    def note_stop(self) -> None:
        """Record a stop for the batch script: after the last thing that can go wrong."""
        if self._stopped_after is not None and self._environment.rank == 0:
            note_stop(self._environment, self._stopped_after)

    def step_done(self, step: int) -> bool:
        """Return, after every step, whether all workers stop after it."""
        if not self._active:
            return False
        self._watchdog.step_done(step)
        if self._stopping.step_done(step):
            self._stopped_after = step
        else:
            begin_step(min(step + 1, self._last))
        return step == self._stopped_after

    def close(self) -> None:
        """End watching, after the last step."""
        if self._active:
            self._watchdog.close()
