"""Rows in which Slurm itself, or the network, fails."""

from __future__ import annotations

import threading
import time

import pytest

from ..waiting import eventually
from . import invariants
from .conftest import Control
from .results import Row
from .trainings import INTERVAL, STEPS, Recovery, Training, submit

pytestmark = pytest.mark.faults


def first_two(run_user) -> tuple[str, ...]:
    """Options that bind a run to the first two nodes."""
    names = ",".join(run_user.sandbox.node_name(n) for n in (1, 2))
    return ("--sbatch", f"--nodelist={names}")


@pytest.mark.row(9, "kill -9 of the batch script's slurmd")
def test_kill_slurmd(user, control, row) -> None:
    """The old script runs on, loses a worker, and must not begin the job anew once more."""
    run = submit(user, "train.pause_s=0.3", "train.keep_last=50")
    run.reach(25)
    node = run.hosts()[0]
    recovery = run.recover(lambda: run.sandbox.fault(node, "slurmd-kill"))
    assert node not in run.hosts(recovery.attempt)
    eventually(lambda: run.said(1)["ended"])
    run.finish()
    assert run.attempts == [1, 2]
    invariants.check(run, control(), row, recovery, lost_at_most=200, bound_s=180)


@pytest.mark.row(9, "kill -9 of every slurmd in the job")
def test_kill_every_slurmd(user, control, row) -> None:
    """The old attempt runs on. Beside the new one it can commit nothing.

    Slurm 22.05 takes the job for one that can never run, and what status says to do brings the new
    attempt; newer ones begin it on other nodes by themselves.
    """
    run = submit(user, "train.pause_s=0.3", "train.keep_last=50")
    run.reach(25)
    run.keep_logs()
    for node in run.hosts():
        run.sandbox.fault(node, "slurmd-kill")
    eventually(lambda: run.sandbox.queue()[0].split()[2] == "PENDING")
    mend = eventually(lambda: run.status()["mend"] or 2 in run.attempts)
    if isinstance(mend, str):
        run.user.trnslurm(*mend.split()[1:])
        run.jobs = run.recorded_jobs()
    run.reach(60, attempt=2)
    eventually(lambda: "a newer attempt" in (run.path / "logs/train-1-node0.log").read_text())
    run.finish()
    invariants.fenced(run, 1, 2)
    lost = max(run.steps(1)) - min(run.steps(2)) + 1
    invariants.check_end(run, control(), row, lost=lost, bound=200)


@pytest.mark.row(10, "a node's network link goes down and comes back up")
def test_link_down(user, control, row) -> None:
    run = submit(user)
    run.reach(25)
    node = run.hosts()[1]
    recovery = run.recover(lambda: run.sandbox.fault(node, "link-down"))
    run.sandbox.fault(node, "link-up")
    run.finish()
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL, bound_s=180)


@pytest.mark.row(11, "kill -9 of slurmctld right after the start")
def test_kill_slurmctld(user, control, row) -> None:
    """What it had not saved yet, the new one does not know.

    It may hold the job as never launched, or have forgotten it, and then ends what is left of it,
    which the script sees, and may save for, if it has the time.
    Then status says what to do, and that mends it.
    """
    mendable = ("HELD", "LOST", "FAILED", "STOPPED")
    run = submit(user)
    eventually(lambda: run.attempts == [1] and run.said(1)["state"] == "RUNNING")
    run.keep_logs()
    run.sandbox.fault("ctld", "kill")
    assert run.state == "RUNNING"
    time.sleep(3)
    run.sandbox.fault("ctld", "start")
    run.order("pace", 0)
    eventually(lambda: run.state in (*mendable, "COMPLETED"), 240)
    if run.state != "COMPLETED":
        assert run.status()["mend"] == f"trnslurm resume {run.path.name}"
        time.sleep(65 if run.state == "LOST" else 0)  # its script must have been silent for so long
        user.trnslurm("resume", str(run.path))
        run.until("COMPLETED")
    assert run.attempts in ([1], [1, 2])
    # It may have found only after the resume that the first job was "never launched".
    user.sandbox.slurm("scancel", "--state=PENDING", run.jobs["train"])
    invariants.check_end(run, control(), row, exit_code=())


@pytest.mark.row(12, "slurmctld is down during submit and status")
def test_submit_without_slurmctld(user, control, row) -> None:
    """sbatch tries again for some seconds, and status says what it knows: there is one job."""
    sandbox = user.sandbox
    time.sleep(6)  # it saves every five seconds: let it not forget how the last test ended
    sandbox.fault("ctld", "kill")
    restart = [*sandbox.argv("fault", "ctld", "start")]
    with sandbox.running(["sh", "-c", f"sleep 2; exec {' '.join(restart)}"]):
        run = submit(user)
    assert len(invariants.queued(run)) == len(sandbox.queue()) == 1
    run.reach(15)
    run.keep_logs()
    sandbox.fault("ctld", "kill")
    assert run.state == "RUNNING"
    sandbox.fault("ctld", "start")
    assert len(sandbox.queue()) == 1
    run.finish()
    assert run.attempts == [1]
    invariants.check_end(run, control(), row, exit_code=(), lost=0, bound=0)


def two_attempts(run: Training) -> None:
    """Start a second attempt by hand beside the first, which is about to commit."""
    run.reach(25)
    run.keep_logs()
    run.order("hold", "rename 1")
    run.held("rename")
    run.user.shell("sbatch --parsable train.sbatch", run.path)
    run.reach(50, attempt=2)
    run.release()
    eventually(lambda: run.said(1)["state"] != "RUNNING")
    made = invariants.whole_checkpoints(run.path)
    assert made == list(range(max(made), 0, -10)), "a checkpoint of the newer attempt is gone"
    time.sleep(15)  # if it were requeued, it would start
    assert run.attempts == [1, 2], "the attempt that was overtaken has begun again"
    # Of a job that was submitted by hand run.json knows nothing.
    run.order("pace", 0)
    eventually(lambda: run.said(2)["state"] == "COMPLETED")
    invariants.fenced(run, 1, 2)


@pytest.mark.row(22, "two attempts at once")
def test_two_attempts(user, control, row) -> None:
    run = submit(user, "train.pause_s=0.3", "train.keep_last=50")
    two_attempts(run)
    invariants.check_end(run, control(), row, exit_code=())


@pytest.mark.row(23, "a node reboots and returns immediately")
def test_node_back_at_once(user, control, row) -> None:
    run = submit(user, more=first_two(user))
    run.reach(25)
    recovery = run.recover(lambda: run.sandbox.fault(2, "reboot"))
    run.finish()
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL, bound_s=180)


@pytest.mark.row(24, "a node powers off and never returns")
def test_node_never_back(user, control, row) -> None:
    run = submit(user)
    run.reach(25)
    node = run.hosts()[0]
    recovery = run.recover(lambda: run.sandbox.fault(node, "power-off"))
    assert node not in run.hosts(recovery.attempt)
    run.finish()
    run.sandbox.fault(node, "power-on")
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL, bound_s=180)


@pytest.mark.row(26, "a node powers off, and a spare takes its place")
def test_spare(user, control, row) -> None:
    run = submit(user, "slurm.spares=1")
    run.reach(25)
    job, node = run.jobs["train"], run.hosts()[1]
    recovery = run.recover(lambda: run.sandbox.fault(node, "power-off"))
    assert node not in run.hosts(recovery.attempt) and len(run.hosts(recovery.attempt)) == 2
    run.finish()
    run.sandbox.fault(node, "power-on")
    assert {run.said(attempt)["job_id"] for attempt in run.attempts} == {job}
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


def same_training(run: Training, control: Control, row: Row, recovery: Recovery) -> None:
    """All invariants, for a training whose number of nodes has changed."""
    assert recovery.lost <= INTERVAL
    invariants.every_sample_once(run, STEPS)
    invariants.same_numbers(run, control(nodes=3), rel=1e-6)
    invariants.ended_well(run)
    invariants.logs_kept(run)
    row.holds("I1 I2 I3 I4 I6", lost=recovery.lost, bound=INTERVAL)
    row.measured(recovery)


@pytest.mark.row(27, "a node powers off, and the run continues on the two remaining nodes")
def test_fewer_nodes_left(user, control, row) -> None:
    run = submit(user, "slurm.min_nodes=1", nodes=3)
    run.reach(25)
    job, node = run.jobs["train"], run.hosts()[1]
    recovery = run.recover(lambda: run.sandbox.fault(node, "power-off"))
    assert len(run.hosts(recovery.attempt)) == 2
    run.finish()
    run.sandbox.fault(node, "power-on")
    assert {run.said(attempt)["job_id"] for attempt in run.attempts} == {job}
    same_training(run, control, row, recovery)


@pytest.mark.row(29, "the first node of a job with a node range powers off and stays off")
def test_first_node_of_a_range(user, control, row) -> None:
    """The second node's program goes on, and starts the job again at the end, to complete it."""
    run = submit(user, "slurm.min_nodes=2", nodes=3)
    run.reach(25)
    job, node = run.jobs["train"], run.hosts()[0]
    recovery = run.recover(lambda: run.sandbox.fault(node, "power-off"))
    assert node not in run.hosts(recovery.attempt)
    run.finish()
    run.sandbox.fault(node, "power-on")
    eventually(lambda: run.attempts == [1, 2, 3], said=run.story)
    run.until("COMPLETED")
    restarts = [(run.said(n)["job_id"], run.said(n)["restarts"]) for n in run.attempts]
    assert restarts == [(job, 0), (job, 0), (job, 1)]
    same_training(run, control, row, recovery)


@pytest.mark.row(35, "a lost node returns, and the run grows from two nodes back to three")
def test_more_nodes_again(user, control, row) -> None:
    run = submit(user, "slurm.min_nodes=2", "slurm.grow_minutes=0.05", nodes=3)
    run.reach(25)
    job, node = run.jobs["train"], run.hosts()[1]
    fewer = run.recover(lambda: run.sandbox.fault(node, "power-off"))
    assert len(run.hosts(fewer.attempt)) == 2

    def fault() -> None:
        run.order("pace", 20)  # so slow that a restart is worth it
        run.sandbox.fault(node, "power-on")

    recovery = run.recover(fault)
    assert len(run.hosts(recovery.attempt)) == 3
    assert recovery.lost == 0
    run.finish()
    assert {run.said(attempt)["job_id"] for attempt in run.attempts} == {job}
    same_training(run, control, row, recovery)


@pytest.mark.row(30, "too few nodes are left, and the run waits until a node returns")
def test_too_few_nodes_left(user, control, row) -> None:
    run = submit(user, "slurm.min_nodes=3", nodes=4)
    run.reach(25)
    job, nodes = run.jobs["train"], run.hosts()[2:]
    run.sandbox.fault(nodes[0], "power-off")
    run.reach(45, attempt=2)

    def fault() -> None:
        run.sandbox.fault(nodes[1], "power-off")
        eventually(lambda: run.said(2)["state"] == "REQUEUED", said=run.story)
        eventually(lambda: "PENDING" in run.sandbox.queue()[0], said=run.story)
        assert "held" not in run.shown()
        run.sandbox.fault(nodes[0], "power-on")

    recovery = run.recover(fault)
    run.finish()
    run.sandbox.fault(nodes[1], "power-on")
    assert {run.said(attempt)["job_id"] for attempt in run.attempts} == {job}
    same_training(run, control, row, recovery)


@pytest.mark.row(31, "a node and an idle spare power off together, and the other spare takes over")
def test_two_nodes_at_once(user, control, row) -> None:
    run = submit(user, "slurm.spares=2")
    run.reach(25)
    job, node = run.jobs["train"], run.hosts()[1]
    idle = ({1, 2, 3, 4} - {*run.hosts()}).pop()

    def fault() -> None:
        for each in (idle, node):
            run.sandbox.fault(each, "power-off")

    recovery = run.recover(fault)
    assert not {node, idle} & {*run.hosts(recovery.attempt)}
    run.finish()
    for each in (idle, node):
        run.sandbox.fault(each, "power-on")
    assert {run.said(attempt)["job_id"] for attempt in run.attempts} == {job}
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.row(32, "two of three nodes power off together, and the run continues on the first")
def test_one_node_left(user, control, row) -> None:
    run = submit(user, "slurm.min_nodes=1", nodes=3)
    run.reach(25)
    job, nodes = run.jobs["train"], run.hosts()[1:]
    recovery = run.recover(lambda: [run.sandbox.fault(each, "power-off") for each in nodes])
    assert len(run.hosts(recovery.attempt)) == 1
    run.finish()
    for each in nodes:
        run.sandbox.fault(each, "power-on")
    assert {run.said(attempt)["job_id"] for attempt in run.attempts} == {job}
    same_training(run, control, row, recovery)


@pytest.mark.row(36, "the first node's link is down for 30 s, with a spare")
def test_first_link_down(user, control, row) -> None:
    """Another node goes on, or the queue does; the first node ends neither."""
    run = submit(user, "slurm.spares=1", "train.pause_s=0.3")
    run.reach(25)
    node = run.hosts()[0]

    def fault() -> None:
        run.sandbox.fault(node, "link-down")
        threading.Timer(30, run.sandbox.fault, (node, "link-up")).start()

    recovery = run.recover(fault)
    run.finish()
    trained = [line["attempt"] for line in run.lines]
    assert trained == sorted(trained), "two attempts at once"
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL, bound_s=180)


@pytest.mark.row(37, "the first node powers off, and then the node that took over")
def test_first_then_second(user, control, row) -> None:
    run = submit(user, "slurm.spares=2", "train.pause_s=0.3")
    run.reach(25)
    off = [run.hosts()[0]]
    run.recover(lambda: run.sandbox.fault(off[0], "power-off"))
    run.reach(max(run.steps(2)) + 30, attempt=2)
    off.append(run.hosts(2)[0])
    recovery = run.recover(lambda: run.sandbox.fault(off[1], "power-off"))
    assert not {*off} & {*run.hosts(recovery.attempt)}
    run.finish()
    for each in off:
        run.sandbox.fault(each, "power-on")
    eventually(lambda: run.attempts == [1, 2, 3, 4], said=run.story)
    run.until("COMPLETED")
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.row(38, "a node is drained, a worker dies, and the spare takes the node's place")
def test_drained(user, control, row) -> None:
    run = submit(user, "slurm.spares=1")
    run.reach(25)
    node = run.hosts()[1]
    name = f"NodeName={run.sandbox.node_name(node)}"
    assert not run.sandbox.slurm("scontrol", "update", name, "State=DRAIN", "Reason=bad").code
    recovery = run.recover(lambda: run.kill(1))
    assert node not in run.hosts(recovery.attempt)
    run.finish()
    assert not run.sandbox.slurm("scontrol", "update", name, "State=RESUME").code
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.row(33, "SIGKILL of a worker while slurmctld is down for 20 s")
def test_controller_away_in_a_restart(user, control, row) -> None:
    run = submit(user)
    run.reach(25)
    job = run.jobs["train"]

    def fault() -> None:
        run.sandbox.fault("ctld", "kill")
        run.kill(1)
        time.sleep(20)
        run.sandbox.fault("ctld", "start")

    recovery = run.recover(fault)
    run.finish()
    assert {run.said(attempt)["job_id"] for attempt in run.attempts} == {job}
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.row(34, "all processes on a node are frozen, with standby workers enabled")
def test_frozen_node(user, control, row) -> None:
    run = submit(user, "train.pause_s=0.7")
    run.reach(25)
    eventually(lambda: run.workers() == 4, said=run.story)
    node = run.hosts()[1]
    recovery = run.recover(lambda: run.sandbox.fault(node, "freeze"))
    assert node not in run.hosts(recovery.attempt)
    run.finish()
    run.sandbox.fault(node, "thaw")
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL, bound_s=180)
