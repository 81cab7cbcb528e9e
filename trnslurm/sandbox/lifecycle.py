"""Starts and ends sandboxes: their files, wrappers, profile and holder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import trnslurm
from trnslurm.errors import SandboxError
from trnslurm.sandbox import configuration, neuron
from trnslurm.sandbox.layout import Layout, base_locked
from trnslurm.sandbox.machine import SandboxHost
from trnslurm.sandbox.namespaces import wrapper
from trnslurm.sandbox.settings import SandboxSettings, settings_of

_UP_S = 240
_DOWN_S = 30
_POLL_S = 0.05
_JOB_IDS = 60_000_000  # below Slurm's MaxJobId, 67 108 863
_JOB_IDS_PER_S = 4  # sandboxes can start seconds apart; no number repeats within 173 days


def up(
    layout: Layout, settings: SandboxSettings, *, owner: int | None, say: Callable[[str], None]
) -> bool:
    """Start a sandbox, after cleaning up after a crash; return False if it is already running.

    The sandbox ends with the process whose pid is `owner`.
    """
    with base_locked():
        if layout.is_up():
            _refuse_other_settings(layout, settings)
            return False
        _remove(layout)
        host = SandboxHost.look(accounting=settings.accounting, slurm=settings.slurm)
        if settings.users and host.user_namespace:
            raise SandboxError(
                f"--users {settings.users}: only root can run processes of other users on this "
                "machine: use "
                "sudo, or remove --users"
            )
        try:
            layout.path.mkdir(mode=0o700)
            with _umask(0o022):  # its users can read slurm.conf, but not write to it
                _write_files(layout, settings, host)
            if settings.users:  # users may pass through, but not list
                for directory in (layout.path.parent, layout.path):
                    directory.chmod(0o711)
            holder = _start_holder(layout, host, owner)
            _wait_until_up(layout, holder, say)
        except BaseException:
            _remove(layout)
            raise
    return True


def down(layout: Layout) -> bool:
    """End a sandbox and remove its files; return False if there was none."""
    with base_locked():
        found = layout.path.exists() or bool(_holders(layout))
        _remove(layout)
    return found


def _refuse_other_settings(layout: Layout, asked: SandboxSettings) -> None:
    found = settings_of(layout)
    if found == asked:
        return
    differing = [k for k in asked.__dataclass_fields__ if getattr(asked, k) != getattr(found, k)]
    words = ", ".join(f"{key} {getattr(found, key)!r}" for key in differing)
    raise SandboxError(
        f"sandbox {layout.name} is running with other settings ({words}): stop it first, or give "
        "the new one another --name"
    )


def _write_files(layout: Layout, settings: SandboxSettings, host: SandboxHost) -> None:
    for directory in (
        layout.etc,
        layout.run,
        layout.log,
        layout.state,
        layout.bin,
        layout.bin_inside,
        layout.profile.parent,
        layout.state / "slurmctld",
        *(layout.state / name for name in settings.node_names),
    ):
        directory.mkdir()
    texts = {
        layout.settings: settings.to_json(),
        layout.host: host.to_json(),
        layout.etc / "slurm.conf": configuration.slurm_conf(
            layout, settings, host, int(time.time() * _JOB_IDS_PER_S) % _JOB_IDS + 1
        ),
        layout.etc / "cgroup.conf": configuration.cgroup_conf(host),
        layout.etc / "hosts": configuration.hosts(settings),
        layout.profile: configuration.profile(layout, settings),
    }
    if devices := configuration.devices(settings):
        texts[layout.etc / "gres.conf"] = configuration.gres_conf(layout, settings)
        layout.devices.mkdir()
    for name in devices:
        (layout.devices / name).symlink_to("/dev/null")
    for directory in (layout.log, layout.state / "slurmctld"):
        directory.chmod(0o700)  # private: other users' output and job scripts
    if settings.users:
        found = [Path("/etc", name).read_text(encoding="utf-8") for name in ("passwd", "group")]
        passwd, group = configuration.accounts(layout, settings, *found)
        texts |= {layout.accounts / "passwd": passwd, layout.accounts / "group": group}
        layout.accounts.mkdir()
        layout.homes.mkdir()
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    first = layout.bin / host.clients[0]
    first.write_text(wrapper(layout, host), encoding="utf-8")
    first.chmod(0o755)
    for name in host.clients:
        (layout.bin_inside / name).symlink_to(host.client_dir / name)
        if name != first.name:
            (layout.bin / name).symlink_to(first.name)
    if settings.neuron_stand_ins:
        neuron.write(layout, settings.instance, host)


@contextlib.contextmanager
def _umask(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def _start_holder(layout: Layout, host: SandboxHost, owner: int | None) -> subprocess.Popen[bytes]:
    environ = {k: v for k in ("PATH", "HOME", "USER") if (v := os.environ.get(k))}
    environ["PATH"] = environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin"
    environ |= {"LANG": "C.UTF-8", "PYTHONPATH": str(Path(trnslurm.__file__).parent.parent)}
    argv = ["unshare", *host.unshare, host.python, "-m", "trnslurm.sandbox.holder"]
    argv += [str(layout.path), str(layout.path.stat().st_ino)]
    descriptors = []
    if owner is not None:
        try:
            descriptors.append(os.pidfd_open(owner))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise SandboxError(f"--owner {owner}: {why}") from None
        argv.append(str(descriptors[0]))
    try:
        with (layout.log / "holder.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                env=environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=descriptors,
                umask=0o022,
            )
    finally:
        for fd in descriptors:
            os.close(fd)


def _wait_until_up(
    layout: Layout, holder: subprocess.Popen[bytes], say: Callable[[str], None]
) -> None:
    said = 0
    deadline = time.monotonic() + _UP_S
    while not layout.entry.is_file():
        lines = layout.progress.read_text().splitlines() if layout.progress.is_file() else []
        for line in lines[said:]:
            say(line)
        said = len(lines)
        if holder.poll() is not None:
            raise SandboxError(f"sandbox {layout.name}: {_why(layout)}")
        if time.monotonic() > deadline:
            raise SandboxError(f"sandbox {layout.name} did not start within {_UP_S} s")
        time.sleep(_POLL_S)
    holder.returncode = 0  # it stays up, so there must be no warning when this object is dropped


def _why(layout: Layout) -> str:
    if layout.failure.is_file():
        words = layout.failure.read_text(encoding="utf-8").strip()
        unknown = re.search(r"unrecognized key: (\w+)", words)
        return words + (configuration.unknown_key_hint(unknown[1]) if unknown else "")
    log = (layout.log / "holder.log").read_text(errors="replace").split("\n")
    return next((line for line in reversed(log) if line), "its first process was killed")


def _remove(layout: Layout) -> None:
    """End the holder if it is alive, and remove every file."""
    deadline = time.monotonic() + _DOWN_S
    holders = set(_holders(layout))
    for pid in holders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while layout.is_held() or any(_lives(pid) for pid in holders):
        if time.monotonic() > deadline:
            raise SandboxError(f"the processes of sandbox {layout.name} do not end")
        time.sleep(_POLL_S)
    if layout.path.exists():
        shutil.rmtree(layout.path)


def _lives(pid: int) -> bool:
    """Check whether a process lives; a namespace's first process ends after all others in it."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False


def _holders(layout: Layout) -> list[int]:
    """Return the pids of the sandbox's holders, found by their command line."""
    wanted = f"\0trnslurm.sandbox.holder\0{layout.path}\0".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue  # it has ended
    return found
