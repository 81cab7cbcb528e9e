"""The files of a run directory, as the launcher, the nodes and the training know them."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
from pathlib import Path

import pytest

import trnslurm
from trnslurm.contract.checkpoints import (
    checkpoint_name,
    checkpoints_in,
    damaged_name,
    is_removed,
    newest_in,
    removed_name,
    step_of,
    temporary_name,
    writer_of,
)
from trnslurm.contract.files import (
    first_line,
    last_line,
    load_json,
    read_file,
    read_json,
    read_json_lines,
    write_json,
    write_json_once,
)
from trnslurm.contract.rundir import RunFiles

PACKAGE = Path(trnslurm.__file__).parent
ROOT = PACKAGE.parent


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000017", 17),
        ("step-00000000", 0),
        ("step-123456789", 123456789),
        ("step-0000017", None),
        ("step-00000017.tmp-3", None),
        ("step-00000017\n", None),
        ("step-٠٠٠٠٠٠١٧", None),
    ],
)
def test_a_checkpoint_has_its_step_in_eight_digits_or_more(name: str, step: int | None) -> None:
    assert step_of(name) == step
    if step is not None:
        assert checkpoint_name(step) == name


def test_the_newest_checkpoint_is_of_the_highest_step(tmp_path: Path) -> None:
    assert checkpoints_in(tmp_path / "none") == []
    assert newest_in(tmp_path) == 0
    names = ["step-99999999", "step-100000000", "step-00000005", "step-200000000.tmp-1"]
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints_in(tmp_path)] == [names[1], names[0], names[2]]
    assert newest_in(tmp_path) == 100000000


def test_names_of_unfinished_and_removed_checkpoints() -> None:
    writing = temporary_name(17, 3)
    assert (writing, writer_of(writing)) == ("step-00000017.tmp-3", 3)
    for name in (writing, checkpoint_name(17)):
        removed = removed_name(name, 4)
        assert is_removed(removed) and writer_of(removed) is None
        assert not is_removed(name)
    damaged = damaged_name(checkpoint_name(17), 4)
    assert (step_of(damaged), is_removed(damaged)) == (None, False)


def test_attempts_are_told_from_other_state_files(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert files.attempt_numbers("train") == []
    files.state.mkdir()
    for attempt in (10, 9):
        write_json(files.state_file("train", attempt), {})
    others = [
        files.state_file("precompile", 11), files.stop_file("train", 12), files.cancelled_file,
        files.stopped_file("train", 12), files.stuck_file("train", 12), files.excluded_file,
        files.failed_file("train", 12, 0), files.preflight_file("train", 12),
        files.preflight_file("train", 12, 1), files.graphs_file(12, 0),
    ]  # fmt: skip
    for file in others:
        write_json(file, {})
    assert files.attempt_numbers("train") == [9, 10]
    assert files.preflight_files("train", 12) == others[7:8]
    others[7].unlink()
    assert files.preflight_files("train", 12) == others[8:9]
    assert files.failed_files("train", 12) == {0: others[6]}
    assert files.graphs_files(12) == [others[9]]
    assert files.graphs_files(1) == []


def test_logs_of_nodes_are_told_from_the_batch_scripts(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.logs.mkdir()
    nodes = [files.node_log("train", 1, node) for node in (10, 9)]
    batch = [files.batch_log("train", "7"), files.batch_log("x", "8")]
    for number, file in enumerate([*nodes, *batch]):
        file.touch()
        os.utime(file, (number, number))
    assert files.node_logs("train", 1) == {9: nodes[1], 10: nodes[0]}
    assert files.batch_logs("train") == batch[:1]


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert read_json(file) == {"a": 1}
    assert not write_json_once(file, {"a": 2})
    assert write_json_once(tmp_path / "b.json", {"b": 1})
    assert (read_json(file), read_json(tmp_path / "b.json")) == ({"a": 1}, {"b": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "list", "null", "bytes", "deep", "long-number"],
)
def test_damaged_json_is_empty(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text)
    assert read_json(file) == {}
    with pytest.raises(ValueError):
        load_json(file)


def test_what_is_no_file_or_huge_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opened plainly, it would wait for a writer
    (tmp_path / "loop").symlink_to("loop")
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(1 << 40)
    for path in (tmp_path, *(tmp_path / name for name in ("pipe", "loop", "huge", "none"))):
        assert read_json(path) == {}
    assert read_json(Path("/dev/zero")) == {}


def test_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert (first_line(file), last_line(file)) == ({}, {})
    lines = [json.dumps({"step": step, "pad": "x" * 1000}) for step in range(200)]
    file.write_text("\n".join(lines) + '\n"no object"\n{"step": 200', encoding="utf-8")
    assert first_line(file)["step"] == 0
    assert last_line(file)["step"] == 199
    assert [line["step"] for line in read_json_lines(file)] == list(range(200))


DAMAGE = ["", "{", '{"step": 1', "[]", "1", '{"step": 1},{"step": 2}', "\0"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_costs_no_other(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"step": step}) for step in range(1000)]
    lines[500] = damage
    file.write_text("\n".join(lines), encoding="utf-8")
    steps = [line["step"] for line in read_json_lines(file)]
    assert steps == [*range(500), *range(501, 1000)]


NAMES = {
    "run.json", "plan.json", "strategy.json", "config.yaml", "graphs.json", "node.sh", "git.patch",
    "metrics.jsonl", "checkpoints", "tensorboard", "exported", "heartbeat", "excluded.json",
    "cancelled.json", "turns",
}  # fmt: skip
FOLDERS = {"state", "logs", "code", "compiled"}  # common words, but not in a path
NUMBERED = re.compile(r"(step|stop|stopped|stuck|failed|preflight|graphs)-(\W.*)?", re.DOTALL)
IN_A_FOLDER = re.compile(r"(state|logs|checkpoints|exported)/\S+")


def spelled(source: str) -> list[str]:
    """The names of a run directory that a source has itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            part = node.right
            if isinstance(part, ast.Constant) and part.value in FOLDERS:
                found.append(part.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text in NAMES or NUMBERED.fullmatch(text) or IN_A_FOLDER.fullmatch(text):
                found.append(text)
    return found


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('run / "state"', 1),
        ('entry["state"]', 0),
        ('run / "plan.json"', 1),
        ('f"plan.json: {problem}"', 0),
        ('f"step-{step:08d}"', 1),
        (r're.compile(r"step-(\d{8})")', 1),
        ('"step-by-step"', 0),
        ('Path("state/excluded.json")', 1),
        ('"""state/ has step-00000017."""', 0),
    ],
)
def test_the_search_finds_names_and_nothing_else(source: str, number: int) -> None:
    assert len(spelled(source)) == number


def test_only_the_contract_names_the_files_of_a_run_directory() -> None:
    others = [PACKAGE / "contract", PACKAGE / "sandbox"]  # a sandbox has a directory of its own
    # Where tensorboard is a package; examples are users' own.
    others += [PACKAGE / "cluster/installed.py", PACKAGE / "examples"]
    found = {
        str(file.relative_to(ROOT)): names
        for room in (PACKAGE, ROOT / "jobs")
        for file in room.rglob("*.py")
        if not any(file.is_relative_to(other) for other in others)
        if (names := spelled(file.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize("size", [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 100_000])
def test_a_file_is_read_whole_up_to_the_most(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(size))
    assert read_file(file, most_bytes=100_000) == file.read_bytes()
    if size:
        with pytest.raises(OSError, match="more than 0 MiB"):
            read_file(file, most_bytes=size - 1)


def test_a_full_disk_is_named_and_changes_nothing(tmp_path: Path) -> None:
    file, limits = tmp_path / "run.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_json(file, {"before": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as found:
            write_json(file, {"after": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.value.filename == str(file)  # the kernel names no file for a write
    assert read_json(file) == {"before": 1} and [*tmp_path.iterdir()] == [file]
