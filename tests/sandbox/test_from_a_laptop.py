"""A user elsewhere, on a real Slurm: an account without trnslurm, behind the real sshd."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.namespaces import enter

from ..processes import Done, run_process
from ..remote.login import Login
from ..waiting import eventually
from .cluster import AT_ONCE, CHECKOUT, Sandbox

pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users"),
]

# Says where it is; the runs that are not told to end are cancelled.
SCRIPT = """\
#!/bin/bash
echo "node $SLURM_NODEID begins in $(pwd)"
for n in $(seq 2000); do echo "line $n of node $SLURM_NODEID"; done
until [ -e ../go ]; do sleep 0.05; done
echo "node $SLURM_NODEID ends"
"""


class Laptop:
    """A user of this machine, which sees nothing of the sandbox but its sshd."""

    def __init__(self, sandbox: Sandbox, above: Path, path: str) -> None:
        self.sandbox, self.home = sandbox, above / "laptop"
        self.home.mkdir()
        layout = Layout(sandbox.path)
        there = sandbox.path / "home/alice"
        environ = {
            "PATH": f"{layout.bin}:/usr/bin:/bin", "SLURM_CONF": str(layout.etc / "slurm.conf"),
        }  # fmt: skip
        (above / "login").mkdir()
        self.login = Login(above / "login", there, environ, enter(layout, []), "alice")
        self.login.start()
        (above / "run").mkdir(mode=0o700)
        self.environ = {
            "HOME": str(self.home), "PATH": path, "PYTHONPATH": str(CHECKOUT),
            "TRNSLURM_SSH": f"ssh -F {above}/login/ssh_config", "TRNSLURM_CLUSTER": "far",
            "XDG_RUNTIME_DIR": str(above / "run"), "TRNSLURM_SANDBOXES": str(above / "none"),
        }  # fmt: skip
        profile = yaml.safe_load(layout.profile.read_text())
        del profile["slurm"]["bin_dir"]
        profile |= {"remote": "login1", "run_root": "~/runs", "preflight": False}
        site = self.home / ".config/trnslurm/cluster-config"
        site.mkdir(parents=True)
        (site / "far.yaml").write_text(yaml.safe_dump(profile))
        (self.home / "work.sh").write_text(SCRIPT)
        (self.home / "work.sh").chmod(0o755)

    def trnslurm(self, *words: object) -> Done:
        return run_process(
            [sys.executable, "-m", "trnslurm", *map(str, words)], env=self.environ, cwd=self.home
        )

    @contextmanager
    def running(self, *words: object) -> Iterator[subprocess.Popen[str]]:
        """Run a command meanwhile."""
        process = subprocess.Popen(
            [sys.executable, "-m", "trnslurm", *map(str, words)], env=self.environ, text=True,
            cwd=self.home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


@pytest.fixture(scope="module")
def laptop(path_without_slurm: str) -> Iterator[Laptop]:
    above = Path(tempfile.mkdtemp(dir="/tmp", prefix="lt-"))
    above.chmod(0o755)
    sandbox = Sandbox(base=above / "b")
    try:
        options = ("--python", "/usr/bin/python3", "--nodes", 2, "--users", 1, "--set", AT_ONCE)
        up = sandbox.trnslurm("up", "-q", *options)
        assert (up.code, up.err) == (0, "")
        yield Laptop(sandbox, above, path_without_slurm)
    finally:
        sandbox.trnslurm("down")
        shutil.rmtree(above)


SUBMIT = ("submit", "./work.sh", "--nodes", "2", "--time", "10", "--set", "device=cpu")


@pytest.fixture(autouse=True)
def _ended(laptop: Laptop) -> Iterator[None]:
    """End what a test leaves running."""
    yield
    laptop.sandbox.slurm("scancel", "--user=alice")


def bytes_below(directory: Path) -> dict[str, bytes]:
    files = (f for f in directory.rglob("*") if f.is_file())
    return {str(f.relative_to(directory)): f.read_bytes() for f in files}


def test_a_run_over_links_that_break(laptop: Laptop) -> None:
    home = laptop.login.home
    rendered = laptop.trnslurm("render", *SUBMIT[1:], "-o", "../reviewed")
    assert rendered.code == 0, rendered
    laptop.login.plan(
        {"up": 300_000}, {"until": f"{home}/.cache/trnslurm/asks/*/begun"},
        {"until": f"{home}/runs/*/train.sbatch"}, {"until": f"{home}/runs/*/logs/train-*.log"},
    )  # fmt: skip
    said = json.loads(laptop.trnslurm(*SUBMIT, "--json").ok)
    run = Path(said["directory"])
    assert [*(home / "runs").iterdir()] == [run]
    assert run.stat().st_uid == home.stat().st_uid
    assert bytes_below(laptop.home.parent / "reviewed").items() <= bytes_below(run).items()
    jobs = laptop.sandbox.slurm("squeue", "--noheader", "--format=%A").ok.split()
    assert jobs == [said["jobs"]["train"]]

    def is_running() -> bool:
        """both nodes run"""
        return all((run / f"logs/train-1-node{n}.log").exists() for n in (0, 1))

    eventually(is_running)
    assert "RUNNING" in laptop.trnslurm("status", "last").ok
    assert laptop.trnslurm("exec", "last", "--node", "1", "--", "cat", "plan.json").ok
    laptop.login.plan({"down": 20_000}, {"down": 30_000})
    with laptop.running("logs", "last", "-f", "-n", "0") as following:
        for line in following.stdout:
            if line.startswith("line 2000 "):
                break
        (run / "go").touch()
        rest = following.stdout.read()
    assert "node 0 ends" in rest
    assert (
        laptop.trnslurm("logs", "last", "-n", "0").ok
        == (run / "logs/train-1-node0.log").read_text()
    )
    assert "COMPLETED" in laptop.trnslurm("status", "last").ok
    jobs = laptop.sandbox.slurm("squeue", "--noheader", "--states=all", "--format=%A").ok.split()
    assert len(jobs) <= 1


def test_cancelled_resumed_and_reported(laptop: Laptop) -> None:
    run = Path(json.loads(laptop.trnslurm(*SUBMIT, "--json").ok)["directory"])
    assert f"Cancelled {run.name}" in laptop.trnslurm("cancel", run.name).ok

    def is_cancelled() -> bool:
        """it is cancelled"""
        return "CANCELLED" in laptop.trnslurm("status", run.name).ok

    eventually(is_cancelled)
    (run / "go").touch()
    laptop.trnslurm("resume", run.name)
    watched = laptop.trnslurm("watch", run.name, "--every", "1s")
    assert watched.code == 0 and " COMPLETED" in watched.out.splitlines()[-1], watched
    page = laptop.trnslurm("report", run.name).ok
    assert page == f"Wrote {run.name}.html\n"
    assert run.name in (laptop.home / f"{run.name}.html").read_text()


def test_a_profile_of_the_cluster_is_written_here(laptop: Laptop) -> None:
    said = laptop.trnslurm("cluster", "detect", "--write", "--name", "found").ok
    file = laptop.home / ".config/trnslurm/cluster-config/found.yaml"
    assert said.startswith(f"Wrote {file}; ")
    assert yaml.safe_load(file.read_text()).items() >= {
        "remote": "login1", "instance_type": "trn1.32xlarge"
    }.items()  # fmt: skip
    assert not (laptop.login.home / ".config").exists()
