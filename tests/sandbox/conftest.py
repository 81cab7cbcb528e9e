"""A Slurm sandbox that all tests of jobs share, and a user who submits to it.

Where no sandbox can be started the tests fail: what they show cannot be shown without Slurm.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import pytest

from .jobs import JobSandbox, User, started_sandbox
from .stand_ins import Stage

# Slurm's waits, cut short; and a partition whose jobs share nodes, as at sites that do not give
# out whole nodes. A batch job starts at once, not within 3 seconds (batch_sched_delay). An srun
# that nobody ends cancels its step KillWait and 2 s after one of its tasks has failed: before the
# requeued job begins again (cred_expire), as on a real cluster. Tasks are bound to CPUs as there.
SETTINGS = (
    "KillWait=5", "MinJobAge=2", "AuthInfo=cred_expire=5", "InactiveLimit=0",
    "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2",
    "PartitionName=shared Nodes=ALL OverSubscribe=FORCE:2 State=UP", "TaskPlugin=task/affinity",
)  # fmt: skip

NewSandbox = Callable[..., AbstractContextManager[JobSandbox]]


@pytest.fixture(scope="session")
def new_sandbox(path_without_slurm: str) -> NewSandbox:
    """Start a sandbox with these options of `up`, for users who have no Slurm on their PATH."""
    return partial(started_sandbox, path_without_slurm, SETTINGS)


@pytest.fixture(scope="session")
def sandbox(new_sandbox: NewSandbox) -> Iterator[JobSandbox]:
    """Four nodes like trn1.32xlarge, with stand-ins of the Neuron tools."""
    with new_sandbox("--nodes", "4", "--neuron-stand-ins") as sandbox:
        yield sandbox


@pytest.fixture
def user(sandbox: JobSandbox, tmp_path: Path) -> Iterator[User]:
    """A user whose jobs end with the test."""
    yield User(sandbox, tmp_path)
    sandbox.clean()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for process in stage.started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the command that a failed test left
        process.wait(180)
        process.stdout.close()
        process.stderr.close()
