"""submit --in: which jobs of Slurm it refuses, before anything is made."""

from __future__ import annotations

import os

import pytest

JOB = {
    "JobId": "7", "UserId": f"me({os.getuid()})", "JobState": "RUNNING", "Partition": "compute",
    "NodeList": "n[1-2]", "NumCPUs": "256", "EndTime": "2026-11-26T18:00:00",
}  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "word", "said"),
    [
        ({}, "x", "--in 'x': expected the id of a Slurm job: squeue --me lists yours"),
        ({"UserId": "bob(4242)"}, "7", "--in 7: job 7 belongs to bob"),
        ({"JobState": "PENDING"}, "7", "--in 7: job 7 is PENDING: it must be running"),
        (
            {"NumCPUs": "2"},
            "7",
            "job 7 has 1 of each node's CPUs, but precompile needs 128: pass --set "
            "slurm.cpus_per_task=1, or hold whole nodes: "
            "salloc --partition=compute --nodes=2 --exclusive",
        ),
        (
            {"Partition": "gpus"},
            "7",
            "--in 7: job 7 is in partition gpus, whose nodes have cuda, but pc is for neuron: hold "
            "a job on such nodes, or choose another --cluster",
        ),
    ],
)
def test_a_job_that_does_not_fit(site, fake_slurm, cli, differs, word, said) -> None:
    fields = JOB | differs
    fake_slurm.answer("show-job", " ".join(f"{k}={v}" for k, v in fields.items()))
    fake_slurm.answer("show-hostnames", "n1", "n2")
    fake_slurm.answer("show-partition", f"PartitionName={fields['Partition']}")
    fake_slurm.answer("show-node", "NodeName=n1 Partitions=gpus CPUTot=96 Gres=gpu:a100:8")
    done = cli("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2", "--in", word)
    assert (done.code, done.err.splitlines()[-1]) == (1, f"error: {said}")
    assert {c.command for c in fake_slurm.calls()} <= {"scontrol", "squeue"}
    assert not site.run_root.exists()


def test_a_time_limit_is_not_the_runs(site, fake_slurm, cli, tmp_path) -> None:
    fake_slurm.answer("show-job", " ".join(f"{k}={v}" for k, v in JOB.items()))
    fake_slurm.answer("show-hostnames", "n1", "n2")
    fake_slurm.answer("show-partition", f"PartitionName={JOB['Partition']}")
    inside = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2", "--in", "7", "--dry-run")
    said = "warning: --time 30 does not limit the run in job 7, which ends with that job. "
    assert said in cli(*inside, "--time", "30").err
    assert "--time" not in cli(*inside).err
    (tmp_path / "train.py").touch()  # whose time nothing is known of
    done = cli("submit", str(tmp_path / "train.py"), *inside[2:], "--set", "devices=[neuron]")
    assert (done.code, "time" in done.err) == (0, False), done.err


def test_an_unknown_job_and_a_job_around(site, fake_slurm, cli, monkeypatch) -> None:
    submit = ("submit", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")
    unknown = "error: --in 7: no such job in Slurm: squeue --me lists yours\n"
    assert cli(*submit, "--in", "7").err.endswith(unknown)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    done = cli(*submit)  # nothing changes for those who submit from within a job
    assert "This shell is inside job 9. To run there, pass --in 9\n" in done.err
    assert [c.command for c in fake_slurm.calls()].count("sbatch") == 2
