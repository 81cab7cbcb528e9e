"""Which failures would come again in every attempt: what cannot be the machine's fault."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from trnslurm.contract.files import write_json
from trnslurm.node.triage.diagnosis import diagnose, nothing_found
from trnslurm.node.triage.finding import Finding
from trnslurm.records.run import RunDir

STARTED = {"state": "RUNNING", "checkpoint": 40, "hosts": "node-1,node-2"}
TRAIN_ERROR = "trnslurm.train.errors.TrainError"
NUMPY = "/venv/lib/python3.11/site-packages/numpy/core/memmap.py"
PEER_GONE = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "/runs/x/code/jobs/toy/train.py", line 7, in <module>\n'
    "[rank{0}]: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:41702\n"
)


@pytest.fixture
def run(make_run) -> RunDir:
    """A run of two nodes in whose second attempt everything below happens."""
    run: RunDir = make_run(states={"train": [{}, {}]}, phases=("train",))
    run.state_file("train", 2).write_text(json.dumps(STARTED))
    return run


def traceback(error: str, *, file: str = "train.py", line: int = 12) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/runs/x/code/jobs/toy/train.py", line 30, in <module>\n'
        "    main()\n"
        f'  File "{file}", line {line}, in main\n'
        f'    lr = settings["lr"]\n{error}\n'
    )


def log(run: RunDir, node: int, text: str, attempt: int = 2) -> None:
    run.node_log("train", attempt, node).write_text(text)


def record(run: RunDir, rank: int, said: str, raised: list[str], **more: Any) -> None:
    write_json(
        run.failed_file("train", 2, rank),
        {"time": 5.0 + rank, "rank": rank, "node": rank, "host": f"node-{rank + 1}",
         "error": said.splitlines()[-1], "traceback": said, "steps_done": 0, "raised": raised,
         **more},
    )  # fmt: skip


def found(run: RunDir) -> Finding:
    finding = diagnose(run.path, "train", 2)
    assert finding is not None
    return finding


# -- by the exception


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ("KeyError: 'lr'", True),
        ("NameError: name 'torhc' is not defined", True),
        ("TypeError: 'int' object is not iterable", True),
        ("AttributeError: 'Plan' object has no attribute 'lr'", True),
        ("ValueError: 8 heads do not divide a width of 100", True),
        ("AssertionError", True),
        ("ModuleNotFoundError: No module named 'trnslurm.train.nothing'", True),
        ("ModuleNotFoundError: No module named 'mine.part'", True),
        ("ImportError: cannot import name 'plan' from 'own' (/runs/x/code/jobs/toy/own.py)", True),
        # Another machine may have it, or have it now.
        ("ModuleNotFoundError: No module named 'h5py'", False),
        ("ImportError: cannot import name 'f' from 'h5py' (/venv/h5py/__init__.py)", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/x'", False),
        ("OSError: [Errno 116] Stale file handle", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("TimeoutError: the read operation timed out", False),
        ("MemoryError", False),
        ("EOFError", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
        ("RuntimeError: [gloo/pair.cc:547] Connection reset by peer", False),
        ("torch.distributed.DistNetworkError: The client socket has timed out", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", False),
        ("KeyError: 'neff_cache2'", False),  # which Neuron's cache raises
        ("__main__.Unreachable: no answer", False),
        # An empty directory, or half a file.
        ("IndexError: list index out of range", False),
        ("ValueError: no shards in /fsx/data", False),
        ("ValueError: cannot mmap an empty file", False),
        ("ValueError: invalid literal for int() with base 10: ''", False),
    ],
)
def test_an_exception_of_the_jobs_own_code(run, error: str, again: bool) -> None:
    """Without a record, as a script leaves it that knows nothing of trnslurm."""
    (run.code / "jobs/toy").mkdir(parents=True)
    (run.code / "trnslurm.zip").touch()
    (run.code / "jobs/toy/own.py").touch()
    (run.code / "project/mine").mkdir(parents=True)
    log(run, 0, traceback(error))
    assert found(run).again is again
    if found(run).kind == "cause":
        assert found(run).brief.startswith((error, f"node-1: {error}"))


def test_one_that_a_library_raises_may_be_the_machines(run) -> None:
    log(run, 0, traceback("KeyError: 'x'", file=NUMPY))
    assert not found(run).again


def test_an_option_that_hf_argument_parser_does_not_know(run) -> None:
    file = "/venv/lib/python3.11/site-packages/transformers/hf_argparser.py"
    error = "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--lrr']"
    log(run, 0, traceback(error, file=file))
    assert found(run).again


def test_the_same_at_the_same_line_twice_is_a_proof(run) -> None:
    log(run, 0, traceback("IndexError: list index out of range"))
    log(run, 0, traceback("IndexError: tuple index out of range", line=13), attempt=1)
    assert not found(run).again
    log(run, 0, traceback("IndexError: tuple index out of range"), attempt=1)
    assert found(run).again
    for error in ("OSError: [Errno 5] Input/output error", "RuntimeError: no"):
        for attempt in (1, 2):
            log(run, 0, traceback(error), attempt=attempt)
        assert not found(run).again


MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"


def test_a_file_that_all_nodes_lack(run) -> None:
    """One node may have lost its mount; the run's own directory is the same on all nodes."""
    log(run, 0, traceback(MISSING.format("/data/x")))
    assert not found(run).again
    log(run, 1, traceback(MISSING.format("/data/y")))
    assert not found(run).again
    log(run, 1, traceback(MISSING.format("/data/x")))
    assert (found(run).again, found(run).mend) == (True, "submit")
    assert found(run).brief == f"{MISSING.format('/data/x')} at train.py, line 12"
    log(run, 1, "")
    log(run, 0, traceback(MISSING.format("/data/x")), attempt=1)
    assert found(run).again  # twice at the same line


def test_a_file_that_the_run_lacks(run) -> None:
    """Another rank may have written it meanwhile."""
    run.code.mkdir(exist_ok=True)
    write_json(run.project_file, {"links": {}, "left_out": []})
    log(run, 0, traceback(MISSING.format("data/x")))
    assert found(run).again
    (run.path / "work/data").mkdir(parents=True)
    (run.path / "work/data/x").touch()
    assert not found(run).again
    record(run, 1, traceback("OSError: [Errno 5] Input/output error"), ["OSError"])
    (run.path / "work/data/x").unlink()
    assert not found(run).again


def test_a_file_that_python_cannot_parse(run) -> None:
    """Of which it prints no traceback, only where."""
    said = (
        '  File "/runs/x/code/train.py", line 3\n    def f(\n         ^\nSyntaxError: not closed\n'
    )
    log(run, 0, f"step\n{said}{said}")
    assert (found(run).again, found(run).brief) == (
        True,
        "SyntaxError: not closed at train.py, line 3",
    )


ARGPARSE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: plan.json\n"
CLICK = (
    "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\n"
    "Error: unrecognized arguments: plan.json\n"
)


@pytest.mark.parametrize(("code", "again"), [(2, True), (1, False)])
@pytest.mark.parametrize("usage", [ARGPARSE, CLICK], ids=["argparse", "click"])
def test_arguments_that_a_script_does_not_take(run, usage: str, code: int, again: bool) -> None:
    error = "train.py: error: unrecognized arguments: plan.json"
    died = "E1122 01:45:01.6 7 torch/api.py:882] failed (exitcode: {}) local_rank: {} (pid: 9) of\n"
    log(run, 0, usage * 2 + died.format(2, 0) + died.format(code, 1))
    finding = found(run)
    assert (finding.name, finding.again, finding.brief) == ("usage", again, error if again else
            f"node-1: {error}")  # fmt: skip


def test_an_argument_that_a_script_requires_is_named(run) -> None:
    error = "train.py: error: the following arguments are required: --lr"
    died = "E1122 01:45:01.6 7 torch/api.py:882] failed (exitcode: 2) local_rank: 0 (pid: 9) of\n"
    log(run, 0, f"usage: train.py [-h] --lr LR\n{error}\n{died}")
    finding = found(run)
    assert (finding.name, finding.again, finding.brief) == ("usage-required", True, error)
    assert "(trnslurm submit … -- --lr …)" in finding.fix


def test_what_became_of_an_os_error_may_pass(run) -> None:
    """Even if `from None` hides it from the traceback."""
    error = "train.lr is -1.0: it must be at least 0"
    said = traceback(f"{TRAIN_ERROR}: {error}")
    record(run, 0, said, [TRAIN_ERROR, "FileNotFoundError"])
    assert not found(run).again
    record(run, 0, said, [TRAIN_ERROR])
    assert (found(run).again, found(run).brief) == (True, error)
    record(run, 0, said.replace("train.lr", "/data"), [TRAIN_ERROR])
    assert not found(run).again
    record(run, 0, said.replace("TrainError", "MachineError"), [f"{TRAIN_ERROR[:-10]}MachineError"])
    assert not found(run).again


# -- by what else there is


def test_all_workers_say_the_same_or_only_miss_each_other(run) -> None:
    """srun's TERM reaches the other node: that it is ended is an effect, and "143" no cause."""
    ended = "torch.distributed.elastic.multiprocessing.api.SignalException: got signal: 15\n"
    record(run, 0, traceback("KeyError: 'lr'"), ["KeyError"])
    log(run, 0, traceback("KeyError: 'lr'"))
    log(run, 1, f"Traceback (most recent call last):\n{ended}{PEER_GONE.format(1)}")
    assert (found(run).again, found(run).brief) == (True, "KeyError: 'lr' at train.py, line 12")


@pytest.mark.parametrize(
    "other",
    [
        traceback("OSError: [Errno 5] Input/output error"),
        traceback("RuntimeError: CUDA error: unspecified launch failure"),
        traceback("KeyError: 'lr'\nTraceback (most recent call last):\nZeroDivisionError: x"),
        "NEURON_HW_ERR=NRT_EXEC_HW_ERR_HBM_UE\n",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\n",
        "E1122 01:45:01.6 7 torch/api.py:882] failed (exitcode: -9) local_rank: 0 (pid: 9) of\n",
        "E1122 01:45:01.6 7 torch/api.py:882] failed (exitcode: 7) local_rank: 0 (pid: 9) of\n",
    ],
)
def test_anything_else_that_failed_may_be_the_reason(run, other: str) -> None:
    record(run, 0, traceback("KeyError: 'lr'"), ["KeyError"])
    assert found(run).again
    log(run, 1, other)
    assert not found(run).again


def test_nothing_after_a_new_step(run) -> None:
    def judged(**more: Any) -> bool:
        record(run, 0, traceback("KeyError: 'lr'"), ["KeyError"], **more)
        return found(run).again

    run.metrics_file.write_text('{"attempt": 1, "step": 40}\n')
    (run.checkpoints / "step-00000040").mkdir(parents=True)
    assert judged() and not judged(steps_done=1)
    run.metrics_file.write_text('{"attempt": 2, "step": 41}\n')
    assert not judged()
    run.metrics_file.unlink()
    assert judged()
    (run.checkpoints / "step-00000050").mkdir()
    assert not judged()


def test_a_script_that_tells_no_steps(run) -> None:
    """It may have made some if its workers worked together, or if it ran for long."""
    log(run, 0, traceback("KeyError: 'lr'"))
    assert found(run).again
    log(run, 1, PEER_GONE.format(1))
    assert not found(run).again
    log(run, 1, "")
    run.metrics_file.write_text('{"attempt": 1, "step": 40, "read": "log"}\n')
    assert found(run).again
    run.metrics_file.write_text('{"attempt": 2, "step": 41, "read": "log"}\n')
    assert not found(run).again
    run.metrics_file.unlink()
    times = {"started": "2026-01-01T00:00:00Z", "ended": "2026-01-01T00:09:59Z"}
    for ended, again in (("2026-01-01T00:09:59Z", True), ("2026-01-01T00:10:01Z", False)):
        run.state_file("train", 2).write_text(json.dumps(STARTED | times | {"ended": ended}))
        assert found(run).again is again


# -- what is said


def test_one_line_for_every_failure(run) -> None:
    log(run, 1, traceback("OSError: [Errno 116] Stale file handle"))
    assert found(run).brief == "node-2: OSError: [Errno 116] Stale file handle at train.py, line 12"
    log(run, 1, "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\n")
    assert found(run).brief.startswith("node-2: a process was killed because the node's memory")
    log(run, 1, traceback("OSError: [Errno 28] No space left on device: '/fsx/a'"))
    assert re.match(r"node-2: OSError: .*/a' at train.py, line 12: .* is full", found(run).brief)
    log(run, 1, PEER_GONE.format(1))
    assert (found(run).kind, found(run).brief) == ("effect", "")
    first = "only consequences were found; the first: rank 1 on node 1 (node-2): "
    assert found(run).line.startswith(first)


@pytest.mark.parametrize(
    "state",
    [
        {"state": "CANCELLED", "reason": "saved step 40"},
        {"state": "TIMEOUT", "reason": "time limit"},
        {"state": "REQUEUED", "reason": "preempted", "cause": "preempted"},
    ],
)
def test_nobody_is_blamed_for_ending_when_told_to(run, state) -> None:
    log(run, 0, "Signal 15 (SIGTERM) received\n")
    log(run, 1, "node.sh: line 60:  8156 Killed                  python -m torch.distributed.run\n")
    assert diagnose(run.path, "train", 2) is not None
    run.state_file("train", 2).write_text(json.dumps(state))
    assert diagnose(run.path, "train", 2) is None
    said = f"triage: train attempt 2: {state['state']} {state['reason']}: nothing failed"
    assert nothing_found(run.path, "train", 2) == [said]


def test_a_script_that_repeats_requests_to_a_server_is_not_blamed_for_them(run) -> None:
    """Servers of roles restart alone; a reason names the one that is down."""
    server = {"address": "10.0.0.3:2000", "host": "c"}
    write_json(run.servers_file, {"reward": [server]})
    asks = "asks http://10.0.0.3:2000 again: <urlopen error [Errno 111] Connection refused>\n" * 3
    log(run, 0, asks + traceback("RuntimeError: Connection closed by peer [10.0.0.2]:37589"))
    log(run, 1, asks + 'node.sh: line 58:   182 Killed    "${TRNSLURM_COMMAND[@]}"\n')
    assert "killed (SIGKILL)" in found(run).cause and "internet" not in found(run).line
