"""Ways into a sandbox: argument lists for nsenter, and wrappers made from them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trnslurm.contract.variables import Variable
from trnslurm.errors import SandboxError
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.machine import SandboxHost

_NAMESPACES = ("--mount", "--uts", "--net", "--pid")
# nsenter leaves the command in the root directory, so change back. The command ends with nsenter.
_RUN = 'cd -- "$1" && shift && exec setpriv --pdeathsig TERM "$@"'


def holder_pid(layout: Layout) -> int:
    """Return the holder's pid as seen from outside, or raise that the sandbox is not running."""
    if layout.is_up():
        pid, net = layout.entry.read_text(encoding="utf-8").split()
        try:
            if str(Path(f"/proc/{pid}/ns/net").readlink()) == net:
                return int(pid)
        except FileNotFoundError:
            pass
    raise SandboxError(
        f"sandbox {layout.name} is not running: start it with `{up_command(layout)}`"
    )


def up_command(layout: Layout) -> str:
    """Return the command that starts a sandbox."""
    named = "" if layout.cluster == layout.name else f" --name {layout.name}"
    return f"trnslurm sandbox up{named}"


def enter(
    layout: Layout, command: Sequence[str], *, node: int | None = None, user: str | None = None
) -> list[str]:
    """Return the argument list that runs a command on the head node or on another node.

    `user` is one of the sandbox's users; the command starts in that user's home.
    """
    pid = str(holder_pid(layout))
    host = SandboxHost.of(layout)
    argv = _outer(host, pid)
    if node is not None:
        try:
            inner = layout.node_pid(node).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise SandboxError(f"sandbox {layout.name}: node {node} is off") from None
        argv += ["setpriv", "--pdeathsig", "TERM", "nsenter", f"--target={inner}"]
        argv += [*_NAMESPACES, "--"]
    who, where = (login(user), layout.homes / user) if user else (as_user(host), Path.cwd())
    return [*argv, *who, "/bin/sh", "-c", _RUN, "sh", str(where), *command]


def as_user(host: SandboxHost) -> list[str]:
    """Return the command that turns the sandbox's root into the ordinary user who started it."""
    if not host.user_namespace:
        return []
    return ["unshare", f"--map-user={host.uid}", f"--map-group={host.gid}"]


def login(name: str) -> list[str]:
    """Return the command with which root permanently becomes one of the sandbox's users."""
    words = (f"--reuid={name}", f"--regid={name}", "--init-groups", "--inh-caps=-all")
    return ["setpriv", *words, "--no-new-privs"]


def environment(layout: Layout) -> dict[str, str]:
    """Return the environment variables that processes inside need."""
    return {"SLURM_CONF": str(layout.etc / "slurm.conf")}


def commands(layout: Layout) -> str:
    """Return the directories that come first on PATH inside."""
    tools = f"{layout.neuron_bin}:" if layout.neuron_bin.is_dir() else ""
    return f"{tools}{layout.bin}"


def login_environment(layout: Layout, user: str, python: str) -> dict[str, str]:
    """Return the login environment of one of the sandbox's users, without our variables.

    PATH contains the directory of the jobs' Python, where trnslurm may be installed.
    """
    kept = {name: os.environ[name] for name in ("TERM", "PYTHONPATH") if name in os.environ}
    own = {"HOME": str(layout.homes / user), "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}
    path = f"{commands(layout)}:{Path(python).parent}:/usr/local/bin:/usr/bin:/bin"
    site = {Variable.PATH: str(layout.path), Variable.CLUSTER: layout.cluster}
    return kept | own | {"PATH": path, "SHELL": "/bin/sh"} | site | environment(layout)


def wrapper(layout: Layout, host: SandboxHost) -> str:
    """Return the script that runs the Slurm command of the same name inside the sandbox."""
    outer = " ".join(_outer(host, '"$pid"'))
    user = shlex.join(as_user(host))
    directory, wrappers = shlex.quote(str(host.client_dir)), shlex.quote(str(layout.bin))
    settings = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in environment(layout).items())
    return f"""\
#!/bin/sh
# Runs a Slurm command inside the sandbox {layout.name}. Written by `trnslurm sandbox up`.
command=${{0##*/}}
if ! read -r pid net 2> /dev/null < {shlex.quote(str(layout.entry))} ||
  [ "$(readlink "/proc/$pid/ns/net")" != "$net" ]; then
  echo "error: $command: sandbox {layout.name} is not running: use {up_command(layout)}" >&2
  exit 1
fi
# A job that calls srun must not find another Slurm on this machine.
case $(command -v srun) in
  '' | {directory}/srun | {wrappers}/srun) ;;
  *) export PATH={wrappers}:"$PATH" ;;
esac
{settings}exec {outer} {user} /bin/sh -c {shlex.quote(_RUN)} sh \\
  "$PWD" {directory}/"$command" "$@"
"""


def _outer(host: SandboxHost, pid: str) -> list[str]:
    user = ["--user", "--preserve-credentials"] if host.user_namespace else []
    return ["nsenter", f"--target={pid}", *user, *_NAMESPACES, "--"]
