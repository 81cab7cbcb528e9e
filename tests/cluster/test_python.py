"""A cluster's Python on this host: what it is started with, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trnslurm
from trnslurm.cluster.python import run_python
from trnslurm.config.schema import Cluster, Slurm
from trnslurm.errors import TrnslurmError

from ..processes import alive
from ..waiting import eventually

LOCAL = Cluster(scheduler="local")
# A program that says in a file that it runs, and which of its children does.
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open("pids.part", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""
CALLER = """
import sys
from pathlib import Path
from trnslurm.cluster.python import run_python
from trnslurm.config.schema import Cluster
try:
    here = Path.cwd()
    run_python(Cluster(scheduler="local"), ["-c", sys.argv[1]], cwd=here, pythonpath=here)
except KeyboardInterrupt:
    print("interrupted")
"""


def say(expression: str) -> list[str]:
    return ["-c", f"import os, sys; print({expression})"]


@pytest.fixture
def run(weird_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the Python of a cluster in a directory with a weird name; give what it printed."""

    def call(cluster: Cluster, arguments: list[str]) -> str:
        assert run_python(cluster, arguments, cwd=weird_path, pythonpath=weird_path) == 0
        return capfd.readouterr().out

    return call


def test_the_local_default_is_this_interpreter(run) -> None:
    assert run(LOCAL, say("sys.executable")) == f"{sys.executable}\n"


def test_arguments_directories_and_output(run, weird_path: Path) -> None:
    words = ["it's", "$HOME", "a  b", "目录", ""]
    expression = "(sys.argv[1:], os.getcwd(), os.environ['PYTHONPATH'], sys.stdin.read())"
    found = run(LOCAL, [*say(expression), *words])
    assert found == f"{(words, str(weird_path), str(weird_path), '')}\n"


def test_environment_is_that_of_the_batch_script(run, monkeypatch, tmp_path: Path) -> None:
    script = tmp_path / "activate"
    script.write_text('export ACTIVATED="with $# words"\n')
    cluster = Cluster(
        scheduler="local", activate=(f"source '{script}'",), env={"QUOTED": "it's $x"},
        slurm=Slurm(bin_dir="/the/slurm"),
    )  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("HF_HOME", "/the/cache")
    names = ["ACTIVATED", "QUOTED", "HF_HOME", "SLURM_JOB_ID", "PYTHONDONTWRITEBYTECODE"]
    found = run(cluster, say(f"[os.environ.get(n) for n in {names}], os.environ['PATH']"))
    assert found.startswith("['with 0 words', \"it's $x\", '/the/cache', None, '1'] ")
    assert f"{Path(sys.executable).parent}:/the/slurm:" in found


def test_exit_code_and_umask(tmp_path: Path) -> None:
    write = "open('file', 'w').close(); raise SystemExit(7)"
    code = run_python(LOCAL, ["-c", write], cwd=tmp_path, pythonpath=tmp_path)
    assert code == 7
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_what_is_missing_is_one_line(tmp_path: Path, capfd) -> None:
    where = {"cwd": tmp_path, "pythonpath": tmp_path}
    code = run_python(LOCAL, say("1"), modules=["json", "no_such", "nor_this"], **where)
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {sys.executable} has no no_such, nor_this: install")
    assert err.count("\n") == 1
    absent = Cluster(scheduler="local", python="/no such/python")
    assert run_python(absent, say("1"), **where) == 1
    what = "there is no Python at /no such/python here"
    expected = f"error: {what}: set python: in the cluster profile\n"
    assert capfd.readouterr().err == expected


def test_activation_that_fails_ends_it(tmp_path: Path, capfd) -> None:
    cluster = Cluster(scheduler="local", activate=("module load absent",))
    assert run_python(cluster, say("1"), cwd=tmp_path, pythonpath=tmp_path) == 127
    assert "module" in capfd.readouterr().err


def test_a_killed_python_is_told(tmp_path: Path) -> None:
    suicide = ["-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(TrnslurmError, match=r"was killed \(SIGKILL\)"):
        run_python(LOCAL, suicide, cwd=tmp_path, pythonpath=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_whatever_ends_us(tmp_path: Path, number: signal.Signals) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, SLEEPER],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(trnslurm.__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        eventually((tmp_path / "pids").exists)
        python, below = map(int, (tmp_path / "pids").read_text().split())
        caller.send_signal(number)
        # On a signal that gives us no chance, the Python is told by the kernel; what it has started
        # itself is its own to end, and holds the pipes open here.
        if number != signal.SIGINT:
            caller.wait(180)
            os.kill(below, signal.SIGKILL)
        out, err = caller.communicate(timeout=600)
        assert (out, err) == ("interrupted\n" if number == signal.SIGINT else "", "")
        eventually(lambda: not alive(python) and not alive(below))
    finally:
        caller.kill()
        caller.communicate()
