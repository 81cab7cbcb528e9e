"""Sandboxes with accounting, with claimed GPUs, with other partitions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..processes import processes_with
from ..waiting import eventually
from .cluster import AT_ONCE, Sandbox, sandbox_up

pytestmark = pytest.mark.rest


def accounted(cluster: Sandbox, job: str) -> list[str]:
    """A job's state and exit code according to accounting."""
    words = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", "--jobs", job)
    return cluster.slurm("sacct", *words).ok.split()


def test_accounting(tmp_path: Path) -> None:
    with sandbox_up("--nodes", 1, "--accounting", "--set", AT_ONCE) as cluster:
        state = cluster.state()
        assert state["daemons"] == ["mariadbd", "munged", "slurmctld", "slurmdbd"]
        for file in ("slurmdbd.conf", "init.sql", "munge.key"):
            assert (cluster.path / "etc" / file).stat().st_mode & 0o777 == 0o600, file
        (password,) = [
            line.partition("=")[2]
            for line in (cluster.path / "etc" / "slurmdbd.conf").read_text().splitlines()
            if line.startswith("StoragePass=")
        ]
        assert len(password) == 32
        assert processes_with(password) == []  # on no command line, in no environment

        output = f"--output={tmp_path}/%j"
        first = cluster.slurm("sbatch", "--parsable", output, "--wrap=exit 3").ok.strip()
        eventually(lambda: accounted(cluster, first) == ["FAILED|3:0"])

        assert cluster.fault("dbd", "kill") == "slurmdbd killed"
        assert "slurmdbd" not in cluster.state()["daemons"]
        assert cluster.slurm("sacct").code != 0
        second = cluster.slurm("sbatch", "--parsable", output, "--wrap=true").ok.strip()
        eventually(lambda: not cluster.slurm("squeue", "--noheader", "--states=R,PD,CG").ok)
        assert cluster.fault("dbd", "start") == "slurmdbd started"
        eventually(lambda: accounted(cluster, second) == ["COMPLETED|0:0"])
        assert accounted(cluster, first) == ["FAILED|3:0"]

        assert cluster.trnslurm("down").code == 0
        assert cluster.processes() == []


def test_gpus_are_counted() -> None:
    with sandbox_up("--nodes", 2, "--like", "p4d.24xlarge") as cluster:
        rows = cluster.slurm("sinfo", "--noheader", "--Node", "--format=%N|%T|%G|%c|%f").ok
        assert rows.splitlines() == [
            f"compute-dy-p4d-{n}|idle|gpu:8|96|dynamic,p4d.24xlarge,p4d,efa" for n in (1, 2)
        ]
        seen = cluster.slurm("srun", "--gres=gpu:8", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert seen.ok == "0,1,2,3,4,5,6,7\n"
        assert cluster.slurm("srun", "-N2", "--gres=gpu:3", "true").code == 0
        refused = cluster.slurm("srun", "--gres=gpu:9", "true")
        assert (refused.code, "not available" in refused.err) == (1, True), refused
        assert cluster.slurm("srun", "--gres=gpu:1", "-N3", "true").code == 1


def test_settings_and_partitions_of_ones_own(tmp_path: Path) -> None:
    """As a site would try them: a second partition whose jobs are requeued for the first's."""
    asked = (
        "CPUs=8", "RealMemory=1000", "Feature=mine", "Gres=gpu:t4:2", "KillWait=7",
        "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
        "PartitionName=compute Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF",
        "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE", AT_ONCE,
    )  # fmt: skip
    options = [word for setting in asked for word in ("--set", setting)]
    with sandbox_up("--nodes", 1, *options) as cluster:
        format_ = "--format=%P|%N|%T|%c|%m|%f|%G"
        rows = cluster.slurm("sinfo", "--noheader", format_).ok.splitlines()
        node = "compute-dy-trn1-1|idle|8|1000|mine|gpu:t4:2"
        assert sorted(rows) == [f"compute*|{node}", f"low|{node}"]
        config = cluster.slurm("scontrol", "show", "config").ok
        found = dict(line.split(" = ", 1) for line in config.splitlines() if " = " in line)
        assert {k.strip(): v for k, v in found.items()}["KillWait"] == "7 sec"

        low = ("--partition=low", "--exclusive", "--requeue", f"--output={tmp_path}/%j")
        job = cluster.slurm("sbatch", "--parsable", *low, "--wrap=sleep 600").ok.strip()
        eventually(lambda: job_says(cluster, job, "JobState=RUNNING"))
        assert cluster.slurm("srun", "--exclusive", "hostname").ok == "compute-dy-trn1-1\n"
        assert job_says(cluster, job, "Restarts=1")


def job_says(cluster: Sandbox, job: str, word: str) -> bool:
    return word in cluster.slurm("scontrol", "show", "job", job).ok.split()


def test_more_nodes_than_processors() -> None:
    nodes = min(4 * (os.cpu_count() or 1), 16)
    with sandbox_up("--nodes", nodes) as cluster:
        assert set(cluster.nodes().values()) == {"idle"}
        done = cluster.slurm("srun", f"--nodes={nodes}", "hostname")
        assert len(set(done.ok.split())) == nodes
