"""cluster detect --ask-nodes: what a node says of itself, read by a shell in a stand-in's job.

The files are made after public sources; no node of AWS was asked:

- product_name is the instance type on Nitro: EC2's User Guide, "Identify EC2 instances".
- veth_def_agent and /opt/sagemaker_cluster on HyperPod: aws-samples/awsome-distributed-training at
  7217859f, micro-benchmarks/nccl-tests/slurm/nccl-tests-ami.sbatch and 3.test_cases.
- /proc/driver/nvidia/gpus: NVIDIA's driver README, "The /proc Interface".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.slurm.test_aws import P5, TRN1, hyperpod, write
from tests.slurm.test_detect import cluster
from trnslurm.slurm import ask

MakeNode = Callable[..., None]
H200 = "NVIDIA H200"


def node_files(
    root: Path,
    product: str,
    *,
    vendor: str = "Amazon EC2",
    efa: int = 0,
    mlx: int = 0,
    gpus: int = 0,
    neuron: int = 0,
    hyperpod: bool = False,
) -> None:
    """Make the files of a node below a directory."""
    dmi = root / "sys/class/dmi/id"
    dmi.mkdir(parents=True)
    (dmi / "sys_vendor").write_text(f"{vendor}\n")
    (dmi / "product_name").write_text(f"{product}\n")
    for driver, number in (("efa", efa), ("mlx5_core", mlx)):
        for n in range(number):
            device = root / f"sys/class/infiniband/{driver}_{n}/device"
            device.mkdir(parents=True)
            (device / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
    for name in ("lo", "ens5", *(["veth_def_agent"] if hyperpod else [])):
        (root / "sys/class/net" / name).mkdir(parents=True)
    (root / "sys/class/net/bonding_masters").touch()
    (root / "dev").mkdir()
    for n in range(neuron):
        (root / f"dev/neuron{n}").touch()
    for n in range(gpus):
        facts = root / f"proc/driver/nvidia/gpus/0000:{n:02}:00.0/information"
        facts.parent.mkdir(parents=True)
        facts.write_text(f"Model: \t\t {H200}\nIRQ:   \t\t 16\n")
    if hyperpod:
        (root / "opt/sagemaker_cluster").mkdir(parents=True)


@pytest.fixture
def a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeNode:
    def make(product: str, **facts: object) -> None:
        root = tmp_path / "a node's root"
        node_files(root, product, **facts)
        monkeypatch.setattr(ask, "ROOT", str(root))

    return make


def profile(cli, home: Path) -> tuple[dict[str, object], str, str]:
    text, said = write(cli, home, "--ask-nodes")
    return yaml.safe_load(text), text, said


def test_hyperpod_with_gpus(site, fake_slurm, cli, home: Path, a_node: MakeNode) -> None:
    """Slurm and the size leave p5e and p5en; the node is a p5en."""
    cluster(fake_slurm, "", *hyperpod(f"{P5} Gres=gpu:h200:8", None))
    a_node("p5en.48xlarge", efa=16, gpus=8, hyperpod=True)
    own, text, said = profile(cli, home)
    assert own["instance_type"] == "p5en.48xlarge" and "instance_types" not in own
    assert "?" not in text.partition("slurm:")[0]
    assert said.splitlines()[0] == "Asking one node of each kind: dev"
    assert ", p5en.48xlarge, 8 GPUs (NVIDIA H200), 16 EFA interfaces, SageMaker HyperPod" in said
    assert "warning" not in said
    (call,) = fake_slurm.calls("srun")
    assert {"--partition=dev", "--nodes=1", "--time=2"} < {*call.arguments}
    assert not any(word.startswith("--nodelist") for word in call.arguments)


def test_hyperpod_with_trainium(site, fake_slurm, cli, home: Path, a_node: MakeNode) -> None:
    cluster(fake_slurm, "", *hyperpod(TRN1, None))
    a_node("trn1.32xlarge", efa=8, neuron=16, hyperpod=True)
    found = json.loads(cli("cluster", "detect", "--ask-nodes", "--json").out)
    (dev,) = found["partitions"]
    assert (dev["instance_type"], dev["accelerators"], dev["doubt"]) == ("trn1.32xlarge", 16, "")
    told = dev["told"]
    assert (told["efa"], told["neuron_devices"], told["hyperpod"]) == (8, 16, True)
    assert told["interfaces"] == ["ens5", "lo", "veth_def_agent"]
    profile(cli, home)
    plan = json.loads(cli("plan", "gpt2_zero1", "-c", "lab", "--nodes", "2", "--json").out)
    assert plan["plans"][0]["workers"] == 64


def test_pcs_without_efa(site, fake_slurm, cli, home: Path, a_node: MakeNode) -> None:
    """A launch template without EFA interfaces: the profile says so, and so does stderr."""
    cluster(fake_slurm, "", f"gpu-*2 {P5} Gres=gpu:8", "gpu Nodes=gpu-")
    a_node("p5.48xlarge", gpus=8)
    own, text, said = profile(cli, home)
    assert own["instance_type"] == "p5.48xlarge"
    assert own["instance_types"] == {"p5.48xlarge": {"efa": 0}}
    assert "has 0 EFA interfaces, but a p5.48xlarge has 32" in said and "has 32." in text


def test_type_that_the_catalog_lacks(site, fake_slurm, cli, home: Path, a_node: MakeNode) -> None:
    """Its GPUs are no GRES."""
    cluster(fake_slurm, "", "gpu-*2 CPUTot=192", "gpu Nodes=gpu-")
    a_node("p9.48xlarge", efa=24, gpus=8)
    own, _, said = profile(cli, home)
    made = own["instance_types"]["gpu"]
    assert (made["device"], made["accelerators"], made["efa"]) == ("cuda", 8, 24)
    assert own["slurm"]["gpus_per_node"] == 0 and "warning" not in said
    site.recipe("steps: 3\nbatch: {global_batch: 64}\nslurm: {time_min: 5}\n")
    script = cli("render", "toy", "--cluster", "lab", "--nodes", "2").out
    assert "--efa=24" in script and "FI_PROVIDER=efa" in script
    assert "--gpus-per-node" not in script


def test_trainium_that_the_catalog_lacks(
    site, fake_slurm, cli, home: Path, a_node: MakeNode
) -> None:
    cluster(fake_slurm, "", "t-*2 CPUTot=192", "t Nodes=t-")
    a_node("trn3.48xlarge", neuron=16)
    _, text, said = profile(cli, home)
    assert "they have 16 Neuron devices, but trn3.48xlarge is not in the catalog" in text
    assert "trn3.48xlarge is not in the catalog" in said and "--ask-nodes" not in said


def test_other_sites(site, fake_slurm, cli, home: Path, a_node: MakeNode) -> None:
    """InfiniBand is not EFA, and a server of this size is no p5."""
    cluster(fake_slurm, "", f"dgx*2 {P5} Gres=gpu:h100:8", "gpu Nodes=dgx")
    a_node("DGXH100", vendor="NVIDIA", mlx=8, gpus=8)
    own, text, said = profile(cli, home)
    assert "efa" not in own["instance_types"]["gpu"] and "?" not in text.partition("slurm:")[0]
    assert ", unknown instance type, 8 GPUs (NVIDIA H200)" in said


def test_each_kind_is_asked_once(site, fake_slurm, cli, a_node: MakeNode) -> None:
    """The same nodes in two partitions, and two kinds in one; idle nodes first."""
    cluster(
        fake_slurm, "",
        f"a*1 {P5} Gres=gpu:8 State=ALLOCATED\na*2 {P5} Gres=gpu:8\nc*3",
        "all Nodes=a,c Default=YES\nbig Nodes=a\noff Nodes=c State=DOWN",
    )  # fmt: skip
    a_node("p5.48xlarge", efa=32, gpus=8)
    found = json.loads(cli("cluster", "detect", "--ask-nodes", "--json").out)
    assert len(fake_slurm.calls("srun")) == 2
    lists = {w for c in fake_slurm.calls("srun") for w in c.arguments if "nodelist" in w}
    assert len(lists) == 2
    told = {n["label"]: n["told"] is not None for n in found["partitions"]}
    assert told == {"all/8-gpus": True, "all/64-cpus": True, "big": True, "off": True}
    fake_slurm.forget_calls()
    assert cli("cluster", "detect", "--ask-nodes", "--partition", "big").code == 0
    assert len(fake_slurm.calls("srun")) == 1


def test_refusals(site, fake_slurm, cli, home: Path, tmp_path: Path) -> None:
    cluster(fake_slurm, "", *hyperpod(TRN1, None))
    done = cli("cluster", "detect", "--ask-nodes", "--dump", tmp_path / "x")
    assert done.error == "--ask-nodes starts a job on this cluster: omit --dump"
    fake_slurm.refuse("srun", "srun: error: Unable to allocate resources: Access denied")
    done = cli("cluster", "detect", "--write", "--ask-nodes")
    refused = "dev: no answer from a node: srun: Unable to allocate resources: Access denied"
    assert done.code == 1 and done.err.endswith(f"error: {refused}\n")
    assert not any(f for f in home.rglob("*") if f.is_file())


def test_one_kind_answers(site, fake_slurm, cli, a_node: MakeNode) -> None:
    cluster(
        fake_slurm, "", f"a*2 {P5} Gres=gpu:8\nc*3\nd*1 CPUTot=8 State=DOWN",
        "gpu Nodes=a Default=YES\ncpu Nodes=c\ndown Nodes=d",
    )  # fmt: skip
    a_node("p5.48xlarge", efa=32, gpus=8)
    fake_slurm.refuse("srun-2", "srun: error: Invalid account")
    done = cli("cluster", "detect", "--ask-nodes")
    assert done.code == 0  # both were started at once: either was the second
    assert done.err.count(", p5.48xlarge, 8 GPUs") == 1
    assert re.search("warning: (cpu|gpu): no answer from a node: srun: Invalid account", done.err)
    words = ("--ask-nodes", "--partition", "down")
    assert "none of these nodes is up" in cli("cluster", "detect", *words).error


def test_nodes_that_do_not_come(site, fake_slurm, cli) -> None:
    cluster(fake_slurm, "", *hyperpod(TRN1, None))
    fake_slurm.hang("srun")
    done = cli("cluster", "detect", "--ask-nodes", "--timeout", "1")
    assert done.code == 1 and "dev: no node started the job within 1 s" in done.err
