"""The texts of a sandbox: slurm.conf, gres.conf, hosts, processors and the cluster profile."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from trnslurm.config.catalog import catalog
from trnslurm.devices import XLA_CPU
from trnslurm.sandbox.configuration import (
    FIRST_ID,
    PARALLELCLUSTER,
    accounts,
    cgroup_conf,
    devices,
    gres_conf,
    node_words,
    profile,
    slurm_conf,
    slurmdbd_conf,
    topology,
)
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.machine import SandboxHost
from trnslurm.sandbox.settings import OWNED_KEYS, SandboxSettings

LAYOUT = Layout(Path("/b/sandbox"))
HOST = SandboxHost(
    user="me", uid=1, gid=1, unshare=(), commands={"srun": "/usr/bin/srun"}, version=(22, 5, 8),
    python="/bin/false",
)  # fmt: skip


def values(*asked: str, accounting: bool = False) -> dict[str, str]:
    """The lines of slurm.conf by lower-case key; each key is there once."""
    text = slurm_conf(LAYOUT, SandboxSettings(set=asked, accounting=accounting), HOST, 700)
    lines = [line for line in text.splitlines() if not line.startswith(("#", "NodeN", "Partit"))]
    pairs = [line.split("=", 1) for line in lines]
    found = {key.lower(): value for key, value in pairs}
    assert len(found) == len(pairs)
    return found


def lines(kind: str, settings: SandboxSettings) -> list[dict[str, str]]:
    """The NodeName or PartitionName lines, each as a mapping."""
    text = slurm_conf(LAYOUT, settings, HOST, 700)
    found = [line.split() for line in text.splitlines() if line.startswith(f"{kind}=")]
    return [dict(word.split("=", 1) for word in words) for words in found]


def test_parallelclusters_settings_stand_there() -> None:
    found = values()
    for key, value in PARALLELCLUSTER.items():
        assert value in found[key.lower()], key
    assert {"MessageTimeout": "60", "ReturnToService": "1"}.items() <= PARALLELCLUSTER.items()


@pytest.mark.parametrize("change", [str, str.lower, str.upper])
@pytest.mark.parametrize(
    "key", [*PARALLELCLUSTER, "SlurmdParameters", "ProctrackType", "TaskPlugin"]
)
def test_each_can_be_set_otherwise(key: str, change) -> None:
    assert values(f"{change(key)}=other")[key.lower()].endswith("other")


@pytest.mark.parametrize(
    ("version", "plugin"),
    [((22, 5, 8), "cgroup/v1"), ((24, 5), "disabled"), ((26, 5, 3), "disabled")],
)
def test_no_slurmd_needs_a_cgroup(version: tuple[int, ...], plugin: str) -> None:
    assert cgroup_conf(replace(HOST, version=version)) == f"CgroupPlugin={plugin}\n"


def test_the_plugins_of_a_prefix_are_found(tmp_path: Path) -> None:
    """A package that is unpacked looks for them where it would be installed."""
    plugins = tmp_path / "root/usr/lib/slurm-wlm"
    plugins.mkdir(parents=True)
    (plugins / "auth_munge.so").touch()
    host = replace(HOST, commands={"srun": str(tmp_path / "bin/srun")})
    assert f"PluginDir={plugins}\n" in slurm_conf(LAYOUT, SandboxSettings(), host, 700)
    assert f"PluginDir={plugins}\n" in slurmdbd_conf(LAYOUT, host, "secret")
    assert "PluginDir" not in slurm_conf(LAYOUT, SandboxSettings(), HOST, 700)


def test_a_new_key_is_added_and_the_last_value_counts() -> None:
    assert values("KillWait=5", "killwait=6")["killwait"] == "6"
    asked = "LaunchParameters=enable_nss_slurm, with blanks = and # more"
    key, _, value = asked.partition("=")
    assert values(asked)[key.lower()] == value


@pytest.mark.parametrize("asked", ["AuthInfo=cred_expire=5", "authinfo=socket=/run/other.sock"])
def test_authinfo_keeps_the_socket(asked: str) -> None:
    """Of several `socket=`, Slurm takes the first."""
    value = values(asked)["authinfo"]
    assert value.startswith("socket=/b/sandbox/run/munge.sock,")
    assert value.endswith(asked.partition("=")[2])


def test_job_numbers_begin_where_they_are_told_to() -> None:
    assert values()["firstjobid"] == "700"
    assert values("FirstJobId=5")["firstjobid"] == "5"


def test_no_path_of_the_machine_is_written_to() -> None:
    """Every directory and file that a daemon writes is in the sandbox."""
    files = {k: v for k, v in values(accounting=True).items() if v.startswith("/")}
    assert files.pop("mailprog") == "/bin/true"
    assert len(files) >= 6
    assert all(value.startswith("/b/sandbox/") for value in files.values()), files


def test_the_owned_keys_stand_there() -> None:
    elsewhere = {"NodeName", "NodeAddr", "Include", "AccountingStorageHost", "PluginDir"}
    assert {key.lower() for key in OWNED_KEYS if key not in elsewhere} <= set(values(
        accounting=True
    ))  # fmt: skip


@pytest.mark.parametrize("like", [n for n, t in catalog().items() if t.gpus])
def test_gpus(like: str) -> None:
    settings = SandboxSettings(nodes=2, like=like)
    count = catalog()[like].gpus
    assert [n["Gres"] for n in lines("NodeName", settings)] == [f"gpu:{count}"] * 2
    assert devices(settings) == sorted(f"gpu-{n}" for n in range(count))
    numbers = f"[0-{count - 1}]" if count > 1 else "0"
    (line,) = gres_conf(LAYOUT, settings).splitlines()
    names = ",".join(settings.node_names)
    assert line == f"NodeName={names} Name=gpu File=/b/sandbox/state/devices/gpu-{numbers}"
    assert gres_conf(LAYOUT, SandboxSettings()) == ""


def test_claimed_gres_stands_in_gres_conf_as_well() -> None:
    """Otherwise slurmd finds none, and the controller drains the node."""
    asked = SandboxSettings(set=("Gres=gpu:a100:4,gpu:t4:2,shard:9",))
    assert [n["Gres"] for n in lines("NodeName", asked)] == ["gpu:a100:4,gpu:t4:2,shard:9"] * 4
    nodes = f"NodeName={','.join(asked.node_names)}"
    place = "/b/sandbox/state/devices"
    assert gres_conf(LAYOUT, asked).splitlines() == [
        f"{nodes} Name=gpu Type=a100 File={place}/gpua100-[0-3]",
        f"{nodes} Name=gpu Type=t4 File={place}/gput4-[0-1]",
        f"{nodes} Name=shard File={place}/shard-[0-8]",
    ]


def test_node_words_go_to_the_node_lines() -> None:
    asked = SandboxSettings(nodes=2, set=("cpus=8", "RealMemory=1000", "features=a,b", "Weight=7"))
    text = slurm_conf(LAYOUT, asked, HOST, 700)
    for node in lines("NodeName", asked):
        assert (node["CPUs"], node["RealMemory"], node["Weight"]) == ("8", "1000", "7")
        assert node["Feature"] == "a,b"
    assert not re.search(
        r"^(cpus|realmemory|features?|weight)=", text, re.IGNORECASE | re.MULTILINE
    )


def test_partitions() -> None:
    (one,) = lines("PartitionName", SandboxSettings())
    assert (one["PartitionName"], one["MaxTime"]) == ("compute", "INFINITE")
    asked = ("partitionname=low Nodes=ALL PriorityTier=1", "PartitionName=compute MaxTime=5")
    found = lines("PartitionName", SandboxSettings(set=asked))
    assert [p["PartitionName"] for p in found] == ["compute", "low"]
    assert found[0]["MaxTime"] == "5"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((), "package:128 core:1 pu:1"),
        (("CPUs=8",), "package:8 core:1 pu:1"),
        (("Sockets=2", "CoresPerSocket=4", "ThreadsPerCore=2"), "package:2 core:4 pu:2"),
        (("SocketsPerBoard=2", "CoresPerSocket=4"), "package:2 core:4 pu:1"),
    ],
)
def test_processors_that_slurmd_finds(asked: tuple[str, ...], found: str) -> None:
    (words, *_) = node_words(SandboxSettings(set=asked)).values()
    assert topology(words) == found


@pytest.mark.parametrize("like", [n for n in catalog() if n != "local"])
def test_profile(like: str) -> None:
    settings = SandboxSettings(nodes=3, like=like, python="/p/python")
    tree = yaml.safe_load(profile(LAYOUT, settings))
    name = f"sandbox-{like}"
    assert (tree["instance_type"], tree["python"]) == (name, "/p/python")
    assert tree["slurm"]["bin_dir"] == "/b/sandbox/bin"
    assert tree["slurm"]["max_nodes"] == 3
    types = catalog(tree["instance_types"])
    assert types[name].device is XLA_CPU
    assert types[name].price_per_hour is None  # it costs nothing
    assert types[name].vcpus == catalog()[like].vcpus
    assert tree["slurm"].get("gpus_per_node", 0) == catalog()[like].gpus


def test_profile_of_claimed_cpus_and_stand_ins() -> None:
    settings = SandboxSettings(set=("cpus=8",), neuron_stand_ins=True)
    tree = yaml.safe_load(profile(LAYOUT, settings))
    assert tree["instance_types"]["sandbox-trn1.32xlarge"]["vcpus"] == 8
    assert tree["activate"] == [
        'export PATH="/b/sandbox/neuron/bin:$PATH"', "export TRNSLURM_STAND_IN_DEVICE=xla-cpu"
    ]  # fmt: skip


def test_its_users_stand_beside_those_of_the_machine() -> None:
    """In the place of one who has such a name here: inside, it means the sandbox's."""
    passwd = "root:x:0:0::/root:/bin/sh\nbob:x:7:7::/bob:/bin/sh"
    found = accounts(LAYOUT, SandboxSettings(users=2), passwd, "team:x:9:ada")
    a, b, team = FIRST_ID, FIRST_ID + 1, FIRST_ID + 8
    assert [text.splitlines() for text in found] == [
        [
            "root:x:0:0::/root:/bin/sh",
            f"alice:x:{a}:{a}::/b/sandbox/home/alice:/bin/sh",
            f"bob:x:{b}:{b}::/b/sandbox/home/bob:/bin/sh",
        ],
        [f"alice:x:{a}:", f"bob:x:{b}:", f"team:x:{team}:alice,bob"],
    ]
