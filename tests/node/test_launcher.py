"""The launcher that takes torchrun's place: what workers get, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trnslurm
from trnslurm.node.triage.diagnosis import diagnose

from ..free_port import free_port
from .conftest import Workbench

ROOT = Path(trnslurm.__file__).parents[1]
# With other limits, as no test waits for minutes.
WITHIN = """
import sys
from trnslurm.node import launcher, processes
launcher.MEET_S, processes.KILL_WAIT_S = 2.0, 0.2
sys.exit(launcher.main())
"""
FOR_EVER = """
import os, signal, sys, time
name = f"worker-{os.environ['RANK']}"
signal.signal(signal.SIGTERM, lambda *_: (open(f"{name}-told", "w"), sys.exit(0)))
open(name, "w")
while True:
    time.sleep(0.05)
    if os.path.exists(f"{name}-ends"):
        break
"""
RECORDED = "from torch.distributed.elastic.multiprocessing.errors import record; record(main)()"


class Job:
    """The launchers of some nodes, all on this machine."""

    def __init__(self, bench: Workbench, nodes: int, workers: int) -> None:
        self.bench, self._workers = bench, workers
        self._hosts = [f"node-{n}" for n in range(nodes)]
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
               "GLOO_SOCKET_IFNAME": "lo", "TRNSLURM_HOSTS": ",".join(self._hosts),
               "TRNSLURM_RUN_DIR": str(bench.directory), "TRNSLURM_PHASE": "train",
               "TRNSLURM_ATTEMPT": "1"}  # fmt: skip
        bench.environ |= own
        for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE"):
            bench.environ.pop(name, None)

    def node(self, number: int, script: str, *, within: bool = False) -> subprocess.Popen[str]:
        """Start a node's launcher, which writes a log."""
        (self.bench.directory / "train.py").write_text(script)
        (self.bench.directory / "logs").mkdir(exist_ok=True)
        program = ["-c", WITHIN] if within else ["-m", "trnslurm.node.launcher"]
        with self.log(number).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *program, f"--workers={self._workers}", "--", "train.py"],
                cwd=self.bench.directory, stdout=log, stderr=subprocess.STDOUT, text=True,
                env=self.bench.environ | {"SLURM_NODEID": str(number)}, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.bench.started(process)
        return process

    def log(self, number: int) -> Path:
        return self.bench.directory / f"logs/train-1-node{number}.log"

    def said(self, number: int) -> str:
        return self.log(number).read_text()


@pytest.fixture
def job(bench: Workbench) -> Callable[[int, int], Job]:
    return lambda nodes, workers: Job(bench, nodes, workers)


def ended(process: subprocess.Popen[str]) -> int:
    return process.wait(600)


def test_a_training_over_two_nodes_says_nothing_of_its_own(job: Callable[[int, int], Job]) -> None:
    """Worker 0 keeps the store, and ends after the last worker, which uses it until then."""
    script = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
if rank == 3:
    for other in range(3):
        store.wait([f"{other} is at its end"])
    for _ in range(100):
        store.add("still there", 1)
    told = f"{ones.item():.0f} workers, {store.get('still there').decode()}\\n"
    os.write(1, told.encode())  # at once: print would write the end of the line apart
store.set(f"{rank} is at its end", "")
"""
    both = job(2, 2)
    both.bench.environ["USE_TORCH_XLA"] = "0"
    nodes = [both.node(number, script) for number in (0, 1)]
    assert [*map(ended, nodes)] == [0, 0], both.said(0) + both.said(1)
    said = both.said(0) + both.said(1)
    assert said.count("4 workers, 100\n") == 1
    # Gloo's workers tell that they have met, and write through each other; socket.cpp tells of a
    # machine without IPv6, or without a name for this address.
    lines = [line for line in said.splitlines() if "socket.cpp" not in line]
    bad = re.compile(r"error|traceback|warn|trnslurm|\[[WE]", re.IGNORECASE)
    assert not [*filter(bad.search, lines)], said


def test_workers_have_the_variables_of_torchrun(job: Callable[[int, int], Job]) -> None:
    tell = """
import json, os, sys
text = json.dumps([sys.argv, sys.orig_argv[:-1], dict(os.environ)])
open(f"{sys.argv[0]}-{os.environ['LOCAL_RANK']}", "w").write(text)
"""
    ours = job(1, 2)
    assert ended(ours.node(0, tell)) == 0, ours.said(0)
    place = ours.bench.directory
    (place / "theirs.py").write_text(tell)
    words = ["--nnodes=1", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    words += [f"--master_port={ours.bench.environ['MASTER_PORT']}", "theirs.py"]
    subprocess.run(
        [sys.executable, "-m", "trnslurm.node.torchrun", *words], cwd=place,
        env=ours.bench.environ | {"SLURM_NODEID": "0"}, check=True, capture_output=True,
    )  # fmt: skip
    for local_rank in range(2):
        (argv, python, found), (theirs, same_python, expected) = (
            json.loads((place / f"{name}.py-{local_rank}").read_text())
            for name in ("train", "theirs")
        )
        assert [argv, theirs, python] == [["train.py"], ["theirs.py"], same_python]
        assert found.pop("TORCHELASTIC_ERROR_FILE").endswith(f"/{local_rank}.json")
        expected.pop("TORCHELASTIC_ERROR_FILE")
        changes = {
            "TORCHELASTIC_USE_AGENT_STORE": ("False", "True"),
            "PYTHONFAULTHANDLER": ("1", None),  # a crash shows its stack
        }
        for environ in (found, expected):
            environ.pop("PYTHONPATH")
        assert found.pop("TRNSLURM_OTHERS", None) is None, "it is for worker 0 alone"
        differ = {k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)}
        assert {k: (found.get(k), expected.get(k)) for k in differ} == changes


@pytest.mark.parametrize(
    ("dies", "name", "line"),
    [
        ("sys.exit(3)", "", "it ended with exit code 3, without a traceback"),
        ("os.kill(os.getpid(), 9)", "killed-by-hand", "for lack of memory"),
        (RECORDED, "token-index", "ValueError: tokens 51 is beyond the vocabulary of 50"),
    ],
    ids=["exit", "kill", "record"],
)
def test_who_failed_is_told_at_once(
    job: Callable[[int, int], Job], dies: str, name: str, line: str
) -> None:
    """The others of the node are told to end; triage finds who it was."""
    script = f"""
import os, sys
def main():
    raise ValueError("tokens 51 is beyond the vocabulary of 50")
if os.environ["RANK"] == "1":
    import time
    while not all(os.path.exists(f"worker-{{n}}") for n in (0, 2)):
        time.sleep(0.01)
    {dies}
{FOR_EVER}"""
    one = job(1, 3)
    node = one.node(0, script)
    assert ended(node) == 1, one.said(0)
    assert {*map(one.bench.has, ("worker-0-told", "worker-2-told"))} == {True}
    one.bench.await_none_alive()
    report = one.said(0)
    told = r"^trnslurm: 20\S+\.\d{3}Z rank 1 \(local rank 1, \S+\) failed: "
    assert re.search(told, report, re.M), report
    (one.bench.directory / "plan.json").write_text('{"workers_per_node": 3}')
    found = diagnose(one.bench.directory, "train", 1)
    assert found and (found.rank, found.node, found.name) == (1, 0, name), report
    assert found.lines[-1].endswith(line)
    assert found.when and abs(found.when - one.log(0).stat().st_mtime) < 60


def test_what_does_not_end_is_killed(job: Callable[[int, int], Job]) -> None:
    script = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"worker-{os.environ['RANK']}", "w")
while not (os.environ["RANK"] == "0" and os.path.exists("worker-1")):
    time.sleep(0.01)
sys.exit(1)
"""
    one = job(1, 2)
    assert ended(one.node(0, script, within=True)) == 1
    one.bench.await_none_alive()


def test_term_goes_on_to_the_workers(job: Callable[[int, int], Job]) -> None:
    """They save and end well, and yet the training is not complete. A second TERM means nothing."""
    slow = FOR_EVER.replace("sys.exit(0)", "time.sleep(0.2), sys.exit(0)")
    one = job(1, 2)
    node = one.node(0, slow)
    one.bench.await_files("worker-0", "worker-1")
    node.send_signal(signal.SIGUSR1)  # Slurm sends it to the workers as well
    node.send_signal(signal.SIGTERM)
    one.bench.await_files("worker-0-told", "worker-1-told")
    node.send_signal(signal.SIGTERM)
    assert ended(node) == 1
    assert one.said(0).endswith("trnslurm: the launcher got signal: 15 (SIGTERM)\n")
    one.bench.await_none_alive()


def test_workers_end_with_their_launcher(job: Callable[[int, int], Job]) -> None:
    one = job(1, 2)
    node = one.node(0, FOR_EVER)
    one.bench.await_files("worker-0", "worker-1")
    node.kill()
    one.bench.await_none_alive()


def test_nodes_leave_together(job: Callable[[int, int], Job]) -> None:
    """srun ends what outlives the first node by a minute, so no node leaves before the last."""
    both = job(2, 1)
    nodes = [both.node(number, FOR_EVER) for number in (0, 1)]
    both.bench.await_files("worker-0", "worker-1")
    (both.bench.directory / "worker-1-ends").touch()
    both.bench.await_true(lambda: not children(nodes[1].pid), "its worker has ended")
    assert [node.poll() for node in nodes] == [None, None]
    (both.bench.directory / "worker-0-ends").touch()
    assert [*map(ended, nodes)] == [0, 0]
    assert both.said(0) + both.said(1) == ""


def test_a_node_that_waits_for_the_others_can_be_ended(job: Callable[[int, int], Job]) -> None:
    both = job(2, 1)
    nodes = [both.node(number, FOR_EVER) for number in (0, 1)]
    both.bench.await_files("worker-0", "worker-1")
    (both.bench.directory / "worker-1-ends").touch()
    both.bench.await_true(lambda: not children(nodes[1].pid), "its worker has ended")
    for node in nodes:
        node.terminate()
    assert [*map(ended, nodes)] == [1, 1]


@pytest.mark.parametrize("there", [0, 1])
def test_a_node_that_does_not_come_is_named(job: Callable[[int, int], Job], there: int) -> None:
    both = job(2, 1)
    assert ended(both.node(there, FOR_EVER, within=True)) == 1
    address = f"127.0.0.1:{both.bench.environ['MASTER_PORT']}"
    says = {
        0: "after 2 s, only 1/2 nodes joined; missing: node 1 (node-1)",
        1: f"cannot reach node 0 at {address} (Connection refused)",
    }
    assert both.said(there) == f"error: the workers cannot start: {says[there]}\n"


@pytest.mark.parametrize(
    ("end", "waits"),
    [
        ("", True),
        ("sys.exit()", True),
        ("sys.exit(3)", False),
        ("raise ValueError", False),
    ],
)
def test_only_a_worker_that_ends_well_waits_for_the_others(
    tmp_path: Path, end: str, waits: bool
) -> None:
    ours, theirs = os.pipe()
    os.close(theirs)
    (tmp_path / "sitecustomize.py").write_text(
        "import select\n_select = select.select\n"
        "select.select = lambda *words: print('waits', words[0], flush=True) or _select(*words)\n"
    )
    path = f"{ROOT / 'trnslurm/node/startup'}:{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{end}"], pass_fds=[ours], text=True, check=False,
        env=os.environ | {"PYTHONPATH": path, "TRNSLURM_OTHERS": str(ours)}, capture_output=True,
    )  # fmt: skip
    os.close(ours)
    assert done.stdout == (f"waits [{ours}]\n" if waits else ""), done.stderr


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        (
            "open('done-1', 'w').close(); time.sleep(600)",
            "rank 1 was at train.py:11 (<module>), while others waited for it",
        ),
        ("fail(11)", "ranks wait in different collectives: rank 0 at train.py:9, rank 1 at train"),
    ],
)
def test_who_did_not_wait_when_another_timed_out(job, second: str, cause: str) -> None:
    """Both have said where they are before one of them ends."""
    job = job(1, 2)
    script = f"""
import os, sys, time
rank = os.environ["RANK"]
def fail(line):
    said = ["Traceback (most recent call last):", f'  File "train.py", line {{line}}, in <module>',
            "RuntimeError: [gloo/buffer.cc:7] Timed out waiting 5ms for recv operation"]
    print("\\n".join(f"[rank{{rank}}]: {{words}}" for words in said), file=sys.stderr, flush=True)
    open("done-" + rank, "w").close()
if rank == "0": fail(9)
else:
    {second}
while len([name for name in os.listdir() if name.startswith("done-")]) < 2: time.sleep(0.05)
sys.exit(1)
"""
    startup = str(ROOT / "trnslurm/node/startup")
    job.bench.environ["PYTHONPATH"] = f"{startup}:{job.bench.environ.get('PYTHONPATH', ROOT)}"
    assert ended(job.node(0, script)) == 1
    found = diagnose(job.bench.directory, "train", 1)
    assert found is not None and found.brief.startswith(cause), job.said(0)
