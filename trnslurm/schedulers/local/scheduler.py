"""This machine's implementation of the scheduler interface. Only a start imports submitit."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import write_json
from trnslurm.contract.states import State
from trnslurm.contract.times import utc_time
from trnslurm.errors import NotYetError, RunError, SubmitError, TrnslurmError
from trnslurm.records.foreign import this_user
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.interface import PhaseStatus, Scheduler, Seen, Wait, WaitsFor
from trnslurm.schedulers.signs import STALE_S, silent_since

_ENDING_S = 60
_POLL_S = 0.5


class ThisMachine(Scheduler):
    """Not a real scheduler: a guard process runs the phases one after another on emulated nodes."""

    name: ClassVar[str] = "local"
    words: ClassVar[str] = "this machine, without Slurm"
    has_queue: ClassVar[bool] = False
    is_here: ClassVar[bool] = True
    requeues: ClassVar[bool] = False
    has_sbatch_lines: ClassVar[bool] = False
    suffix: ClassVar[str] = ".sh"
    template: ClassVar[str] = "batch.sh.j2"
    starts_with: ClassVar[str] = "bash"
    cancels_with: ClassVar[str] = "kill"
    phase_word: ClassVar[str] = "phase"
    poll_s: ClassVar[float] = 0.3

    def by_hand(self, phases: Sequence[str]) -> list[str]:
        return [" && ".join(f"bash {self.script_name(phase)}" for phase in phases)]

    def check_container(self, runtime: str) -> Iterable[str]:
        import shutil  # few runs have a container

        if not shutil.which(runtime):
            raise SubmitError(
                f"container.runtime is {runtime}, which is missing on this machine: install it"
            )
        return ()

    def start(self, runs: Mapping[RunDir, WaitsFor], *, python: str, detach: bool) -> None:
        from trnslurm.schedulers.local.start import start

        start(runs, python, detach=detach)

    def look(self, records: Sequence[tuple[RunDir, Record]]) -> Seen:
        return SeenHere()

    def refuse_elsewhere(self, run: RunDir, record: Record, what: str) -> None:
        if record.host != os.uname().nodename:
            raise RunError(f"{run.name} is running on {record.host}: {what}")

    def cancel(self, records: Mapping[RunDir, Record], *, now: bool) -> set[RunDir]:
        from trnslurm.schedulers.local.start import stop

        for run in [*records][::-1]:  # so that none starts
            stop(run)
        return set()

    def take_back(self, runs: Sequence[RunDir], error: TrnslurmError) -> None:
        for run in runs:
            run.write_record(replace(run.record(), refused=str(error)))
            with contextlib.suppress(OSError):
                write_json(run.cancelled_file, {"by": this_user(), "time": utc_time()})
        self.cancel({run: run.record() for run in runs}, now=True)

    def end_leftovers(self, run: RunDir, record: Record) -> None:
        """Wait for the run's processes, which end shortly after its script."""
        deadline = time.monotonic() + _ENDING_S
        while record.local_job_alive or _script_alive(run, record):
            if time.monotonic() > deadline:
                raise NotYetError(
                    f"{run.name} still has processes here: run trnslurm cancel {run.name}"
                )
            time.sleep(_POLL_S)

    def lingers(self, record: Record) -> bool:
        return record.local_job_alive

    def step(self, run: RunDir, phase: PhaseStatus, node: int | None = None) -> list[str]:
        return []

    def allocate(self, name: str, options: Sequence[str], nodes: int | None = None) -> list[str]:
        if nodes is None:
            return []
        return [sys.executable, "-P", "-m", "trnslurm.node.local_srun", "--nodes", str(nodes), "--"]

    def rendezvous(self, nodes: int, python: str) -> str:
        import socket  # slow to import

        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        hosts = ",".join(f"local-{node}" for node in range(nodes))
        return f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} TRNSLURM_HOSTS={hosts}"


class SeenHere(Seen):
    """The state of runs on this machine, from its processes at the time of the call."""

    def state(
        self, run: RunDir, record: Record, phase: str, last: Attempt | None, wait: Wait
    ) -> tuple[State, str]:
        if last and last.state.written:
            return last.state, last.reason
        if last is None and wait.never:
            return State.CANCELLED, wait.never
        if (last is None or last.state is State.STARTING) and run.cancelled_file.exists():
            return State.CANCELLED, ""  # the script ends as soon as it sees cancelled.json
        if record.host != os.uname().nodename:
            age = run.heartbeat_age_s()
            fresh = age is not None and age < STALE_S
            return (
                (State.RUNNING, f"on {record.host}") if fresh else (State.LOST, silent_since(age))
            )
        if record.local_job_alive:
            if last:
                return State.RUNNING, ""
            return State.PENDING, f"waiting for {wait.what}" if wait.what else "starting"
        if run.cancelled_file.exists():
            return State.CANCELLED, ""
        return _lost(run.heartbeat_age_s())

    def may_run(self, job: str | None) -> bool:
        return True


def _lost(age_s: float | None) -> tuple[State, str]:
    return State.LOST, silent_since(age_s)


def _script_alive(run: RunDir, record: Record) -> bool:
    """Check whether a batch script is running in the run directory on this host."""
    pids = [attempt.pid for phase in record.phases for attempt in run.attempts(phase)]
    for pid in filter(None, pids):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").readlink() == run.path.resolve():
                return True
    return False
