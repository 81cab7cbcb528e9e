"""The lookout of a node, and the verdict on what all workers do in a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path

import pytest

from trnslurm.contract.attempt import Attempt
from trnslurm.devices import CUDA
from trnslurm.node import lookout, stacks
from trnslurm.node.accelerators import neuron
from trnslurm.node.accelerators.accelerator import accelerator_of
from trnslurm.node.hang import HangWatch, Worker, judge
from trnslurm.node.lookout import Activity
from trnslurm.node.stacks import Process, main_frames, workers_of

from ..waiting import eventually

LOAD = ("/proj/data.py", 31, "load")
ITEM = ("/proj/train.py", 88, "step")
REDUCE = (
    "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    9,
    "all_reduce",
)
BACKWARD = (
    "/env/lib/python3.11/site-packages/torch/autograd/graph.py",
    829,
    "_engine_run_backward",
)
STACKS = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f02 (most recent call first):
  File "/proj/data.py", line 31 in load
  File "/proj/train.py", line 88 in <module>
"""


def worker(rank: int | None, *frames: tuple[str, int, str], state: str = "S") -> Worker:
    node = rank or 0
    return Worker(rank, node, f"node-{node}", state, f"python: state {state}, futex_wait", frames)


SELECT = ("/usr/lib/python3.11/selectors.py", 415, "select")
LOADER = ("/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 1265, "_try_get_data")


@pytest.mark.parametrize(
    ("workers", "rank", "line"),
    [
        (
            [worker(0, SELECT, LOADER, ITEM), worker(1, SELECT, LOADER, ITEM)],
            None,
            "no worker has made any progress for 60 s after step 7: all are at train.py:88 (step), "
            "waiting for the data loader",
        ),
        (
            [worker(0, REDUCE, ITEM), worker(1, LOAD), worker(2, REDUCE, ITEM)],
            1,
            "worker 1 (node 1, node-1) has made no progress for 60 s after step 7: it is at "
            "data.py:31 (load), while 2 others wait at train.py:88 (step), in all_reduce",
        ),
        (
            [worker(0, BACKWARD, ITEM), worker(1, REDUCE, ITEM, state="T")],
            1,
            "worker 1 (node 1, node-1) has made no progress for 60 s after step 7: its process is "
            "stopped (state T)",
        ),
        (
            [worker(0, REDUCE, ITEM), worker(1, state="D"), worker(2, REDUCE, ITEM)],
            1,
            "worker 1 (node 1, node-1) has made no progress for 60 s after step 7: it does not "
            "respond to signals (state D), while 2 others wait at train.py:88 (step), in "
            "all_reduce",
        ),
        # With GPUs, workers may wait in a function of C, called at one line.
        (
            [worker(0, ITEM), worker(1, LOAD), worker(2, ITEM)],
            1,
            "worker 1 (node 1, node-1) has made no progress for 60 s after step 7: it is at "
            "data.py:31 (load), while 2 others are at train.py:88 (step)",
        ),
        (
            [worker(0, ITEM), worker(1, LOAD)],
            None,
            "no worker has made any progress for 60 s after step 7: worker 0 (node 0, node-0) is "
            "at train.py:88 (step); worker 1 (node 1, node-1) is at data.py:31 (load)",
        ),
        (
            [worker(0, REDUCE, ITEM), worker(1, REDUCE, ITEM)],
            None,
            "no worker has made any progress for 60 s after step 7: all are at train.py:88 (step), "
            "in all_reduce (check the network and the devices)",
        ),
        (
            [worker(0, REDUCE, ITEM), worker(2, REDUCE, ITEM)],
            None,
            "no worker has made any progress for 60 s after step 7: worker 1 has ended, while 2 "
            "others wait at train.py:88 (step), in all_reduce",
        ),
        (
            [worker(None), worker(None)],
            None,
            "no worker has made any progress for 60 s after step 7: it has no Python stacks; "
            "python: state S, futex_wait",
        ),
        ([], None, "no worker has made any progress for 60 s after step 7: no node responds"),
    ],
)
def test_verdict(workers: list[Worker], rank: int | None, line: str) -> None:
    expected = 3 if len(workers) > 2 or any(w.rank == 2 for w in workers) else len(workers)
    facts = judge(workers, expected=expected, seconds=60, step=7)
    assert (facts["rank"], facts["line"]) == (rank, line)
    assert facts["host"] == (None if rank is None else f"node-{rank}")


def test_frames_of_the_main_thread() -> None:
    assert main_frames(STACKS) == [LOAD, ("/proj/train.py", 88, "<module>")]
    assert main_frames("") == []


def test_workers_are_the_topmost_processes_of_their_ranks() -> None:
    agent, first, loader, second = (
        Process(10, 1, "S", None), Process(11, 10, "S", 0), Process(12, 11, "S", 0),
        Process(13, 10, "S", 1),
    )  # fmt: skip
    assert workers_of([agent, first, loader, second]) == [first, second]
    # A shell starts the worker: the shell offers no stacks.
    assert workers_of([loader], [first, second]) == [loader, second]
    assert workers_of([Process(10, 1, "S", None), Process(11, 10, "S", None)]) == [
        Process(10, 1, "S", None)
    ]


@pytest.fixture
def python(tmp_path: Path) -> subprocess.Popen[str]:
    """A Python process as node.sh starts it, beside another sitecustomize, that waits."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.other = True")
    code = "import sys, threading; print(sys.other, flush=True); threading.Event().wait()"
    startup = Path(lookout.__file__).parent / "startup"
    environ = os.environ | {"PYTHONPATH": f"{startup}:{tmp_path}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_stacks_of_a_process_that_goes_on(python: subprocess.Popen[str]) -> None:
    for _ in range(2):
        eventually(lambda: 'threading.py", line ' in stacks.stacks_of(python.pid))
    assert python.poll() is None


def test_py_spy_is_asked_where_a_process_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in prints what py-spy 0.4.3 printed for a real process."""
    frames = [
        {"name": "load", "filename": "/proj/data.py", "short_filename": "data.py", "line": 31},
        {"name": "<module>", "filename": "/proj/train.py", "line": 88},
    ]
    other = [{"name": "wait", "filename": "/usr/lib/python3.11/threading.py", "line": 327}]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        threads = [{"os_thread_id": 1, "frames": other}]
        threads.append({"os_thread_id": process.pid, "frames": frames})
        tool = tmp_path / "py-spy"
        tool.write_text(
            f"#!/bin/sh\n[ \"$*\" = 'dump --json --pid {process.pid}' ] || exit 1\n"
            f"echo '{json.dumps(threads)}'\n"
        )
        tool.chmod(0o755)
        assert stacks.stacks_of(process.pid) == ""
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert main_frames(stacks.stacks_of(process.pid)) == [
            LOAD,
            ("/proj/train.py", 88, "<module>"),
        ]
        assert stacks.stacks_of(process.pid, until=0) == ""
        tool.write_text("#!/bin/sh\necho '[{}]'\n")
        assert stacks.stacks_of(process.pid) == ""
        process.kill()


def test_a_process_without_the_handler_gets_no_signal() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert stacks.stacks_of(process.pid) == ""
        assert process.poll() is None
        process.kill()
    assert stacks.stacks_of(process.pid) == ""


def test_idle_and_quiet_times(monkeypatch: pytest.MonkeyPatch) -> None:
    use = {7: lookout.Use(5.0, 1000)}
    now = [0.0]
    monkeypatch.setattr(lookout, "use_of", use.get)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = Activity()

    def after(cpu_s: float, moved: int) -> tuple[float, float]:
        now[0] += 10
        use[7] = lookout.Use(use[7].cpu_s + cpu_s, use[7].read_and_written + moved)
        activity.look([Process(7, 1, "S", 0)])
        return activity.idle_s, activity.quiet_s

    assert after(0, 0) == (0, 10)  # it has used 5 s since it started
    assert after(0.1, 4096) == (10, 20)
    assert after(0.1, 0) == (20, 30)
    assert after(3.0, 0) == (0, 40)
    assert after(0, 10 << 20) == (0, 0)
    # Its processes may compute on other hosts.
    monkeypatch.setattr(lookout, "name_of", lambda pid: "ssh")
    assert after(0, 0) == (0, 10)


@pytest.mark.parametrize(("counted", "idle"), [([3, 4, 5], 0), ([3, 3, 3], 10)])
def test_a_device_that_computes_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: list[int], idle: float
) -> None:
    file = tmp_path / "neuron0/neuron_core0/stats/status/success/total"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(neuron, "_COUNTERS", tmp_path)
    monkeypatch.setenv("TRNSLURM_DEVICE", "neuron")
    monkeypatch.setattr(lookout, "use_of", lambda pid: lookout.Use(0.0, 0))
    now = iter(range(0, 1000, 5))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    activity = Activity()
    for count in counted:
        file.write_text(f"{count}\n")
        activity.look([Process(7, 1, "S", 0)])
    assert activity.idle_s == idle


@pytest.mark.parametrize(
    ("said", "works"),
    [("echo 0; echo 0", False), ("echo 0; echo 3", True), ("echo '[N/A]'", True), ("exit 9", True)],
)
def test_a_gpu_that_computes_or_says_nothing_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, works: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$*" in *--id=2,3) {said};; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert accelerator_of(CUDA).works() is works


class Clock:
    """The time of a HangWatch, and what the nodes report."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(directory)
        for name in ("state", "logs", "checkpoints"):
            (directory / name).mkdir()
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = HangWatch(Attempt(phase="train", attempt=1, hosts="a,b"), 10)
        self.compiling = HangWatch(Attempt(phase="precompile", attempt=1, hosts="a,b"), 10)
        self.log = directory / "logs/train-1-node0.log"
        self.request = directory / "state/hang-train-1.json"

    def pass_s(
        self, seconds: float, *, output: bool = False, silent: Set[int] = frozenset()
    ) -> None:
        self.now += seconds
        if output:
            with self.log.open("a") as file:
                file.write("step\n")
        self.watch.look(silent)

    def report(self, *nodes: tuple[float, float]) -> None:
        for node, (idle_s, quiet_s) in enumerate(nodes):
            file = Path(f"state/still-train-1-node{node}.json")
            file.write_text(json.dumps({"idle_s": idle_s, "quiet_s": quiet_s}))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(tmp_path, monkeypatch)


def test_all_nodes_must_be_idle_for_so_long(clock: Clock) -> None:
    clock.pass_s(1, output=True)
    clock.report((700, 700))
    clock.pass_s(700)
    assert not clock.request.exists()  # node 1 works
    clock.report((700, 700), (500, 700))
    clock.pass_s(10)
    assert not clock.request.exists()
    clock.pass_s(10, output=True)
    clock.report((700, 700), (700, 700))
    clock.pass_s(599)
    assert not clock.request.exists()
    clock.pass_s(1)
    assert json.loads(clock.request.read_text())["seconds"] == 600


def test_a_node_that_gives_no_sign_of_life_is_still(clock: Clock) -> None:
    """All its programs are frozen, that which would report as well."""
    clock.pass_s(1, output=True)
    clock.report((700, 700))
    clock.pass_s(700)
    assert not clock.request.exists()
    clock.pass_s(10, silent={1})
    assert clock.request.exists()


def test_a_checkpoint_under_way_is_progress(clock: Clock) -> None:
    clock.report((700, 700), (700, 700))
    Path("checkpoints/step-00000001.tmp-1").mkdir()
    clock.pass_s(1)
    clock.pass_s(700)
    assert not clock.request.exists()


def test_busy_workers_hang_only_if_the_job_used_to_write(clock: Clock) -> None:
    clock.report((0, 9000), (0, 9000))
    clock.pass_s(1, output=True)
    clock.pass_s(9000)
    assert not clock.request.exists()
    for _ in range(10):
        clock.pass_s(300, output=True)
    clock.report((0, 99000), (0, 99000))
    # The longest silence before was 9300 s.
    clock.pass_s(92999)
    assert not clock.request.exists()
    clock.pass_s(1)
    assert clock.request.exists()


def test_a_precompile_hangs_only_if_all_that_compile_are_idle(clock: Clock) -> None:
    """However long a compiler computes without output."""
    request = Path("state/hang-precompile-1.json")

    def after(seconds: float, *nodes: tuple[float, float]) -> bool:
        for node, (idle_s, quiet_s) in enumerate(nodes):
            file = Path(f"state/still-precompile-1-node{node}.json")
            file.write_text(json.dumps({"idle_s": idle_s, "quiet_s": quiet_s}))
        clock.now += seconds
        clock.compiling.look()
        return request.exists()

    for graph in range(1, 20):
        log = Path("logs/precompile-1-node0.log")
        log.write_text("a graph\n" * graph)
        assert not after(1)
    assert not after(99_000, (0, 99_000), (99_000, 99_000))
    assert not after(99_000)
    Path("state/graphs-1-node0.json").write_text("{}")
    assert after(1)


def test_a_step_that_its_nodes_do_not_end_is_killed(clock: Clock) -> None:
    clock.pass_s(1)
    clock.report((700, 700), (700, 700))
    clock.pass_s(700)
    assert not clock.watch.look()
    clock.now += 89
    assert not clock.watch.look() and not Path("state/stuck-train-1.json").exists()
    clock.now += 2
    assert not clock.watch.look()
    assert "no node responds" in json.loads(Path("state/stuck-train-1.json").read_text())["line"]
    clock.now += 61
    assert clock.watch.look()


def test_lookout_ends_with_its_task(tmp_path: Path) -> None:
    environ = os.environ | {
        "TRNSLURM_NODE": "0", "TRNSLURM_ATTEMPT": "1", "TRNSLURM_RUN_DIR": str(tmp_path),
        "TRNSLURM_PHASE": "train",
    }  # fmt: skip
    script = f'("{sys.executable}" -m trnslurm.node.lookout --task=$$ --minutes=30 & echo $!)'
    with subprocess.Popen(
        ["bash", "-c", f"{script}; exec sleep 1000"],
        env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    ) as task:  # fmt: skip
        assert task.stdout
        pid = int(task.stdout.readline())
        eventually(lambda: "lookout" in Path(f"/proc/{pid}/cmdline").read_text())
        task.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
