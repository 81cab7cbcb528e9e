"""Builds the parts of a sandbox for its holder: mounts, network, daemons, nodes; obeys orders."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trnslurm.errors import SandboxError
from trnslurm.sandbox import configuration
from trnslurm.sandbox.daemons import Daemons, run
from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.machine import SandboxHost
from trnslurm.sandbox.namespaces import as_user, environment, login
from trnslurm.sandbox.nodes import BRIDGE, NodeLink
from trnslurm.sandbox.rehearsal import Rehearsal
from trnslurm.sandbox.settings import HEAD, HEAD_ADDRESS, PREFIX_BITS, settings_of

_NODES_S = 90
_POLL_S = 0.1
_BRIDGE_MAC = "02:77:10:00:00:01"  # locally administered
_MOST_NAMED = 4
# slurmctld notices a reboot only if it is later, in whole seconds, than the node's last message.
_DARK_S = 2.1
# slurmctld records a node's boot up to a second too late. An answer after this time is later than
# the recorded boot. A node that is set to RESUME earlier can go down again as rebooted.
# https://github.com/SchedMD/slurm/blob/slurm-22-05-8-1/src/slurmctld/node_mgr.c#L3076-L3093
_YOUNG_S = 1.1
_SLURMCTLD_PORT = 6820
_SLURMD_PORT = 6818
_SLURMDBD_PORT = 6819
_MARIADB_PORT = 3306


class BootedCluster:
    """The sandbox as seen by its holder."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._settings = settings_of(layout)
        self._rehearsal = self._settings.rehearsal
        self._host = SandboxHost.of(layout)
        self._user = as_user(self._host)
        self._users = self._settings.user_names
        self._daemons = Daemons(lambda name: layout.log / f"{name}.out")
        self._disks: set[Path] = set()
        os.environ.update(environment(layout))
        slurmd = [*self._user, self._host.commands["slurmd"]]
        stepd = Path(self._host.commands["slurmd"]).with_name("slurmstepd")
        slurmd += ["-d", str(stepd)] if stepd.is_file() else []
        self._nodes = []
        for n, (name, words) in enumerate(configuration.node_words(self._settings).items(), 1):
            own = ["env", f"HWLOC_SYNTHETIC={configuration.topology(words)}", *slurmd]
            munged = self._munged(f"munge-{n}")
            self._nodes.append(NodeLink(layout, n, name, slurmd=own, munged=munged))

    def boot(self) -> None:
        """Build everything, and wait until every node is idle."""
        self._step("file systems and network", self._mounts, self._network)
        if self._users:
            self._step(f"users {', '.join(self._users)}", self._homes)
        self._step("munge", self._munge)
        if self._settings.accounting:
            self._step("database", self._mariadb)
            self._step("slurmdbd", self._slurmdbd)
        like = self._rehearsal
        if like and like.has_accounting:
            # Partitions refer to QOS, which must exist; limits refer to GRES that slurmctld adds.
            self._step("accounts", partial(self._accounts, like), self._slurmctld)
            self._step("limits", partial(self._limits, like))
        else:
            self._step("slurmctld", self._slurmctld)
        self._step("slurmd on every node", self._power_on, self._wait_for_nodes)

    def reap(self) -> None:
        """Reap the processes that have ended, including orphans."""
        ended = self._daemons.reap()
        for node in self._nodes:
            node.ended(ended)

    def obey(self, order: dict[str, Any]) -> Any:
        """Carry out one order; return the result, or raise the reason for failing."""
        self.reap()
        match order:
            case {"do": "state"}:
                return {
                    "daemons": self._daemons.running(),
                    "nodes": ["on" if node.is_on else "off" for node in self._nodes],
                }
            case {"daemon": "slurmdbd"} if not self._settings.accounting:
                raise SandboxError("there is no slurmdbd: start the sandbox with --accounting")
            case {"do": "kill", "daemon": daemon}:
                self._daemons.kill(daemon)
                return f"{daemon} killed"
            case {"do": "start", "daemon": daemon}:
                {"slurmctld": self._slurmctld, "slurmdbd": self._slurmdbd}[daemon]()
                return f"{daemon} started"
            case {"do": "disk", "directory": directory, "mib": mib}:
                return self._disk(Path(directory), mib)
            case {"do": action, "node": number}:
                return self._node_order(self._nodes[number - 1], action, order)
        raise SandboxError(f"unknown order {order}")

    def _step(self, what: str, *parts: Callable[[], None]) -> None:
        with self._layout.progress.open("a", encoding="utf-8") as file:
            file.write(f"{what}\n")
        for part in parts:
            part()

    def _mounts(self) -> None:
        layout = self._layout
        run(["mount", "--make-rshared", "/"])  # so that the nodes see later mounts too
        run(["mount", "-t", "proc", "proc", "/proc"])
        if self._users:
            # Not a mount on each file: `useradd` on this machine replaces the files, and the kernel
            # drops a mount on a replaced file.
            lower = f"lowerdir={layout.accounts}:/etc"
            run(["mount", "-t", "overlay", "-o", lower, "overlay", "/etc"])
        for source, target in (
            (layout.bin_inside, layout.bin),
            (layout.etc, Path("/etc/slurm")),
            (layout.etc, Path("/opt/slurm/etc")),
            (layout.etc / "hosts", Path("/etc/hosts")),
        ):
            if target.exists():
                run(["mount", "--bind", str(source), str(target)])

    def _network(self) -> None:
        socket.sethostname(HEAD)
        run(["ip", "link", "set", "lo", "up"])
        # A bridge without an address uses the lowest address of its ports, which changes as nodes
        # are plugged in; nodes that know the previous address lose slurmctld for up to 3 s
        # (br_stp_recalculate_bridge_id in Linux's net/bridge/br_stp_if.c).
        run(["ip", "link", "add", BRIDGE, "address", _BRIDGE_MAC, "type", "bridge"])
        run(["ip", "address", "add", f"{HEAD_ADDRESS}/{PREFIX_BITS}", "dev", BRIDGE])
        run(["ip", "link", "set", BRIDGE, "up"])

    def _homes(self) -> None:
        """Give each user a home, and check that the users can run jobs."""
        for name in self._users:
            home = self._layout.homes / name
            home.mkdir(mode=0o700)
            shutil.chown(home, name, name)
        python, conf = self._settings.python, self._layout.etc / "slurm.conf"
        for test, what in (("-x", python), ("-r", str(conf))):
            try:
                run([*login(self._users[0]), "test", test, what])
            except SandboxError:
                remedy = (
                    "pass a --python that everyone can run"
                    if what == python
                    else "set TRNSLURM_SANDBOXES to a directory that everyone can enter"
                )
                raise SandboxError(
                    f"the users cannot read {what}, because a parent directory is private: {remedy}"
                ) from None

    def _munge(self) -> None:
        key = self._layout.etc / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        os.chown(key, *self._owner)
        self._daemons.start("munged", self._munged("munge"))
        self._daemons.wait("munged", (self._layout.run / "munge.sock").is_socket)

    def _munged(self, name: str) -> list[str]:
        """Return the command of a munged. The head node and each node have their own.

        If two nodes read a credential, a shared munged would report it as a replay, which only a
        Slurm built for several slurmds on one machine accepts.
        """
        files = {
            "socket": f"run/{name}.sock",
            "pid-file": f"run/{name}.pid",
            "log-file": f"log/{name}d.log",
            "seed-file": f"state/{name}.seed",
            "key-file": "etc/munge.key",
        }
        options = [f"--{option}={self._layout.path / file}" for option, file in files.items()]
        command = [self._host.commands["munged"], "--foreground", "--force", "--num-threads=4"]
        return [*self._user, *command, *options]

    def _mariadb(self) -> None:
        data = self._layout.state / "mariadb"
        # Not /tmp: MariaDB names its files there by pid, and other sandboxes have the same pids.
        tmpdir = f"--tmpdir={self._layout.state}"
        password = secrets.token_hex(16)
        init = self._layout.etc / "init.sql"
        _write_private(init, configuration.database_init(password))
        text = configuration.slurmdbd_conf(self._layout, self._host, password)
        _write_private(self._layout.etc / "slurmdbd.conf", text)
        options = ["--no-defaults", f"--datadir={data}", f"--user={self._host.user}", tmpdir]
        if not data.is_dir():
            install = [*self._user, self._host.commands["mariadb-install-db"], *options]
            run([*install, "--auth-root-authentication-method=normal", "--skip-test-db"])
        options += [
            f"--socket={self._layout.run}/mariadb.sock",
            f"--init-file={init}",
            f"--pid-file={self._layout.run}/mariadb.pid",
            "--bind-address=127.0.0.1",
            f"--port={_MARIADB_PORT}",
            "--innodb-buffer-pool-size=64M",
        ]
        self._daemons.start("mariadbd", [*self._user, self._host.commands["mariadbd"], *options])
        self._daemons.wait("mariadbd", lambda: _listens("127.0.0.1", _MARIADB_PORT))

    def _slurmdbd(self) -> None:
        self._daemons.start("slurmdbd", [*self._user, self._host.commands["slurmdbd"], "-D"])
        self._daemons.wait("slurmdbd", lambda: _listens(HEAD_ADDRESS, _SLURMDBD_PORT))

    def _slurmctld(self) -> None:
        command = [*self._user, self._host.commands["slurmctld"], "-D"]
        # Without -i, slurmctld 25.05 and later does not restart after a KILL (no usage files).
        command += ["-i"] if self._settings.accounting and self._host.version >= (25, 5) else []
        self._daemons.start("slurmctld", command)
        self._slurmctld_listens()

    def _slurmctld_listens(self) -> None:
        """Wait until slurmctld listens; if it has ended, raise its last error."""
        self._daemons.wait("slurmctld", lambda: _listens(HEAD_ADDRESS, _SLURMCTLD_PORT))

    def _accounts(self, rehearsal: Rehearsal) -> None:
        self._sacctmgr("add", "cluster", configuration.CLUSTER)
        for words in rehearsal.accounts(self._host.user):
            self._sacctmgr(*words)

    def _limits(self, rehearsal: Rehearsal) -> None:
        for words in rehearsal.limits(self._host.user):
            self._sacctmgr(*words)

    def _sacctmgr(self, *words: str) -> None:
        sacctmgr = [*self._user, str(self._host.client_dir / "sacctmgr"), "--immediate", "--quiet"]
        run([*sacctmgr, *words])

    def _power_on(self) -> None:
        for step in (NodeLink.power_on, NodeLink.plug_in, NodeLink.connect):
            for node in self._nodes:
                step(node)

    def _wait_for_nodes(self) -> None:
        sinfo = [*self._user, str(self._host.client_dir / "sinfo")]
        deadline = time.monotonic() + _NODES_S
        left_out = self._rehearsal.unusable if self._rehearsal else set()
        while True:
            try:
                text = run([*sinfo, "--noheader", "--Node", "--format=%N|%T|%E"])
            except SandboxError:
                self._slurmctld_listens()  # newer versions listen before they load plugins
                raise
            rows = [line.split("|", 2) for line in text.splitlines()]
            unready = {
                name: f"{name} is {state} ({why})"
                for name, state, why in rows
                if state != "idle" and name not in left_out
            }
            if not unready:
                return
            for node in self._nodes:
                if node.name in unready:
                    node.order(do="slurmd-check")
            if time.monotonic() > deadline:
                some = ", ".join(list(unready.values())[:_MOST_NAMED])
                more = len(unready) - _MOST_NAMED
                also = f" and {more} more" if more > 0 else ""
                raise SandboxError(f"{some}{also} after {_NODES_S} s")
            time.sleep(_POLL_S)

    def _node_order(self, node: NodeLink, action: str, order: dict[str, Any]) -> str:
        match action:
            case "power-off":
                node.power_off()
                return "powered off"
            case "power-on" | "reboot":
                if action == "reboot":
                    node.power_off()
                    time.sleep(_DARK_S)
                node.power_on(rebooted=True)
                node.plug_in()
                node.connect()
                self._await_slurmd(node)
                return "rebooted" if action == "reboot" else "powered on"
            case "link-down" | "link-up":
                return node.link(action.removeprefix("link-"))
        return node.order(**order)

    @staticmethod
    def _await_slurmd(node: NodeLink) -> None:
        """Wait until a booted node has run for a second, then announce its network card.

        Not earlier, because the node should contact slurmctld first, which remembers the previous
        card. If slurmctld gets the answer to a ping before the node registers, it notices no
        reboot.
        """
        deadline = time.monotonic() + _NODES_S
        while not _listens(node.address, _SLURMD_PORT):
            node.order(do="slurmd-check")
            if time.monotonic() > deadline:
                raise SandboxError(f"slurmd on {node.name} is not listening after {_NODES_S} s")
            time.sleep(_POLL_S)
        time.sleep(_YOUNG_S)
        node.order(do="announce", address=node.address)

    def end(self) -> None:
        """End every other process of the sandbox, and remove its files."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        run(["umount", str(self._layout.bin)])  # a mount would prevent removing the directory
        shutil.rmtree(self._layout.path)
        with contextlib.suppress(OSError):  # there can be other sandboxes
            self._layout.path.parent.rmdir()

    def _disk(self, directory: Path, mib: int) -> str:
        if mib == 0:
            if directory not in self._disks:
                raise SandboxError(f"no sandbox file system is mounted on {directory}")
            run(["umount", "--lazy", str(directory)])
            self._disks.remove(directory)
            return f"{directory} is restored"
        if directory in self._disks:
            raise SandboxError(
                f"a file system is already mounted on {directory}: use disk {directory} off"
            )
        uid, gid = self._owner
        options = f"size={mib}M,mode=0700,uid={uid},gid={gid}"
        run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)])
        self._disks.add(directory)
        return f"{directory} is a file system of {mib} MiB inside the sandbox"

    @property
    def _owner(self) -> tuple[int, int]:
        """The user ID and group ID inside the sandbox: those of root in a user namespace."""
        return (0, 0) if self._host.user_namespace else (self._host.uid, self._host.gid)


def _write_private(file: Path, text: str) -> None:
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False
