"""The lines of a training that count, of all that its attempts wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trnslurm.records.run import RunDir


def steps(tmp_path: Path, *lines: tuple[int, int], torn: str = "") -> list[tuple[int, int]]:
    """What counts of lines of (attempt, step)."""
    file = tmp_path / "metrics.jsonl"
    content = [json.dumps({"attempt": attempt, "step": step}) for attempt, step in lines]
    file.write_text("\n".join([*content, torn]))
    return [(line["attempt"], line["step"]) for line in RunDir(tmp_path).steps()]


@pytest.mark.parametrize(
    ("lines", "counted"),
    [
        ([(1, 1), (1, 2), (2, 3)], [(1, 1), (1, 2), (2, 3)]),
        # Done again.
        (
            [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (3, 4)],
            [(1, 1), (2, 2), (3, 3), (3, 4)],
        ),
        # Will be done again.
        ([(1, 1), (1, 2), (1, 5), (1, 6), (2, 5)], [(1, 1), (1, 2), (2, 5)]),
        # An old attempt that still writes.
        ([(1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4)], [(1, 1), (2, 2), (2, 3)]),
    ],
)
def test_steps_that_count(tmp_path: Path, lines, counted) -> None:
    assert steps(tmp_path, *lines) == counted


def test_every_step_is_printed_once(make_run, cli) -> None:
    run = make_run()
    assert "is PENDING and has no metrics yet" in cli("metrics", run.name).error
    lines = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
    text = [json.dumps({"attempt": a, "step": s, "loss": s / a, "host": "\x1b"}) for a, s in lines]
    run.metrics_file.write_text("\n".join(text))
    assert cli("metrics", run.name, "-n", "2").out.splitlines() == [
        "step  attempt    loss", "   2        2  1.0000", "   3        2  1.5000",
    ]  # fmt: skip
    done = json.loads(cli("metrics", run.name, "--json").out)
    assert [(s["attempt"], s["step"]) for s in done] == [(1, 1), (2, 2), (2, 3)]


def test_the_loss_is_what_was_said_last(make_run, cli) -> None:
    run = make_run(states={"train": [{"state": "RUNNING"}]})
    lines = [{"step": 6, "loss": 0.5}, {"step": 7}]
    text = [json.dumps({"attempt": 1, "steps": 30} | line) for line in lines]
    run.metrics_file.write_text("\n".join(text))
    assert run.last_metrics() == {"attempt": 1, "step": 7, "steps": 30, "loss": 0.5}
    run.metrics_file.write_text(text[1])
    assert run.last_metrics() == {"attempt": 1, "step": 7, "steps": 30}


def test_a_torn_line_and_none_at_all(tmp_path: Path) -> None:
    assert steps(tmp_path, (1, 1), torn='{"attempt": 1, "st') == [(1, 1)]
    assert RunDir(tmp_path / "nothing").steps() == []


def test_the_last_steps_of_a_large_file_are_read_from_its_end(make_run, cli, monkeypatch) -> None:
    run = make_run()

    def write(*attempts: tuple[int, range]) -> None:
        lines = [
            {"attempt": attempt, "step": step, "loss": 1.0, "more": 300 * "x"}
            for attempt, steps in attempts
            for step in steps
        ]
        run.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    write((1, range(1, 400)), (2, range(300, 302)))
    assert [step["step"] for step in run.last_steps(3)][-3:] == [299, 300, 301]
    assert [step["step"] for step in run.last_steps(2)] == [300, 301]
    monkeypatch.setattr(RunDir, "steps", None)
    write((1, range(1, 400)))
    _, *rows = cli("metrics", run.name, "-n", "3").out.splitlines()
    assert [row.split()[0] for row in rows] == ["397", "398", "399"]


def test_the_numbers_of_jobs_that_follow(tmp_path: Path) -> None:
    """They belong to the step of the checkpoint, which may have no line of its own."""
    run = RunDir(tmp_path / "gpt")

    def write(place: RunDir, *lines: dict[str, object]) -> None:
        place.path.mkdir(exist_ok=True)
        place.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    write(run, *({"step": n, "attempt": 1, "loss": 1 / n, "time": n} for n in (2, 4, 8)))
    assert [line["step"] for line in run.steps()] == [2, 4, 8]
    for step in (4, 6, 8):
        mark = run.mark_file("eval", step)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({"run": f"gpt.eval-{step}", "job": "7"}))
        if step < 8:  # the last job has reported nothing yet
            own = {"step": 1, "attempt": 1, "time": 9.0, "accuracy": step / 10, "note": "x"}
            write(run.sibling(f"gpt.eval-{step}"), own)
    found = run.steps()
    assert found[1] == {"step": 4, "attempt": 1, "loss": 0.25, "time": 4, "eval/accuracy": 0.4}
    assert found[2] == {"step": 6, "attempt": 1, "time": 4, "eval/accuracy": 0.6}
    assert [line["step"] for line in run.last_steps(2)] == [2, 4, 6, 8]
