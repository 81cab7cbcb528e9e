"""The launcher that joins nodes to a Ray cluster, with a stand-in for Ray: its programs and calls.

`make test-ray` starts the real one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..free_port import free_port
from ..waiting import eventually
from .conftest import Workbench

# Each node notes its words and its token, and is in the cluster while it runs.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
note = Path(os.environ["NOTES"]) / f"node-{os.environ['SLURM_NODEID']}"
signal.signal(signal.SIGTERM, lambda *_: (note.with_suffix(".ended").touch(), sys.exit(0)))
note.with_suffix(".new").write_text(json.dumps([os.environ["RAY_AUTH_TOKEN"], *sys.argv[1:]]))
note.with_suffix(".new").rename(note)
while not note.with_suffix(".dies").exists():
    time.sleep(0.05)
print("out of memory", flush=True)
sys.exit(9)
"""
CALLS = """
import os
from pathlib import Path
init = lambda **_: None
nodes = lambda: [{"Alive": True} for _ in Path(os.environ["NOTES"]).glob("node-?")]
"""
DRIVER = """
import os, sys, time
from pathlib import Path
notes = Path(os.environ["NOTES"])
(notes / "driver").write_text(os.environ["RAY_ADDRESS"] + os.environ["RAY_AUTH_TOKEN"])
while not (notes / "done").exists():
    time.sleep(0.05)
sys.exit(int((notes / "done").read_text()))
"""


class Cluster:
    """The launchers of two nodes."""

    def __init__(self, bench: Workbench, *, installed: bool = True) -> None:
        self.notes = bench.directory / "notes"
        ray = {"__init__": CALLS, "scripts/__init__": "", "scripts/scripts": PROGRAM}
        for name, text in ray.items() if installed else ():
            (file := bench.directory / f"ray/{name}.py").parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (bench.directory / "driver.py").write_text(DRIVER)
        self.notes.mkdir()
        port = str(free_port())
        python_path = f"{bench.directory}:{bench.environ['PYTHONPATH']}"
        self._environ = bench.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TRNSLURM_HOSTS": "a,b",
            "TRNSLURM_DEVICE_PORT": port, "TRNSLURM_RUN_DIR": str(bench.directory),
            "TRNSLURM_PHASE": "train", "TRNSLURM_ATTEMPT": "1", "NOTES": str(self.notes),
            "PYTHONPATH": python_path, "TMPDIR": str(bench.directory),
        }  # fmt: skip
        self.address = f"127.0.0.1:{port}"
        self.nodes = [self._start(bench, number) for number in (0, 1)]

    def _start(self, bench: Workbench, number: int) -> subprocess.Popen[str]:
        words = ["--ray", "--ray-option=--resources={}", "--program", "--", sys.executable]
        process = subprocess.Popen(
            [sys.executable, "-m", "trnslurm.node.launcher", *words, "driver.py"],
            env=self._environ | {"SLURM_NODEID": str(number)}, cwd=bench.directory, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        bench.started(process)
        return process

    def words_of(self, number: int) -> list[str]:
        return list(json.loads((self.notes / f"node-{number}").read_text()))

    def end(self) -> list[tuple[int, str]]:
        """The exit codes of the nodes, and what they have said."""
        said = [node.communicate(timeout=600)[0] for node in self.nodes]
        return [(node.returncode, text) for node, text in zip(self.nodes, said, strict=True)]


@pytest.fixture
def cluster(bench: Workbench) -> Cluster:
    return Cluster(bench)


def test_the_driver_begins_once_all_nodes_have_joined(cluster: Cluster) -> None:
    eventually((cluster.notes / "driver").exists)
    (token, *head), (same, *other) = (cluster.words_of(number) for number in (0, 1))
    assert token == same and len(token) == 64
    assert eventually((cluster.notes / "driver").read_text) == cluster.address + token
    port = cluster.address.rpartition(":")[2]
    assert {"--head", f"--port={port}", "--include-dashboard=false", "--resources={}"} <= {*head}
    assert f"--address={cluster.address}" in other and "--head" not in other
    [place] = [Path(word.partition("=")[2]).parent for word in head if "--temp-dir=" in word]
    assert place.stat().st_mode & 0o777 == 0o700
    (cluster.notes / "done").write_text("0")
    assert cluster.end() == [(0, ""), (0, "")]
    assert [(cluster.notes / f"node-{n}.ended").exists() for n in (0, 1)] == [True, True]
    assert not place.exists()


def test_the_exit_code_is_the_drivers(cluster: Cluster) -> None:
    (cluster.notes / "done").write_text("7")
    (code, _), _ = cluster.end()
    assert code == 7


@pytest.mark.parametrize("number", [0, 1])
def test_it_ends_when_ray_ends_on_a_node(cluster: Cluster, number: int) -> None:
    eventually((cluster.notes / "driver").exists)
    (cluster.notes / f"node-{number}.dies").touch()
    broken = cluster.nodes[number]
    said, _ = broken.communicate(timeout=600)
    assert broken.returncode
    assert (
        f"ray: the last lines of start-{number}.log:\nout of memory\nerror: Ray has ended on "
        in said
    )
    if number:  # on Slurm srun ends the first node then
        cluster.nodes[0].terminate()
        assert cluster.nodes[0].wait(600)


def test_a_python_without_ray_says_so(bench: Workbench) -> None:
    done = Cluster(bench, installed=False).end()
    assert [(code, said.endswith(" has no Ray: pip install ray\n")) for code, said in done] == [
        (1, True), (1, True)
    ]  # fmt: skip
