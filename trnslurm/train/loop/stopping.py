"""A graceful stop: all workers end after the same step, and save it.

A request is the file state/stop-<phase>-<attempt>.json. Worker 0 runs on the node of the batch
script. It looks for the file when it has ended a step s and has not yet given step s + 1 to its
device, and announces a last step S in the workers' store. Every worker looks for the announcement
at the end of every step, and ends after step S.

No worker can miss it. A host that ends a step has waited for the results of all but the last `lead`
steps (Device.steps_ahead), and S = s + 1 + lead. So a worker that ends S has waited for step s + 1.
Worker 0 contributed to step s + 1 after the announcement, so by then the worker can see it. If a
step R > s is reported, S = R is late enough, because a report is a collective of the hosts, and
worker 0 takes part in it after the announcement.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trnslurm.contract.files import write_json
from trnslurm.train.background import Asker
from trnslurm.train.devices.store import Store, open_store
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

# How often worker 0 looks for the file, if steps are short.
LOOK_S = 0.5
# A worker that gets TERM waits this long for a request to stop: Slurm sends TERM to batch
# script and workers at the same moment.
TERM_PATIENCE_S = 3.0
TERMINATED = 128 + signal.SIGTERM


class Stopping:
    """One worker's part in the agreement."""

    def __init__(
        self,
        environment: Environment,
        *,
        lead: int,
        last: int,
        reported: Callable[[int], bool],
        store: Store | None = None,
    ) -> None:
        """Set how many steps hosts run ahead, the last step, and which steps are reported."""
        self.stops_at: int | None = None
        """The agreed last step."""
        self._environment = environment
        self._file = environment.files.stop_file(environment.phase, environment.attempt)
        self._lead = lead
        self._last = last
        self._reported = reported
        self._store = open_store("stop", store)
        self._next_look = 0.0

    def step_done(self, step: int) -> bool:
        """Return whether a stop makes this step the last one; call it after every step."""
        if step == self._last:
            return False  # training has reached its end anyway
        if self.stops_at is None:
            self.stops_at = self._agree(step)
        if self.stops_at is None:
            return False
        if self.stops_at < step:
            raise TrainError(
                f"worker {self._environment.rank} has ended step {step}, but all should stop "
                f"after {self.stops_at}: this attempt ends without a last checkpoint"
            )
        return self.stops_at == step

    def asked(self) -> bool:
        """Return whether a stop is requested; worker 0 looks, and announces it to the others."""
        if self._environment.rank == 0:
            if not self._file.exists():
                return False
            self._store.set("asked", "yes")
            return True
        return bool(self._store.check(["asked"]))

    def note(self) -> None:
        """Record that all work is saved; worker 0 calls this at the very end."""
        here = self._environment
        path = here.files.stopped_file(here.phase, here.attempt)
        try:
            write_json(path, {"step": self.stops_at, "saved": True, "time": time.time()})
        except FileNotFoundError:
            pass  # no batch script has made the directory: the job was started by hand
        except OSError as error:
            raise TrainError(f"{path}: {error.strerror}") from None

    def _agree(self, step: int) -> int | None:
        """Return the last step if it is decided; worker 0 decides, the others read."""
        if self._environment.rank:
            return int(self._store.get("last")) if self._store.check(["last"]) else None
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_S
        if not self.asked():
            return None
        latest = min(step + 1 + self._lead, self._last)
        stops_at = next(filter(self._reported, range(step + 1, latest)), latest)
        self._store.set("last", str(stops_at))
        return stops_at


def follow_term(asked: Callable[[], bool]) -> None:
    """End at once on SIGTERM, unless a stop is requested: then continue to the agreed step.

    A thread does this, because Python runs no signal handler while the main thread waits in a
    collective.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # The interpreter writes each signal's number there at once, whatever the main thread does, but
    # only for signals that have a handler.
    signal.signal(signal.SIGTERM, _nothing)
    signal.siginterrupt(signal.SIGTERM, False)  # foreign libraries may not expect it
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before >= 0:
        os.close(before)  # its thread ends
    threading.Thread(target=_follow, args=(reading, asked), name="term", daemon=True).start()


def _follow(reading: int, asked: Callable[[], bool]) -> None:
    ask = Asker("term")
    while numbers := os.read(reading, 64):
        if signal.SIGTERM not in numbers:
            continue
        end = time.monotonic() + TERM_PATIENCE_S
        while not ask(asked, patience_s=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                leave(TERMINATED)
            time.sleep(0.1)
        return  # decided: later signals, and a store that is gone, change nothing
    os.close(reading)


def leave(code: int) -> None:
    """End this process at once, whatever its threads are waiting for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _nothing(*_: Any) -> None:
    pass
