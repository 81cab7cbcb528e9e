"""cluster detect: what a Slurm says of itself, and the profile that comes of it."""

from __future__ import annotations

import getpass
import json
from pathlib import Path

import pytest
import yaml

from trnslurm.slurm import detect

CONFIG = """\
Configuration data as of 2026-01-01T00:00:00
AccountingStorageHost   = localhost
AccountingStorageType   = {accounting}
ClusterName             = {name}
MinJobAge               = 300 sec
SlurmctldHost[0]        = ip-10-0-0-10(10.0.0.10)

Slurmctld(primary) at ip-10-0-0-10 is UP
"""
# ParallelCluster's cloud nodes as scontrol shows them while they are powered down.
NODE = (
    "NodeName={name} CoresPerSocket=1 CPUAlloc=0 CPUEfctv={cpus} CPUTot={cpus} CPULoad=0.00 "
    "AvailableFeatures={features} ActiveFeatures={features} Gres={gres} NodeAddr={name} "
    "NodeHostName={name} RealMemory={memory} AllocMem=0 FreeMem=N/A Sockets={cpus} Boards=1 "
    "State=IDLE+CLOUD+POWERED_DOWN ThreadsPerCore=1 TmpDisk=0 Weight=1000 Owner=N/A "
    "MCS_label=N/A Partitions={partition} BootTime=None SlurmdStartTime=None "
    "LastBusyTime=Unknown CfgTRES=cpu={cpus},mem={memory}M,billing={cpus} AllocTRES= "
    "CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/a ExtSensorsWatts=0 "
    "ExtSensorsTemp=n/a Comment=(null)"
)
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
    "Default={default} QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 "
    "Hidden=NO MaxNodes=UNLIMITED MaxTime={max_time} MinNodes=0 LLN=NO Nodes={nodes} State=UP "
    "TotalCPUs=256 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null)"
)


def nodes(partition: str, count: int, features: str, cpus: int, **more: str) -> list[str]:
    """Lines of `scontrol show node -o`."""
    fields = {"memory": "498074", "gres": "(null)"} | more
    return [
        NODE.format(name=f"{partition}-dy-cr-{n}", partition=partition, features=features,
                    cpus=cpus, **fields)
        for n in range(1, count + 1)
    ]  # fmt: skip


@pytest.fixture
def parallelcluster(site, fake_slurm):
    """A ParallelCluster with a queue for the login work and one of Trainium nodes."""
    fake_slurm.answer("show-config", CONFIG.format(accounting="(null)", name="parallelcluster"))
    fake_slurm.answer(
        "show-node",
        *nodes("small", 4, "dynamic,c5.large,cr", 2, memory="3891"),
        *nodes("compute", 3, "dynamic,trn1.32xlarge,cr,efa", 128),
    )
    fake_slurm.answer(
        "show-partition",
        PARTITION.format(name="small", default="YES", max_time="UNLIMITED", nodes="small-dy-cr-1"),
        PARTITION.format(
            name="compute", default="NO", max_time="2-12:00:00", nodes="compute-[1-3]"
        ),
        PARTITION.format(name="empty", default="NO", max_time="UNLIMITED", nodes="(null)"),
    )
    return fake_slurm


def test_powered_down_nodes_are_known(parallelcluster, cli) -> None:
    site = json.loads(cli("cluster", "detect", "--json").out)
    assert (site["cluster"], site["accounting"], site["chosen"]) == (
        "parallelcluster", False, "compute",
    )  # fmt: skip
    assert [p["name"] for p in site["partitions"]] == ["small", "compute"]
    assert site["partitions"][1] == {
        "name": "compute", "default": False, "nodes": 3, "cpus": 128, "gpus": 0,
        "memory_mib": 498074, "max_time_min": 3600, "instance_type": "trn1.32xlarge",
    }  # fmt: skip


def test_table(parallelcluster, cli, home: Path) -> None:
    done = cli("cluster", "detect")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "parallelcluster, accounting off"
    assert "small 4 ? 2 0 -" in lines
    assert "compute * 3 trn1.32xlarge 128 0 3600" in lines
    assert not any(f for f in home.rglob("*") if f.is_file())


def test_written_profile_is_the_default_and_can_be_planned_with(
    parallelcluster, cli, home: Path
) -> None:
    done = cli("cluster", "detect", "--write")
    file = home / ".config/trnslurm/cluster-config/parallelcluster.yaml"
    settings = home / ".config/trnslurm/trnslurm.yaml"
    assert done.code == 0
    assert done.out.splitlines()[0] == (
        f"Wrote {file}; parallelcluster is now the default cluster, by {settings}."
    )
    slurm = yaml.safe_load(file.read_text())["slurm"]
    assert slurm == {
        "partition": "compute", "max_nodes": 3, "max_time_min": 3600, "cpus_per_task": 128,
        "data_partition": None, "bin_dir": None,
    }  # fmt: skip
    listed = cli("clusters").out
    assert "parallelcluster *" in listed
    assert listed.endswith(f"* the default, from {settings}\n")
    plan = json.loads(cli("plan", "gpt2_zero1", "--nodes", "2", "--json").out)
    assert (plan["cluster"], plan["plans"][0]["workers"]) == ("parallelcluster", 64)


def test_profile_is_never_overwritten(parallelcluster, cli) -> None:
    assert cli("cluster", "detect", "--write").code == 0
    again = cli("cluster", "detect", "--write")
    assert again.code == 1
    assert "already exists: remove it, or pass --name" in again.error
    assert cli("cluster", "detect", "--write", "--name", "other").code == 0


def test_default_cluster_chosen_before_is_kept(parallelcluster, cli, home: Path) -> None:
    settings = home / ".config/trnslurm/trnslurm.yaml"
    settings.parent.mkdir()
    settings.write_text("cluster: trn1\n")
    done = cli("cluster", "detect", "--write")
    assert done.out.splitlines()[0].startswith("Wrote ")
    assert "default cluster" not in done.out
    assert settings.read_text() == "cluster: trn1\n"


@pytest.fixture
def host(home: Path, monkeypatch, tmp_path: Path):
    """Let this host have these file systems, and export these directories."""

    def have(*mounts: tuple[str, Path], exports: tuple[Path, ...] = ()) -> None:
        lines = [
            f"server {str(p).replace(' ', chr(92) + '040')} {kind} rw 0 0" for kind, p in mounts
        ]
        (tmp_path / "mounts").write_text("\n".join(lines) + "\n")
        (tmp_path / "etab").write_text("".join(f"{p}\t10.0.0.0/16(rw,sync)\n" for p in exports))

    monkeypatch.setattr(detect, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(detect, "EXPORTS", tmp_path / "etab")
    return have


def written(cli, home: Path) -> dict[str, str | None]:
    """Where a detected profile keeps what the nodes share."""
    assert cli("cluster", "detect", "--write").code == 0
    profile = yaml.safe_load(
        (home / ".config/trnslurm/cluster-config/parallelcluster.yaml").read_text()
    )
    return {key: profile[key] for key in ("run_root", "data_root", "compile_cache")}


def test_graphs_go_where_the_nodes_share(parallelcluster, cli, home: Path, host, tmp_path) -> None:
    """Lustre before NFS; a directory of one's own there, if the admin made one."""
    fast = tmp_path / "fs x"
    fast.mkdir()
    host(("ext4", Path("/")), ("nfs4", home), ("lustre", fast))
    own = fast / getpass.getuser()
    assert written(cli, home) == {
        "run_root": f"{own}/trnslurm-runs", "data_root": f"{own}/trnslurm-data",
        "compile_cache": f"{own}/trnslurm-compile-cache",
    }  # fmt: skip


@pytest.mark.parametrize("how", ["mounted", "exported"])
def test_graphs_go_to_a_shared_home(parallelcluster, cli, home: Path, host, how: str) -> None:
    """On ParallelCluster's head node it is a disk of that host, which it exports."""
    if how == "mounted":
        host(("ext4", Path("/")), ("nfs4", home.parent))
    else:
        host(("ext4", Path("/")), exports=(home.parent,))
    assert written(cli, home)["compile_cache"] == f"{home}/trnslurm-compile-cache"


def test_without_a_shared_file_system_it_is_said(parallelcluster, cli, home: Path, host) -> None:
    host(("ext4", Path("/")), ("nfs4", Path("/opt/software")))
    done = cli("cluster", "detect", "--write")
    assert done.err.startswith(
        "warning: this host shows no file system that the nodes share, so compile_cache is null: "
        "compiled graphs stay in each node's /var/tmp and go with the node. Set it"
    )
    assert cli("cluster", "detect", "--write", "--partition", "small", "--name", "s").err == ""


def test_nodes_of_an_unknown_type_get_a_type_of_their_own(parallelcluster, cli, site) -> None:
    assert cli("cluster", "detect", "--write", "--partition", "small", "--name", "small").code == 0
    site.recipe("steps: 3\nbatch: {global_batch: 8}\n")
    plan = json.loads(cli("plan", "toy", "-c", "small", "--nodes", "1,2", "--json").out)
    assert [p["workers"] for p in plan["plans"]] == [2, 4]


@pytest.mark.parametrize(
    "gres", ["gpu:8", "gpu:a100:8", "gpu:a100:8(S:0-1)", "gpu:nvidia_a100-sxm4-40gb:8(S:0-1)"]
)
def test_gpus(site, fake_slurm, cli, gres: str) -> None:
    fake_slurm.answer(
        "show-config",
        CONFIG.format(accounting="accounting_storage/slurmdbd", name="lab"),
    )
    fake_slurm.answer("show-node", *nodes("gpu", 2, "(null)", 96, gres=gres))
    fake_slurm.answer(
        "show-partition",
        PARTITION.format(name="gpu", default="YES", max_time="1-00:00:00", nodes="gpu-[1-2]"),
    )
    found = json.loads(cli("cluster", "detect", "--json").out)
    assert found["accounting"] is True
    assert (found["partitions"][0]["gpus"], found["partitions"][0]["nodes"]) == (8, 2)
    assert cli("cluster", "detect", "--write").code == 0
    site.recipe("steps: 3\nbatch: {global_batch: 64}\nslurm: {time_min: 5}\n")
    script = cli("render", "toy", "--cluster", "lab", "--nodes", "2").out
    assert "#SBATCH --gpus-per-node=8" in script


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--partition", "big"], "--partition big: parallelcluster has small, compute"),
        (["--write", "--name", "../x"], "use letters, digits, '-' and '_'"),
        (["--write", "--name", "a b"], "--name 'a b'"),
    ],
)
def test_refusals(parallelcluster, cli, arguments: list[str], words: str, home: Path) -> None:
    done = cli("cluster", "detect", *arguments)
    assert done.code == 1
    assert words in done.error
    assert not any(f for f in home.rglob("*") if f.is_file())


def test_without_slurm(site, cli) -> None:
    done = cli("cluster", "detect")
    assert done.code == 1
    assert done.error.startswith("scontrol not found: load your site's Slurm module")


@pytest.mark.parametrize(
    "said",
    [
        "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "scontrol: error: fetch_config: DNS SRV lookup failed\n"
        "scontrol: fatal: Could not establish a configuration source",
        "scontrol: error: s_p_parse_file: cannot stat file /nowhere: No such file or directory\n"
        "scontrol: fatal: Unable to process configuration file",
    ],
)
def test_slurm_without_a_cluster(site, fake_slurm, cli, said: str) -> None:
    """As Slurm 22.05 puts it, on a host that has only its commands."""
    fake_slurm.refuse("scontrol", said)
    done = cli("cluster", "detect")
    assert done.error.startswith("Slurm is installed here, but has no configuration of a cluster: ")


def test_silent_controller(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("scontrol", "slurm_load_ctl_conf error: Unable to contact slurm controller")
    done = cli("cluster", "detect")
    assert done.code == 1
    assert done.error.endswith("Unable to contact slurm controller")
