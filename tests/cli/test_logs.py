"""logs: which file is shown, its end, and following it over attempts to the end of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from trnslurm.contract.files import write_json
from trnslurm.runs import logs
from trnslurm.runs.logs import follow_log, last_states, tail_offset

DONE = {"state": "COMPLETED", "exit_code": 0}
RUNNING = {"state": "RUNNING"}


@pytest.fixture
def run(make_run):
    """A run whose second attempt runs on two nodes."""
    run = make_run(states={"precompile": [DONE], "train": [{"state": "REQUEUED"}, DONE]})
    for phase, attempt in (("precompile", 1), ("train", 1), ("train", 2)):
        for node in (0, 1):
            run.node_log(phase, attempt, node).write_text(f"{phase} {attempt} node {node}\n")
    (run.logs / "precompile-1001.log").write_text("batch precompile\n")
    (run.logs / "train-1002.log").write_text("batch train\n")
    return run


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "train 2 node 0\n"),
        (["--node", "1"], "train 2 node 1\n"),
        (["--phase", "precompile"], "precompile 1 node 0\n"),
        (["--phase", "precompile", "--node", "1"], "precompile 1 node 1\n"),
        (["--batch"], "batch train\n"),
        (["--batch", "--phase", "precompile"], "batch precompile\n"),
    ],
)
def test_choice(run, cli, arguments: list[str], text: str) -> None:
    assert cli("logs", run.name, *arguments).out == text


def test_attempt_without_a_log_yet_leaves_the_one_before(run, cli) -> None:
    run.node_log("train", 2, 0).unlink()
    assert cli("logs", run.name).out == "train 1 node 0\n"


def test_refusals(run, make_run, cli) -> None:
    for node in ("2", "-1"):
        error = cli("logs", run.name, "--node", node).error
        assert error == f"{run.name} has no node {node}, only nodes 0 to 1"
    fresh = make_run("20260102-000000-train-only", phases=("train",), jobs={})
    assert cli("logs", fresh.name).error == (
        f"{fresh.name} has no such log yet: it is LOST: not submitted"
    )
    assert "has no phase 'precompile'" in cli("logs", fresh.name, "--phase", "precompile").error


def test_last_lines(run, cli) -> None:
    file = run.node_log("train", 2, 0)
    file.write_text("".join(f"{n}\n" for n in range(1, 251)) + "not ended")
    assert cli("logs", run.name).out.splitlines() == [*map(str, range(152, 251)), "not ended"]
    assert cli("logs", run.name, "-n", "2").out == "250\nnot ended"
    assert cli("logs", run.name, "-n", "0").out.startswith("1\n2\n")


def test_all_of_a_log_is_all_of_it(run, run_cli) -> None:
    text = "".join(f"line {n} of a log that is longer than one buffer\n" for n in range(60_000))
    run.node_log("train", 2, 0).write_text(text)
    assert len(text) > 2 << 20
    assert run_cli("logs", run.name, "-n", "0").out == text


def test_tail_of_a_big_file_reads_its_end_only(tmp_path: Path) -> None:
    file = tmp_path / "big"
    with file.open("wb") as stream:
        stream.truncate(1 << 36)  # 64 GiB, all of it a hole: reading it would take minutes
        stream.seek(0, 2)
        stream.write(b"\nfirst\nlast\n")
    assert tail_offset(file, 2) == (1 << 36) + 1
    assert tail_offset(file, 1) == (1 << 36) + 7


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_of_a_progress_bar_the_last_state_is_shown(size: int, monkeypatch) -> None:
    """However the log is cut into chunks, and though a line may be longer than what is held."""
    monkeypatch.setattr(logs, "_CHUNK_BYTES", 20)
    long = b"x" * 50 + b"\n"
    data = long + b"\r  0%|   |\r 50%|## |\r       \r{'loss': 2}\nplain\n"
    data += b"\r 50%|## |\r100%|###|\ndos\r\n  \r 9%|"
    shown = b"".join(last_states(data[at : at + size] for at in range(0, len(data), size)))
    assert shown == long + b"{'loss': 2}\nplain\n100%|###|\ndos\n 9%|"


def test_bytes_that_are_no_text_are_passed_on(run) -> None:
    data = b"\xff\xfe\0 \b progress\n"
    run.node_log("train", 2, 0).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-m", "trnslurm", "logs", str(run.path)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(logs.__file__).parents[1])},
        capture_output=True, timeout=180, check=True,
    )  # fmt: skip
    assert done.stdout == data


class Scene:
    """Follows a log whose run goes on step by step: one step is played at each poll."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)
        monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=self._poll))

    def _poll(self, seconds: float) -> None:
        assert 0 < seconds <= 1
        self._steps.pop(0)()

    def ended(self) -> bool:
        return not self._steps


def append(file: Path, data: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(data)


def test_follow_over_a_new_attempt_to_the_end(tmp_path: Path, monkeypatch) -> None:
    first, second = tmp_path / "train-1-node0.log", tmp_path / "train-2-node0.log"

    def chosen() -> Path | None:
        return next((f for f in (second, first) if f.exists()), None)

    scene = Scene(
        monkeypatch,
        lambda: append(first, b"a\nb\nc\n"),
        lambda: append(first, b"d "),
        lambda: (append(first, b"e\n"), append(second, b"f\n")),
        lambda: append(second, b"g\n"),
    )
    said = b"".join(follow_log(chosen, scene.ended, lines=2))
    assert said == b"b\nc\nd e\n==> train-2-node0.log <==\nf\ng\n"


def test_follow_starts_again_where_a_log_was_truncated(tmp_path: Path, monkeypatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old and long\n")
    scene = Scene(monkeypatch, lambda: log.write_bytes(b"new\n"), lambda: append(log, b"more\n"))
    said = b"".join(follow_log(lambda: log, scene.ended, lines=10))
    assert said == b"old and long\nnew\nmore\n"


def test_follow_ends_where_there_never_was_a_log(monkeypatch) -> None:
    scene = Scene(monkeypatch, lambda: None)
    assert list(follow_log(lambda: None, scene.ended, lines=10)) == []


def test_what_is_written_last_is_shown(tmp_path: Path, monkeypatch) -> None:
    """The end is asked for before the log is read: the other order would lose the last lines."""
    log = tmp_path / "log"
    log.write_bytes(b"a\n")
    scene = Scene(monkeypatch, lambda: None)

    def ended() -> bool:
        if scene.ended():
            append(log, b"the last words\n")
        return scene.ended()

    assert b"".join(follow_log(lambda: log, ended, lines=10)).endswith(b"the last words\n")


def test_follow_through_the_command_line(run, fake_slurm) -> None:
    """A process that follows shows a first line, then what is added, and ends with the run."""
    write_json(run.state / "train-2.json", {"phase": "train", "attempt": 2, "state": "RUNNING"})
    fake_slurm.queue("1002|RUNNING|None|x|node-[1-2]")
    file = run.node_log("train", 2, 0)
    with subprocess.Popen(
        [sys.executable, "-m", "trnslurm", "logs", str(run.path), "-f"],
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(logs.__file__).parents[1])},
    ) as process:  # fmt: skip
        watchdog = threading.Timer(30, process.kill)
        watchdog.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "train 2 node 0\n"
        append(file, b"step 1\n")
        assert process.stdout.readline() == "step 1\n"
        write_json(
            run.state / "train-2.json", {"phase": "train", "attempt": 2, "state": "COMPLETED"}
        )
        fake_slurm.queue()
        assert process.stdout.read() == ""
        assert process.wait() == 0
        watchdog.cancel()
