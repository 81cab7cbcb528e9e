"""A job with nodes of two partitions, as Slurm's commands show it: a heterogeneous job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status

WORDS = (
    "./train.py", "--cluster", "pc", "--nodes", "1", "--time", "60", "--set", "device=cuda",
    "--set", "instance_type=p4d.24xlarge",
    "--set", "roles.reward={partition: cpu, command: [python, train.py]}",
)  # fmt: skip
PARTITIONS = ("PartitionName=compute Default=YES State=UP", "PartitionName={other} State=UP")
NODE = "NodeName={name} CPUTot=128 RealMemory=900000 State={state} Partitions={partition} "


@pytest.fixture
def project(site, fake_slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with a trainer, in which the user stands, and a cluster with two partitions."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").touch()
    monkeypatch.chdir(tmp_path / "project")
    partitions(fake_slurm, "cpu")


def partitions(fake_slurm, other: str) -> None:
    fake_slurm.answer("show-partition", *(line.format(other=other) for line in PARTITIONS))


def nodes(fake_slurm, state: str) -> None:
    """A node of each partition; the state is that of the roles' node."""
    own = NODE.format(name="p4d-1", state="IDLE", partition="compute") + "Gres=gpu:8"
    fake_slurm.answer("show-node", own, NODE.format(name="c-1", state=state, partition="cpu"))


def submitted(site, cli) -> RunDir:
    done = cli("submit", *WORDS, "--json")
    assert done.code == 0, done.err
    (run,) = json.loads(done.out) if done.out.startswith("[") else [json.loads(done.out)]
    return RunDir(Path(run["directory"]))


def test_an_unknown_partition_is_refused(site, fake_slurm, project, cli) -> None:
    partitions(fake_slurm, "other")
    done = cli("submit", *WORDS)
    assert done.err.rstrip().endswith(
        "roles.reward.partition is cpu: the partitions of the cluster are compute, other"
    )
    assert not fake_slurm.calls("sbatch") and not site.run_root.exists()


def test_nodes_that_are_down_are_not_lacking(site, fake_slurm, project, cli) -> None:
    """sbatch --test-only refuses a job that some of its nodes are down for."""
    nodes(fake_slurm, "DOWN")
    fake_slurm.refuse("test-only", "sbatch: error: Requested node configuration is not available")
    done = cli("submit", *WORDS)
    assert done.code == 0, done.err
    assert "only 0 of the 1 nodes that fit the job are up, but it needs 1" in done.err


def test_in_a_job_that_the_user_holds(site, fake_slurm, project, cli) -> None:
    done = cli("submit", *WORDS, "--in", "7")
    assert done.error == (
        "--in 7: the run uses the nodes of that job, but role reward needs nodes in "
        "partition cpu: pass --set roles.reward.partition=null"
    )


def test_the_runs_of_a_sweep_are_jobs_of_their_own(site, fake_slurm, project, cli) -> None:
    """Slurm has no arrays of heterogeneous jobs."""
    fake_slurm.answer("show-config", "MaxArraySize            = 1001")
    done = cli("submit", *WORDS, "--sweep", "seed=1,2")
    assert done.code == 0, done.err
    assert [call.script.count(b"--array=") for call in fake_slurm.calls("sbatch")] == [0, 0]
    assert [call.script.count(b"\n#SBATCH hetjob\n") for call in fake_slurm.calls("sbatch")] == [
        1, 1,
    ]  # fmt: skip


def test_a_component_is_no_job_but_may_have_the_reason(site, fake_slurm, project, cli) -> None:
    run = submitted(site, cli)
    first, second = "1001+0 1001|PENDING|{}|N/A||{}", "1001+1 1002|PENDING|PartitionDown|N/A||{}"
    down, held = "its partition is down", "held by its owner: `scontrol release` frees it"
    for reason, said in (("None", down), ("Resources", down), ("JobHeldUser", held)):
        fake_slurm.queue(second.format(run.path), first.format(reason, run.path))
        assert run_status(run).reason.endswith(said)
    fake_slurm.queue(f"1001+1 1002|COMPLETING|None|N/A|c|{run.path}",
                     f"1001+0 1001|RUNNING|None|N/A|n|{run.path}")  # fmt: skip
    assert run_status(run).state == "RUNNING"
    cli("cancel", run.name)
    assert [call.arguments for call in fake_slurm.calls("scancel")] == [["1001"]]


def test_doctor_looks_at_the_nodes_of_all_partitions(site, fake_slurm, project, cli) -> None:
    nodes(fake_slurm, "DOWN")
    run = submitted(site, cli)
    fake_slurm.queue(f"1001+0 1001|PENDING|Resources|N/A||{run.path}")
    job = "JobId={} HetJobOffset={} JobState=PENDING StartTime=Unknown Partition={} NumNodes=1-1"
    fake_slurm.answer("show-job", job.format(1001, 0, "compute"), job.format(1002, 1, "cpu"))
    said = cli("doctor", "last").out
    assert "partition compute: 1 idle; it needs 1 node\nc-1: down: no reason given" in said
    assert (
        "problem: the job's roles need 1 of the 1 nodes in partition cpu, but only 0 can run them"
    ) in said
