"""top: in a real terminal, that of tmux."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status
from trnslurm.top.look import row_of, view_of

from ..processes import run_process
from ..waiting import eventually

BOUND_S = 600
ENDED = {"state": "COMPLETED", "started": "2026-01-01T00:00:00Z", "ended": "2026-01-01T01:00:00Z"}
LOCAL = {"scheduler": "local", "jobs": {}, "phases": ("train",)}


def tell(run: RunDir, steps: int, of: int = 30) -> None:
    """Write metrics and a log."""
    lines = [
        {"attempt": 1, "step": n, "steps": of, "loss": 5 - n / 10, "tokens_per_s": 1234.5,
         "step_s": 60.0}
        for n in range(1, steps + 1)
    ]  # fmt: skip
    run.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    log = run.node_log("train", 1, 0)
    log.write_text("".join(f"line {n} of the log\x1b[31m\n" for n in range(1, 101)))


class Terminal:
    """A terminal of tmux, in which one command runs."""

    def __init__(self, place: Path, columns: int, rows: int) -> None:
        self._tmux = ["tmux", "-S", str(place / "t")]
        self.size = ["-x", str(columns), "-y", str(rows)]
        self.code = place / "code"

    def start(self, *words: str) -> None:
        """Start trnslurm with these words."""
        command = f'"$@"; echo $? > {self.code}'
        argv = [sys.executable, "-m", "trnslurm", *words]
        self._call("new-session", "-d", *self.size, "sh", "-c", command, "sh", *argv)

    def _call(self, *words: str) -> str:
        size = ("COLUMNS", "LINES")  # which would be taken for the size of the terminal
        env = {name: value for name, value in os.environ.items() if name not in size}
        env |= {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        argv = [*self._tmux, "-f", "/dev/null", *words]
        done = run_process(argv, env=env, timeout_s=BOUND_S)
        return done.out

    def press(self, *keys: str) -> None:
        """Press keys."""
        self._call("send-keys", *keys)

    def shown(self) -> str:
        """What it shows now."""
        return self._call("capture-pane", "-p")

    def wait(self, *texts: str, without: str = "") -> str:
        """Wait until it shows these texts; return all that it shows."""

        def as_asked() -> str:
            shown = self.shown()
            whole = all(text in shown for text in texts)
            return shown if whole and not (without and without in shown) else ""

        said = f"{texts} are shown, without {without!r}"
        return str(eventually(as_asked, BOUND_S, said=lambda: f"{said}:\n{self.shown()}"))

    def quit(self) -> None:
        """Press q; the command ends well."""
        self.press("q")
        code = eventually(lambda: self.code.exists() and self.code.read_text(), said=self.shown)
        assert code == "0\n"

    def close(self) -> None:
        """End the terminal, and what runs in it."""
        self._call("kill-server")


@pytest.fixture
def terminal(
    site, tmp_path_factory, monkeypatch, request: pytest.FixtureRequest
) -> Iterator[Terminal]:
    if not shutil.which("tmux"):
        pytest.skip("no tmux here: apt-get install tmux")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    columns, rows = getattr(request, "param", (80, 24))
    terminal = Terminal(tmp_path_factory.mktemp("t"), columns, rows)
    yield terminal
    terminal.close()


@pytest.fixture
def runs(make_run: Callable[..., RunDir], fake_slurm) -> list[RunDir]:
    """A run that has ended, and one that waits for nodes."""
    ended = make_run("20260101-000000-a", states={"train": [ENDED]}, **LOCAL)
    tell(ended, 30)
    waiting = make_run("20260102-000000-b")
    fake_slurm.queue(
        f"1001|PENDING|Resources|N/A||{waiting.path}",
        f"1002|PENDING|Dependency|N/A||{waiting.path}",
    )
    return [ended, waiting]


@pytest.mark.parametrize("terminal", [(80, 24), (200, 50)], indirect=True)
def test_a_list_a_run_its_log_and_back(runs, terminal) -> None:
    terminal.start("top", "--every", "0.5")
    wide = "200" in terminal.size
    reason = "precompile: waiting for free nodes" if wide else "precompile: waiting"
    shown = terminal.wait("2 runs, 1 active", "20260101-000000-a", "30/30", "2.0000", reason)
    rows = [line for line in shown.splitlines() if " 2026010" in line]
    assert rows[0].split()[:2] == ["20260102-000000-b", "PENDING"]  # the newest first
    assert reason in rows[0] and ("speed" in shown) == wide
    terminal.press("Down", "Enter")
    terminal.wait("20260101-000000-a  COMPLETED", "100%", "1,234 tok/s", "▁", "between 2.0000")
    shown = terminal.wait("line 100 of the log")  # the newest is in sight
    assert max(map(len, shown.splitlines())) <= int(terminal.size[1])
    terminal.press("l")
    terminal.wait("line 99 of the log\\x1b[31m", without="1,234 tok/s")
    with runs[0].node_log("train", 1, 0).open("a") as log:
        log.write("line 101 comes later\n")
    terminal.wait("line 101 comes later")
    terminal.press("Escape")
    terminal.wait("1,234 tok/s")
    terminal.press("Escape")
    terminal.wait("2 runs, 1 active")
    terminal.quit()


def test_a_long_reason_is_shown_whole(make_run, terminal) -> None:
    why = f"a cause {'that needs many words ' * 5}to the end"
    make_run(states={"train": [ENDED | {"state": "FAILED", "reason": why}]}, **LOCAL)
    terminal.start("top", "last", "--every", "0.5")
    terminal.wait("FAILED", "to the end")
    terminal.quit()


def test_it_goes_on_with_the_run(make_run, terminal) -> None:
    begun = {"state": "RUNNING", "started": "2026-01-01T00:00:00Z"}
    run = make_run(states={"train": [begun]}, heartbeat_age_s=0, **LOCAL)
    tell(run, 3)
    terminal.start("top", "last", "--every", "0.5")
    terminal.wait("step  3/30", "10%")
    tell(run, 15)
    terminal.wait("step  15/30", "50%")
    terminal.quit()


def test_keys_ask_before_they_end_a_run(runs, terminal, fake_slurm) -> None:
    terminal.start("top", "--every", "0.5")
    terminal.wait("20260102-000000-b")
    terminal.press("-H", "ff")  # not UTF-8: no key
    shown = terminal.shown()
    eventually(lambda: terminal.shown() != shown, said=terminal.shown)  # its clock goes on
    terminal.press("c")
    terminal.wait("Cancel 20260102-000000-b?", "y: yes")
    terminal.press("n")
    terminal.wait("2 runs", without="y: yes")
    assert not fake_slurm.calls("scancel") and not runs[1].cancelled_file.exists()
    terminal.press("c")
    terminal.wait("y: yes")
    terminal.press("y")
    terminal.wait("Cancelled", without="y: yes")
    assert fake_slurm.calls("scancel")
    terminal.press("Down", "r")
    terminal.wait("Resume 20260101-000000-a from")
    terminal.press("y")
    terminal.wait("20260101-000000-a", without="y: yes")
    terminal.quit()


def test_it_writes_a_report(runs, terminal, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    terminal.start("top", runs[0].name, "--every", "0.5")
    terminal.wait("COMPLETED", "100%")
    terminal.press("p")
    terminal.wait("Wrote")
    assert "<svg" in (tmp_path / f"{runs[0].name}.html").read_text()
    terminal.quit()


def test_without_a_terminal_it_is_one_line(runs, cli) -> None:
    done = cli("top")
    assert (done.code, done.error) == (
        1, "top needs a terminal: use trnslurm status or trnslurm watch instead",
    )  # fmt: skip


def test_what_is_left_is_told_while_it_runs(make_run, fake_slurm) -> None:
    begun = {"state": "RUNNING", "started": "2026-01-01T00:00:00Z", "job_id": "1002"}
    run = make_run(
        states={"train": [begun]}, heartbeat_age_s=0, phases=("train",), jobs={"train": "1002"}
    )
    fake_slurm.queue(f"1002|RUNNING|None|2026-01-01T00:00:00|node-1|{run.path}")
    for of, left in ((3, "< 1 min"), (20, "17 min"), (303, "5.0 h"), (30003, "20.8 d")):
        tell(run, 3, of)
        assert row_of(run_status(run))[4] == left
        assert dict(view_of(run, lines=3).facts)["left"] == left
    assert row_of(run_status(run))[6] == "1,234 tok/s"
    (run.state / "train-1.json").write_text(json.dumps(ENDED))
    assert row_of(run_status(run))[4] == "-"


def test_numbers_that_are_none_and_a_run_without_a_word(make_run) -> None:
    run = make_run(states={"train": [ENDED]}, **LOCAL)
    view = view_of(run, lines=5)
    assert (view.share, [*view.losses], [*view.log]) == (None, [], [])
    run.metrics_file.write_text('{"attempt": 1, "step": 3, "steps": "x", "loss": NaN}\n')
    assert view_of(run, lines=5).losses == []
