"""The functions with which a custom training script talks to trnslurm.

    import trnslurm

    for step in range(first, steps + 1):
        loss = train(step)
        trnslurm.report(step=step, steps=steps, loss=loss)    # for status, runs, metrics, watch
        if trnslurm.should_stop():                            # the time limit, cancel, preemption
            save(step, path)
            trnslurm.saved(step, path)                        # what the next attempt begins with
            break

All workers make the same calls, and worker 0 writes. Outside a trnslurm run, the calls do nothing
and should_stop() is False. The calls only use files and variables, so any language can do the same:
docs/scripts.md describes the contract. Standard library only: PyTorch is used only if the script
has opened a process group.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.contract.checkpoints import reported_step
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.halving import rung_end
from trnslurm.contract.roles import Stand
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.tracing import Tracer

# How often, about, the workers meet to agree on a stop.
_LOOK_S = 1.0
_MOST_CALLS = 1000
# How often a script that waits for servers looks.
_SERVERS_S = 0.5
# How long a worker that gets TERM waits for a stop request, which another node may write.
_TERM_PATIENCE_S = 5.0
_TERMINATED, _USAGE = 128 + signal.SIGTERM, 2


def report(*, step: int, steps: int | None = None, **numbers: Any) -> None:
    """Report that a step is done, the total number of steps, and metrics such as the loss."""
    if worker := _here():
        worker.report(int(step), steps, numbers)


def should_stop() -> bool:
    """Return whether to save and end now: a time limit, a cancel or a preemption is near.

    It is also true if the rung of a sweep with --halving ends with the step that was reported last.
    All workers get the same answer from the same call, so all must call it after every step.
    """
    worker = _here()
    return worker is not None and worker.should_stop()


def saved(step: int, path: str | os.PathLike[str] | None = None) -> None:
    """Report a complete checkpoint and its path, which {resume} will contain.

    Without a path, the checkpoint is step-N, with at least eight digits, in {checkpoints}.
    """
    if worker := _here():
        worker.saved(int(step), Path(path).absolute() if path is not None else None)


def ends_now() -> bool:
    """Return whether should_stop() has returned True, which makes the next save the last."""
    return _worker is not None and _worker.ends


def servers(role: str) -> list[str]:
    """Return the addresses (HOST:PORT) of a role's servers once all of them are ready.

    A server that ends is restarted, so a script that has lost a server can call this to wait for
    it. Outside a run, the list is empty.
    """
    run_dir = os.environ.get(Variable.RUN_DIR)
    if not run_dir:
        return []
    files = RunFiles(Path(run_dir))
    while True:
        told = read_json(files.servers_file)
        if told and role not in told:
            raise ValueError(f"the run has no role {role}, only {', '.join(told)}")
        if not told and not files.roles_file.exists():
            raise ValueError(f"the run has no role {role}: see docs/roles.md")
        found = told.get(role, [])
        if found and all(each["stand"] == Stand.READY for each in found):
            return [each["address"] for each in found]
        time.sleep(_SERVERS_S)


class _Worker:
    """The state of this process within an attempt."""

    def __init__(self, run_dir: str) -> None:
        values = os.environ
        self._files = RunFiles(Path(run_dir))
        self._attempt = int(values.get(Variable.ATTEMPT, "1"))
        self._rank = int(values.get("RANK", values.get("SLURM_PROCID", "0")))
        self._stop_file = self._files.stop_file("train", self._attempt)
        self._stops = False
        self._rung_end, self._step = rung_end(run_dir), 0
        self._calls, self._pause = 0, 1
        self._agreements = 0
        self._looked = time.monotonic()
        self._tracer = Tracer(self._files, self._rank)
        self._order: int | None = None
        """How many steps the data is ahead of the run, or None if nothing was reported."""
        self._order_agreed = False
        self._asks_to_stop = False
        """Whether the script asks after every step, and so shows when a step is done."""
        _refuse_lonely(int(values.get("WORLD_SIZE", "1")))
        self._follow_term()
        self._pace: Any = None
        with suppress(Exception):  # a project may have a module of the same name as Python's
            self._pace = self._measured()

    def _measured(self) -> Any:
        """Return the object that finds slow workers, if there are several workers."""
        store = _shared_store()
        if store is None:
            return None
        from trnslurm.ddp_pace import DdpPace

        group = sys.modules["torch.distributed"]
        file = self._files.pace_file("train", self._attempt)
        return DdpPace(file, group.get_rank(), group.get_world_size(), store)

    def report(self, step: int, steps: int | None, numbers: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        self._step = step
        with suppress(Exception):  # a record only
            self._note_order(step)
        if not self._asks_to_stop:
            self._tracer.step_done()
        if self._pace:
            self._pace.step_done(step)
        if self._rank:
            return
        line: dict[str, Any] = {"attempt": self._attempt, "step": step}
        if steps is not None:
            line["steps"] = int(steps)
        values = {name: float(value) for name, value in numbers.items()}
        # JSON has no nan and no infinity.
        line |= {name: v if math.isfinite(v) else None for name, v in values.items()}
        line["time"] = round(time.time(), 3)
        with self._files.metrics_file.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def _note_order(self, step: int) -> None:
        """Record which samples this attempt began with, and where steps and data steps diverge."""
        module = sys.modules.get("trnslurm.samples.batches")
        order = module.in_use() if module else None
        if order is None:
            return
        facts, store = order.facts(), _shared_store()
        if self._order is None and store and self._rank:
            store.set(f"trnslurm/order/{self._rank}", json.dumps(facts))
        # What a library prefetches may be a step ahead.
        ahead = order.position - step if order.position - step != 1 else 0
        line: dict[str, Any] = {}
        if self._order is None:
            line = {"begin": order.begun, "workers": order.world_size, **facts}
        elif not self._rank and not self._order_agreed and store:
            self._order_agreed = True  # all have begun with this step or the one before
            keys = [f"trnslurm/order/{rank}" for rank in range(1, order.world_size)]
            told = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            wrong = [rank for rank, each in enumerate(told, 1) if each != json.dumps(facts)]
            line = {"differ": wrong} if wrong else {}
        if line or ahead != self._order:
            line |= {"attempt": self._attempt, "step": step, "ahead": ahead}
            self._order = ahead
            if not self._rank:
                with self._files.order_file.open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(line)}\n")

    @property
    def ends(self) -> bool:
        """Whether the script was told to save and end."""
        return self._stops or 0 < self._rung_end <= self._step

    def saved(self, step: int, path: Path | None) -> None:
        """Record a complete checkpoint."""
        if not self._rank:
            where = "" if path is None else str(path)
            facts = {"step": step, "path": where, "attempt": self._attempt, "time": time.time()}
            write_json(self._files.saved_file, facts)
            if self._stops:
                self._note_stop(step, saved=True)

    def should_stop(self) -> bool:
        """Agree with the other workers, at every call or, if steps are short, only occasionally.

        All workers know after which reported step a rung ends.
        """
        self._asks_to_stop = True
        self._tracer.step_done()
        if self._pace:
            self._pace.step_done()
        self._calls += 1
        if not self._stops and self._calls >= self._pause:
            self._stops = self._agree()
            if self._stops and not self._rank:
                self._note_stop(reported_step(self._files), saved=False)
        return self.ends

    def _agree(self) -> bool:
        now = time.monotonic()
        calls_per_look = _LOOK_S * self._calls / max(now - self._looked, 1e-9)
        pause = max(1, min(int(calls_per_look), 2 * self._pause, _MOST_CALLS))
        asked = int(self._stop_file.exists())
        if store := _shared_store():
            # Worker 0, on the node of whoever asks, decides both for all.
            self._agreements += 1
            key = f"trnslurm/stop/{self._agreements}"
            if self._rank:
                asked, pause = map(int, store.get(key).split())
            else:
                store.set(key, f"{asked} {pause}")
        self._calls, self._pause, self._looked = 0, pause, now
        return asked > 0

    def _note_stop(self, step: int, *, saved: bool) -> None:
        """Tell the batch script that an end from now on is a stop, and what was saved for it."""
        facts = {"step": step, "saved": saved, "time": time.time()}
        write_json(self._files.stopped_file("train", self._attempt), facts)

    def _follow_term(self) -> None:
        """End on SIGTERM unless a stop is requested. Leave the signal to a script that handles it.

        A thread does this, because Python runs no handler while the main thread waits in a
        collective.
        """
        with suppress(ValueError):  # this is not the main thread
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            if (before := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) >= 0:
                signal.set_wakeup_fd(before)  # the script's own
                return
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.siginterrupt(signal.SIGTERM, False)
            threading.Thread(target=self._await_term, args=(reading,), daemon=True).start()

    def _await_term(self, reading: int) -> None:
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        end = time.monotonic() + _TERM_PATIENCE_S
        # The directory is listed: NFS may answer from memory for a single file.
        while self._stop_file.name not in os.listdir(self._files.state):  # noqa: PTH208
            if time.monotonic() >= end:
                os._exit(_TERMINATED)
            time.sleep(0.1)


def _refuse_lonely(world: int) -> None:
    """End a worker that trains alone although it is one of many. Its copy would be worthless."""
    distributed = sys.modules.get("torch.distributed")
    if world < 2 or distributed is None or not distributed.is_available():
        return
    xla = sys.modules.get("torch_xla.runtime")
    if not distributed.is_initialized() and not (xla and xla.world_size() == world):
        print(
            f"error: {world} workers were started, but this worker has not opened a process "
            "group, so each worker would train its own copy. Call "
            "torch.distributed.init_process_group(), or create the Accelerator or Trainer, "
            "before trnslurm.report() or should_stop()",
            file=sys.stderr,
            flush=True,
        )
        os._exit(_USAGE)


def _shared_store() -> Any:
    """Return the store of the script's process group, if it has several workers.

    Unlike a collective, the store works with every backend and device.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() < 2:
        return None
    return distributed.distributed_c10d._get_default_store()


_worker: _Worker | None = None


def _here() -> _Worker | None:
    """Return the state of this process, or None outside a run."""
    global _worker
    run_dir = os.environ.get(Variable.RUN_DIR)
    if _worker is None and run_dir and os.environ.get(Variable.PHASE) == "train":
        _worker = _Worker(run_dir)
    return _worker
