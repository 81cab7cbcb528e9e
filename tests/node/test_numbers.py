"""The program that reads a script's numbers: its files, what it writes, and when it stops."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trnslurm.contract.files import write_json
from trnslurm.contract.metrics import is_reported, read_from
from trnslurm.contract.rundir import RunFiles
from trnslurm.node.numbers import table, tensorboard, trainer
from trnslurm.node.numbers.__main__ import Numbers
from trnslurm.node.numbers.names import canonical, with_loss
from trnslurm.node.numbers.outside import Outside
from trnslurm.node.numbers.sources import Log, Tensorboard, Trainer
from trnslurm.node.numbers.wandb import WandbReader

from ..json_lines import read_lines

CODE = Path(__file__).parents[2]
BEGIN = 1_800_000_000.0


# --- writers of the formats


def field(number: int, value: int | bytes | float) -> bytes:
    """A field of a protobuf message; a float is a double."""
    if isinstance(value, float):
        return bytes([number << 3 | 1]) + struct.pack("<d", value)
    head = number << 3 | (0 if isinstance(value, int) else 2)
    size = value if isinstance(value, int) else len(value)
    return varint(head) + varint(size) + (b"" if isinstance(value, int) else value)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def event(step: int, *values: bytes, time: float = BEGIN) -> bytes:
    """A record of an event file, without checksums."""
    summary = b"".join(field(1, value) for value in values)
    message = field(1, time) + field(2, step) + field(5, summary)
    return struct.pack("<QI", len(message), 0) + message + bytes(4)


def simple(tag: str, value: float) -> bytes:
    return field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)


def tensor(tag: str, value: float) -> bytes:
    content = field(1, 1) + field(4, struct.pack("<f", value))
    return field(1, tag.encode()) + field(8, content)


def history(call: int, **numbers: float) -> bytes:
    """A record of W&B's log with the numbers of a call."""
    items = [field(1, field(1, n.encode()) + field(16, json.dumps(v).encode()))
             for n, v in numbers.items()]  # fmt: skip
    return field(2, b"".join(items) + field(2, field(1, call)))


def offline_log(records: list[bytes]) -> bytes:
    """A file of W&B: blocks of 32 KiB."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        first = True
        while record or first:
            left = (32 << 10) - len(out) % (32 << 10)
            if left < 7:
                out += bytes(left)
                continue
            part, record = record[: left - 7], record[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}
            out += struct.pack("<IHB", 0, len(part), kind[first, not record]) + part
            first = False
    return bytes(out)


# --- the formats


def test_scalars_of_event_files() -> None:
    small = event(0) + event(3, simple("train/loss", 2.5), tensor("lr", 0.5))
    found, done = tensorboard.scalars(small + event(4, simple("loss", 2.0))[:-1])
    assert [(s.step, s.tag, s.value) for s in found] == [(3, "train/loss", 2.5), (3, "lr", 0.5)]
    assert done == len(small) and found[0].time == BEGIN
    image = event(4, field(1, b"picture") + field(4, bytes(300_000)))
    assert tensorboard.scalars(image[:500]) == ([], len(image))  # passed over unread
    for damaged in (
        b"not an event file at all",
        struct.pack("<QI", 3, 0) + b"\xff\xff\xff" + bytes(4),
    ):
        with pytest.raises(ValueError, match=r"event file|damaged"):
            tensorboard.scalars(damaged)


def test_the_file_of_a_real_writer(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    path = tmp_path / "events.out.tfevents.1.host"
    with path.open("wb") as stream:
        out = writer.RecordWriter(stream)
        for step in range(3):
            told = event_pb2.Event(wall_time=BEGIN + step, step=step)
            told.summary.value.add(tag="train/loss", simple_value=4.0 - step)
            out.write(told.SerializeToString())
    source = Tensorboard([])
    source.offer([path])
    source.look()
    found = [(s.step, s.time, dict(s.numbers)) for s in source.steps.take(end=True)]
    assert found == [(n, BEGIN + n, {"loss": 4.0 - n}) for n in range(3)]


def test_the_log_of_weights_and_biases() -> None:
    """Records are parts in blocks; the step is the one that the script names."""
    numbers = {"train/loss": 2.5, "train/global_step": 40, "_timestamp": BEGIN, "text": 0.5}
    records = [
        history(0, loss=3.5, step=0),
        b"\x32\x05other",
        history(7, loss=3.5),  # the seventh call
        history(1, step=1, **{f"x{n}": 1.5 for n in range(6000)}),
    ]
    log = offline_log([*records, history(2, **numbers)])
    assert len(log) > 64 << 10
    reader, found, at = WandbReader(), [], 0
    for end in (3, 100, 40_000, len(log) - 5, len(log)):
        seen, done = reader.feed(log[at:end])
        found, at = found + seen, at + done
    assert at == len(log) and [s.step for s in found] == [0, 1, 40]
    assert found[2].numbers == {"loss": 2.5, "text": 0.5} and found[2].time == BEGIN
    with pytest.raises(ValueError, match="no log"):
        WandbReader().feed(b"something else")


def test_tables_of_lightning() -> None:
    text = "epoch,lr,step,train_loss,val_loss\n0,0.5,9,2.5,\n0,,19,,2.25\n1,bad,29,nan,\n1,0.5,39,2"
    found = [(s.step, dict(s.numbers)) for s in table.rows(text)]
    assert found[:2] == [
        (9, {"loss": 2.5, "epoch": 0, "lr": 0.5}),
        (19, {"epoch": 0, "eval_loss": 2.25}),
    ]
    assert len(found) == 3 and "lr" not in found[2][1]  # the last line may be cut
    assert table.rows("a,b\n1,2\n") == [] == table.rows("") == table.rows('step,"x\n1\n')


def test_the_history_of_trainer() -> None:
    entries = [
        {"step": 10, "loss": 2.5, "learning_rate": 0.5, "epoch": 0.1},
        {"step": 10, "eval_loss": 2.0},
        {"step": 20, "train_loss": 9.0, "train_runtime": 5.0},  # a mean over all steps
        {"step": "x", "loss": 1.0},
        "no entry",
    ]
    found = trainer.history({"log_history": entries, "max_steps": 60})
    assert [(s.step, s.steps, dict(s.numbers)) for s in found] == [
        (10, 60, {"loss": 2.5, "lr": 0.5, "epoch": 0.1}),
        (10, 60, {"eval_loss": 2.0}),
    ]
    assert trainer.history({}) == [] == trainer.history({"log_history": 3})


# --- the program


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A run whose first attempt trains, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("work/out", "logs", "state"):
        (tmp_path / name).mkdir(parents=True)
    return RunFiles(tmp_path)


@pytest.fixture
def log(run: RunFiles) -> Callable[[str], None]:
    """Appends to the log of the first node."""

    def append(text: str, attempt: int = 1) -> None:
        with run.node_log("train", attempt, 0).open("a", newline="") as file:
            file.write(text)

    return append


def look(
    numbers: Numbers, run: RunFiles, *times: float, end: bool = False
) -> list[dict[str, object]]:
    """Look at these times, in seconds; return all lines, without their times."""
    for at in times:
        assert numbers.look(BEGIN + at, end=end)
    lines = read_lines(run.metrics_file) if run.metrics_file.exists() else []
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def line(step: int, read: str = "log", attempt: int = 1, **numbers: float) -> dict[str, object]:
    return {"attempt": attempt, "step": step, **numbers, "read": read}


def test_a_log_is_read_as_it_grows(run: RunFiles, log) -> None:
    """Parts of lines wait, and the first numbers until a script would have reported."""
    numbers = Numbers(1)
    assert look(numbers, run, 0) == []  # no log yet
    log("iter 0: loss 4.5\niter 1: lo")
    assert look(numbers, run, 3) == []
    log("ss 4.25\n  1/9 [00:01<00:09, 9.9it/s]\riter 2: loss nan\r")
    assert look(numbers, run, 6, 10) == []
    expected = [line(0, loss=4.5), line(1, loss=4.25), line(2, loss=None)]
    assert look(numbers, run, 25) == expected
    pause_s = numbers.pause_s
    assert look(numbers, run, *range(30, 90, 3)) == expected
    assert numbers.pause_s > 3 * pause_s
    log("iter 3: loss 4.0\niter 4: loss 3.5")  # the script ends there
    assert look(numbers, run, 100, end=True) == [*expected, line(3, loss=4.0)]
    assert [told["time"] - BEGIN for told in read_lines(run.metrics_file)] == [
        *(3, 6, 6),
        100,
    ]
    assert not any(is_reported(each) for each in expected) and read_from(expected[0]) == "its log"


def test_a_script_that_reports_is_left_alone(run: RunFiles, log) -> None:
    numbers = Numbers(1)
    run.metrics_file.write_text('{"attempt": 0, "step": 1, "loss": 2.5}\n')  # an older one ends
    log("iter 0: loss 4.5\niter 1: loss 4.25\n")
    assert len(look(numbers, run, 0, 20)) == 3
    with run.metrics_file.open("a") as file:
        file.write('{"attempt": 1, "step": 1, "loss": 4.25, "time": 1')
        file.flush()
        assert numbers.look(BEGIN + 23)
        file.write(".5}\n")
    log("iter 2: loss 4.0\n")
    assert not numbers.look(BEGIN + 26) and not numbers.look(BEGIN + 29)
    assert len(read_lines(run.metrics_file)) == 4


def test_one_source_at_a_time(run: RunFiles, log) -> None:
    """Event files take over once they have come as far; no step is written twice."""
    log("Step 1/9 loss: 4.5\nStep 2/9 loss: 4.25\nStep 3/9 loss: 4.0\n")
    numbers = Numbers(1)
    look(numbers, run, 0, 20)
    events = run.path / "work/out/events.out.tfevents.1.host.1"
    events.write_bytes(b"".join(event(n, simple("train/loss", 5 - n / 4)) for n in (1, 2)))
    assert [each["step"] for each in look(numbers, run, 40, 60)] == [1, 2, 3]
    with events.open("ab") as file:
        file.write(event(3, simple("train/loss", 4.0)) + event(4, simple("train/loss", 3.5)))
        file.write(event(4, simple("eval/loss", 3.25)) + event(5, simple("train/loss", 3.0)))
    log("Step 4/9 loss: 3.5\nStep 5/9 loss: 3.0\nStep 6/9 loss: 2.5\n")
    found = look(numbers, run, 80, 90, 100, end=True)
    assert found[:3] == [line(n, loss=4.75 - n / 4, steps=9) for n in (1, 2, 3)]
    assert found[3:] == [
        line(4, "tensorboard", loss=3.5, eval_loss=3.25, steps=9),
        line(5, "tensorboard", loss=3.0, steps=9),
    ]


def test_an_attempt_reads_only_its_own(run: RunFiles, log) -> None:
    """Files of earlier attempts are there, and continue in this one's."""
    out = run.path / "work/out"
    (out / "events.out.tfevents.1").write_bytes(event(1, simple("loss", 4.5)))
    state = out / "checkpoint-20/trainer_state.json"
    state.parent.mkdir()
    entries = [{"step": 10, "loss": 4.5}, {"step": 20, "loss": 4.0}]
    write_json(state, {"log_history": entries})
    (out / "metrics.csv").write_text("step,loss\n1,4.5\n")
    log("iter 10: loss 4.5\n")
    log("iter 50: loss 2.5\n", attempt=2)
    numbers = Numbers(2)
    assert look(numbers, run, 0, 3, 20) == [line(50, attempt=2, loss=2.5)]
    (out / "checkpoint-60").mkdir()
    entries.append({"step": 60, "loss": 2.25})
    write_json(out / "checkpoint-60/trainer_state.json", {"log_history": entries})
    assert look(numbers, run, 40, end=True)[1:] == [line(60, "trainer", attempt=2, loss=2.25)]


def test_a_table_that_continues_or_starts_over(run: RunFiles, log) -> None:
    table = run.path / "work/metrics.csv"
    table.parent.mkdir(exist_ok=True)
    table.write_text("step,loss\n1,4.5\n2,4.0\n")
    log("")
    for attempt, text, steps in ((2, "1,4.5\n2,4.0\n3,3.5\n", [3]), (3, "2,4.2\n3,3.2\n", [2, 3])):
        numbers = Numbers(attempt)
        table.write_text(f"step,loss\n{text}")
        seen = look(numbers, run, 0, 20, end=True)
        assert [told["step"] for told in seen if told["attempt"] == attempt] == steps


def test_files_outside_of_the_run(
    run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that this attempt's processes write, or have named after themselves, count."""
    shared = tmp_path / "shared"
    for name in ("tb", "wandb", "linked", "var"):
        (shared / name).mkdir(parents=True)
    (run.path / "work/here").symlink_to(shared / "linked")
    own = {"TRNSLURM_RUN_DIR": str(run.path), "TRNSLURM_PHASE": "train", "TRNSLURM_ATTEMPT": "1"}
    monkeypatch.setenv("TENSORBOARD_LOGDIR", str(shared / "var"))
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    outside = Outside(BEGIN, [run.path / "work"])
    held = "import sys; a, b = open('run-x.wandb', 'ab'), open('../tb/events.out.tfevents.1', 'rb')"
    program = [sys.executable, "-c", f"{held}; print(flush=True); sys.stdin.read()"]

    def start(cwd: Path, *words: str) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([*program, *words], cwd=cwd, **pipes)  # type: ignore[call-overload]
        assert process.stdout.readline() == b"\n"
        return process  # type: ignore[no-any-return]

    (shared / "tb/events.out.tfevents.1").touch()
    (shared / "other").mkdir()
    with (
        start(shared / "wandb", "--output_dir", "../tb", "--data_dir=/proc") as worker,
        start(shared / "wandb", f"train.log_dir={run.path}/work/here") as another,
    ):
        monkeypatch.setenv("TRNSLURM_ATTEMPT", "2")
        with start(shared / "other", "--logdir", "../other") as of_another_attempt:
            monkeypatch.setenv("TRNSLURM_ATTEMPT", "1")
            host, now = os.uname().nodename, int(BEGIN)
            expected = [shared / "wandb/run-x.wandb"]
            for place, name, counts in (
                ("tb", f"{now}.{host}.{worker.pid}.0", True),
                ("tb", f"{now - 1}.{host}.{worker.pid}.0", False),  # of an earlier process
                ("tb", f"{now}.another.{worker.pid}.0", False),
                ("tb", f"{now}.{host}.{of_another_attempt.pid}.0", False),
                ("linked", f"{now}.{host}.{another.pid}.1.v2", True),
                ("var", f"{now}.{host}.{another.pid}.2", True),
                ("other", f"{now}.{host}.{another.pid}.3", False),  # nobody names the directory
            ):
                file = shared / place / f"events.out.tfevents.{name}"
                file.touch()
                expected += [file] if counts else []
            assert {*outside.found()} == {*expected}
            of_another_attempt.communicate()
        worker.communicate()
        another.communicate()
    assert {*outside.found()} == {*expected[1:]}  # whose writers have ended


def test_numbers_in_files_outside_of_the_run(
    run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shared" / "events.out.tfevents.1"
    file.parent.mkdir()
    file.write_bytes(event(5, simple("loss", 4.5)))
    numbers = Numbers(1)
    monkeypatch.setattr(Outside, "found", lambda _: iter([file]))
    assert look(numbers, run, 0, 3, 20) == [line(5, "tensorboard", loss=4.5)]


def test_logs_that_are_cut_or_long(run: RunFiles, log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trnslurm.node.numbers.sources._BACKLOG_BYTES", 2000)
    monkeypatch.setattr("trnslurm.node.numbers.sources._LOG_BYTES", 500)
    path = run.node_log("train", 1, 0)
    source = Log(path)
    log("".join(f"iter {n}: loss 2.5\n" for n in range(1000)))
    source.look()
    assert min(seen.step for seen in source.steps.take(end=True)) > 900
    path.write_text("iter 5000: loss 2.5\n")  # cut, as logrotate's copytruncate does
    source.look()
    assert [seen.step for seen in source.steps.take(end=True)] == [5000]
    log("iter 5001: loss 2.5\niter 7: loss 2.5\niter 8: loss 2.5\n")  # they contradict
    source.look()
    assert source.steps.take(end=True) == []
    path.unlink()
    source.look()


def test_odd_files_do_no_harm(run: RunFiles, tmp_path: Path) -> None:
    out = run.path / "work/out"
    os.mkfifo(out / "events.out.tfevents.2")
    (out / "loop").symlink_to(run.path)
    for name in ("events.out.tfevents.1", "run-x.wandb", "trainer_state.json", "metrics.csv"):
        (out / name).write_bytes(b"\x00\xffnothing of that kind, of some length\n")
    os.utime(out / "metrics.csv", (1, 1))
    assert look(Numbers(1), run, 0, 20) == []
    source = Trainer([])
    source.offer([out / "trainer_state.json"])
    numbers = Numbers(1)
    for name in ("events.out.tfevents.3", "b/run-y.wandb", "c/metrics.csv"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(b"\x00\xffnothing of that kind, of some length\n")
    assert look(numbers, run, 0, 20, end=True) == []


def test_the_program_ends_with_its_task(run: RunFiles, log) -> None:
    """It writes what came last, although it gets TERM."""
    run.state_file("train", 1).write_text("{}")
    log("iter 0: loss 4.5\n")
    environ = os.environ | {"PYTHONPATH": str(CODE), "TRNSLURM_ATTEMPT": "1"}
    with subprocess.Popen(["sleep", "600"]) as task:
        command = [sys.executable, "-m", "trnslurm.node.numbers", f"--task={task.pid}"]
        with subprocess.Popen(command, cwd=run.path, env=environ) as program:
            log("iter 1: loss 4.25\n")
            task.kill()
            assert program.wait(600) == 0
    assert [told["step"] for told in read_lines(run.metrics_file)] == [0, 1]


def test_the_loss_of_a_batch_is_the_loss() -> None:
    numbers = {canonical(name): 1.0 for name in ("training/batch loss", "lr/group_0")}
    assert with_loss(numbers) == {"loss": 1.0, "lr_group_0": 1.0}
    # One sum of losses is the loss. Of two, neither is.
    sums = {"train_total_mse_loss": 2.0, "train_y_mse_loss": 1.0}
    assert with_loss(sums) == {"loss": 2.0, "train_y_mse_loss": 1.0}
    assert "loss" not in with_loss(sums | {"train_total_l1_loss": 1.0})
