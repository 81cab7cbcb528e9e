"""The real sshd, started by ssh itself: a login node for tests."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..waiting import eventually

LINK = Path(__file__).with_name("link.py")


@dataclass
class Login:
    """The login node `login1`, as ssh on this machine knows it."""

    above: Path
    home: Path
    """The account's own."""
    environ: dict[str, str]
    """Of the account's sessions."""
    server: list[str] = field(default_factory=list)
    """The words before sshd, if it runs in a sandbox."""
    user: str = field(default_factory=getpass.getuser)

    def start(self) -> None:
        """Write keys, and the configuration of both sides."""
        for name in ("host_key", "user_key"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.above / name)]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        (self.above / "authorized_keys").write_bytes((self.above / "user_key.pub").read_bytes())
        for public in ("user_key.pub", "authorized_keys"):
            (self.above / public).chmod(0o644)
        key = (self.above / "host_key.pub").read_text().split()
        (self.above / "known_hosts").write_text(f"login1 {key[0]} {key[1]}\n")
        self.start_again()

    def start_again(self) -> None:
        """Write the configurations, for the next connections."""
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        assert sshd, "apt-get install openssh-server"
        setenv = " ".join(f'"{name}={value}"' for name, value in self.environ.items())
        (self.above / "sshd_config").write_text(
            f"HostKey {self.above}/host_key\nAuthorizedKeysFile {self.above}/authorized_keys\n"
            "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nUsePAM no\nPidFile none\nSetEnv {setenv}\n"
        )
        words = [sys.executable, LINK, self.above, *self.server, sshd, "-i", "-f"]
        proxy = " ".join(f"'{word}'" for word in [*words, self.above / "sshd_config"])
        (self.above / "ssh_config").write_text(
            f"Host login1\n User {self.user}\n IdentityFile {self.above}/user_key\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {self.above}/known_hosts\n"
            f" GlobalKnownHostsFile none\n ProxyCommand {proxy}\n"
        )
        if os.getuid() == 0:  # root's sshd needs it, in a sandbox too; its service makes it
            Path("/run/sshd").mkdir(exist_ok=True)

    def plan(self, *connections: dict[str, object]) -> None:
        """Say how the next connections break."""
        (self.above / "plan").write_text("".join(f"{json.dumps(c)}\n" for c in connections))

    def forget_launcher(self) -> None:
        """Be an account that has never been used."""
        shutil.rmtree(self.home / ".cache")

    def alone(self) -> None:
        """Have each command make a connection of its own."""
        config = self.above / "ssh_config"
        config.write_text(f"{config.read_text()} ControlMaster no\n ControlPath none\n")
        os.environ["XDG_RUNTIME_DIR"] = str(self.above / ("too-long-for-a-socket" * 5))

    def connections(self) -> int:
        """How many there were."""
        file = self.above / "connections"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def until_nothing_is_left(self) -> None:
        """Wait until nothing is kept there of what was asked: its end was taken."""
        asks = self.home / ".cache/trnslurm/asks"
        eventually(lambda: not list(asks.iterdir()), said=lambda: list(asks.iterdir()))

    @property
    def runs(self) -> list[Path]:
        """The runs of the account."""
        return sorted(f.parent for f in self.home.glob("runs/*/run.json"))
