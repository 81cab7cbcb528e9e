"""triage reads logs of any size and content, and says nothing that could drive a terminal."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from trnslurm.contract.files import write_json
from trnslurm.node.triage import evidence
from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.node.triage.evidence import clean, read_log
from trnslurm.node.triage.finding import Finding
from trnslurm.node.triage.words import read_words, time_in
from trnslurm.records.run import RunDir


@pytest.fixture
def run(make_run) -> RunDir:
    """A run whose training has failed."""
    return make_run(states={"train": [{"state": "FAILED"}]}, phases=("train",))


def found(run: RunDir) -> Finding:
    finding = diagnose(run.path, "train", 1)
    assert finding is not None
    return finding


def test_nothing_that_drives_a_terminal_is_left() -> None:
    hostile = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J\x1bc 10%\r20%\u202eevil\u2028\x00\x08\t."
    assert clean(hostile) == "red  2J 10%\n20%evil    ."


def test_an_unfinished_escape_swallows_no_other_line() -> None:
    assert clean("a\x1b]0;title\nb") == "a\nb"


def test_a_line_without_end_does_not_make_patterns_slow(run) -> None:
    run.node_log("train", 1, 0).write_text("error: x is damaged (" * 100_000)
    assert found(run).lines[0].startswith("error: x is damaged")


def test_a_finding_is_clean_whatever_was_logged(run) -> None:
    error = "ValueError: \x1b]0;owned\x07\x1b[2Jtext\x9b"
    write_json(run.state / "failed-train-1-rank0.json", {"rank": 0, "error": error})
    assert found(run).lines == ("ValueError: text",)
    assert all(line.isprintable() for line in found(run).report())


def test_torn_lines_and_garbage_are_tolerated(run) -> None:
    (run.state / "failed-train-1-rank9.json").write_text('{"rank": 9, "err')
    (run.state / "stuck-train-1.json").write_text("[" * 100_000)
    data = b"\xff\xfe\0\n[rank3]: Traceback (most recent call last):\n"
    data += b"[rank2]: torn [rank3]:   File \"a.py\", line 1\n\x00\x80[rank3]: KeyError: 'x'\n"
    data += b"[rank3]: KeyError: 'x'\n"
    run.node_log("train", 1, 1).write_bytes(data)
    assert (found(run).rank, found(run).lines[-1]) == (3, "KeyError: 'x'")


def test_two_ranks_tracebacks_are_told_apart() -> None:
    lines = [
        [f"[rank{rank}]: {line}" for line in (
            "Traceback (most recent call last):", f'  File "{rank}.py", line 1, in f',
            f"KeyError: {rank}", "", "During handling of the above exception, another occurred:",
            "", "Traceback (most recent call last):", f'  File "{rank}b.py", line 2, in g',
            f"ValueError: {rank}")]
        for rank in (0, 1)
    ]  # fmt: skip
    mixed = "\n".join(line for pair in zip(*lines, strict=True) for line in pair)
    words = read_words(mixed)
    for rank in (0, 1):
        lines = words.last_of(rank).lines
        assert lines[-1] == f"ValueError: {rank}"
        assert lines[1] == f"KeyError: {rank}"


def test_a_traceback_in_a_box_is_read() -> None:
    box = """\
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /home/a/job/train.py:12 in <module>                                          │
│                                                                              │
│    11 # read                                                                 │
│ ❱  12 │   main(1)                                                            │
│ /home/users/g/env/lib/python3.8/site-packages/pytorch_lightning/trainer.py   │
│ :485 in __init__                                                             │
╰──────────────────────────────────────────────────────────────────────────────╯
ValueError: no such thing
"""
    assert read_words(box).last_without_rank().lines == [
        '  File "/home/a/job/train.py", line 12, in <module>',
        "    main(1)",
        '  File "/home/users/g/env/lib/python3.8/site-packages/pytorch_lightning/trainer.py", '
        "line 485, in __init__",
        "ValueError: no such thing",
    ]


def test_a_big_log_is_searched_whole_in_little_memory(run) -> None:
    """An error in the middle of it is found; the rest is a hole, which reads as zeros."""
    file = run.node_log("train", 1, 0)
    with file.open("wb") as stream:
        stream.seek(50 << 20)
        stream.write(b"\n[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 'x'\n")
        stream.truncate(100 << 20)
    tracemalloc.start()
    assert found(run).lines == ("KeyError: 'x'",)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 48 << 20


def test_many_errors_do_not_make_it_read_all(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"\nerror: again and again" * 1_000_000)
    assert len(read_log(file)) < (evidence._MAX_FOUND + 2) * (64 << 10) + (3 << 20)


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("slurm *** JOB 1 ON n CANCELLED AT 2026-01-02T03:04:05 ***", False),
        ("2026-Jan-02 03:04:05.25 15042:15042 ERROR", False),
        ("2026-01-02T03:04:05Z train: node 0", True),
        ("2026-99-02 03:04:05", None),
        ("step 3", None),
    ],
)
def test_times(text: str, utc: bool | None) -> None:
    when = time_in(text)
    if utc is None:
        assert when is None
        return
    assert when is not None
    parts = time.gmtime(when) if utc else time.localtime(when)
    assert time.strftime("%F %T", parts) == "2026-01-02 03:04:05"


def test_a_program_that_only_says_why_it_ends(run) -> None:
    """As by sys.exit("no data"): its log has the reason, and srun's only the exit code."""
    said = "srun: error: node-2: task 1: Exited with exit code 3\n"
    (run.logs / "train-7.log").write_text(said)
    run.node_log("train", 1, 0).write_text("loading\n")
    run.node_log("train", 1, 1).write_text("loading\nno data\n")
    finding = found(run)
    assert finding.line == "node-2: exit code 3; the last line: no data"
    assert finding.evidence == "logs/train-1-node1.log"
    assert finding.report()[1:4] == [
        "  loading", "  no data", "unknown: these are the last lines of the program",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "sizes"),
    [
        ("assert x.shape[0] == self.batch", True),
        ("assert len(ids) == len(labels), f'{ids}'", True),
        ("assert d_model % num_heads == 0", True),
        ("assert world_size == 8", True),
        ("assert len(files) > 0", False),
        ("assert args.dimension in KNOWN", False),
        ("assert os.path.getsize(path)", False),
        ("assert ready, 'wrong shape: %s' % name", False),
        ("assert mode == 'train', 'what a size'", False),
    ],
)
def test_an_assert_about_sizes_compares_sizes(run: RunDir, check: str, sizes: bool) -> None:
    run.node_log("train", 1, 0).write_text(
        "[rank0]: Traceback (most recent call last):\n"
        f'[rank0]:   File "/home/ada/train.py", line 3, in <module>\n[rank0]:     {check}\n'
        "[rank0]: AssertionError\n"
    )
    assert ("a check in " in found(run).cause) == sizes
