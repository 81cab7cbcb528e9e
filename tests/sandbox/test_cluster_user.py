"""An ordinary user's sandbox: no root anywhere, and everything works.

Run by root, these tests make a user for the time they take, and give that user a readable copy of
the package. Run by an ordinary user, all tests of this directory are that case.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..processes import processes_with, run_process
from ..waiting import eventually
from .cluster import AT_ONCE, CHECKOUT, Sandbox

pytestmark = pytest.mark.rest

USER = "trnslurm-test"
# What `trnslurm sandbox` imports besides the standard library.
PACKAGES = ("click", "yaml")


@pytest.fixture(scope="module")
def user() -> Iterator[pwd.struct_passwd]:
    """An ordinary user: the one who runs this, or one made for it."""
    if os.getuid():
        yield pwd.getpwuid(os.getuid())
        return
    if not any(entry.pw_name == USER for entry in pwd.getpwall()):  # of a run that was killed
        subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", USER], check=True)
    try:
        yield pwd.getpwnam(USER)
    finally:
        subprocess.run(["userdel", USER], check=True)


def as_user(user: pwd.struct_passwd) -> list[str]:
    if os.getuid() == user.pw_uid:
        return []
    words = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    setpriv = ["setpriv", *words, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]
    return [*setpriv, "/bin/sh", "-c", 'exec "$@"', "sh"]  # setpriv's own exec has rights left


def interpreter(user: pwd.struct_passwd) -> str:
    """An interpreter that the user may run: this one may be readable by root only."""
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        argv = [*as_user(user), python, "-I", "-c", code]
        if not subprocess.run(argv, capture_output=True, cwd="/", check=False).returncode:
            return python
    pytest.fail(f"{user.pw_name} may run no Python of 3.11 or later: apt-get install python3")


def give_code(directory: Path) -> None:
    """Copy the package and what `trnslurm sandbox` imports to where everyone may read it."""
    unneeded = shutil.ignore_patterns("__pycache__")
    for name in ("trnslurm", "templates", "jobs", "cluster-config"):
        shutil.copytree(CHECKOUT / name, directory / name, ignore=unneeded)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, directory / name, ignore=unneeded)
    subprocess.run(["chmod", "-R", "a+rX", directory], check=True)


@pytest.fixture(scope="module")
def cluster(user: pwd.struct_passwd) -> Iterator[Sandbox]:
    """A sandbox of the user with every daemon in it, and a home."""
    above = Path(tempfile.mkdtemp(dir="/tmp", prefix="tu-"))
    above.chmod(0o755)
    give_code(above / "code")
    for directory in ("home", "own"):
        (above / directory).mkdir(mode=0o700)
        os.chown(above / directory, user.pw_uid, user.pw_gid)
    environ = {
        "PYTHONPATH": str(above / "code"), "HOME": str(above / "home"), "USER": user.pw_name,
        "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    made = Sandbox(
        base=above / "own" / "b", environ=environ, user=tuple(as_user(user)),
        python=interpreter(user),
    )  # fmt: skip
    try:
        options = ("--nodes", 2, "--accounting", "--set", AT_ONCE)
        up = made.trnslurm("up", "-q", "--python", made.python, *options)
        assert (up.code, up.out, up.err) == (0, "", "")
        yield made
    finally:
        made.trnslurm("down")
        left = made.base.exists(), processes_with(str(made.base))
        shutil.rmtree(above)
    assert left == (False, [])


@pytest.fixture
def home(cluster: Sandbox) -> Path:
    return Path(cluster.environ["HOME"])


def test_controller_killed_and_started(cluster: Sandbox) -> None:
    """Before there is a job: one that ended in the last seconds before, it would run again."""
    assert cluster.fault("ctld", "kill") == "slurmctld killed"
    assert cluster.fault("ctld", "start") == "slurmctld started"
    for node in (1, 2):
        cluster.until(node, "idle")


def test_everything_in_it_is_the_users(user, cluster: Sandbox, home: Path) -> None:
    everything = cluster.processes()
    assert len(everything) > 8
    owners = {Path(f"/proc/{line.partition(':')[0]}").stat().st_uid for line in everything}
    assert owners == {user.pw_uid}
    assert cluster.nodes() == {1: "idle", 2: "idle"}
    identity = f"uid={user.pw_uid}({user.pw_name}) gid={user.pw_gid}"
    for done in (
        cluster.slurm("srun", "-N2", "id", cwd=home),
        cluster.trnslurm("exec", "--", "id", cwd=home),
        cluster.trnslurm("exec", "--node", 2, "--", "id", cwd=home),
    ):
        assert all(line.startswith(identity) for line in done.ok.splitlines()), done


def test_further_users_need_root(cluster: Sandbox) -> None:
    done = cluster.trnslurm("up", "--name", "more", "--users", 2, "--python", cluster.python)
    assert done.error == (
        "--users 2: only root can run processes of other users on this machine: use "
        "sudo, or remove --users"
    )


def test_batch_job(user, cluster: Sandbox, home: Path) -> None:
    lines = ("#SBATCH --nodes=2 --output=said", "id -un", "srun -l hostname | sort", "touch mine")
    script = "\n".join(["#!/bin/sh", *lines, ""])
    job = cluster.slurm("sbatch", "--parsable", cwd=home, feed=script).ok.strip()
    eventually(lambda: not cluster.slurm("squeue", "--noheader").ok)
    assert (home / "said").read_text().splitlines() == [
        user.pw_name, "0: compute-dy-trn1-1", "1: compute-dy-trn1-2",
    ]  # fmt: skip
    assert (home / "mine").stat().st_uid == user.pw_uid
    sacct = ("sacct", "-nXP", "--format=State,User", "--jobs", job)  # first it may say root
    eventually(lambda: cluster.slurm(*sacct).ok == f"COMPLETED|{user.pw_name}\n")


def test_faults(user, cluster: Sandbox, home: Path) -> None:
    disk = home / "disk"
    assert cluster.trnslurm("exec", "--", "mkdir", disk).code == 0
    assert cluster.fault("disk", disk, "1M").endswith("of 1 MiB inside the sandbox")
    full = cluster.on_node(2, "dd", "if=/dev/zero", f"of={disk}/file", "bs=64k")
    assert "No space left on device" in full.err
    assert list(disk.iterdir()) == []
    assert cluster.fault("disk", disk, "off")
    cluster.until(2, "idle")

    def started() -> str:
        """When the node's slurmd was started, as the controller knows it."""
        shown = cluster.slurm("scontrol", "show", "node", "-o", "compute-dy-trn1-2").ok
        return shown.partition("SlurmdStartTime=")[2].split()[0]

    before = started()
    for fault in ("freeze", "thaw", "link-down", "link-up", "slurmd-kill", "slurmd-start"):
        assert cluster.fault(2, fault)
    # What it says later than the reboot would hide that: slurmctld compares the two times.
    eventually(lambda: started() != before)
    cluster.until(2, "idle")
    assert cluster.fault(2, "reboot") == "compute-dy-trn1-2: rebooted"
    assert cluster.on_node(2, "id", "-un").ok == f"{user.pw_name}\n"
    why = "Node unexpectedly rebooted"  # and not down for anything before it
    eventually(lambda: why in cluster.trnslurm("status").ok)
    resume = ("update", "nodename=compute-dy-trn1-2", "state=resume")
    assert cluster.slurm("scontrol", *resume).code == 0
    cluster.until(2, "idle")


def test_down_leaves_nothing(user, cluster: Sandbox) -> None:
    def inside() -> list[str]:
        """The command that runs on the node, not what entered it."""
        return [p for p in cluster.processes() if p.endswith(": sleep 600 ")]

    with cluster.running(cluster.argv("exec", "--node", "2", "--", "sleep", "600")) as entered:
        eventually(inside)
        down = cluster.trnslurm("down")
        assert (down.code, down.out, down.err) == (0, "Sandbox sandbox is down\n", "")
        assert not inside()
        assert entered.wait(180) != 0
    assert cluster.processes() == []
    if os.getuid() != user.pw_uid:
        mine = ["ps", "-u", user.pw_name, "-o", "stat=,args="]
        ps = run_process(mine).out.splitlines()
        assert [line for line in ps if not line.startswith("Z")] == []
