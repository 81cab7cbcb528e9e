"""Makes the files that Slurm, the database and trnslurm read in a sandbox, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from trnslurm.devices import CPU, XLA_CPU
from trnslurm.errors import did_you_mean
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.machine import SandboxHost
from trnslurm.sandbox.rehearsal import gres_of
from trnslurm.sandbox.settings import (
    HEAD,
    HEAD_ADDRESS,
    NODE_KEYS,
    PARTITION,
    TEAM,
    USERS,
    SandboxSettings,
    node_address,
    split_settings,
)
from trnslurm.slurm.profile import slurm_keys

# The settings of ParallelCluster's cookbook that work on one machine, without cgroups (ordinary
# users have none), power saving (there is nothing to power up) and nss_slurm.
PARALLELCLUSTER: Mapping[str, str] = {
    "AuthInfo": "cred_expire=70",
    "EnforcePartLimits": "ALL",
    "GresTypes": "gpu",
    "InactiveLimit": "0",
    "JobCompType": "jobcomp/none",
    "KillWait": "30",
    "MailProg": "/bin/true",
    "MessageTimeout": "60",
    "MinJobAge": "300",
    "MpiDefault": "none",
    "PrivateData": "cloud",
    "ReconfigFlags": "KeepPartState",
    "ReturnToService": "1",
    "SchedulerType": "sched/backfill",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "SlurmctldDebug": "info",
    "SlurmctldTimeout": "300",
    "SlurmdDebug": "info",
    "SlurmdTimeout": "180",
    "SwitchType": "switch/none",
    "TreeWidth": "65533",
    "UnkillableStepTimeout": "300",  # newer versions of Slurm require five times MessageTimeout
    "WaitTime": "0",
}
CLUSTER = "parallelcluster"
# Differs from ParallelCluster: nodes claim CPUs and memory, cgroups track no processes, and tasks
# are not bound. task/affinity cannot bind a task to a CPU that this machine does not have: the job
# fails before its first line, and its node is drained.
_HERE = {
    "SlurmdParameters": "config_overrides",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
}
# The first id of the sandbox's users, who own files on this machine while it is up. systemd calls
# the ids between those of its containers and 2**31 unused (https://systemd.io/UIDS-GIDS/).
FIRST_ID = 2_000_000_001
# ParallelCluster leaves this share of the memory to the system.
_SCHEDULABLE_MEMORY = 0.95
_WORKERS = range(1, 9)
_CPU_NODE = {
    "device": CPU.name,
    "accelerators": 1,
    "workers": [*_WORKERS],
    "multi_node_workers": [*_WORKERS],
}


def slurm_conf(layout: Layout, settings: SandboxSettings, host: SandboxHost, first_job: int) -> str:
    """Return slurm.conf; `first_job` avoids repeating the job IDs of earlier sandboxes."""
    extra, _ = split_settings(settings.set)
    values = dict(PARALLELCLUSTER) | _HERE | _accounting(layout, settings)
    values["FirstJobId"] = str(first_job)
    default = f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    partitions = {PARTITION: default}
    if rehearsal := settings.rehearsal:
        partitions = rehearsal.partitions()
        values |= _config(settings)
    for key, value in extra:
        if key.lower() == "partitionname":
            partitions[value.split()[0]] = f"PartitionName={value}"
        else:
            known = next((k for k in values if k.lower() == key.lower()), key)
            values[known] = value
    chosen = {key.lower() for key, _ in extra} | {key.lower() for key in _config(settings)}
    if values["SelectType"] == "select/linear" and "selecttypeparameters" not in chosen:
        del values["SelectTypeParameters"]  # it rejects those of select/cons_tres
    values["AuthInfo"] = f"socket={layout.run}/munge.sock,{values['AuthInfo']}"
    lines = [f"# Written by `trnslurm sandbox up --name {layout.name}`."]
    lines += [f"{key}={value}" for key, value in _owned(layout, host).items()]
    lines += [f"{key}={value}" for key, value in sorted(values.items())]
    for n, (name, words) in enumerate(node_words(settings).items(), 1):
        facts = " ".join(f"{key}={value}" for key, value in ({"State": "UNKNOWN"} | words).items())
        lines.append(f"NodeName={name} NodeAddr={node_address(n)} {facts}")
    return "\n".join([*lines, *partitions.values()]) + "\n"


def _config(settings: SandboxSettings) -> dict[str, str]:
    return settings.rehearsal.config() if settings.rehearsal else {}


def cgroup_conf(host: SandboxHost) -> str:
    """Return cgroup.conf. slurmd uses no cgroup, because an ordinary user cannot create one.

    Without the file, slurmd uses the cgroups of this machine. If there is only version 2, it
    requests a scope from systemd. Slurm supports `disabled` since 24.05. The plugin for version 1
    does nothing until a plugin that needs cgroups is configured.
    """
    plugin = "disabled" if host.version >= (24, 5) else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def unknown_key_hint(key: str) -> str:
    """Return a suggestion for a key that slurmctld did not recognize."""
    return did_you_mean(key, [*PARALLELCLUSTER, *_HERE, *NODE_KEYS])


def devices(settings: SandboxSettings) -> list[str]:
    """Return the names of the device files that represent generic resources."""
    every = (g for words in node_words(settings).values() for g in gres_of(words.get("Gres", "")))
    return sorted({f"{g.name}{g.kind}-{n}" for g in every for n in range(g.count)})


def gres_conf(layout: Layout, settings: SandboxSettings) -> str:
    """Return gres.conf, whose device files slurmd counts and numbers in CUDA_VISIBLE_DEVICES."""
    nodes: dict[str, list[str]] = {}
    for name, words in node_words(settings).items():
        for g in gres_of(words.get("Gres", "")):
            kind = f" Type={g.kind}" if g.kind else ""
            numbers = f"[0-{g.count - 1}]" if g.count > 1 else "0"
            line = f"Name={g.name}{kind} File={layout.devices}/{g.name}{g.kind}-{numbers}"
            nodes.setdefault(line, []).append(name)
    return "".join(f"NodeName={','.join(names)} {line}\n" for line, names in nodes.items())


def topology(words: Mapping[str, str]) -> str:
    """Return the processors that slurmd should find on a node, in hwloc's synthetic syntax.

    Claimed CPUs are not enough for `--set TaskPlugin=task/affinity`, which binds tasks to the
    processors that slurmd finds.
    """
    sockets = int(words.get("Sockets") or words.get("SocketsPerBoard") or words["CPUs"])
    cores, threads = int(words.get("CoresPerSocket", 1)), int(words.get("ThreadsPerCore", 1))
    return f"package:{sockets} core:{cores} pu:{threads}"


def hosts(settings: SandboxSettings) -> str:
    """Return /etc/hosts, with the host names of ParallelCluster's private DNS zone."""
    lines = ["127.0.0.1 localhost", f"{HEAD_ADDRESS} {HEAD}"]
    lines += [f"{node_address(n)} {name}" for n, name in enumerate(settings.node_names, 1)]
    return "\n".join(lines) + "\n"


def accounts(layout: Layout, settings: SandboxSettings, passwd: str, group: str) -> tuple[str, str]:
    """Return this machine's /etc/passwd and /etc/group with the sandbox's users added.

    Inside the sandbox, a user of the sandbox replaces a user of the machine with the same name.
    """
    names = settings.user_names
    ids = {name: FIRST_ID + n for n, name in enumerate(names)}
    team = FIRST_ID + len(USERS)
    users = [f"{name}:x:{i}:{i}::{layout.homes / name}:/bin/sh" for name, i in ids.items()]
    groups = [f"{name}:x:{i}:" for name, i in ids.items()] + [f"{TEAM}:x:{team}:{','.join(names)}"]
    return _with_lines(passwd, users), _with_lines(group, groups)


def _with_lines(text: str, ours: list[str]) -> str:
    names = {line.partition(":")[0] for line in ours}
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in names]
    return "\n".join([*kept, *ours]) + "\n"


def slurmdbd_conf(layout: Layout, host: SandboxHost, password: str) -> str:
    """Return slurmdbd.conf. It contains the password, so only its user may read it."""
    plugins = f"PluginDir={host.plugins}\n" if host.plugins else ""
    return f"""\
{plugins}AuthType=auth/munge
AuthInfo=socket={layout.run}/munge.sock
DbdHost={HEAD}
DbdAddr={HEAD_ADDRESS}
SlurmUser={host.user}
LogFile={layout.log}/slurmdbd.log
PidFile={layout.run}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass={password}
"""


def database_init(password: str) -> str:
    """Return the SQL that MariaDB runs when it starts."""
    return (
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
        f"CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n"
    )


def _owned(layout: Layout, host: SandboxHost) -> dict[str, str]:
    plugins = {"PluginDir": str(host.plugins)} if host.plugins else {}
    return plugins | {
        "ClusterName": CLUSTER,
        "SlurmctldHost": f"{HEAD}({HEAD_ADDRESS})",
        "SlurmctldPort": "6820",
        "SlurmdPort": "6818",
        "SlurmUser": host.user,
        "SlurmdUser": host.user,
        "AuthType": "auth/munge",
        "StateSaveLocation": f"{layout.state}/slurmctld",
        "SlurmdSpoolDir": f"{layout.state}/%n",
        "SlurmctldPidFile": f"{layout.run}/slurmctld.pid",
        "SlurmdPidFile": f"{layout.run}/%n.pid",
        "SlurmctldLogFile": f"{layout.log}/slurmctld.log",
        "SlurmdLogFile": f"{layout.log}/%n.log",
    }


def _accounting(layout: Layout, settings: SandboxSettings) -> dict[str, str]:
    if not settings.accounting:
        return {
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
        }
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": HEAD_ADDRESS,
        "AccountingStoragePass": f"{layout.run}/munge.sock",  # not AuthInfo
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "30",
    }


def node_words(settings: SandboxSettings) -> dict[str, dict[str, str]]:
    """Return the words on each node's line in slurm.conf."""
    _, own = split_settings(settings.set)
    if settings.rehearsal:
        return {name: words | dict(own) for name, words in settings.rehearsal.words().items()}
    instance = settings.instance
    features = ["dynamic", settings.like, settings.resource]
    facts = {
        "CPUs": str(instance.vcpus),
        "RealMemory": str(int(instance.host_gib * 1024 * _SCHEDULABLE_MEMORY)),
        "Feature": ",".join([*features, "efa"] if instance.efa else features),
    }
    if instance.gpus:
        facts["Gres"] = f"gpu:{instance.gpus}"
    return {name: {**facts, **own} for name in settings.node_names}


def profile(layout: Layout, settings: SandboxSettings) -> str:
    """Return the cluster profile: a Slurm cluster whose nodes compute on this machine's CPU."""
    likely = settings.rehearsal.best() if settings.rehearsal else None
    name = "sandbox-" + (settings.like if not settings.seen else "node")
    tree: dict[str, Any] = {
        "description": f"Sandbox on this machine: {settings.nodes} nodes that look like "
        f"{settings.like}, jobs on its CPU",
        "scheduler": "slurm",
        "instance_type": name,
        "prefer_preset": "tiny",
        "workers_per_node": 1,
        "python": settings.python,
        # Only `doctor --run` with device neuron reads the second line.
        "activate": [
            f'export PATH="{layout.neuron_bin}:$PATH"',
            f"export TRNSLURM_STAND_IN_DEVICE={XLA_CPU}",
        ]
        if settings.neuron_stand_ins
        else [],
        "slurm": {"bin_dir": str(layout.bin)},
    }
    if likely:
        keys = slurm_keys(likely) | ({"gpus_per_node": likely.gpus} if likely.gpus else {})
        tree["slurm"] |= {key: value for key, value in keys.items() if value is not None}
        size = {"vcpus": likely.cpus, "host_gib": likely.memory_mib // 1024}
        tree["instance_types"] = {name: _CPU_NODE | size}
    elif settings.seen:
        tree["instance_types"] = {name: _CPU_NODE}
    else:
        tree["slurm"] |= {"partition": PARTITION, "max_nodes": settings.nodes}
        tree["instance_types"] = {name: _instance(settings)}
        if settings.instance.gpus:
            tree["slurm"]["gpus_per_node"] = settings.instance.gpus
    header = "# Written by `trnslurm sandbox up`, gone with `trnslurm sandbox down`.\n"
    return header + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100)


def _instance(settings: SandboxSettings) -> dict[str, Any]:
    """Return the claimed type with this machine's CPU as its device, and without a price."""
    facts = asdict(settings.instance)
    del facts["name"]
    _, words = split_settings(settings.set)
    if words.get("CPUs", "").isdecimal():
        facts["vcpus"] = int(words["CPUs"])
    facts |= {"device": XLA_CPU.name, "workers": [*_WORKERS], "multi_node_workers": [*_WORKERS]}
    return facts | {"efa": 0, "bf16_tflops": 0.0, "device_gib": 0, "price_per_hour": None}
