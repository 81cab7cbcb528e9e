"""Runs that are stopped, whatever stops them, and the next ones, which resume."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .stopping import DEADLINE_S, PIECES_BEFORE, go_on, session, started, wait_for
from .stopping import finished as finished_chunks

pytestmark = pytest.mark.rest

# Hundreds of chunks, so that a run is still at work when a busy machine gets to stopping it.
CHUNK_BYTES = 10_000
ALONE = ("--processes", 1)  # a run to the end that need not be stopped


@pytest.fixture(scope="module")
def make_long_text(text):
    def make(path):
        path.write_text("\n\n".join(f"{number}: {text.read_text()}" for number in range(60)))
        return path

    return make


@pytest.fixture
def long_text(make_long_text, tmp_path):
    return make_long_text(tmp_path / "long.txt")


@pytest.fixture
def command(long_text, tmp_path):
    """The arguments of a run in small chunks; it is stopped after the tokenizer is trained."""
    work = ("--processes", 2, "--chunk-bytes", CHUNK_BYTES)
    return ("--text", long_text, "--tokenizer", "train:400", *work)


@pytest.fixture(scope="module")
def at_once(make_long_text, run_prepare, read_data, tmp_path_factory):
    """What the command makes when nothing stops it."""
    directory = tmp_path_factory.mktemp("at-once")
    text = make_long_text(directory / "long.txt")
    output = directory / "data"
    work = (*ALONE, "--chunk-bytes", 10**9)
    done = run_prepare("--output", output, "--text", text, "--tokenizer", "train:400", *work)
    assert done.code == 0, done
    return read_data(output)


def workers(pid, *, are_forked=False):
    def started_by(worker):
        return Path(f"/proc/{worker}/cmdline").read_bytes()

    others = [worker for worker in session(pid) if worker != pid]
    if are_forked:
        assert {started_by(worker) for worker in others} == {started_by(pid)}
    else:
        others = [worker for worker in others if b"spawn_main" in started_by(worker)]
    assert len(others) == 2
    return others


def blocks(pid, number):
    """Whether a process blocks a signal, in each of its threads."""
    masks = [
        int(re.search(r"SigBlk:\s*(\w+)", status.read_text())[1], 16)
        for status in Path(f"/proc/{pid}/task").glob("*/status")
    ]
    return all(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_resumes_where_another_was_stopped(
    prepare, read_data, left_beside, command, at_once, tmp_path, number
):
    output = tmp_path / "data"
    with started(output, command) as process:
        if number != signal.SIGKILL:
            assert all(blocks(worker, number) for worker in workers(process.pid))
        # The others go to every process, as from a terminal and scancel.
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        go_on(process)
        err = process.communicate(timeout=DEADLINE_S)[1]
        # No worker outlives it, however it ends.
        wait_for(lambda: not session(process.pid))
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert err.endswith("finished work is kept; run the command again to resume\n"), err
        assert "Traceback" not in err
    assert not output.exists()
    finished = finished_chunks(output)
    assert len(finished) >= PIECES_BEFORE

    if number == signal.SIGKILL:
        with started(output, command) as process:
            # Nothing is done twice.
            assert finished.items() <= finished_chunks(output).items()
            process.kill()
    done = prepare("--output", output, *command, *ALONE)
    assert done.code == 0, done
    assert left_beside(output) == []
    assert read_data(output).files() == at_once.files()


@pytest.mark.parametrize("kind", [(), ("bert",)])
def test_it_stops_while_a_tokenizer_is_trained(tmp_path, kind):
    """On text without blanks, which takes the library many minutes."""
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(1).choices("abcdefgh", k=2_000_000)))
    words = (*kind, "--text", text, "--tokenizer", "train:9999", "--output", tmp_path / "data")
    with subprocess.Popen(
        [sys.executable, "-m", "trnslurm.prepare", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            for line in process.stderr:
                if line.startswith("training the tokenizer: 100%"):
                    break
            process.terminate()
            _, err = process.communicate(timeout=600)
        finally:
            process.kill()
    assert (process.returncode, err.splitlines()[-1:]) == (
        143, ["stopped: finished work is kept; run the command again to resume"],
    )  # fmt: skip


def test_workers_are_forked_from_a_process_without_threads(read_data, command, at_once, tmp_path):
    """As here, where no tokenizer is trained; then they end with it as well."""
    trained = at_once.path / "tokenizer.json"
    command = tuple(trained if word == "train:400" else word for word in command)
    output = tmp_path / "data"
    for number in (signal.SIGKILL, signal.SIGTERM):
        with started(output, command) as process:
            forked = workers(process.pid, are_forked=True)
            assert all(blocks(worker, signal.SIGTERM) for worker in forked)
            (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
            go_on(process)
            process.communicate(timeout=DEADLINE_S)
            wait_for(lambda: not session(process.pid))
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    error = kill_a_worker(output, command, are_forked=True)
    assert error.startswith("error: a tokenizing process died")
    with started(output, command) as process:
        go_on(process)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    made = read_data(output).files()
    for name in ("train.bin", "eval.bin", trained.name):
        assert made[name] == at_once.files()[name]


def kill_a_worker(output, command, *, are_forked=False):
    """Start a run, kill one of its two workers, and return the last line that it prints."""
    with started(output, command) as process:
        dead, stuck = workers(process.pid, are_forked=are_forked)
        os.kill(stuck, signal.SIGSTOP)  # as if it waited for a lock of the other's
        os.kill(dead, signal.SIGKILL)
        for process_id in set(session(process.pid)) - {dead, stuck}:
            os.kill(process_id, signal.SIGCONT)
        err = process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 1
    return err.splitlines()[-1]


def test_a_dead_worker_loses_nothing_that_is_finished(
    prepare, read_data, command, at_once, tmp_path
):
    output = tmp_path / "data"
    assert kill_a_worker(output, command) == (
        "error: a tokenizing process died (if memory is short, use fewer --processes): "
        "finished work is kept; run the command again to resume"
    )
    assert not output.exists()
    finished = finished_chunks(output)
    with started(output, command) as process:
        assert finished.items() <= finished_chunks(output).items()
        go_on(process)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    assert read_data(output).files() == at_once.files()


def test_another_share_held_out_uses_the_same_work_and_another_input_removes_it(
    prepare, left_beside, command, tmp_path
):
    output = tmp_path / "data"
    with started(output, command) as process:
        process.kill()
    finished = finished_chunks(output)
    with started(output, (*command, "--holdout", 0.1)) as process:
        assert finished.items() <= finished_chunks(output).items()
        assert len({path.parent for path in finished_chunks(output)}) == 1
        process.kill()
    # Nobody will finish it once there is data from other input.
    assert len(left_beside(output)) == 1
    assert prepare("--output", output, *command, *ALONE, "--document-per", "line").code == 0
    assert left_beside(output) == []


def test_two_at_once_do_not_disturb_each_other(prepare, command, tmp_path):
    output = tmp_path / "data"
    with started(output, command) as process:
        done = prepare("--output", output, *command)
        assert done.error == f"{output}: another process is preparing this data right now"
        go_on(process)
        assert process.wait(DEADLINE_S) == 0
    assert prepare("--output", output, *command).out.startswith(
        f"{output} is already prepared from this"
    )


@pytest.fixture
def full_disk(run_prepare, text, tmp_path):
    """What a run prints that met a full disk, its output and arguments.

    A limit on the size of files stands in for the disk: the token file is too large.
    """
    output = tmp_path / "data"
    command = ("--text", text, "--tokenizer", "train:300", "--chunk-bytes", 2000)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, limit[1]))
    try:
        return run_prepare("--output", output, *command), output, command
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_full_disk_loses_nothing_that_is_finished(prepare, full_disk):
    done, output, command = full_disk
    assert done.error.endswith("large: finished work is kept; run the command again to resume")
    assert not output.exists()
    assert len(finished_chunks(output)) > 10
    assert prepare("--output", output, *command).code == 0


def test_a_damaged_chunk_is_made_again(prepare, read_data, full_disk, tmp_path):
    _, output, command = full_disk
    damaged, *_ = finished_chunks(output)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert prepare("--output", output, *command).code == 0
    assert prepare("--output", tmp_path / "other", *command).code == 0
    assert read_data(output).files() == read_data(tmp_path / "other").files()
