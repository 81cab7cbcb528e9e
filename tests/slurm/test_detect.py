"""cluster detect: what a Slurm says of itself, and the profile that comes of it."""

from __future__ import annotations

import getpass
import json
import re
from pathlib import Path

import pytest
import yaml

import trnslurm
from trnslurm.render.directives import slurm_time
from trnslurm.slurm import profile

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


@pytest.mark.parametrize("key", ["SlurmctldParameters", "SchedulerParameters"])
def test_expedited_requeues_are_known(parallelcluster, cli, home: Path, key: str) -> None:
    plain = CONFIG.format(accounting="(null)", name="parallelcluster")
    assert not json.loads(cli("cluster", "detect", "--json").out)["expedites"]
    parallelcluster.answer(
        "show-config", f"{plain}{key} = idle_on_node_suspend,enable_expedited_requeue"
    )
    assert json.loads(cli("cluster", "detect", "--json").out)["expedites"]
    assert cli("cluster", "detect", "--write").code == 0
    file = home / ".config/trnslurm/cluster-config/parallelcluster.yaml"
    assert yaml.safe_load(file.read_text())["slurm"]["expedite"] is True


def test_powered_down_nodes_are_known(parallelcluster, cli, stable) -> None:
    site = json.loads(cli("cluster", "detect", "--json").out)
    stable.json("cluster detect", site)
    assert (site["cluster"], site["accounting"], site["chosen"]) == (
        "parallelcluster", False, "compute",
    )  # fmt: skip
    assert [p["name"] for p in site["partitions"]] == ["small", "compute"]
    found = {
        "name": "compute", "default": False, "nodes": 3, "cpus": 128, "gpus": 0,
        "memory_mib": 498074, "max_time_min": 3600, "instance_type": "trn1.32xlarge",
        "accelerators": 16, "constraint": None, "exclusive": True, "unusable": "",
    }  # fmt: skip
    assert found.items() <= site["partitions"][1].items()


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
        f"Wrote {file}; parallelcluster is now the default cluster, set in {settings}."
    )
    slurm = yaml.safe_load(file.read_text())["slurm"]
    assert slurm == {
        "partition": "compute", "max_nodes": 3, "max_time_min": 3600, "default_time_min": 3600,
        "cpus_per_task": 128,
        "data_partition": None, "bin_dir": str(FAKE),
    }  # fmt: skip
    listed = cli("clusters").out
    assert "parallelcluster *" in listed
    assert listed.endswith(f"* the default, from {settings}\n")
    plan = json.loads(cli("plan", "gpt2_zero1", "--nodes", "2", "--json").out)
    assert (plan["cluster"], plan["plans"][0]["workers"]) == ("parallelcluster", 64)


def test_profile_is_never_overwritten(parallelcluster, cli, home: Path) -> None:
    assert cli("cluster", "detect", "--write").code == 0
    settings = home / ".config/trnslurm/trnslurm.yaml"
    settings.unlink()  # as after a kill between the two files
    assert cli("cluster", "detect", "--write").code == 0
    assert settings.exists()
    profile = settings.parent / "cluster-config/parallelcluster.yaml"
    profile.write_text(f"{profile.read_text()}# mine\n")
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

    monkeypatch.setattr(profile, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(profile, "EXPORTS", tmp_path / "etab")
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
        "warning: no shared file system was found on this host, so compile_cache is null and "
        "compiled graphs stay in each node's /var/tmp and are lost with the node. Set "
    )
    assert cli("cluster", "detect", "--write", "--partition", "small", "--name", "s").err == ""


def test_nodes_of_an_unknown_type_get_a_type_of_their_own(parallelcluster, cli, site) -> None:
    assert cli("cluster", "detect", "--write", "--partition", "small", "--name", "small").code == 0
    site.recipe("steps: 3\nbatch: {global_batch: 8}\n")
    plan = json.loads(cli("plan", "toy", "-c", "small", "--nodes", "1,2", "--json").out)
    assert [p["workers"] for p in plan["plans"]] == [2, 4]


def cluster(fake_slurm, config: str, node_lines: str, partition_lines: str) -> None:
    """Answer with nodes `NAME*COUNT key=value …` and partitions `NAME key=value …`."""
    fake_slurm.answer("show-config", CONFIG.format(accounting="(null)", name="lab"), config)
    places: dict[str, list[str]] = {}
    partitions = []
    for line in partition_lines.strip().splitlines():
        name, *words = line.split()
        given = dict(word.split("=", 1) for word in words)
        for node in given.pop("Nodes").split(","):
            places.setdefault(node, []).append(name)
        text = PARTITION.format(name=name, default="NO", max_time="UNLIMITED", nodes=name)
        partitions.append(_with(text, given))
    lines = []
    for line in node_lines.strip().splitlines():
        head, *words = line.split()
        name, _, count = head.partition("*")
        for n in range(int(count or 1)):
            text = NODE.format(name=f"{name}{n}", features="(null)", gres="(null)", cpus=64,
                               memory="256000", partition=",".join(places[name]))  # fmt: skip
            lines.append(_with(text, dict(word.split("=", 1) for word in words)))
    fake_slurm.answer("show-node", *lines)
    fake_slurm.answer("show-partition", *partitions)


def _with(text: str, fields: dict[str, str]) -> str:
    for key, value in fields.items():
        text = re.sub(rf"(?<= ){key}=\S*", "", text) + f" {key}={value}"
    return text


FAKE = Path(__file__).parents[1] / "fake_bin"  # no job would find Slurm there by itself
# As scontrol shows public clusters: what `slurm` in the profile must be, besides the usual.
MEMORY = "SelectTypeParameters = CR_CORE_MEMORY\nDefMemPerCPU = 4000"
SITES: dict[str, tuple[str, str, str, dict[str, object]]] = {
    # The shorter partitions are the site's default and a test's; two of its cores are reserved.
    "for-tests": (
        MEMORY,
        "gn*6 Gres=gpu:8 CPUTot=36 CPUEfctv=34 MemSpecLimit=8000",
        """
        gtest Nodes=gn MaxTime=00:30:00 MaxNodes=1 Default=YES
        gp1d Nodes=gn MaxTime=1-00:00:00 MaxNodes=5 DefaultTime=08:00:00
        old Nodes=gn State=DOWN
        root Nodes=gn RootOnly=YES ReqResv=YES""",
        {"partition": "gp1d", "max_nodes": 5, "max_time_min": 1440, "default_time_min": 480,
         "cpus_per_task": 34, "mem_per_node_mib": 248000},
    ),
    # The site's default is for one node; one of the others is for large jobs only, and jobs of
    # another are ended for those.
    "by-size": (
        "PreemptType = preempt/partition_prio\n", "g*8 Gres=gpu:h100:8",
        """
        small Nodes=g MaxNodes=1 MaxTime=1-00:00:00 Default=YES PreemptMode=OFF
        large Nodes=g MinNodes=4 MaxTime=12:00:00 PreemptMode=OFF
        free Nodes=g MaxTime=7-00:00:00 PreemptMode=REQUEUE
        short Nodes=g MaxNodes=1 MaxTime=02:00:00 PreemptMode=OFF""",
        {"partition": "small", "max_nodes": 1, "max_time_min": 1440, "default_time_min": 1440,
         "cpus_per_task": 64, "gpu_type": "h100", "partitions":
         {"large": {"fewest_nodes": 4, "max_nodes": 8, "max_time_min": 720}}},
    ),
    # The same nodes in two partitions, the shorter one first.
    "for-development": (
        "", "h*3 Gres=gpu:8", "dev Nodes=h MaxTime=04:00:00\nlong Nodes=h MaxTime=2-00:00:00",
        {"partition": "long", "max_nodes": 3, "max_time_min": 2880, "default_time_min": 2880,
         "cpus_per_task": 64},
    ),
    "before-CPUEfctv": (
        "", "a*2 CPUTot=64 CPUEfctv= CoreSpecCount=2 ThreadsPerCore=2", "main Nodes=a",
        {"partition": "main", "max_nodes": 2, "max_time_min": None, "cpus_per_task": 60},
    ),
    # A job gets a part of a node.
    "shared-by-students": (
        "", "c*3 \ng*2 Gres=gpu:rtx_6000:2 RealMemory=257566",
        "students Nodes=c,g Default=YES MaxTime=1-00:00:00 DefMemPerNode=8192 MaxMemPerNode=32768"
        " MaxCPUsPerNode=8 MaxNodes=1",
        {"partition": "students", "max_nodes": 1, "max_time_min": 1440, "default_time_min": 1440,
         "cpus_per_task": 8, "mem_per_node_mib": 32768, "exclusive": False,
         "gpu_type": "rtx_6000"},
    ),
    # No partition has a limit, and all nodes are in another than the site's default.
    "pairs": (
        "", "a*2 Gres=gpu:1\nb*2 Gres=gpu:1",
        "pair Nodes=a MaxNodes=2 Default=YES\nall Nodes=a,b",
        {"partition": "pair", "max_nodes": 2, "max_time_min": None, "cpus_per_task": 64,
         "partitions": {"all": {"fewest_nodes": 1, "max_nodes": 4, "max_time_min": None}}},
    ),
    # The site's default is for jobs of students, on a part of one node.
    "several-nodes": (
        "", "s*2 Gres=gpu:rtx_6000:2\nd*6 Gres=gpu:rtx_6000:2",
        """
        students Nodes=s Default=YES MaxTime=1-00:00:00 MaxCPUsPerNode=8 MaxNodes=1
        staff Nodes=d MaxTime=3-00:00:00 MaxNodes=4""",
        {"partition": "staff", "max_nodes": 4, "max_time_min": 4320, "default_time_min": 4320,
         "cpus_per_task": 64, "gpu_type": "rtx_6000"},
    ),
    # Two nodes of eight GPUs rather than one of ten.
    "one-is-larger": (
        "", "x*1 Gres=gpu:10\ny*3 Gres=gpu:8", "fast Nodes=x,y MaxTime=06:00:00",
        {"partition": "fast", "max_nodes": 3, "max_time_min": 360, "default_time_min": 360,
         "cpus_per_task": 64},
    ),
    # One node of eight GPUs rather than many of one.
    "one-is-much-larger": (
        "", "x*1 Gres=gpu:8\ny*9 Gres=gpu:1", "fast Nodes=x,y MaxTime=06:00:00",
        {"partition": "fast", "max_nodes": 1, "max_time_min": 360, "default_time_min": 360,
         "cpus_per_task": 64},
    ),
    # GPUs that jobs cannot use are more, and in the site's default partition.
    "other-makers": (
        "", "m*2 Gres=gpu:mi50:8\nr*4 Gres=gpu:rtx8000:4\nc*4",
        "amd Nodes=m Default=YES MaxTime=06:00:00\nrtx Nodes=r MaxTime=06:00:00\ncpu Nodes=c",
        {"partition": "rtx", "max_nodes": 4, "max_time_min": 360, "default_time_min": 360,
         "cpus_per_task": 64, "gpu_type": "rtx8000"},
    ),
    # Of two nodes in the site's default partition, a partition for tests and one for large jobs.
    "two-for-tests": (
        "", "n*8\nt*2",
        """
        par48 Nodes=n MaxNodes=1 MaxTime=7-00:00:00 Default=YES
        par480 Nodes=n MinNodes=2 MaxNodes=10 MaxTime=7-00:00:00
        test Nodes=t MaxTime=00:30:00""",
        {"partition": "par48", "max_nodes": 1, "max_time_min": 10080, "default_time_min": 10080,
         "cpus_per_task": 64, "partitions":
         {"par480": {"fewest_nodes": 2, "max_nodes": 8, "max_time_min": 10080}}},
    ),
    # More of the same nodes, but jobs there are ended for others.
    "more-for-a-while": (
        "PreemptType = preempt/partition_prio\n", "g*4 Gres=gpu:8\nh*4 Gres=gpu:8",
        "free Nodes=g,h MaxTime=7-00:00:00 PreemptMode=REQUEUE Default=YES\n"
        "own Nodes=g MaxTime=2-00:00:00 PreemptMode=OFF",
        {"partition": "own", "max_nodes": 4, "max_time_min": 2880, "default_time_min": 2880,
         "cpus_per_task": 64},
    ),
    # Whole GPUs rather than more slices, by their type, and not the smaller nodes; some are down.
    "slices-and-others": (
        MEMORY,
        """
        mig*9 Gres=gpu:1g.10gb:14
        few*3 AvailableFeatures=gpu Gres=gpu:a100:2(S:0),gpu:nvidia_a100_80gb_pcie_3g.40gb:4
        big*2 Gres=gpu:a100:4(S:0-1),mps:800 AvailableFeatures=gpu,big
        bad*5 Gres=gpu:a100:4 AvailableFeatures=gpu,big State=IDLE+DRAIN
        off*1 Gres=gpu:a100:4 AvailableFeatures=gpu,big State=IDLE+CLOUD+POWERED_DOWN""",
        "gpu Nodes=mig,few,big,bad,off",
        {"partition": "gpu", "constraint": "big", "max_nodes": 8, "max_time_min": None,
         "cpus_per_task": 64, "mem_per_node_mib": 256000, "gpu_type": "a100"},
    ),
    # A group that root, who runs the tests, may use anyway; a limit per CPU.
    "limit-per-cpu": (
        "SelectTypeParameters = CR_CORE_MEMORY\nMaxMemPerCPU = 2048",
        "a*4 CPUTot=24 CPUEfctv=24 RealMemory=131072", "main Nodes=a MaxTime=02:00:00",
        {"partition": "main", "max_nodes": 4, "max_time_min": 120, "default_time_min": 120,
         "cpus_per_task": 24, "mem_per_node_mib": 49152},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_sites(site, fake_slurm, cli, home: Path, name: str) -> None:
    config, nodes, partitions, expected = SITES[name]
    cluster(fake_slurm, config, nodes, partitions)
    done = cli("cluster", "detect", "--write")
    assert done.code == 0, done.err
    text = (home / ".config/trnslurm/cluster-config/lab.yaml").read_text()
    slurm = yaml.safe_load(text)["slurm"]
    assert slurm == expected | {"data_partition": None, "bin_dir": str(FAKE)}
    for key in {*expected} - {"partitions"}:  # each with its source
        assert re.search(rf"(?m)^  {key}: .*# .+", text), text
    site.recipe("steps: 3\nbatch: {global_batch: 64}\n")
    script = cli("render", "toy", "--cluster", "lab", "--nodes", "1")
    if "default_time_min" in expected:
        minutes = expected["default_time_min"]
        assert f"#SBATCH --time={slurm_time(minutes)}" in script.out
    else:
        assert "# default_time_min: ?  the partition has no DefaultTime and no MaxTime" in text
        assert "pass --time" in script.err
    memory = expected.get("mem_per_node_mib")
    assert (f"#SBATCH --mem={memory} " in script.out) == (memory is not None and script.code == 0)


def test_where_a_job_can_have_several_nodes(site, fake_slurm, cli, home: Path) -> None:
    cluster(
        fake_slurm, "", "g*1 Gres=gpu:1\nc*9", "gpu Nodes=g\ncpu Nodes=c\none Nodes=c MaxNodes=1"
    )
    assert cli("cluster", "detect", "--write").code == 0
    site.recipe("steps: 3\nbatch: {global_batch: 64}\n")
    refused = cli("render", "toy", "--cluster", "lab", "--nodes", "2", "--time", "60").error
    assert refused.endswith("(the partition's identical nodes; detect --partition cpu allows more)")
    assert cli("cluster", "detect", "--write", "--partition", "one", "--name", "one").code == 0
    text = (home / ".config/trnslurm/cluster-config/one.yaml").read_text()
    assert "# MaxNodes of the partition; it has 9 such nodes" in text and "allows more" not in text


def test_nodes_that_jobs_must_share(site, fake_slurm, cli, home: Path) -> None:
    cluster(fake_slurm, "", "f*2", "batch Nodes=f OverSubscribe=FORCE:8 MaxTime=08:00:00")
    assert cli("cluster", "detect", "--write").code == 0
    text = (home / ".config/trnslurm/cluster-config/lab.yaml").read_text()
    assert "  # exclusive: ?  OverSubscribe=FORCE:8: jobs always share its nodes\n" in text


def test_a_hidden_partition_is_named_but_not_chosen(site, fake_slurm, cli, home: Path) -> None:
    cluster(
        fake_slurm, "", "h*4 Gres=gpu:8\nn*2",
        "team Nodes=h Hidden=YES MaxTime=08:00:00\nmain Nodes=n MaxTime=08:00:00",
    )  # fmt: skip
    done = cli("cluster", "detect")
    assert "main *" in done.out
    assert done.out.endswith("\nteam: hidden by the site; choose one with --partition\n")
    assert cli("cluster", "detect", "--write", "--partition", "team").code == 0
    text = (home / ".config/trnslurm/cluster-config/lab.yaml").read_text()
    assert yaml.safe_load(text)["slurm"]["partition"] == "team"
    assert any("--all" in call.arguments for call in fake_slurm.calls("scontrol"))


def test_nodes_that_differ_in_what_is_no_device(site, fake_slurm, cli, home: Path) -> None:
    more = "Gres=gpu:8 CPUTot=96 CPUEfctv=96 RealMemory=500000"
    cluster(fake_slurm, MEMORY, f"h*4 Gres=gpu:8\nm*1 {more}", "g Nodes=h,m MaxTime=08:00:00")
    assert cli("cluster", "detect", "--write").code == 0
    text = (home / ".config/trnslurm/cluster-config/lab.yaml").read_text()
    assert "max_nodes: 5 " in text and "cpus_per_task: 64 " in text
    assert "# CPUEfctv of its nodes, the lowest value: some have 96\n" in text
    assert re.search(
        r"  mem_per_node_mib: 256000 +# .*, the lowest value: some have 500000\n", text
    ), text


def test_slices_beside_whole_gpus(site, fake_slurm, cli, home: Path) -> None:
    gres = "gpu:a100:4(S:0-1),gpu:a100_3g.20gb:6(S:0-1)"
    cluster(fake_slurm, "", f"m*2 Gres={gres}", "gpu Nodes=m MaxTime=08:00:00")
    assert cli("cluster", "detect", "--write").code == 0
    text = (home / ".config/trnslurm/cluster-config/lab.yaml").read_text()
    assert "# Gres of its nodes; --exclusive also takes their 6 slices\n" in text
    site.recipe("steps: 3\nbatch: {global_batch: 64}\n")
    script = cli("render", "toy", "--cluster", "lab", "--nodes", "2").out
    assert "#SBATCH --gpus-per-node=a100:4 " in script and "#SBATCH --exclusive " in script
    assert "W = nodes x workers per node        8 = 2 x 4\n" in script


def test_a_job_takes_a_partition_that_allows_it(site, fake_slurm, cli, home: Path) -> None:
    cluster(fake_slurm, *SITES["by-size"][:3])
    assert cli("cluster", "detect", "--write").code == 0
    site.recipe("steps: 3\nbatch: {global_batch: 64}\n")
    render = ("render", "toy", "--cluster", "lab", "--time", "60", "--nodes")
    assert "#SBATCH --partition=small " in cli(*render, "1").out
    large = cli(*render, "4")
    assert "#SBATCH --partition=large " in large.out
    submit = ("submit", "toy", "--cluster", "lab", "--time", "60", "--nodes")
    assert "Using partition large, because small does not allow it\n" in cli(*submit, "4").err
    assert cli("cancel", "last").code == 0
    assert cli("resume", "last", "--nodes", "1").code == 0
    (run,) = (home / "trnslurm-runs").glob("*-toy")
    assert "#SBATCH --partition=small " in (run / "train.sbatch").read_text()
    both = ("--set", "slurm.partitions={all: {max_nodes: 8, max_time_min: 90}}")
    assert "#SBATCH --partition=small,all " in cli(*render, "1", *both).out
    said = cli(*submit, "5", *both, "--dry-run").err
    assert "Using partition large or all, whichever can start it first, because small" in said
    one = cli(*render, "3-5", *both)  # large has no jobs of three nodes
    assert "#SBATCH --partition=all " in one.out and "#SBATCH --nodes=3-5\n" in one.out
    file = home / ".config/trnslurm/cluster-config/lab.yaml"
    small = (
        f"is more than slurm.max_nodes (1): use at most 1, or change it in {file}, line 25 (MaxNo"
    )
    none = cli(*render, "2").error
    assert none.startswith(f"--nodes 2 {small}") and none.endswith(
        f"; --nodes 2 is less than slurm.partitions.large.fewest_nodes (4): use at least 4, or "
        f"change it in {file}, line 32"
    )
    named = cli(*render, "4", "--set", "slurm.partition=small")
    assert named.error.startswith(f"--nodes 4 {small}")
    bad = cli(*render, "1", "--set", "slurm.partitions={x: {nodes: 1}}")
    assert "unknown key slurm.partitions.x.nodes" in bad.error
    bad = cli(*render, "1", "--set", "slurm.partitions={'': {}}")
    assert bad.error == "slurm.partitions: a partition has no name"
    assert "#SBATCH --cpus" not in cli(*render, "1", "--set", "slurm.cpus_per_task=0").out


def test_each_kind_of_node_can_be_chosen(site, fake_slurm, cli, home: Path) -> None:
    cluster(
        fake_slurm, "",
        "p*4 Gres=gpu:v100:8 CPUTot=96 CPUEfctv=96\nt*10 Gres=gpu:t4:1\nplain*3",
        "q Nodes=p,t,plain\nno Nodes=p State=INACTIVE",
    )  # fmt: skip
    done = cli("cluster", "detect")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "q/v100:8 * 4 ? 96 8 -" in lines
    assert "no does not accept your jobs: its State is INACTIVE" in lines
    done = cli("cluster", "detect", "--write", "--partition", "q/t4:1", "--name", "small")
    assert done.code == 0
    text = (home / ".config/trnslurm/cluster-config/small.yaml").read_text()
    assert "#   q/v100:8: 4 nodes, 96 CPUs, 8 GPUs" in text
    assert yaml.safe_load(text)["slurm"]["gpu_type"] == "t4" and "Neuron" not in text
    site.recipe("steps: 3\nbatch: {global_batch: 64}\nslurm: {time_min: 5}\n")
    script = cli("render", "toy", "--cluster", "small", "--nodes", "2").out
    assert "#SBATCH --gpus-per-node=t4:1 " in script and "aws/neuron" not in script
    plain = cli("cluster", "detect", "--write", "--partition", "q/64-cpus", "--name", "plain")
    assert plain.code == 0
    text = (home / ".config/trnslurm/cluster-config/plain.yaml").read_text()
    assert "# constraint: ?  no feature distinguishes these nodes from 14 others" in text
    warned = cli("cluster", "detect", "--write", "--partition", "no", "--name", "no").err
    assert warned == "warning: partition no does not accept your jobs: its State is INACTIVE\n"


def test_nodes_that_are_hidden_while_powered_down(site, fake_slurm, cli) -> None:
    """PrivateData lacks `cloud`: only the partition's sums are shown."""
    cluster(fake_slurm, "", "a*1", "a Nodes=a")
    line = PARTITION.format(name="a", default="YES", max_time="1:00:00", nodes="a[1-4]")
    fake_slurm.answer("show-node", "No nodes in the system")
    totals = {"TotalNodes": "4", "TotalCPUs": "256", "TRES": "cpu=256,mem=1000G,node=4,gres/gpu=32"}
    fake_slurm.answer("show-partition", _with(line, totals))
    (found,) = json.loads(cli("cluster", "detect", "--json").out)["partitions"]
    assert (found["nodes"], found["cpus"], found["gpus"], found["memory_mib"]) == (4, 64, 8, 256000)


# DefaultAccount|Cluster|Account|Partition|QOS|DefaultQOS|GrpTRES|MaxTRES|MaxWall
MINE = ("me|Lab|me||normal,long||||", "me|Lab|grant||gpu,normal|gpu|||", "me|other|x||||||")
QOS = (
    *("normal|||||", "large|||||gres/gpu=10", "odd|||||gres/gpu=1,node=3", "tpu|||||gres/tpu=1"),
    *("long||cpu=32,gres/gpu=4||7-00:00:00|", "gpu||node=2|gres/gpu=8|1-00:00:00|"),
)
GRANT = {"account": "grant", "max_nodes": 2, "job_gpus": 8, "max_time_min": 1440}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ("", {}),
        ("AllowAccounts=grant,boss", GRANT),
        ("DenyAccounts=me", GRANT),
        # Where there is a list of the allowed, Slurm ignores that of the denied.
        ("AllowAccounts=me DenyAccounts=me", {}),
        ("AllowQos=gpu", GRANT),
        # Only a part of a node fits.
        ("AllowQos=long", {"qos": "long", "max_nodes": 4, "job_cpus": 32, "job_gpus": 4,
                           "max_time_min": 10080, "cpus_per_task": 32, "exclusive": False}),
        ("QoS=gpu", {"max_nodes": 2, "job_gpus": 8, "max_time_min": 1440}),
        ("QoS=large", {"fewest_nodes": 2}),
        ("QoS=odd", {"fewest_nodes": 3}),
        ("AllowAccounts=boss", {}),  # which may be above them
        ("DenyAccounts=me,grant", "it accepts none of your accounts: grant, me"),
        ("AllowQos=vip", "it allows QOS vip, but you have gpu, long, normal"),
    ],
)  # fmt: skip
def test_accounts_and_qos(site, fake_slurm, cli, home: Path, limits, expected) -> None:
    cluster(fake_slurm, "", "g*4 Gres=gpu:8", f"gpu Nodes=g {limits}")
    known = CONFIG.format(accounting="accounting_storage/slurmdbd", name="lab")
    fake_slurm.answer("show-config", known, "AccountingStorageEnforce = associations,limits,qos")
    fake_slurm.answer("accounting-user", *MINE)
    fake_slurm.answer("accounting-qos", *QOS)
    done = cli("cluster", "detect", "--write")
    if isinstance(expected, str):
        assert done.error == f"no partition here accepts your jobs: gpu: {expected}"
        return
    slurm = yaml.safe_load((home / ".config/trnslurm/cluster-config/lab.yaml").read_text())["slurm"]
    usual = {"partition": "gpu", "max_nodes": 4, "max_time_min": None, "cpus_per_task": 64}
    found = {key: slurm[key] for key in slurm if key not in ("data_partition", "bin_dir")}
    found.pop("default_time_min", None), found.pop("mem_per_node_mib", None)
    assert found == usual | expected
    text = (home / ".config/trnslurm/cluster-config/lab.yaml").read_text()
    # An account below a denied one is denied too, by newer Slurm.
    assert ("# partition: ?  DenyAccounts=" in text) == limits.startswith("DenyAccounts")


def test_limits_of_the_accounts_above(site, fake_slurm, cli, home: Path) -> None:
    """A job with more would wait for good: AssocGrpCpuLimit."""
    cluster(fake_slurm, "", "g*8 Gres=gpu:8", "gpu Nodes=g")
    known = CONFIG.format(accounting="accounting_storage/slurmdbd", name="lab")
    fake_slurm.answer("show-config", known, "AccountingStorageEnforce = associations,limits")
    fake_slurm.answer("accounting-user", "team|lab|team||normal||mem=9T,gres/gpu=60||")
    fake_slurm.answer("accounting-qos", "normal|||||")
    fake_slurm.answer(
        "accounting-assoc", "lab|root||", "lab|team|dept|mem=10G,cpu=400", "lab|dept|root|cpu=200"
    )
    (found,) = json.loads(cli("cluster", "detect", "--json").out)["partitions"]
    assert (found["nodes"], found["job_cpus"], found["job_gpus"]) == (8, 200, 60)
    assert found["sources"]["job_cpus"] == "account team allows no more"
    assert found["memory_mib"] == 10240


def test_accounting_that_does_not_answer(site, fake_slurm, cli, home: Path) -> None:
    cluster(fake_slurm, "", "g*4", "gpu Nodes=g AllowAccounts=a,b AllowQos=high")
    known = CONFIG.format(accounting="accounting_storage/slurmdbd", name="lab")
    fake_slurm.answer("show-config", known)
    assert cli("cluster", "detect", "--write").code == 0
    text = (home / ".config/trnslurm/cluster-config/lab.yaml").read_text()
    assert "  # account: ?  AllowAccounts=a,b\n" in text
    assert "  # qos: ?  AllowQos=high\n" in text
    fake_slurm.answer("show-config", CONFIG.format(accounting="(null)", name="lab"))
    off = "accepts your jobs: gpu: it allows only accounts a,b, but accounting is off"
    assert cli("cluster", "detect").error == f"no partition here {off}"


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
    assert done.error.startswith("Slurm is installed here, but no cluster is configured: ")


def test_silent_controller(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("scontrol", "slurm_load_ctl_conf error: Unable to contact slurm controller")
    done = cli("cluster", "detect")
    assert done.code == 1
    assert done.error.endswith("Unable to contact slurm controller")


CLUSTER_FILE = Path(trnslurm.__file__).parents[1] / "cluster-config/parallelcluster"


@pytest.mark.parametrize(
    ("name", "profile", "nodes", "cpus"),
    [("trn1-16-nodes", "trn1", 16, 128), ("p5-4-nodes", "p5", 4, 192)],
)
def test_profile_of_a_parallelcluster_file(
    cli, home: Path, name: str, profile: str, nodes: int, cpus: int
) -> None:
    """Before the cluster is there: the same as the profile that comes with trnslurm."""
    file = CLUSTER_FILE / f"{name}.yaml"
    done = cli("cluster", "detect", "--from", file, "--write", "--name", "east")
    assert done.code == 0
    assert done.err == f"warning: {file}: c6i.16xlarge is not in the catalog and was left out\n"
    own = yaml.safe_load((home / ".config/trnslurm/cluster-config/east.yaml").read_text())
    shipped = yaml.safe_load((CLUSTER_FILE.parent / f"{profile}.yaml").read_text())
    assert own["instance_type"] == shipped["instance_type"]
    assert own["slurm"]["partition"] == shipped["slurm"]["partition"]
    assert (own["slurm"]["max_nodes"], own["slurm"]["cpus_per_task"]) == (nodes, cpus)
    assert own["run_root"].startswith("/fsx")


QUEUES = """
Scheduling:
  SlurmSettings: {EnableMemoryBasedScheduling: true, CustomSlurmSettings: [{DefMemPerCPU: 1000}]}
  SlurmQueues:
    - Name: gpu
      CustomSlurmSettings: {MaxTime: 90, DefaultTime: "01:00:00"}
      ComputeResources:
        - Name: block
          InstanceType: p5.48xlarge
          MinCount: 2
          MaxCount: 2
          DisableSimultaneousMultithreading: true
          SchedulableMemory: 100000
        - {Name: spot, InstanceType: p5.48xlarge, Efa: {Enabled: true}}
"""


def test_queues_of_a_parallelcluster_file(cli, tmp_path) -> None:
    """Static and dynamic nodes; a block without hyperthreads; limits of a queue."""
    file = tmp_path / "cluster.yaml"
    file.write_text(QUEUES)
    site = json.loads(cli("cluster", "detect", "--from", file, "--json").out)
    (both,) = site["partitions"]  # of one type; the fewer CPUs are those of the block
    assert (both["nodes"], both["gpus"], both["cpus"], both["max_time_min"]) == (12, 8, 96, 90)
    assert site["partitions"][0]["default_time_min"] == 60
    dump = tmp_path / "cluster.json"
    assert cli("cluster", "detect", "--from", file, "--dump", dump).code == 0
    again = json.loads(cli("cluster", "detect", "--from", dump, "--json").out)
    assert again == site
    nodes = json.loads(dump.read_text())["nodes"]
    assert [n["NodeName"] for n in nodes][:3] == [
        "gpu-st-block-1",
        "gpu-st-block-2",
        "gpu-dy-spot-1",
    ]
    assert (nodes[0]["CPUTot"], nodes[0]["RealMemory"]) == ("96", "100000")
    assert nodes[2]["AvailableFeatures"] == "dynamic,p5.48xlarge,spot,efa,gpu"


@pytest.mark.parametrize(
    ("name", "gpus", "cpus"),
    [("g5.48xlarge", 8, 192), ("g7.12xlarge", 2, 48), ("g7e.24xlarge", 4, 96),
     ("p6e-gb200.36xlarge", 4, 144)],
)  # fmt: skip
def test_types_of_a_parallelcluster_file(
    cli, tmp_path, home: Path, name: str, gpus: int, cpus: int
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"""
Scheduling:
  SlurmQueues:
    - Name: gpu
      ComputeResources:
        - {{Name: a, InstanceType: {name}, MaxCount: 2, Efa: {{Enabled: true}}}}
""")
    done = cli("cluster", "detect", "--from", file, "--write", "--name", "east")
    assert (done.code, done.err) == (0, "")
    own = yaml.safe_load((home / ".config/trnslurm/cluster-config/east.yaml").read_text())
    assert (own["instance_type"], own["slurm"]["cpus_per_task"]) == (name, cpus)
    words = ("--preset", "tiny", "--nodes", "2", "--time", "60", "--allow-idle")
    script = cli("render", "gpt2_zero1", "--cluster", "east", *words)
    file.write_text(file.read_text().replace("true", "false"))
    done = cli("cluster", "detect", "--from", file, "--write", "--name", "slow")
    assert (
        f"has not enabled EFA on these {name} nodes (Efa/Enabled): the profile records" in done.err
    )
    slow = cli("render", "gpt2_zero1", "--cluster", "slow", *words).out
    assert "FI_PROVIDER" not in slow and "--efa=0 " in slow
    assert "FI_PROVIDER=efa" in script.out and f"--workers={gpus} " in script.out, script.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Scheduling: 3", "not a ParallelCluster file with Slurm queues"),
        ("Scheduling: {Scheduler: awsbatch}", "not a ParallelCluster file with Slurm queues"),
        (
            QUEUES.replace("p5.48xlarge", "p9.48xlarge"),
            "cluster.yaml: the catalog has none of its instance types: p9.48xlarge. On",
        ),
        (QUEUES.replace("gpu", '"g\\nInclude=x"'), "not a ParallelCluster file"),
        ("a: [", "cluster.yaml:2: "),
    ],
)
def test_other_yaml_files(cli, tmp_path, text: str, says: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    done = cli("cluster", "detect", "--from", file)
    assert done.code == 1 and says in done.error, done
