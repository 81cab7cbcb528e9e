"""The settings of a sandbox, their checks, and the node names and addresses that they imply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from trnslurm.config.catalog import InstanceType, catalog, find
from trnslurm.errors import SandboxError
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.rehearsal import Rehearsal
from trnslurm.slurm.snapshot import Snapshot

MAX_NODES = 256
HEAD = "head-node"
HEAD_ADDRESS = "10.77.0.1"
PARTITION = "compute"
# --users selects the first of these. Each has a group of the same name; all are in the group TEAM.
USERS = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
TEAM = "team"
PREFIX_BITS = 16

# Keys of slurm.conf's NodeName line, which apply to every node.
NODE_KEYS = (
    "CPUs",
    "Boards",
    "Sockets",
    "SocketsPerBoard",
    "CoresPerSocket",
    "ThreadsPerCore",
    "RealMemory",
    "MemSpecLimit",
    "CpuSpecList",
    "CoreSpecCount",
    "TmpDisk",
    "Feature",
    "Gres",
    "Weight",
)
_NODE_KEY_OF = {key.lower(): key for key in NODE_KEYS} | {"features": "Feature"}
# The node keys with a number, from which slurmd's processors are made.
COUNTS = ("CPUs", "Sockets", "SocketsPerBoard", "CoresPerSocket", "ThreadsPerCore", "RealMemory")
# Keys that the sandbox depends on; --set rejects them.
OWNED_KEYS = (
    "ClusterName",
    "SlurmctldHost",
    "SlurmUser",
    "SlurmdUser",
    "AuthType",
    "StateSaveLocation",
    "SlurmdSpoolDir",
    "SlurmctldPidFile",
    "SlurmdPidFile",
    "SlurmctldLogFile",
    "SlurmdLogFile",
    "SlurmctldPort",
    "SlurmdPort",
    "AccountingStorageHost",
    "AccountingStorageType",
    "NodeName",
    "NodeAddr",
    "Include",
    "PluginDir",
)
_GRES = r"(\w+(:\w+)?:[1-9]\d{0,2}(,(?=\w)|$))+"
_SETTING = re.compile(r"([A-Za-z][A-Za-z0-9]*)=([ -~]*)")


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """The options of `trnslurm sandbox up`."""

    nodes: int = 4
    like: str = "trn1.32xlarge"
    """The instance type that the nodes claim to be, or the file that `seen` comes from."""
    seen: Mapping[str, Any] | None = None
    """The output of `cluster detect --dump` for the cluster that the sandbox is modeled on."""
    accounting: bool = False
    neuron_stand_ins: bool = False
    users: int = 0
    """The number of users in addition to the one who started the sandbox."""
    set: tuple[str, ...] = ()
    """Lines `Key=Value` for slurm.conf."""
    python: str = ""
    """The interpreter that jobs run under."""
    slurm: str = ""
    """The prefix of the sandbox's Slurm; if empty, the prefix of the srun on PATH."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise SandboxError(f"--nodes {self.nodes}: a sandbox can have 1 to {MAX_NODES} nodes")
        if not 0 <= self.users <= len(USERS):
            raise SandboxError(
                f"--users {self.users}: a sandbox can have up to {len(USERS)} additional users"
            )
        for setting in self.set:
            _check_setting(setting)
        is_neuron = not self.seen and self.instance.device.on_trainium
        if self.neuron_stand_ins and not is_neuron:
            raise SandboxError(f"--neuron-stand-ins: {self.like} has no Neuron devices")

    @cached_property
    def rehearsal(self) -> Rehearsal | None:
        """The cluster that the sandbox is modeled on, or None for instances of the type `like`."""
        return Rehearsal(Snapshot.parse(self.seen)) if self.seen else None

    @property
    def instance(self) -> InstanceType:
        """The catalog's entry for `like`."""
        types = catalog()
        of_clusters = {n: t for n, t in types.items() if not t.device.on_host}
        return find(of_clusters, self.like)

    @property
    def resource(self) -> str:
        """ParallelCluster's name for the kind of node, as in our cluster files: trn1, p4d."""
        return self.like.partition(".")[0]

    @property
    def node_names(self) -> list[str]:
        """ParallelCluster's names: queue, `dy` for dynamic, resource, number."""
        if self.rehearsal:
            return self.rehearsal.names
        return [f"{PARTITION}-dy-{self.resource}-{n}" for n in range(1, self.nodes + 1)]

    @property
    def user_names(self) -> tuple[str, ...]:
        return USERS[: self.users]

    def check_user(self, name: str) -> str:
        """Return the name of one of the sandbox's users, or raise an error that lists the users."""
        if name in self.user_names:
            return name
        names = ", ".join(self.user_names)
        hint = (
            f"its users are {names}" if names else "start it with `trnslurm sandbox up --users 2`"
        )
        raise SandboxError(f"there is no user {name!r} in this sandbox: {hint}")

    def node_number(self, word: str) -> int:
        """Return the number of a node given by number or name."""
        names = self.node_names
        if word in names:
            return names.index(word) + 1
        if word.isdecimal() and 1 <= int(word) <= self.nodes:
            return int(word)
        raise SandboxError(
            f"there is no node {word!r} in this sandbox: use 1 to {self.nodes}, or a name such as "
            f"{names[0]}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def settings_of(layout: Layout) -> SandboxSettings:
    """Return the settings that a sandbox was started with."""
    try:
        data: dict[str, Any] = json.loads(layout.settings.read_text(encoding="utf-8"))
        return SandboxSettings(**{**data, "set": tuple(data["set"])})
    except (OSError, ValueError, TypeError, KeyError):  # cut short, or from another version
        raise SandboxError(
            f"{layout.settings} is damaged: remove it with `trnslurm sandbox down --name "
            f"{layout.name}`"
        ) from None


def node_address(number: int) -> str:
    """Return the address of node 1, 2, …"""
    high, low = divmod(number, 256)
    return f"10.77.{1 + high}.{low}"


def split_settings(settings: Sequence[str]) -> tuple[list[tuple[str, str]], Mapping[str, str]]:
    """Split settings into lines of slurm.conf and words of its NodeName lines."""
    lines: list[tuple[str, str]] = []
    words: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if node_key := _NODE_KEY_OF.get(key.lower()):
            words[node_key] = value
        else:
            lines.append((key, value))
    return lines, words


def _check_setting(setting: str) -> None:
    match = _SETTING.fullmatch(setting)
    if not match:
        raise SandboxError(f"--set {setting!r}: expected Key=Value, a line for slurm.conf")
    key, value = match.groups()
    if not value.strip():
        raise SandboxError(f"--set {setting}: {key} needs a value")
    if key.lower() in {k.lower() for k in OWNED_KEYS}:
        raise SandboxError(f"--set {setting}: the sandbox depends on {key}, so it cannot be set")
    word = _NODE_KEY_OF.get(key.lower(), "")
    if word and " " in value:
        raise SandboxError(f"--set {setting}: {word} must be a single word")
    if word == "Gres" and not re.fullmatch(_GRES, value):
        raise SandboxError(f"--set {setting}: Gres must be name:count or name:type:count")
    if word in COUNTS and not re.fullmatch(r"[1-9]\d{0,6}", value):
        raise SandboxError(f"--set {setting}: {word} must be a number")
