"""However a sandbox ends, or fails to start, nothing of it is left, and `up` works again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trnslurm.sandbox.machine import SandboxHost

from ..processes import processes_with
from ..waiting import eventually
from .cluster import AT_ONCE, Sandbox, sandbox

pytestmark = pytest.mark.rest

UP = ("up", "--nodes", "1", "--python", sys.executable)
NOT_UP = "sandbox sandbox is not running: start it with `trnslurm sandbox up`"


@pytest.fixture
def cluster() -> Iterator[Sandbox]:
    """A sandbox that is not up."""
    with sandbox() as made:
        yield made


@pytest.fixture
def stuck(tmp_path: Path) -> dict[str, str]:
    """An environment in which slurmctld never comes up: `up` waits for it, with munge running."""
    return stand_in(tmp_path, "slurmctld", "exec sleep 600")


def stand_in(directory: Path, name: str, script: str) -> dict[str, str]:
    """An environment in which a daemon is another one; Slurm's are taken from one prefix."""
    host = SandboxHost.look(accounting=False, slurm=os.environ.get("TRNSLURM_SANDBOX_SLURM", ""))
    bin_dir = directory / "slurm/bin"
    bin_dir.mkdir(parents=True)
    clients = [str(host.client_dir / command) for command in host.clients]
    for file in {*clients, host.commands["slurmctld"], host.commands["slurmd"]}:
        (bin_dir / Path(file).name).symlink_to(file)
    (bin_dir / name).unlink(missing_ok=True)
    version = f'[ "$1" != -V ] || exec {host.commands[name]} -V'
    (bin_dir / name).write_text(f"#!/bin/sh\n{version}\n{script}\n")
    (bin_dir / name).chmod(0o755)
    path = f"{bin_dir}:{os.environ['PATH']}"
    return {"PATH": path, "TRNSLURM_SANDBOX_SLURM": str(bin_dir.parent)}


def listed(cluster: Sandbox) -> list[str]:
    return [row["state"] for row in json.loads(cluster.trnslurm("list", "--json").ok)]


def starting(cluster: Sandbox, stuck: dict[str, str]):
    """Start `up`, which stays in the middle: munge runs, slurmctld is waited for."""
    return cluster.running(cluster.argv(*UP), stuck)


def in_the_middle(cluster: Sandbox) -> bool:
    """slurmctld's turn has come"""
    return any("sleep 600" in line for line in cluster.processes())


def holder_alone(cluster: Sandbox) -> int:
    (line,) = [p for p in cluster.processes() if "holder" in p and "unshare" not in p]
    return int(line.partition(":")[0])


def leftovers() -> dict[str, object]:
    """What a sandbox could leave on this machine outside its own directory."""
    places = ("/etc", "/opt", "/run", "/var/lib", "/var/log", "/var/run", "/var/spool", "/dev/shm")
    words = ("slurm", "munge", "mysql", "maria")
    found = [Path(place).glob(f"*{word}*") for place in places for word in words]
    return {
        "files": sorted(str(file) for files in found for file in files),
        "links": subprocess.run(["ip", "-o", "link"], capture_output=True, check=True).stdout,
        "netns": sorted(Path("/run/netns").glob("*")),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "hostname": os.uname().nodename,
        "hosts": Path("/etc/hosts").read_bytes(),
    }  # fmt: skip


@pytest.mark.first
def test_down_leaves_nothing(tmp_path: Path) -> None:
    """Nor of a job that does not end when it is asked to, as in a hung collective."""
    before = leftovers()
    with sandbox() as cluster:
        cluster.up("-q", "--nodes", 2, "--set", AT_ONCE)
        job = f"bash -c 'trap : TERM INT HUP; while :; do sleep 600; done' {cluster.base}"
        words = ("--nodes=2", f"--output={tmp_path}/%j", f"--wrap=srun {job}")
        assert cluster.slurm("sbatch", *words).ok
        eventually(lambda: len([p for p in cluster.processes() if "sleep 600" in p]) >= 4)
        down = cluster.trnslurm("down")
        assert (down.code, down.out, down.err) == (0, "Sandbox sandbox is down\n", "")
        assert processes_with(str(cluster.base)) == []  # at once, not in a while
        assert list(cluster.base.parent.iterdir()) == []
        assert cluster.trnslurm("down").out == "No sandbox sandbox\n"
    assert leftovers() == before


def test_down_all(cluster: Sandbox) -> None:
    for name in ("a", "b"):
        Sandbox(base=cluster.base, name=name).up("-q", "--nodes", 1)
    os.kill(Sandbox(base=cluster.base, name="b").holder, signal.SIGKILL)
    out = cluster.trnslurm("down", "--all").ok
    assert out == "Sandbox a is down\nSandbox b is down\n"
    assert not cluster.base.exists()


def test_job_numbers_do_not_come_again(cluster: Sandbox) -> None:
    """A run directory knows its job by number, which no other sandbox's job may have."""
    numbers = []
    for _ in range(2):
        cluster.up("-q", "--nodes", 1)
        submitted = cluster.slurm("sbatch", "--parsable", "--output=/dev/null", "--wrap=true")
        numbers.append(int(submitted.ok))
        assert cluster.trnslurm("down").code == 0
    assert numbers[0] < numbers[1]


@pytest.mark.parametrize("moment", ["first file", "middle"])
def test_interrupted_up_leaves_nothing(cluster: Sandbox, stuck, moment: str) -> None:
    with starting(cluster, stuck) as up:
        eventually((lambda: in_the_middle(cluster)) if moment == "middle" else cluster.path.exists)
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=600)
    assert (up.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "error: interrupted"
    assert not cluster.base.exists()
    eventually(lambda: not cluster.processes())


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_up_after_up_was_killed(cluster: Sandbox, stuck, signum: int) -> None:
    with starting(cluster, stuck) as up:
        eventually(lambda: in_the_middle(cluster))
        up.send_signal(signum)
        assert up.wait(180) == -signum
    assert listed(cluster) == ["starting"]
    assert cluster.trnslurm("status").error == NOT_UP
    holder = holder_alone(cluster)
    cluster.up("-q", "--nodes", 1)
    assert holder_alone(cluster) == cluster.holder != holder
    assert cluster.nodes() == {1: "idle"}
    assert not in_the_middle(cluster)


def test_down_after_up_was_killed(cluster: Sandbox, stuck) -> None:
    with starting(cluster, stuck) as up:
        eventually(lambda: in_the_middle(cluster))
        up.kill()
    assert cluster.trnslurm("down").out == "Sandbox sandbox is down\n"
    assert cluster.processes() == []


def test_up_that_was_killed_before_the_holder_started(cluster: Sandbox) -> None:
    (cluster.path / "etc").mkdir(parents=True)
    cluster.base.chmod(0o700)
    (cluster.path / "settings.json").write_text("{")
    assert listed(cluster) == ["crashed"]
    cluster.up("-q", "--nodes", 1)
    assert listed(cluster) == ["up"]


def test_holder_killed(cluster: Sandbox) -> None:
    """Everything ends with it, and every command says so in one line."""
    before = leftovers()
    cluster.up("-q", "--nodes", 1)
    job = cluster.argv("exec", "--node", "1", "--", "sleep", "600")
    with cluster.running(job) as inside:
        eventually(lambda: any("sleep 600" in line for line in cluster.processes()))
        os.kill(cluster.holder, signal.SIGKILL)
        assert inside.wait(180) != 0
    eventually(lambda: not cluster.processes())
    assert leftovers() == before
    assert listed(cluster) == ["crashed"]
    for command in ("status", "env", "exec -- true", "exec --node 1 -- true", "fault 1 freeze"):
        assert cluster.trnslurm(*command.split()).error == NOT_UP
    for command in ("sinfo", "srun", "sbatch"):
        words = f"{command}: sandbox sandbox is not running: use trnslurm sandbox up"
        assert cluster.slurm(command).error == words
    clusters = cluster.run([sys.executable, "-m", "trnslurm", "clusters"]).ok
    assert "sandbox" not in clusters
    cluster.up("-q", "--nodes", 2)  # other settings: what crashed does not count
    assert cluster.nodes() == {1: "idle", 2: "idle"}


def test_holder_that_is_told_to_end_may_not_leave_anything(cluster: Sandbox) -> None:
    """The first process of a pid namespace ignores TERM, which must not end half of it."""
    cluster.up("-q", "--nodes", 1)
    os.kill(cluster.holder, signal.SIGTERM)
    assert cluster.nodes() == {1: "idle"}


def test_owner(cluster: Sandbox) -> None:
    with cluster.running(["sleep", "600"]) as owner:
        cluster.up("-q", "--nodes", 1, "--owner", owner.pid)
        assert cluster.nodes() == {1: "idle"}
        owner.kill()
        eventually(lambda: not [p for p in cluster.processes() if "sleep 600" not in p])
    assert listed(cluster) == []
    assert not cluster.base.exists()


def test_directory_removed_by_hand(cluster: Sandbox) -> None:
    cluster.up("-q", "--nodes", 1)
    cluster.path.rename(cluster.base / "gone")
    shutil.rmtree(cluster.base / "gone", ignore_errors=True)
    eventually(lambda: not cluster.processes())
    assert cluster.trnslurm("down").out == "No sandbox sandbox\n"
    assert not cluster.base.exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("NoSuchKey=1", "unrecognized key: NoSuchKey"),
        ("KilWait=5", 'unrecognized key: KilWait (did you mean "KillWait"?)'),
        ("KillWait=soon", 'KillWait value "soon" is not a valid number'),
        ("SelectType=select/none", "select/none"),
        ("PartitionName=x Nodes=nope", "Invalid node names in partition x"),
    ],
)
def test_setting_that_slurm_refuses(cluster: Sandbox, setting: str, words: str) -> None:
    done = cluster.trnslurm(*UP, "-q", "--set", setting)
    assert done.error.startswith("sandbox sandbox: slurmctld ended: ")
    assert words in done.error
    assert not cluster.base.exists()
    assert cluster.processes() == []  # at once


@pytest.mark.parametrize("daemon", ["munged", "slurmctld", "slurmd"])
def test_daemon_that_ends_at_once(cluster: Sandbox, tmp_path: Path, daemon: str) -> None:
    environ = stand_in(tmp_path, daemon, f"echo '{daemon}: fatal: no luck today' >&2; exit 1")
    done = cluster.trnslurm(*UP, "-q", environ=environ)
    assert "ended: no luck today" in done.error
    assert daemon in done.error
    assert not cluster.base.exists()
