"""Checks that training makes progress, and finds who holds it up, in a thread of every worker.

Each call of Device.sync is a beat. Every few seconds the thread checks for new beats and publishes
the result in the workers' store, with the number of its turn. If there is no beat for too long, all
workers log their stacks, and the worker that noticed the stall names the cause. A worker that takes
no more turns is frozen. If there is none, the worker that is furthest behind holds up the others.

The end of a save, which training waits for, may take a long time. While a worker is in a save, no
worker is blamed. A save has a separate time limit.
"""

import faulthandler
import json
import math
import os
import socket
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from trnslurm.contract.files import write_json_once
from trnslurm.contract.variables import Variable
from trnslurm.pace import LOOK_S, NOT_COMPUTING, Pace, Spent, WorkerTime
from trnslurm.train.background import Asker
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.store import Store, open_store
from trnslurm.train.environment import Environment
from trnslurm.train.loop.stopping import leave

# So many steps after those that compile tell how long one takes.
STEPS_TO_LEARN = 3
# Turns from the first suspicion to the verdict: a worker that takes no turn in this time is frozen,
# and by then all have logged their stacks.
TURNS_TO_JUDGE = 3
LEAST_PATIENCE_S = 2.0
EXIT_CODE = 70


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a worker publishes in each turn of its thread."""

    turn: int
    step: int
    """The step that the worker is in."""
    beats: int
    doing: str
    node: int
    host: str
    spent: tuple[float, ...] = ()
    """Where the time of its steps went; see pace.py."""


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """The workers that make no progress."""

    reason: str
    workers: tuple[int, ...] = ()
    """Empty if no worker in particular is stuck."""
    frozen: bool = False
    """Whether these workers no longer publish signs."""


def judge(before: list[Sign], now: list[Sign]) -> Standstill | None:
    """Compare all workers' signs of some turns ago with those of now; None while a worker saves."""
    frozen = [rank for rank, sign in enumerate(now) if sign.turn == before[rank].turn]
    if any(sign.doing == "checkpoint" for rank, sign in enumerate(now) if rank not in frozen):
        return None
    if frozen:
        reason = "it does not answer; its process is frozen"
        return Standstill(workers=tuple(frozen), reason=reason, frozen=True)
    places = [(sign.step, sign.beats) for sign in now]
    behind = tuple(rank for rank, place in enumerate(places) if place == min(places))
    if len(behind) == len(now) > 1:
        return Standstill(
            reason="all workers wait at the same place: check the network and the devices"
        )
    return Standstill(workers=behind, reason="its stacks are in its log")


class Watchdog:
    """One worker's thread. A factor of 0 disables it."""

    def __init__(
        self,
        device: Device,
        environment: Environment,
        *,
        factor: float,
        least_s: float,
        store: Store | None = None,
    ) -> None:
        """Watch for pauses longer than `factor` times a step's time and longer than `least_s`."""
        self._device = device
        self._environment = environment
        self._factor = factor
        self._least_s = least_s
        self._period_s = min(5.0, max(0.1, least_s / 20))
        self._host = socket.gethostname()
        self._store = open_store("watchdog", store) if factor else None
        self._ask = Asker("watchdog's question")
        self._closed = threading.Event()
        # Only the thread uses the rest.
        self._turn = 0
        self._beats = -1
        self._since = self._answered = time.monotonic()
        self._dumps = 0
        self._dumped = -math.inf
        self._suspected: tuple[float, list[Sign]] | None = None
        file = environment.files.pace_file(environment.phase, environment.attempt)
        self._pace = Pace(file) if factor and environment.rank == 0 else None
        self._paced = time.monotonic()

    def start(self) -> None:
        """Start watching."""
        if self._store:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._period_s):
            self._take_turn(time.monotonic())

    def _take_turn(self, now: float) -> None:
        device = self._device
        self._turn += 1
        if device.beats != self._beats or device.timer.doing == "checkpoint":
            self._beats, self._since, self._suspected = device.beats, now, None
        dumps = self._ask(self._exchange, patience_s=self._patience_s)
        if dumps is not None:
            self._answered = now
            if dumps > self._dumps:
                self._dumps = dumps
                self._dump(now)
        self._compare_pace(now)
        limit_s = self._limit_s()
        if limit_s is None or now - self._since <= limit_s or self._closed.is_set():
            return
        if now - self._answered > self._patience_s:
            self._dump(now)
            self._give_up(now, *_without_store(self._device.timer.step))
        self._suspect(now)

    @property
    def _patience_s(self) -> float:
        """How long the store may take to answer, and a worker before it counts as frozen."""
        return max(LEAST_PATIENCE_S, TURNS_TO_JUDGE * self._period_s)

    def _limit_s(self) -> float | None:
        durations = list(self._device.timer.durations)
        if len(durations) < STEPS_TO_LEARN:
            return None
        # The mean too: if a host runs ahead of its device, most steps may seem to take no time.
        usual_s = max(statistics.median(durations), statistics.fmean(durations))
        return max(self._least_s, self._factor * usual_s)

    def _exchange(self) -> int:
        """Publish a heartbeat; return how often workers have requested stacks."""
        sign = Sign(
            turn=self._turn,
            step=self._device.timer.step,
            beats=self._device.beats,
            doing=self._device.timer.doing,
            node=self._environment.node,
            host=self._host,
            spent=self._spent(),
        )
        assert self._store is not None
        self._store.set(str(self._environment.rank), json.dumps(asdict(sign)))
        return int(self._store.add("dumps", 0))

    def _compare_pace(self, now: float) -> None:
        """Compare the workers' steps now and then, on worker 0."""
        if self._pace is None or now - self._paced < LOOK_S:
            return
        self._paced = now
        signs = self._ask(self._signs, patience_s=self._patience_s)
        if signs and all(sign.spent for sign in signs):
            workers = [
                WorkerTime(s.node, s.host, Spent(int(s.spent[0]), *s.spent[1:])) for s in signs
            ]
            self._pace.look(self._device.timer.step, workers)

    def _spent(self) -> Spent:
        """Return where the time of the steps so far went."""
        sums = self._device.timer.sums.copy()
        compute = sums["step"] - sum(sums[name] for name in NOT_COMPUTING)
        return Spent(int(sums["steps"]), max(0.0, compute), sums["data"], sums["collectives"])

    def _signs(self) -> list[Sign]:
        assert self._store is not None
        values: Any = self._store.multi_get([str(rank) for rank in range(self._environment.world)])
        return [Sign(**json.loads(value)) for value in values]

    def _suspect(self, now: float) -> None:
        if self._suspected and now - self._suspected[0] <= self._patience_s:
            return
        signs = self._ask(self._signs, patience_s=self._patience_s)
        if signs is None:
            return
        if self._suspected is None:
            self._suspected = now, signs
            store = self._store
            assert store is not None
            self._ask(lambda: store.add("dumps", 1), patience_s=self._patience_s)
            return
        stall = judge(self._suspected[1], signs)
        if stall is None:
            self._since, self._suspected = now, None
        elif not self._closed.is_set():
            self._give_up(now, signs, stall)

    def _dump(self, now: float) -> None:
        """Write this worker's stacks to its log, in one write and not too often."""
        if now - self._dumped < 10 * self._patience_s:
            return
        self._dumped = now
        step = self._device.timer.step
        with os.fdopen(os.memfd_create("stacks"), "w+b") as file:
            file.write(
                f"no progress: stacks of worker {self._environment.rank} (node "
                f"{self._environment.node}, {self._host}) in step {step}\n".encode()
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read()
        os.write(sys.stderr.fileno(), text)

    def _give_up(self, now: float, signs: list[Sign], stall: Standstill) -> None:
        """Record the stuck workers, unless another worker has done so, and end this worker."""
        step = self._device.timer.step
        values = describe(stall, signs, seconds=round(now - self._since), step=step)
        here = self._environment
        record = {"time": time.time(), **values, "reported_by": here.rank}
        first = True
        with suppress(OSError):  # if it cannot be written, every worker that notices reports it
            first = write_json_once(here.files.stuck_file(here.phase, here.attempt), record)
        if first:
            os.write(sys.stderr.fileno(), f"error: {values['line']}\n".encode())
        leave(EXIT_CODE)


def _without_store(step: int) -> tuple[list[Sign], Standstill]:
    """Return which worker is blamed if the store does not answer: the worker that keeps it."""
    address = os.environ["MASTER_ADDR"]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # a program of torchrun's
        return [], Standstill(reason=f"node 0 ({address}) does not answer")
    host = os.environ.get(Variable.HOSTS, "").partition(",")[0] or address
    keeper = Sign(turn=0, step=step, beats=0, doing="", node=0, host=host)
    reason = "it does not answer: its process is frozen, or its node is down"
    return [keeper], Standstill(workers=(0,), reason=reason, frozen=True)


def describe(stall: Standstill, signs: list[Sign], *, seconds: int, step: int) -> dict[str, Any]:
    """Return a stall as one line, and its parts; `step` is the step of the reporting worker."""
    worker: dict[str, Any] = {"rank": None, "node": None, "host": None, "step": step}
    who = "no worker"
    more = ""
    if stall.workers:
        rank, *others = stall.workers
        sign = signs[rank]
        place = step if stall.frozen else sign.step
        worker = {"rank": rank, "node": sign.node, "host": sign.host, "step": place}
        who = f"worker {rank} (node {sign.node}, {sign.host})"
        more = f" (and {len(others)} more)" if others else ""
    line = (
        f"{who} has made {'any' if who == 'no worker' else 'no'} progress for {seconds} s in step "
        f"{worker['step']}: {stall.reason}{more}"
    )
    return {**worker, "seconds": seconds, "line": line}
