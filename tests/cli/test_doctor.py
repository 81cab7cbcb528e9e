"""doctor: why a run is not running, as a controller tells it; and the preflight on this machine."""

from __future__ import annotations

import getpass
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from trnslurm.cli import checkup
from trnslurm.devices import NEURON
from trnslurm.health.found import Found
from trnslurm.health.judge import Expected, Line
from trnslurm.slurm.reasons import job_reason, node_reason, node_state

from ..toy_site import write_attempt

JOB = "JobId=1001 JobName=gpt-precompile JobState=PENDING Reason=Resources Dependency=(null) {more}"
WAITS = "StartTime=2026-01-01T05:00:00 EndTime=Unknown Partition=compute NumNodes=2-2"
PARTITION = "PartitionName=compute Default=YES Nodes=compute-dy-cr-[1-4] State={state} TotalNodes=4"
NODE = "NodeName=compute-dy-cr-{n} CPUTot=128 State={state} Partitions=compute  BootTime=None{more}"
CAPACITY = (
    " Comment=(null) Reason=(Code:InsufficientInstanceCapacity)Failure when resuming nodes "
    "[root@2026-01-01T00:00:00]"
)


@pytest.fixture
def waiting(make_run, fake_slurm):
    """A run that waits for nodes of a ParallelCluster; some of them could not be had."""

    def make(*states: str, partition: str = "UP", reason: str = "Resources"):
        run = make_run()
        run.script("precompile").write_text("#!/bin/bash\n")
        fake_slurm.queue(f"1001|PENDING|{reason}|N/A|", "1002|PENDING|Dependency|N/A|")
        fake_slurm.answer("show-job", JOB.format(more=WAITS))
        fake_slurm.answer("show-partition", PARTITION.format(state=partition))
        lines = [
            NODE.format(n=n, state=state, more=CAPACITY if "DOWN+" in state else "")
            for n, state in enumerate(states, 1)
        ]
        fake_slurm.answer("show-node", *lines)
        fake_slurm.answer("test-only", "sbatch: Job 1003 to start at 2026-01-01T06:00:00")
        return run

    return make


def test_a_run_that_only_has_to_wait(waiting, cli) -> None:
    waiting("IDLE+CLOUD+POWERED_DOWN", "ALLOCATED+CLOUD", "MIXED+CLOUD+POWERING_UP", "IDLE+CLOUD")
    done = cli("doctor", "last")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "20260101-000000-gpt: PENDING (precompile: waiting for free nodes)",
        "waits: precompile, job 1001; start expected by Slurm: 2026-01-01T05:00:00",
        "if submitted now: Job 1003 to start at 2026-01-01T06:00:00",
        "partition compute: 1 off until a job needs it, 1 in use, 1 booting, 1 idle; "
        "it needs 2 nodes",
        "nothing to fix",
    ]


def test_no_capacity_and_nodes_left_out(waiting, fake_slurm, cli, stable) -> None:
    down = "DOWN+CLOUD+POWERED_DOWN"
    run = waiting(down, down, "IDLE+CLOUD", "IDLE+CLOUD")
    later, before = time.time() + 3600, time.time() - 1
    nodes = {
        "compute-dy-cr-3": {"until": later, "why": "failed preflight"},
        "compute-dy-cr-4": {"until": before, "why": "long ago"},
    }
    (run.state / "excluded.json").write_text(json.dumps({"nodes": nodes}))
    done = cli("doctor", "last")
    assert done.code == 1
    assert (
        "compute-dy-cr-1, compute-dy-cr-2: down: AWS has no capacity for its instance type now; "
        "ParallelCluster tries again in 10 minutes (InsufficientInstanceCapacity)"
    ) in done.out
    assert "compute-dy-cr-3: excluded from this run: failed preflight, until 20" in done.out
    assert "compute-dy-cr-4" not in done.out
    assert (
        "the job needs 2 nodes, but only 1 of the 4 nodes in partition compute can run it: "
        f"trnslurm cancel {run.name} && trnslurm resume {run.name} --nodes 1; "
        f"trnslurm cancel {run.name} && trnslurm resume {run.name} uses the excluded nodes again"
    ) in done.out
    reason = "ReqNodeNotAvail,_UnavailableNodes:compute-dy-cr-[1-2]"
    fake_slurm.queue(f"1001|PENDING|{reason}|N/A|", "1002|PENDING|Dependency|N/A|")
    assert "the job needs 2 nodes, but only 1 of the 4 nodes" in cli("status", "last").out
    found = json.loads(cli("doctor", "last", "--json").out)
    stable.json("doctor (of a run)", found, free=["nodes", "left_out"])
    assert (found["ok"], found["nodes"], len(found["sick"])) == (False, {"down": 2, "idle": 2}, 2)


def test_protected_mode_and_a_script_that_is_refused(waiting, fake_slurm, cli) -> None:
    waiting("IDLE+CLOUD", "IDLE+CLOUD", partition="INACTIVE", reason="PartitionInactive")
    fake_slurm.refuse("test-only", "sbatch: error: allocation failure: Required partition inactive")
    done = cli("doctor", "last")
    assert done.code == 1
    assert "problem: partition compute is inactive: on ParallelCluster, its fleet is st" in done.out
    assert "would now reject the job's script: allocation failure: Required partition" in done.out


def test_held(waiting, cli) -> None:
    waiting("IDLE", "IDLE", reason="JobHeldUser")
    done = cli("doctor", "last")
    assert done.code == 1 and "job 1001 is held: scontrol release 1001" in done.out


def test_held_for_good(waiting, cli) -> None:
    """Slurm keeps BadConstraints even with all nodes back; a release changes nothing (22.05)."""
    run = waiting("IDLE", "DOWN", reason="BadConstraints")
    write_attempt(run, "precompile", 1, state="REQUEUED")
    assert "job 1001 is held: trnslurm resume " in cli("doctor", "last").out


def test_what_cannot_be_asked_is_said(waiting, fake_slurm, cli) -> None:
    waiting("IDLE", "IDLE")
    fake_slurm.refuse("scontrol", "slurm_load_jobs error: Unable to contact slurm controller")
    done = cli("doctor", "last")
    assert (done.code, len(done.out.splitlines())) == (1, 3)
    assert "unknown: scontrol: slurm_load_jobs error: Unable to contact" in done.out


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 1), ("RUNNING", 0)])
def test_a_run_that_does_not_wait(make_run, fake_slurm, cli, state: str, code: int) -> None:
    states = {"precompile": [{"state": "COMPLETED"}], "train": [{"state": state}]}
    make_run(states=states)
    fake_slurm.queue("1002|RUNNING|None|N/A|node-[1-2]" if state == "RUNNING" else "")
    done = cli("doctor", "last")
    assert (done.code, fake_slurm.calls("scontrol")) == (code, [])
    assert f"20260101-000000-gpt: {state}" in done.out


def test_the_preflight_on_this_machine(site, cli, stable) -> None:
    changes = {"scheduler": "local", "instance_type": "local", "python": "python3"}
    site.profile("here", device="cpu", workers_per_node=1, **changes)
    done = cli("doctor", "--cluster", "here", "--nodes", "2", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    stable.json("doctor (of a cluster)", found, free=["nodes[].facts", "nodes[].same"])
    assert [node["host"] for node in found["nodes"]] == ["local-0", "local-1"]
    assert found["ok"] and found["nodes"][0]["facts"]["memory"]
    assert list(site.run_root.iterdir()) == []  # nothing is left

    site.profile("here", device="cuda", workers_per_node=1, **changes)
    done = cli("doctor", "--cluster", "here")
    assert (done.code, done.err) == (1, "")
    assert "local-0: nvidia-smi is not on PATH; install the NVIDIA driver" in done.out


def test_no_nodes_in_time(site, fake_slurm, cli) -> None:
    fake_slurm.hang("srun")
    done = cli("doctor", "--cluster", "pc", "--nodes", "2", "--timeout", "3")
    assert (
        done.code == 1
        and done.error == "the check did not get 2 nodes within 3 s; try again, or pass --timeout"
    )
    (call,) = fake_slurm.calls("srun")
    assert {"--nodes=2", "--partition=compute", "--exclusive"} <= set(call.arguments)
    assert list(site.run_root.iterdir()) == []


def test_a_checkup_that_gets_no_nodes_in_time_is_cancelled(site, fake_slurm, cli) -> None:
    done = cli("doctor", "--run", "--cluster", "pc", "--nodes", "2", "--timeout", "0")
    assert (done.code, done.out) == (1, "")
    assert (
        "the job did not get 2 nodes within 0 s: waiting for jobs of higher priority; try again"
        in done.err
    )
    (call,) = fake_slurm.calls("scancel")
    assert call.arguments == ["1001"]

    # What was submitted is a training's scripts, around whose workers goes the checkup.
    run = site.run()
    script, ranks = run.script("train").read_text(), (run.path / "ranks.sh").read_text()
    assert "#SBATCH --time=00:30:00" in script and "#SBATCH --no-requeue" in script
    assert "export FI_PROVIDER=efa" in script and "--wait=0" in script
    assert "trnslurm.node.launcher --workers=32 " in ranks
    assert "trnslurm.node.preflight" not in ranks
    node = run.path / "node.sh"
    assert "--device=neuron --devices=16 --workers=32 --cache-layout=shared" in node.read_text()
    assert subprocess.run(["bash", "-n", str(node)], check=False).returncode == 0


def test_ctrl_c_cancels_a_checkup(site, fake_slurm, cli, monkeypatch) -> None:

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkup, "follow", interrupted)
    done = cli("doctor", "--run", "--cluster", "pc")
    assert done.code == 130 and "CANCELLED" in done.err
    assert [call.arguments for call in fake_slurm.calls("scancel")] == [["1001"]]


def test_the_report_names_nothing(site, make_run, tmp_path, cli) -> None:
    run = make_run(name="20260101-000000-doctor")
    expected = Expected(
        instance="trn1.32xlarge", device=NEURON, nodes=1, workers_per_node=1, efa=0,
        network_gbps=0, compile_cache="/fsx/our cache",
    )  # fmt: skip
    found = Found(nodes={0: {"host": "compute-dy-cr-1"}})
    user = getpass.getuser()
    secret = f"{run.path}/x of {user} on compute-dy-cr-1 in {Path.home()}/y, /fsx/our cache/z at "
    line = Line("links", "problem", f"{secret}10.0.3.17 and fe80::1:2:3:4")
    file = tmp_path / "report.json"
    checkup._write_report(file, {"lines": [asdict(line)]}, run, expected, found)
    (said,) = json.loads(file.read_text())["lines"]
    assert said["measured"] == "RUN/x of USER on node0 in HOME/y, CACHE/z at ADDRESS and ADDRESS"


@pytest.mark.parametrize(
    "words",
    [
        (), ("last", "--cluster", "pc"), ("--nodes", "0"), ("last", "--run"),
        ("--cluster", "pc", "--report", "file"),
    ],
)  # fmt: skip
def test_usage(site, fake_slurm, cli, words: tuple[str, ...]) -> None:
    assert cli("doctor", *words).code == 2


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("IDLE", "idle"),
        ("DOWN*+CLOUD+NOT_RESPONDING", "down"),
        ("IDLE+DRAIN", "drained"),
        ("MIXED+DRAIN", "drained"),
        ("IDLE+CLOUD+POWERING_DOWN", "powering down"),
        ("ALLOCATED#+CLOUD+POWERING_UP", "booting"),
        ("IDLE~+CLOUD+POWERED_DOWN", "off until a job needs it"),
        ("IDLE+RESERVED", "reserved"),
        ("BLOCKED", "blocked"),
    ],
)
def test_node_states(state: str, word: str) -> None:
    assert node_state(state) == word


def test_reasons() -> None:
    assert job_reason("(QOSMaxCpuPerUserLimit)").endswith("is reached (QOSMaxCpuPerUserLimit)")
    assert job_reason("AssocGrpCPUMinutesLimit").startswith("a limit of its account or QOS")
    assert job_reason("QOSMinGRES").endswith("so it never starts (QOSMinGRES)")
    assert "never starts" in job_reason("AssocMaxCpuPerJobLimit")
    assert job_reason("None") == ""
    assert node_reason("(Code:NewWord)x") == "AWS did not start its instance (NewWord)"
    assert node_reason("Not responding") == "Not responding"
    assert node_reason("Action:Replace").endswith("takes 20 to 30 minutes (Action:Replace)")
    near = "HyperPod ignores the reason 'action: reboot': it must be exactly Action:Reboot"
    assert node_reason("action: reboot") == near
