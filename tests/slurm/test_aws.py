"""cluster detect on SageMaker HyperPod and AWS PCS, which do not name a node's instance type.

The nodes are made after public documents; nothing of this was run on AWS:

- HyperPod: `sinfo` in aws-samples/awsome-distributed-training at 7217859f,
  5.sagemaker-hyperpod/README.md and slurm-studio/README.md: hosts as ip-10-1-4-244, a partition
  `dev` of all, and one for each type, such as ml.c5.4xlarge.
- A p5.48xlarge by `slurmd -C`: 2.aws-parallelcluster/tips-and-tricks.md there: 192 CPUs, 2 sockets
  of 48 cores with 2 threads, RealMemory=2047961.
- PCS: free names of queues; nodes are named after their group, such as gpu-1.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.slurm.test_detect import cluster
from trnslurm.slurm import snapshot

P5 = "CPUTot=192 CPUEfctv=192 Sockets=2 CoresPerSocket=48 ThreadsPerCore=2 RealMemory=2047961"
TRN1 = "CPUTot=128 CPUEfctv=128 Sockets=2 CoresPerSocket=32 ThreadsPerCore=2 RealMemory=511990"
B300 = P5.replace("2047961", "4095900")


def hyperpod(nodes: str, kind: str | None) -> tuple[str, str]:
    """Nodes and partitions of a HyperPod cluster, with or without a partition for the type."""
    own = f"{kind} Nodes=ip-10-1-4-24\n" if kind else ""
    return f"ip-10-1-4-24*4 {nodes}", f"dev Nodes=ip-10-1-4-24 Default=YES\n{own}"


KNOWN = {
    "hyperpod-p5": (*hyperpod(f"{P5} Gres=gpu:8", "ml.p5.48xlarge"), "p5.48xlarge"),
    "hyperpod-trn1": (*hyperpod(TRN1, "ml.trn1.32xlarge"), "trn1.32xlarge"),
    # Of partitions that the API makes; they have no dots (API_ClusterSlurmConfigDetails).
    "hyperpod-by-api": (*hyperpod(f"{P5} Gres=gpu:8", "ml-p5en-48xlarge"), "p5en.48xlarge"),
    # Where GPUs are no GRES.
    "hyperpod-no-gres": (*hyperpod(P5, "ml.p5.48xlarge"), "p5.48xlarge"),
    "hyperpod-h100": (*hyperpod(f"{P5} Gres=gpu:h100:8", None), "p5.48xlarge"),
    "hyperpod-b300": (*hyperpod(f"{B300} Gres=gpu:8", None), "p6-b300.48xlarge"),
    "hyperpod-gb200": (
        *hyperpod("CPUTot=144 RealMemory=963379 Gres=gpu:4", "ml.p6e-gb200.36xlarge"),
        "p6e-gb200.36xlarge",
    ),
    "pcs-group": (f"trn2-48xlarge-*2 {P5}", "train Nodes=trn2-48xlarge-", "trn2.48xlarge"),
    # ParallelCluster's 95 % of the memory, and a feature.
    "parallelcluster": (
        f"q-dy-c-*2 {P5.replace('2047961', '1992294')} Gres=gpu:8 "
        "AvailableFeatures=dynamic,p5e.48xlarge,c,efa,gpu", "q Nodes=q-dy-c-", "p5e.48xlarge",
    ),
    # A partition with hosts for other work, too.
    "hyperpod-mixed": (
        f"p*2 {P5} Gres=gpu:8\nc*1 CPUTot=16 RealMemory=32000",
        "ml.p5.48xlarge Nodes=p,c", "p5.48xlarge",
    ),
    # Several types in a compute resource: no feature.
    "parallelcluster-several": (
        f"q-dy-c-*2 {P5.replace('2047961', '1992294')} Gres=gpu:h100:8 "
        "AvailableFeatures=dynamic,c,efa,gpu", "q Nodes=q-dy-c-", "p5.48xlarge",
    ),
}  # fmt: skip


def write(cli, home: Path, *options: str) -> tuple[str, str]:
    """Return the profile that detect writes, and what it says on stderr."""
    done = cli("cluster", "detect", "--write", *options)
    assert done.code == 0, done.err
    return (home / ".config/trnslurm/cluster-config/lab.yaml").read_text(), done.err


@pytest.mark.parametrize("name", KNOWN)
def test_types_that_a_name_or_the_size_says(site, fake_slurm, cli, home: Path, name: str) -> None:
    nodes, partitions, expected = KNOWN[name]
    cluster(fake_slurm, "", nodes, partitions)
    text, warned = write(cli, home)
    assert yaml.safe_load(text)["instance_type"] == expected, text
    assert "instance_type: ?" not in text and "efa: ?" not in text
    assert "no EFA" not in warned and "accelerators" not in warned
    assert f'instance_type: "{expected}"  # from ' in text


HYPERPOD = {
    "ClusterConfig": {"ClusterName": "lab"},
    "InstanceGroups": [
        {"Name": "controller", "InstanceType": "ml.m5.large", "Instances": [
            {"InstanceName": "controller-1", "CustomerIpAddress": "10.1.4.9"}]},
        {"Name": "gone", "InstanceType": "ml.p4d.24xlarge", "Instances": None},
        {"Name": "workers", "InstanceType": "ml.p5en.48xlarge", "Instances": [
            {"InstanceName": f"workers-{n}", "CustomerIpAddress": f"10.1.4.24{n}"}
            for n in range(4)]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["ip-10-1-4-24", "workers-"])
def test_hyperpods_own_file_names_the_type(
    site, fake_slurm, cli, home: Path, tmp_path: Path, monkeypatch, name: str
) -> None:
    """It is stronger than the size and other names; a dump keeps it, without the addresses."""
    cluster(fake_slurm, "", f"{name}*4 {P5} Gres=gpu:8", f"ml.p5.48xlarge Nodes={name}")
    monkeypatch.setattr(snapshot, "HYPERPOD", tmp_path / "resource_config.json")
    for said in ("{", "[]", '{"InstanceGroups": [1]}'):
        snapshot.HYPERPOD.write_text(said)
        assert '"p5.48xlarge"  # from the partition ml.p5' in write(cli, home)[0]
        (home / ".config/trnslurm/cluster-config/lab.yaml").unlink()
    snapshot.HYPERPOD.write_text(json.dumps(HYPERPOD))
    text, warned = write(cli, home)
    said = "from the resource_config.json of HyperPod ml.p5en.48xlarge"
    assert f'instance_type: "p5en.48xlarge"  # {said}\n' in text and warned == ""
    assert cli("cluster", "detect", "--dump", tmp_path / "dump.json").code == 0
    snapshot.HYPERPOD.unlink()
    dumped = json.loads(cli("cluster", "detect", "--json", "--from", tmp_path / "dump.json").out)
    assert dumped["partitions"][0]["instance_type"] == "p5en.48xlarge"


def test_jobs_on_hyperpod_use_efa(site, fake_slurm, cli, home: Path) -> None:
    cluster(fake_slurm, "", *hyperpod(f"{P5} Gres=gpu:8", "ml.p5.48xlarge"))
    write(cli, home)
    site.recipe("steps: 3\nbatch: {global_batch: 64}\nslurm: {time_min: 5}\n")
    script = cli("render", "toy", "--cluster", "lab", "--nodes", "2").out
    assert "FI_PROVIDER=efa" in script and "--efa=32" in script
    assert "NCCL_SOCKET_IFNAME='^lo,docker,veth' " in script


UNKNOWN = {
    "hyperpod-dev": (*hyperpod(f"{P5} Gres=gpu:8", None), "p5.48xlarge or p5e.48xlarge or"),
    "hyperpod-h200": (
        *hyperpod(f"{P5} Gres=gpu:h200:8", None),
        "judging by their size, they may be p5e.48xlarge or p5en.48xlarge; it is unknown whether",
    ),
    "hyperpod-other": (
        *hyperpod("CPUTot=192 Gres=gpu:8", "ml.p9.48xlarge"),
        "p9.48xlarge is not in the catalog; it is unknown whether they have EFA.",
    ),
    "hyperpod-trn1": (
        *hyperpod(TRN1, None),
        "they may be trn1.32xlarge or trn1n.32xlarge; it is unknown whether they have acc",
    ),
    "hyperpod-trn3": (
        *hyperpod("CPUTot=192", "ml.trn3.48xlarge"),
        "trn3.48xlarge is not in the catalog; it is unknown whether they have accelerators.",
    ),
    # A partition's name that the nodes contradict.
    "pcs-wrong-name": (
        f"gpu-*2 {P5} Gres=gpu:8",
        "ml.trn1.32xlarge Nodes=gpu-",
        "p5.48xlarge or p5e.48xlarge or",
    ),
    "pcs": ("gpu-*2 CPUTot=40 Gres=gpu:1", "gpu Nodes=gpu-", "Slurm does not name"),
    # The site does not give GPUs out as a GRES.
    "no-gres": (
        "dgx*4 CPUTot=256",
        "batch Nodes=dgx",
        "a name mentions GPUs, but Slurm has no GRES; it is unknown whether they have GPUs.",
    ),
    # A server of another vendor may have the size of a p5.48xlarge.
    "lab": (f"dgx*2 {P5} Gres=gpu:h100:8", "gpu Nodes=dgx", "they may be p5.48xlarge; it"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_slurm_does_not_say(site, fake_slurm, cli, home: Path, name: str) -> None:
    """In the profile and on stderr, with the command that answers it."""
    nodes, partitions, doubt = UNKNOWN[name]
    cluster(fake_slurm, "", nodes, partitions)
    text, warned = write(cli, home)
    assert doubt in text and "the nodes: trnslurm cluster detect --write --ask-nodes\n" in text
    assert doubt in warned and warned.endswith("trnslurm cluster detect --write --ask-nodes\n")
    assert ("    # efa: ? " in text) == ("have EFA." in text)
    assert "warning: " in cli("cluster", "detect").err
    assert "warning: " in cli("cluster", "detect", "--json").err


@pytest.mark.parametrize(
    ("nodes", "partitions"),
    [
        ("c*8 CPUTot=192 RealMemory=380000", "dev Nodes=c\nml.c5.24xlarge Nodes=c"),
        ("c*8 CPUTot=64", "cpu Nodes=c"),
        ("g*8 Gres=gpu:1g.10gb:7", "gpu Nodes=g"),
        ("g*8 Gres=gpu:4", "gpu Nodes=g MaxNodes=1"),
    ],
)
def test_nothing_to_ask(site, fake_slurm, cli, home: Path, nodes: str, partitions: str) -> None:
    """CPUs, slices of GPUs, and jobs on one node."""
    cluster(fake_slurm, "", nodes, partitions)
    text, warned = write(cli, home)
    assert warned == "" and "instance_type: ?" not in text


def test_hidden_nodes_may_have_gpus(site, fake_slurm, cli) -> None:
    """Without accounting of GPUs, a partition's sums lack them."""
    cluster(fake_slurm, "GresTypes = gpu", "a*1", "a Nodes=a TotalNodes=4 TotalCPUs=64")
    fake_slurm.answer("show-node", "No nodes in the system")
    (found,) = json.loads(cli("cluster", "detect", "--json").out)["partitions"]
    assert found["doubt"].endswith("whether they have GPUs.")
