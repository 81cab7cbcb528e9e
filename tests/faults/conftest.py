"""The sandbox that faults are put into, the training they are compared with, and the results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ..sandbox.jobs import JobSandbox, User, started_sandbox
from ..waiting import eventually
from .results import Row, results_directory
from .trainings import DEFAULT_WAITS, SITE, Training, submit

# Slurm's waits, cut short, as docs/reliability.md says, or those of slurm.conf(5).
SHORT = (
    "KillWait=5", "MinJobAge=10", "AuthInfo=cred_expire=5", "SlurmdTimeout=10", "MessageTimeout=5",
    "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2",
)  # fmt: skip
DEFAULT = (
    "KillWait=30", "MinJobAge=300", "AuthInfo=cred_expire=120", "SlurmdTimeout=300",
    "MessageTimeout=10",
)  # fmt: skip
# A partition whose jobs take the nodes of others, which are then requeued.
SETTINGS = (
    *(DEFAULT if DEFAULT_WAITS else SHORT), "InactiveLimit=0", "ReturnToService=2",
    "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP",
)  # fmt: skip

Control = Callable[..., Training]


@pytest.fixture(scope="session")
def sandbox(path_without_slurm: str) -> Iterator[JobSandbox]:
    """Four nodes like trn1.32xlarge."""
    with started_sandbox(path_without_slurm, SETTINGS, "--nodes", "4") as sandbox:
        yield sandbox


@pytest.fixture
def user(sandbox: JobSandbox, tmp_path: Path, results: Path) -> Iterator[User]:
    """A user whose jobs end with the test, on nodes that are whole again after it."""
    yield User(sandbox, tmp_path, site=SITE)
    for file in tmp_path.glob("runs/*/state/stages.jsonl"):  # for tests/simulate/traces.py
        kept = results / "stages" / file.parents[1].name
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, kept)
    mend(sandbox)
    sandbox.clean()


@pytest.fixture(scope="session")
def control(sandbox: JobSandbox, tmp_path_factory: pytest.TempPathFactory) -> Control:
    """An uninterrupted training on so many nodes, with these settings."""

    @cache
    def run(*sets: str, nodes: int = 2) -> Training:
        user = User(sandbox, tmp_path_factory.mktemp("control"), site=SITE)
        training = submit(user, "train.pause_s=0", *sets, nodes=nodes)
        training.until("COMPLETED")
        return training

    return run


@pytest.fixture(scope="session")
def results() -> Path:
    return results_directory()


@pytest.fixture
def row(results: Path, request: pytest.FixtureRequest) -> Iterator[Row]:
    """The row that a test is about, named by its mark `row`; written down if the test passes."""
    number, what = request.node.get_closest_marker("row").args
    row = Row(number, what)
    failed = request.session.testsfailed
    yield row
    if request.session.testsfailed == failed and row.invariants:
        row.write(results)


def mend(sandbox: JobSandbox) -> None:
    """Have the controller and every node run, with its daemon and its cable."""
    state = sandbox.state()
    if "slurmctld" not in state["daemons"]:
        sandbox.fault("ctld", "start")
    for node in range(1, len(state["nodes"]) + 1):
        if state["nodes"][node - 1]["power"] == "off":
            sandbox.fault(node, "power-on")
        for action in ("thaw", "link-up"):
            sandbox.fault(node, action)
        if "slurmd" not in sandbox.on_node(node, "ps", "-eo", "comm").out.split():
            sandbox.fault(node, "slurmd-start")
    eventually(lambda: sandbox.slurm("sinfo").code == 0)
