"""Where a sandbox keeps its files, and how to tell whether it is running."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trnslurm.contract.files import is_private
from trnslurm.contract.variables import Variable
from trnslurm.errors import SandboxError

DEFAULT_NAME = "sandbox"
_NAME = r"[a-z0-9][a-z0-9-]{0,19}"
_PATH = r"(?a)/[\w./-]*"
_SOCKET_MAX = 107


def base_dir() -> Path:
    """Return the directory of all this user's sandboxes on this machine.

    The directory is local to the machine, unlike a home, because a sandbox consists of processes on
    one machine. Its path is short, because the path of a socket is limited to 107 bytes.
    """
    return Path(os.environ.get(Variable.SANDBOXES) or f"/tmp/trnslurm-{os.getuid()}")


def replace_text(file: Path, text: str) -> None:
    """Replace a file that others may be reading; they see the old or the new content, complete."""
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


class Layout:
    """Every file name of one sandbox."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        own = DEFAULT_NAME if self.name == DEFAULT_NAME else f"{DEFAULT_NAME}-{self.name}"
        self.cluster = own
        """The name of its cluster profile."""
        self.settings = path / "settings.json"
        """The options of `up`."""
        self.host = path / "host.json"
        """The facts about the machine that `up` found."""
        self.entry = path / "entry"
        """Pid and network namespace of the holder, as seen from outside; exists while it is
        running."""
        self.progress = path / "progress"
        """One line per step of `up`, written by the holder."""
        self.failure = path / "failure"
        """Why `up` failed, on one line."""
        self.etc = path / "etc"
        """slurm.conf and related files; /etc/slurm inside."""
        self.run = path / "run"
        """Sockets and pid files."""
        self.socket = self.run / "holder.sock"
        """The socket on which the holder accepts orders."""
        self.log = path / "log"
        """The daemons' logs."""
        self.state = path / "state"
        """The state of slurmctld, slurmd and the database."""
        self.devices = self.state / "devices"
        """Links to /dev/null that represent GPUs."""
        self.accounts = path / "accounts"
        """The passwd and group files in /etc inside, if the sandbox has users."""
        self.homes = path / "home"
        """The home directories of the sandbox's users."""
        self.bin = path / "bin"
        """Slurm's commands, for use from outside; inside, `bin_inside` is mounted on it."""
        self.bin_inside = path / "bin-inside"
        """The links that are mounted on `bin` inside."""
        self.neuron = path / "neuron"
        """The stand-ins for the Neuron tools, with --neuron-stand-ins."""
        self.neuron_bin = self.neuron / "bin"
        self.profile = path / "cluster-config" / f"{own}.yaml"
        """The sandbox's cluster profile; trnslurm searches the sandbox's directory for it."""

    @classmethod
    def named(cls, name: str) -> Layout:
        """Return the layout of a sandbox, or reject its name."""
        if not re.fullmatch(_NAME, name):
            raise SandboxError(
                f"sandbox name {name!r}: use up to 20 lowercase letters, digits and '-'"
            )
        layout = cls(base_dir() / name)
        if not re.fullmatch(_PATH, str(layout.path)):
            raise SandboxError(
                f"{layout.path}: slurm.conf does not accept this path: set TRNSLURM_SANDBOXES to "
                "a path of "
                "letters, digits, '.', '_' and '-'"
            )
        if len(str(layout.socket)) > _SOCKET_MAX:
            raise SandboxError(
                f"{layout.path} is too long for a socket: set TRNSLURM_SANDBOXES to a shorter path"
            )
        return layout

    def node_pid(self, number: int) -> Path:
        """Pid of a node's first process, seen from the head node; exists while the node is on."""
        return self.run / f"node-{number}.pid"

    def is_up(self) -> bool:
        """Check whether the sandbox is usable: its holder is alive and has finished `up`."""
        return self.is_held() and self.entry.is_file()

    def is_held(self) -> bool:
        """Check whether its holder is alive; the kernel drops a lock when its process ends."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


def all_layouts() -> list[Layout]:
    """Return every sandbox of this user, running or crashed."""
    base = base_dir()
    if not is_private(base, readable=True):
        return []
    return [Layout(d) for d in sorted(base.iterdir()) if d.is_dir() and re.fullmatch(_NAME, d.name)]


def search_roots() -> list[Path]:
    """Return the directories of the running sandboxes, each with its cluster profile."""
    return [layout.path for layout in all_layouts() if layout.is_up()]


@contextmanager
def base_locked() -> Iterator[Path]:
    """Allow one `up` or `down` of this user at a time; remove the directory if it is empty."""
    base = base_dir()
    fd = _open_base(base)
    try:
        yield base
    finally:
        if not any(base.iterdir()):
            base.rmdir()
        os.close(fd)


def _open_base(base: Path) -> int:
    while True:
        try:
            base.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SandboxError(f"{base}: {error.strerror}") from None
        if not is_private(base, readable=True):
            raise SandboxError(
                f"{base} must be a directory that only you can write to: remove it, or set "
                "TRNSLURM_SANDBOXES to another short path"
            )
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if base.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:  # another `down` removed it while we waited
            pass
        os.close(fd)
