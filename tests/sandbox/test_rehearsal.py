"""A sandbox like a cluster that `cluster detect --dump` has described: the same in all it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trnslurm.sandbox.rehearsal import Rehearsal
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.snapshot import Snapshot

from ..processes import Done
from .jobs import JobSandbox, started_sandbox

pytestmark = pytest.mark.rest

# Two shapes of nodes, GPUs by type and as slices, one node drained, cores and memory for the
# system, defaults and limits of memory, and a partition of one group.
CONFIG = {
    "AccountingStorageEnforce": "associations,limits,qos",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "ClusterName": "lab",
    "DefMemPerNode": "UNLIMITED",
    "EnforcePartLimits": "ALL",
    "KillWait": "20 sec",
    "MaxArraySize": "101",
    "PreemptMode": "REQUEUE",
    "PreemptType": "preempt/partition_prio",
    "SLURM_VERSION": "23.11.10",
    "SchedulerParameters": "(null)",
    "SelectType": "select/cons_res",
    "SelectTypeParameters": "CR_CORE_MEMORY",
}
NODE = {
    "ActiveFeatures": "rack1", "AvailableFeatures": "rack1", "Boards": "1", "CPUEfctv": "64",
    "CPUTot": "64", "CoresPerSocket": "32", "Gres": "(null)", "Partitions": "cpu,all",
    "RealMemory": "256000", "Sockets": "2", "State": "IDLE", "ThreadsPerCore": "1",
    "TmpDisk": "0", "Weight": "10",
}  # fmt: skip
GPU_NODE = NODE | {
    "AvailableFeatures": "rack2,a100", "ActiveFeatures": "rack2,a100", "CPUEfctv": "124",
    "CPUTot": "128", "CoreSpecCount": "2", "CPUSpecList": "0-3", "MemSpecLimit": "8000",
    "ThreadsPerCore": "2", "Gres": "gpu:a100:4(S:0-1)", "Partitions": "gpu,all",
    "RealMemory": "512000",
}  # fmt: skip
MIG_NODE = GPU_NODE | {"Gres": "gpu:1g.10gb:7", "AvailableFeatures": "mig", "ActiveFeatures": "mig"}
NODES = [
    *(NODE | {"NodeName": f"cn{n:03}"} for n in range(1, 21)),
    *(GPU_NODE | {"NodeName": f"gn-{n}"} for n in (1, 2)),
    GPU_NODE | {"NodeName": "gn-3", "State": "IDLE+DRAIN"},
    MIG_NODE | {"NodeName": "gn-4"},
]
PARTITIONS = [
    {"PartitionName": "cpu", "Default": "YES", "MaxTime": "2-00:00:00", "DefaultTime": "01:00:00",
     "AllowGroups": "ALL", "AllowAccounts": "ALL", "AllowQos": "ALL", "MaxNodes": "UNLIMITED",
     "DefMemPerCPU": "2000", "OverSubscribe": "NO", "State": "UP", "QoS": "N/A"},
    {"PartitionName": "gpu", "Default": "NO", "MaxTime": "12:00:00", "DefaultTime": "NONE",
     "AllowGroups": "vision", "AllowAccounts": "vision,nlp", "AllowQos": "ALL", "MaxNodes": "2",
     "DefMemPerNode": "8192", "MaxCPUsPerNode": "100", "OverSubscribe": "NO", "State": "UP",
     "QoS": "gpus", "PriorityTier": "2", "PreemptMode": "OFF"},
    {"PartitionName": "all", "Default": "NO", "MaxTime": "UNLIMITED", "State": "DOWN",
     "AllowGroups": "ALL", "AllowAccounts": "ALL", "AllowQos": "ALL", "MaxNodes": "UNLIMITED"},
]  # fmt: skip
ASSOCIATIONS = [
    ["staff", "lab", "staff", "", "normal", "", "", "", ""],
    ["staff", "lab", "nlp", "gpu", "normal,long", "long", "", "node=2", ""],
]
QOS = [
    ["normal", "", "", "", ""],
    ["long", "gres/gpu=8", "", "cpu=400", "1-00:00:00"],
    ["gpus", "", "", "", "10:00:00"],
]
DUMP: dict[str, Any] = {
    "format": 1, "config": CONFIG, "partitions": PARTITIONS, "nodes": NODES,
    "associations": ASSOCIATIONS, "qos": QOS, "groups": ["vision"],
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rehearsal") / "lab.json"
    file.write_text(json.dumps(DUMP))
    return file


@pytest.fixture(scope="module")
def sandbox(path_without_slurm: str, file: Path) -> Iterator[JobSandbox]:
    with started_sandbox(path_without_slurm, (), "--like", str(file), "--nodes", "3") as sandbox:
        yield sandbox


def show(sandbox: JobSandbox, what: str, *names: str) -> list[dict[str, str]]:
    return Slurm(str(sandbox.path / "bin")).show(what, *names)


def test_the_same_nodes_and_partitions(sandbox) -> None:
    """Three of each kind; what is not set there is not set here."""
    nodes = {node["NodeName"]: node for node in show(sandbox, "node")}
    assert [*nodes] == ["cn001", "cn002", "cn003", "gn-1", "gn-2", "gn-3", "gn-4"]
    assert nodes["gn-3"]["State"] == "IDLE+DRAIN"
    for there in NODES:
        if there["NodeName"] in nodes:
            here = nodes[there["NodeName"]]
            same = {*NODE, "CPUEfctv", "CoreSpecCount"} - {"Gres", "State", "CPUSpecList"}
            assert {k: here.get(k) for k in same} == {k: there.get(k) for k in same}
            assert here["Gres"].partition("(")[0] == there["Gres"].partition("(")[0]
    partitions = {p["PartitionName"]: p for p in show(sandbox, "partition")}
    assert [*partitions] == ["cpu", "gpu", "all"]
    for there in PARTITIONS:
        here = partitions[there["PartitionName"]]
        # The user is in the group of that name there.
        assert {k: here[k] for k in there} == there | {"AllowGroups": "ALL"}
    assert partitions["gpu"]["Nodes"] == "gn-[1-4]"


def test_detect_says_the_same_of_it(sandbox, file, cli, home, tmp_path) -> None:
    """And of a dump of it; of the whole cluster with all its nodes."""
    bin_dir, again = sandbox.path / "bin", tmp_path / "again.json"
    assert cli("cluster", "detect", "--bin-dir", bin_dir, "--dump", again).code == 0
    words = ("--write", "--partition", "gpu/a100:4", "--name")
    for name, source in {"here": ("--bin-dir", bin_dir), "again": ("--from", again)}.items():
        assert cli("cluster", "detect", *source, *words, name).code == 0
    there = cli("cluster", "detect", "--from", file, *words, "there")
    assert there.code == 0, there.err
    found = {
        name: yaml.safe_load((home / f".config/trnslurm/cluster-config/{name}.yaml").read_text())
        for name in ("here", "again", "there")
    }
    for tree in found.values():
        tree.pop("description")
        tree.pop("python")  # a file does not say
        tree["slurm"].pop("bin_dir")
    assert found["here"] == found["again"] == found["there"]
    slurm = found["there"]["slurm"]
    assert (slurm["account"], slurm["gpu_type"], slurm["max_nodes"]) == ("nlp", "a100", 2)
    assert slurm["cpus_per_task"] == 100
    assert cli("cluster", "detect", "--dump", again, "--bin-dir", bin_dir).error.endswith(
        "the file already exists: remove it, or choose another"
    )
    other = json.loads(cli("cluster", "detect", "--from", file, "--json").out)
    assert [p["total"] for p in other["partitions"]] == [20, 3, 1, 20, 3, 1]


def test_a_job_gets_what_the_cluster_would_give(sandbox) -> None:
    """Accounts, QOS and limits decide as there."""

    def tried(*words: str) -> Done:
        return sandbox.slurm("sbatch", "--test-only", *words, "--wrap=true")

    assert "on nodes gn-" in tried("-p", "gpu", "-A", "nlp", "--gres=gpu:a100:4").err
    assert "on nodes gn-4" in tried("-p", "gpu", "-A", "nlp", "--gres=gpu:1g.10gb:1").err
    assert "Invalid account" in tried("-p", "gpu", "-A", "vision").err
    assert "account" in tried("-p", "gpu").err  # the default one, which the partition refuses
    assert "Node count" in tried("-p", "gpu", "-A", "nlp", "-N", "3").err
    job = sandbox.slurm("sbatch", "--parsable", "-p", "cpu", "-n", "3", "--wrap=sleep 600").ok
    (fields,) = show(sandbox, "job", job.strip())
    assert fields["MinMemoryCPU"] == "2000M"
    sandbox.slurm("scancel", job.strip())


@pytest.mark.parametrize(
    ("select", "parameters"), [("linear", ""), ("cons_tres", "CR_CORE_MEMORY")]
)
def test_defaults_per_gpu_and_whole_nodes(
    path_without_slurm, tmp_path, select: str, parameters: str
) -> None:
    """scontrol shows JobDefaults, which is no key of slurm.conf; select/linear takes no CR_CPU."""
    config = {key: CONFIG[key] for key in ("ClusterName", "SLURM_VERSION")}
    config |= {"SelectType": f"select/{select}", "SelectTypeParameters": parameters or "NONE"}
    gpus = {"PartitionName": "gpu", "MaxTime": "12:00:00"}
    if select == "cons_tres":
        gpus |= {"JobDefaults": "DefCpuPerGPU=4,DefMemPerGPU=2000"}
    dump = DUMP | {"config": config, "partitions": [gpus], "associations": None, "qos": []}
    dump["nodes"] = [GPU_NODE | {"NodeName": "g1", "Partitions": "gpu"}]
    file = tmp_path / "small.json"
    file.write_text(json.dumps(dump))
    with started_sandbox(path_without_slurm, (), "--like", str(file)) as sandbox:
        (here,) = show(sandbox, "partition")
        assert {key: here[key] for key in gpus} == gpus
        controller = Slurm(str(sandbox.path / "bin")).configuration()
        assert controller["SelectType"] == f"select/{select}"


def test_what_slurm_shows_but_does_not_read_is_left_out() -> None:
    """A database that enforces nothing, and no preemption."""
    shown = {"AccountingStorageEnforce": "none", "PreemptMode": "OFF"}
    shown |= {"PreemptType": "preempt/none"}
    dump = DUMP | {"config": CONFIG | shown}
    assert not {*shown} & {*Rehearsal(Snapshot.parse(dump)).config()}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not written by `trnslurm cluster detect --dump`"),
        ("[]", "not written by"),
        (json.dumps(DUMP | {"format": 2}), "was made by a newer trnslurm (format 2, "),
        (json.dumps(DUMP | {"nodes": [{"NodeName": "a"}]}), "not written by"),
        (
            json.dumps(DUMP | {"nodes": [GPU_NODE | {"NodeName": "a", "CPUTot": "x"}]}),
            "not written by",
        ),
        (json.dumps(DUMP | {"partitions": [{}]}), "not written by"),
        (json.dumps(DUMP | {"qos": [["normal"]]}), "not written by"),
        (json.dumps(DUMP | {"nodes": []}), "contains no nodes"),
        (
            json.dumps(DUMP | {"nodes": [NODE | {"NodeName": "../x"}]}),
            "'../x' is not a valid node name",
        ),
        (json.dumps(DUMP | {"config": {"KillWait": "1\nInclude=/x"}}), "not written by"),
        (
            json.dumps(DUMP | {"partitions": [{"PartitionName": "a Default=YES"}]}),
            "is not a valid word in",
        ),
        (
            json.dumps(DUMP | {"config": {"SchedulerParameters": "a Prolog=/x"}}),
            "is not a valid word in",
        ),
    ],
)
def test_files_of_others_are_read_with_suspicion(cli, tmp_path, monkeypatch, text, says) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(tmp_path / "base"))
    file = tmp_path / "lab.json"
    file.write_text(text)
    done = cli("sandbox", "up", "--like", file, "--nodes", "1")
    assert done.code == 1 and says in done.error, done
    assert not (tmp_path / "base").exists()
    assert cli("sandbox", "up", "--like", tmp_path / "none.json").error.endswith(
        "No such file or directory"
    )
