"""Whether an attempt of a custom script began again, although there was a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trnslurm.contract.files import write_json

SAID = "started over at step {} instead of after {}: check that the script loads the checkpoint"


def lines(attempt: int, *steps: int, loss: float | None = 4.0, **more: Any) -> list[dict[str, Any]]:
    """What an attempt reported, a step a second."""
    values = more if loss is None else {"loss": loss, **more}
    return [{"attempt": attempt, "step": step, "time": 1000.0 + step, **values} for step in steps]


FIRST = lines(1, 10, 20, 30, 40)


@pytest.mark.parametrize(
    ("checkpoint", "changed", "found", "said"),
    [
        (40, 1041.0, [*FIRST, *lines(2, 10, 20)], SAID.format(10, "the checkpoint of step 40")),
        (40, 0.0, [*FIRST, *lines(2, 0)], SAID.format(0, "the checkpoint of step 40")),
        (0, 1041.0, [*FIRST, *lines(2, 10, 20)], SAID.format(10, "its checkpoint")),
        (40, 0.0, lines(1, 10, loss=None) + lines(2, 10, loss=None), "started over"),
        (40, 0.0, [*lines(1, 10, read="log"), *lines(2, 10, read="log")], "started over"),
        (40, 1041.0, [*FIRST, *lines(2, 50)], ""),
        (5, 1005.0, [*FIRST, *lines(2, 10)], ""),  # the first line comes every ten steps
        (0, 1005.0, [*FIRST, *lines(2, 10)], ""),
        (40, 1041.0, [*FIRST, *lines(2, 10, loss=2.0)], ""),  # only its counter began again
        (0, 0.0, [*FIRST, *lines(2, 10)], ""),  # there was no checkpoint
        (40, 1041.0, FIRST, ""),  # no step yet
        (40, 1041.0, lines(2, 10), ""),
    ],
)
def test_an_attempt_that_began_again(
    make_run: Any,
    cli: Any,
    fake_slurm: Any,
    checkpoint: int,
    changed: float,
    found: list[Any],
    said: str,
) -> None:
    attempt = {"state": "RUNNING", "checkpoint": checkpoint, "changed": changed}
    run = make_run(
        phases=("train",),
        jobs={"train": "1002"},
        states={"train": [{"state": "TIMEOUT"}, attempt]},
    )
    fake_slurm.queue("1002|RUNNING|None|x|node-1")
    run.code.mkdir()
    write_json(run.project_file, {})
    run.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in found))
    shown = cli("status", run.name).out
    assert (f"attempt 2 {said}" in shown) if said else ("started over" not in shown)
    told = json.loads(cli("status", run.name, "--json").out)["restarted"]
    assert (told is not None) == bool(said)
