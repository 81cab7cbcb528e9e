"""Whether workers that train alone are told of while they train, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import trnslurm
from trnslurm.contract.rundir import RunFiles
from trnslurm.node import alone, connections

C10D = "torch.distributed.distributed_c10d"
STEP = '{"attempt": 2, "step": 5, "loss": 1.5, "read": "log"}\n'
STARTUP = Path(trnslurm.__file__).parent / "node/startup"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """The run of this process, which is worker 0 of four on two nodes, with PyTorch."""
    files = RunFiles(tmp_path)
    files.state.mkdir()
    told = {
        "TRNSLURM_RUN_DIR": str(tmp_path), "TRNSLURM_PHASE": "train", "TRNSLURM_ATTEMPT": "2",
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    for name in ("torch.cuda", *alone._JOINS, *alone._OTHER_WAYS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    group = SimpleNamespace(_backend=None, _default_pg_init_method=None)
    monkeypatch.setitem(sys.modules, C10D, group)
    monkeypatch.setattr(connections, "are_there", lambda pids: False)
    monkeypatch.setattr(alone, "_seen_connected", False)
    return files


def told_at(run: RunFiles, looks: list[tuple[float, float]]) -> tuple[str, bool]:
    """What is told after looks at these times, with so much processor time; whether it goes on."""
    watch, goes_on = alone.Looks(), True
    for now, cpu_s in looks:
        goes_on = goes_on and watch.go_on(now, cpu_s)
    return alone.so_far(run, 2), goes_on


def test_workers_are_told_at_the_first_known_step(run: RunFiles) -> None:
    assert told_at(run, [(20.0, 9.0)]) == ("", True)
    run.metrics_file.write_text(STEP.replace("2", "1", 1))  # of the attempt before
    assert told_at(run, [(20.0, 9.0)]) == ("", True)
    run.metrics_file.write_text(STEP)
    assert told_at(run, [(20.0, 9.0)]) == (
        "its 4 workers share no process group so far, so each trains alone: call "
        "torch.distributed.init_process_group in the script, or submit it with --nodes 1 "
        "--workers 1, or with --per node if it starts its own workers",
        True,
    )


@pytest.mark.parametrize(
    ("looks", "gpu", "told"),
    [
        ([(20, 9), (4000, 50)], False, False),
        ([(20, 70), (310, 300)], False, False),
        ([(20, 70), (320, 300)], False, True),
        ([(20, 9), (310, 9)], True, False),
        ([(20, 9), (320, 9)], True, True),
    ],
)
def test_without_steps_they_are_told_once_they_have_worked(
    run: RunFiles,
    looks: list[tuple[float, float]],
    gpu: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(_initialized=gpu))  # type: ignore[arg-type]
    words, goes_on = told_at(run, looks)
    assert (bool(words), goes_on) == (told, True)


@pytest.mark.parametrize("late", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("how", ["group", "connection", "mpi4py", "ray"])
def test_workers_that_may_have_joined_are_not_told(
    run: RunFiles, how: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.metrics_file.write_text(STEP)
    looks = alone.Looks()
    if late:
        assert looks.go_on(20, 9)
        assert alone.so_far(run, 2)
    if how == "group":
        opened = SimpleNamespace(_backend="gloo", _default_pg_init_method="env://")
        monkeypatch.setitem(sys.modules, C10D, opened)  # type: ignore[arg-type]
    elif how == "connection":
        monkeypatch.setattr(connections, "are_there", lambda pids: True)
    else:
        monkeypatch.setitem(sys.modules, how, SimpleNamespace())  # type: ignore[arg-type]
    assert (looks.go_on(40, 9), alone.so_far(run, 2)) == (False, "")
    monkeypatch.setattr(connections, "are_there", lambda pids: False)  # it is closed at the end
    alone.tell()
    assert not run.alone_file("train", 2).exists()


def test_a_group_of_one_worker_is_none(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where mpi4py gives each worker the rank 0 of 1: also without a step, and with mpi4py."""
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace())  # type: ignore[arg-type]
    for size, told in (
        (4, ""),
        (1, "share no process group so far, so each trains alone: each worker has"),
    ):
        pg = SimpleNamespace(size=lambda size=size: size)
        group = SimpleNamespace(_backend="gloo", _world=SimpleNamespace(default_pg=pg))
        monkeypatch.setitem(sys.modules, C10D, group)  # type: ignore[arg-type]
        words, goes_on = told_at(run, [(20, 9)])
        assert told in words and goes_on == bool(told)


def test_without_pytorch_nothing_is_told(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    run.metrics_file.write_text(STEP)
    monkeypatch.delitem(sys.modules, C10D)
    assert told_at(run, [(20, 9), (4000, 4000)]) == ("", True)
    monkeypatch.setitem(sys.modules, C10D, SimpleNamespace())  # type: ignore[arg-type] # half imported
    assert told_at(run, [(20, 9), (4000, 4000)]) == ("", True)


@pytest.fixture
def python() -> Iterator[subprocess.Popen[str]]:
    """A process that executes the lines that it reads."""
    program = "import socket, sys\nfor line in sys.stdin: exec(line); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_connections(python: subprocess.Popen[str]) -> None:
    def after(line: str) -> bool:
        assert python.stdin and python.stdout
        python.stdin.write(f"{line}\n")
        python.stdin.flush()
        assert python.stdout.readline() == "\n"
        return connections.are_there([python.pid])

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not after("unconnected = socket.socket()")
        assert after(f"client = socket.create_connection(('127.0.0.1', {port}))")
        assert not after("client.close()")
        assert after("server = socket.create_server(('127.0.0.1', 0))")
        assert not after("server.close()")
        assert after("six = socket.create_server(('::1', 0), family=socket.AF_INET6)")


def test_a_tracker_is_no_worker(python: subprocess.Popen[str], tmp_path: Path) -> None:
    """Weights & Biases' process listens, and the worker is connected to it."""
    assert python.stdin and python.stdout
    python.stdin.write("open('/proc/self/comm', 'w').write('wandb-core')\n")
    python.stdin.write("s = socket.create_server(('', 0)); print(s.getsockname()[1], end='')\n")
    python.stdin.flush()
    port = int((python.stdout.readline(), python.stdout.readline())[1])
    program = (
        f"import socket; s = socket.create_connection(('127.0.0.1', {port})); print(); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout and worker.stdout.readline() == "\n"
        assert connections.are_there([worker.pid])
        assert not connections.are_there([worker.pid, python.pid])
        worker.communicate("\n")


def test_a_worker_tells_while_it_works(run: RunFiles, tmp_path: Path) -> None:
    """The script of worker 0 ends once it has been told of; a site's startup shortens the wait."""
    run.metrics_file.write_text(STEP)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import time\nsleep = time.sleep\ntime.sleep = lambda seconds: sleep(seconds / 1000)\n"
    )
    program = (
        "import os, sys, time, types\n"
        "group = types.SimpleNamespace(_backend=None, _default_pg_init_method=None)\n"
        f"sys.modules['{C10D}'] = group\n"
        "while not os.path.exists('state/alone-train-2.json'): time.sleep(10)\n"
        "os._exit(7)\n"
    )
    path = f"{STARTUP}:{site}:{Path(trnslurm.__file__).parents[1]}"
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=run.path, timeout=60, check=False
    )
    assert done.returncode == 7


@pytest.mark.parametrize("error", ["", "import no_such_module"])
def test_a_worker_tells_at_its_end_unless_it_failed(run: RunFiles, error: str) -> None:
    """Its run is still RUNNING then, and the error may have come before it could join."""
    program = (
        "import sys, types\n"
        "group = types.SimpleNamespace(_backend=None, _default_pg_init_method=None)\n"
        f"sys.modules['{C10D}'] = group\n{error}\n"
    )
    environ = os.environ | {"PYTHONPATH": f"{STARTUP}:{Path(trnslurm.__file__).parents[1]}"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=environ, cwd=run.path, timeout=60, check=False)
    assert bool(alone.so_far(run, 2)) == (not error)
