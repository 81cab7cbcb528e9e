"""Ports and attempts: runs side by side on a node, and runs that Slurm starts a second time."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ..json_lines import read_lines
from ..processes import run_process
from ..waiting import eventually

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]


def master(facts: dict[int, dict]) -> tuple[str, str]:
    """Where the workers of an attempt meet: the same place for all of them."""
    (found,) = {(f["environment"]["MASTER_ADDR"], f["environment"]["MASTER_PORT"])
                for f in facts.values()}  # fmt: skip
    return found


def on_first_two(user) -> tuple[str, ...]:
    """Options that bind a run to the first two nodes."""
    names = ",".join(user.sandbox.node_name(n) for n in (1, 2))
    return ("--sbatch", f"--nodelist={names}")


def test_two_runs_share_a_node(user) -> None:
    """They meet at different ports, so neither joins or blocks the other. The first crashes, and
    starts again beside the processes of the second.
    """
    more = ("--sbatch", f"--nodelist={user.sandbox.node_name(1)}")
    shared = ("train.wait=true", "slurm.partition=shared", "slurm.exclusive=false")
    crash = ("train.save=[1]", "train.fail_attempts=[1]")
    first, second = user.submit(*shared, *crash, more=more), user.submit(*shared, more=more)
    seen, theirs = first.until_there(1), second.until_there(1)
    assert {seen[0]["host"], theirs[0]["host"]} == {user.sandbox.node_name(1)}
    (address, port), (same_address, other_port) = master(seen), master(theirs)
    assert address == same_address and port != other_port
    before = user.sandbox.processes_of(second)
    first.go(attempt=1)
    again = first.until_there(1, attempt=2)
    assert master(again)[1] != other_port
    state = json.loads((first.path / "state/train-1.json").read_text())["state"]
    assert state == "RESTARTED"
    assert user.sandbox.processes_of(second) == before
    for run in (first, second):
        run.go()
        run.until("COMPLETED")
        eventually(lambda run=run: user.sandbox.processes_of(run) == [], said=run.story)


def test_the_partition_that_is_free(user) -> None:
    """Slurm chooses as a job starts, and again when it is requeued."""
    sandbox = user.sandbox
    for name, node in (("few", 1), ("more", 2)):
        place = f"Nodes={sandbox.node_name(node)}"
        sandbox.slurm("scontrol", "create", f"PartitionName={name}", place)
    try:
        hold = ("sbatch", "--parsable", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
        taken = sandbox.slurm(*hold, "--partition=few").ok.strip()
        either = ("slurm.partition=few", "slurm.partitions={more: {max_nodes: 1}}")
        run = user.submit("train.wait=true", *either)
        (facts,) = run.until_there(1).values()
        assert facts["host"] == sandbox.node_name(2)
        sandbox.slurm("scancel", taken)
        sandbox.slurm(*hold, "--partition=more")  # waits for the node
        sandbox.slurm("scontrol", "requeue", run.jobs["train"])
        (facts,) = run.until_there(1, attempt=2).values()
        assert (facts["host"], run.job()["Partition"]) == (sandbox.node_name(1), "few")
        run.go()
        run.until("COMPLETED")
    finally:
        sandbox.clean()
        for name in ("few", "more"):
            sandbox.slurm("scontrol", "delete", f"PartitionName={name}")


@pytest.mark.first
def test_requeued_beside_processes_of_the_first_attempt(user) -> None:
    """Slurm has lost them with its daemons of that node, and starts the job on it once more."""
    sandbox = user.sandbox
    run = user.submit("train.wait=true", nodes=2, more=on_first_two(user))
    first = run.until_there(2)
    (address, port), left = master(first), str(first[0]["pid"])
    sandbox.fault("1", "slurmd-kill")
    sandbox.fault("proc", "1", "^slurmstepd", "KILL")
    sandbox.slurm("scontrol", "requeue", run.jobs["train"])
    sandbox.fault("1", "slurmd-start")

    second = run.until_there(2, attempt=2)
    assert master(second)[0] == address and master(second)[1] != port
    assert not sandbox.on_node(1, "kill", "-KILL", left).code  # what the first has left behind
    run.go()
    run.until("COMPLETED")
    assert run.phase("train")["attempt"] == 2
    for attempt, where in ((1, port), (2, master(second)[1])):
        log = run.path / f"logs/train-{attempt}-node1.log"
        assert f"train: node 1 of 2 on {sandbox.node_name(2)}, master {address}:{where}" in (
            log.read_text()
        )


def test_an_upgrade_of_the_shared_environment_reaches_no_run(user) -> None:
    """What was submitted has its own copy of the code, also in the attempts that follow."""
    shared, python = user.home / "shared", user.home / "python"
    for name in ("trnslurm", "templates", "jobs", "cluster-config"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, shared / name, ignore=ignored)
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{shared}"\nexec \'{sys.executable}\' "$@"\n'
    )
    python.chmod(0o755)
    user.environ["PYTHONPATH"] = str(shared)
    run = user.submit("train.wait=true", f"python={python}", nodes=2, more=on_first_two(user))
    del user.environ["PYTHONPATH"]
    run.until_there(2)
    (shared / "trnslurm/__init__.py").write_text("raise SystemExit('imported after the upgrade')\n")
    probe = run_process([python, "-c", "import trnslurm"], env={"PYTHONPATH": ""}, cwd=user.home)
    assert "imported after the upgrade" in probe.err
    user.sandbox.slurm("scontrol", "requeue", run.jobs["train"])
    run.until_there(2, attempt=2)
    run.go()
    run.until("COMPLETED")
    assert "after the upgrade" not in run.story()


def test_a_node_reboots(user) -> None:
    """Slurm starts the job again once the node is back in service, and people are told."""
    sandbox = user.sandbox
    told = ("notify.command=cat >> told", "notify.events=[start, requeue, end]")
    run = user.submit("train.wait=true", *told, nodes=2, more=on_first_two(user))
    run.until_there(2)
    sandbox.fault("2", "reboot")
    run.until("REQUEUED")
    why = "the nodes it needs are down, drained or reserved"
    failed = f"requeued by Slurm because {sandbox.node_name(2)} failed"
    eventually(lambda: run.status()["reason"] == f"{failed}; {why}")
    assert f"REQUEUED ({failed})" in run.logs("--batch")

    sandbox.slurm("scontrol", "update", f"NodeName={sandbox.node_name(2)}", "State=RESUME")
    assert run.until_there(2, attempt=2)[1]["host"] == sandbox.node_name(2)
    assert run.job()["Restarts"] == "1"
    run.go()
    run.until("COMPLETED")
    assert run.phase("train")["attempt"] == 2
    eventually(lambda: not sandbox.queue())
    assert [(m["event"], m["attempt"], m["state"]) for m in read_lines(run.path / "told")] == [
        ("start", 1, "RUNNING"), ("requeue", 1, "REQUEUED"), ("start", 2, "RUNNING"),
        ("end", 2, "COMPLETED"),
    ]  # fmt: skip
