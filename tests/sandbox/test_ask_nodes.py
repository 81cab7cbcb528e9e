"""cluster detect --ask-nodes on real Slurm, in a sandbox with the nodes of a HyperPod cluster."""

from __future__ import annotations

import json
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trnslurm.slurm import ask

from ..processes import processes_with
from ..slurm.test_ask_nodes import node_files
from ..waiting import eventually
from .jobs import JobSandbox, started_sandbox

pytestmark = pytest.mark.rest

# As tests/slurm/test_aws.py has them, but with few CPUs.
NODE = {
    "AvailableFeatures": "(null)", "CPUTot": "4", "CPUEfctv": "4", "Sockets": "1",
    "CoresPerSocket": "4", "ThreadsPerCore": "1", "RealMemory": "4000", "Gres": "gpu:8",
    "Partitions": "dev", "State": "IDLE",
}  # fmt: skip
DUMP = {
    "format": 1, "config": {"ClusterName": "hyperpod"}, "associations": None, "qos": [],
    "groups": [],
    "partitions": [{"PartitionName": "dev", "Default": "YES", "MaxTime": "UNLIMITED"}],
    "nodes": [NODE | {"NodeName": f"ip-10-1-4-24{n}"} for n in (4, 5)],
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox(
    path_without_slurm: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JobSandbox]:
    file = tmp_path_factory.mktemp("hyperpod") / "hyperpod.json"
    file.write_text(json.dumps(DUMP))
    with started_sandbox(path_without_slurm, (), "--like", str(file)) as sandbox:
        yield sandbox


def test_a_node_says_what_it_is(
    sandbox: JobSandbox, cli, home: Path, tmp_path: Path, monkeypatch
) -> None:
    """And nothing is left behind."""
    root = tmp_path / "root"
    node_files(root, "p5.48xlarge", efa=32, gpus=8, hyperpod=True)
    monkeypatch.setattr(ask, "ROOT", str(root))
    monkeypatch.chdir(home)
    done = cli("cluster", "detect", "--bin-dir", sandbox.path / "bin", "--ask-nodes", "--json")
    (dev,) = json.loads(done.out)["partitions"]
    assert dev["instance_type"] == "p5.48xlarge" and dev["doubt"] == ""
    assert (dev["told"]["efa"], dev["told"]["gpus"], dev["told"]["hyperpod"]) == (32, 8, True)
    assert dev["told"]["host"] == dev["node"] and dev["told"]["slurm"]
    assert sandbox.queue() == [] and not any(f for f in home.rglob("*") if f.is_file())


def test_a_job_that_runs_too_long_is_cancelled(sandbox: JobSandbox, cli, monkeypatch) -> None:
    monkeypatch.setattr(ask, "_LOOK", "sleep 987654")
    asked = ("--bin-dir", sandbox.path / "bin", "--ask-nodes", "--timeout", "4")
    done = cli("cluster", "detect", *asked)
    assert done.code == 1 and "no node started the job within 4 s" in done.err
    eventually(lambda: sandbox.queue() == [])
    eventually(lambda: not processes_with("sleep\0987654"))


def test_ctrl_c_takes_a_waiting_job_off_the_queue(sandbox: JobSandbox) -> None:
    words = ("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    holder = sandbox.slurm("sbatch", "--parsable", *words).ok.strip()
    eventually(lambda: any(" RUNNING " in line for line in sandbox.queue()))
    argv = [sys.executable, "-m", "trnslurm", "cluster", "detect", "--ask-nodes"]
    with sandbox.running([*argv, "--bin-dir", str(sandbox.path / "bin")]) as process:
        said = ""
        while "queued and waiting" not in said:
            assert select.select([process.stderr], [], [], 120)[0], said
            said += process.stderr.readline()
        eventually(lambda: len(sandbox.queue()) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    (left,) = sandbox.queue()
    assert left.startswith(f"{holder} ")
    sandbox.slurm("scancel", holder)
