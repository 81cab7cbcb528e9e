"""The lines of a training that count, of all that its attempts wrote."""

from __future__ import annotations

import json
from pathlib import Path

from trnslurm.runs.run import RunDir


def steps(tmp_path: Path, *lines: tuple[int, int], torn: str = "") -> list[tuple[int, int]]:
    """What counts of lines of (attempt, step)."""
    file = tmp_path / "metrics.jsonl"
    content = [json.dumps({"attempt": attempt, "step": step}) for attempt, step in lines]
    file.write_text("\n".join([*content, torn]))
    return [(line["attempt"], line["step"]) for line in RunDir(tmp_path).steps()]


def test_nothing_was_done_again(tmp_path: Path) -> None:
    assert steps(tmp_path, (1, 1), (1, 2), (2, 3)) == [(1, 1), (1, 2), (2, 3)]


def test_what_was_done_again_counts_once(tmp_path: Path) -> None:
    lines = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (3, 4)]
    assert steps(tmp_path, *lines) == [(1, 1), (2, 2), (3, 3), (3, 4)]


def test_steps_that_will_be_done_again_count_no_more(tmp_path: Path) -> None:
    assert steps(tmp_path, *((1, step) for step in range(1, 9)), (2, 5)) == [
        *((1, step) for step in range(1, 5)),
        (2, 5),
    ]


def test_an_old_attempt_that_still_writes_changes_nothing(tmp_path: Path) -> None:
    lines = [(1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4)]
    assert steps(tmp_path, *lines) == [(1, 1), (2, 2), (2, 3)]


def test_every_step_is_printed_once(make_run, cli) -> None:
    run = make_run()
    assert "has told no steps" in cli("metrics", run.name).error
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
