"""Finds the commands that a sandbox needs on this machine, and a way to create namespaces."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trnslurm.errors import SandboxError
from trnslurm.sandbox.layout import Layout

# Directories of daemons: those on root's PATH, Debian's /usr/sbin, and ParallelCluster's own.
_PLACES = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/opt/slurm/sbin", "/opt/slurm/bin")
# Command -> Debian package.
_COMMANDS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
}
_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
_SLURM = ("slurmctld", "slurmd", "slurmdbd", "sbatch", "srun")
_CLIENTS = (
    "sacct",
    "sacctmgr",
    "salloc",
    "sattach",
    "sbatch",
    "sbcast",
    "scancel",
    "scontrol",
    "scrontab",
    "sdiag",
    "sinfo",
    "sprio",
    "squeue",
    "sreport",
    "srun",
    "sshare",
    "sstat",
    "strigger",
)


@dataclass(frozen=True, kw_only=True)
class SandboxHost:
    """The machine that a sandbox is created on, and its user."""

    user: str
    uid: int
    gid: int
    unshare: tuple[str, ...]
    """The options of unshare that work here."""
    commands: Mapping[str, str]
    """The path of each command that the holder runs."""
    version: tuple[int, ...]
    """Slurm's version, such as (24, 11, 5)."""
    python: str
    """The interpreter that the holder runs under."""

    @classmethod
    def look(cls, *, accounting: bool, slurm: str = "") -> SandboxHost:
        """Inspect this machine, or raise what is missing; `slurm` is the prefix of Slurm."""
        commands = _needed_commands(accounting=accounting, prefix=slurm)
        return cls(
            user=_user_name(),
            uid=os.getuid(),
            gid=os.getgid(),
            commands=commands,
            version=_version(commands["slurmctld"]),
            unshare=tuple(_unshare_options()),
            python=sys.executable,
        )

    @property
    def user_namespace(self) -> bool:
        return "--user" in self.unshare

    @property
    def client_dir(self) -> Path:
        """The directory of Slurm's user commands."""
        return Path(self.commands["srun"]).parent

    @property
    def release(self) -> str:
        """Slurm's version in Slurm's notation: 22.05.8."""
        year, month, *rest = self.version
        return ".".join([str(year), f"{month:02}", *map(str, rest)])

    @property
    def plugins(self) -> Path | None:
        """The plugin directory of a Slurm in a separate prefix, or None for Slurm's default."""
        prefix = Path(self.commands["srun"]).resolve().parent.parent
        if prefix in (Path("/usr"), Path("/")):
            return None
        return next((file.parent for file in prefix.rglob("auth_munge.so")), None)

    @property
    def clients(self) -> list[str]:
        """The names of Slurm's user commands."""
        return [name for name in _CLIENTS if (self.client_dir / name).is_file()]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def of(cls, layout: Layout) -> SandboxHost:
        """Return the machine as recorded by `up`."""
        data: dict[str, Any] = json.loads(layout.host.read_text(encoding="utf-8"))
        return cls(**{**data, **{key: tuple(data[key]) for key in ("unshare", "version")}})


def find_command(name: str) -> str | None:
    """Return the absolute path of a command, ignoring the wrappers of sandboxes."""
    path = [
        directory
        for directory in os.environ.get("PATH", "").split(":")
        if not os.access(Path(directory).parent / "settings.json", os.R_OK)  # belongs to a sandbox
    ]
    found = shutil.which(name, path=":".join([*path, *_PLACES]))
    return str(Path(found).absolute()) if found else None


def _needed_commands(*, accounting: bool, prefix: str) -> dict[str, str]:
    """Return the path of each command that a sandbox runs, or raise how to install missing ones.

    All parts of Slurm come from one prefix, because commands and daemons of different versions
    cannot talk to each other.
    """
    packages = _COMMANDS | (_ACCOUNTING if accounting else {})
    found = {name: find_command(name) for name in packages}
    ours = [name for name in packages if name in _SLURM]
    if prefix:
        found |= {name: _in_prefix(Path(prefix), name) for name in ours}
        if missing := [name for name in ours if found[name] is None]:
            raise SandboxError(
                f"--slurm {prefix}: there is no {', '.join(missing)} in its bin or sbin directory"
            )
    elif srun := found["srun"]:
        same_prefix = {name: _in_prefix(Path(srun).parent.parent, name) for name in ours}
        found |= same_prefix if all(same_prefix.values()) else {}
    if missing := [name for name, path in found.items() if path is None]:
        words = " ".join(dict.fromkeys(packages[name] for name in missing))
        raise SandboxError(
            f"{', '.join(missing)} not found: run sudo apt-get install --no-install-recommends "
            f"{words}"
        )
    return {name: path for name, path in found.items() if path}


def _in_prefix(prefix: Path, name: str) -> str | None:
    return shutil.which(name, path=f"{prefix}/bin:{prefix}/sbin")


def _version(slurmctld: str) -> tuple[int, ...]:
    """Return the version of a Slurm, which prints `slurm 24.11.5` or `slurm-wlm 24.11.5`."""
    try:
        done = subprocess.run(
            [slurmctld, "-V"], capture_output=True, text=True, timeout=30, check=False
        )
        words = done.stdout.split()
        return tuple(int(part) for part in words[-1].split("-")[0].split(".")[:3])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        raise SandboxError(f"{slurmctld} -V does not print a Slurm version") from None


def _user_name() -> str:
    """Return the user's name, which Slurm looks up."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SandboxError(
            f"user ID {os.getuid()} has no name on this machine, but Slurm requires one: "
            "add it to /etc/passwd"
        ) from None


def _unshare_options() -> list[str]:
    """Return the options with which `unshare` works here: none for root, else a user namespace."""
    plain = ["--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--propagation=slave"]
    within = ["--user", "--map-root-user", *plain]
    words = ""
    for options in [plain, within] if os.getuid() == 0 else [within]:
        done = subprocess.run(
            ["unshare", *options, "true"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return options
        words = words or " ".join(done.stderr.split())
    raise SandboxError(
        f"this machine does not let you create namespaces ({words}): run as root, or have its "
        "administrator allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container: --privileged)"
    )
