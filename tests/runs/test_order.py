"""Whether every sample was seen exactly once, over all attempts of a run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trnslurm
from trnslurm import calls
from trnslurm.errors import TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.runs.order import check_order
from trnslurm.samples import batches as module


@pytest.fixture(autouse=True)
def term_ends_this_process() -> Iterator[None]:
    """Take back what the calls of a script do for TERM: their thread would end this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "state").mkdir()
    (tmp_path / "run.json").write_text("{}")
    return RunDir(tmp_path)


class Attempt:
    """A script that calls trnslurm.report after each step, as worker 0 of an attempt."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run, self._number, self._patch = run, 0, monkeypatch

    def __call__(self, steps: range, *, ahead: int = 0, **order: Any) -> None:
        self._number += 1
        for name, value in (
            ("RUN_DIR", self._run.path),
            ("ATTEMPT", self._number),
            ("PHASE", "train"),
        ):
            self._patch.setenv(f"TRNSLURM_{name}", str(value))
        self._patch.setattr(calls, "_worker", None)
        self._patch.setattr(module, "_used", None)
        chosen = {"samples": 103, "global_batch": 16, "seed": 4, "start": steps.start - 1} | order
        found = iter(trnslurm.batches(chosen.pop("samples"), rank=0, world_size=3, **chosen))
        for _ in range(ahead):
            next(found)
        for step in steps:
            next(found)
            trnslurm.report(step=step, steps=40, loss=1.0)


@pytest.fixture
def attempt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    return Attempt(run, monkeypatch)


def test_steps_after_a_checkpoint_that_was_resumed_from_do_not_count(run, attempt) -> None:
    attempt(range(1, 12))
    attempt(range(6, 9))
    attempt(range(6, 7))  # resumed from the same checkpoint
    attempt(range(6, 29), ahead=1)  # a library that prefetches
    found = check_order(run)
    assert [(each.attempt, each.steps, each.data) for each in found.stretches] == [
        (1, range(1, 6), [range(1, 6)]),
        (4, range(6, 29), [range(6, 29)]),
    ]
    assert (found.seen, found.epochs, found.ok, found.counted) == (4 * 103, 4, True, True)


def test_a_position_that_was_not_restored_is_found(run, attempt, run_cli) -> None:
    attempt(range(1, 8))
    attempt(range(8, 15), start=0)
    found = check_order(run)
    assert found.problems == [
        "attempt 2 repeats the data's steps 1-7 at step 8 of the run: restore the position "
        "with loader.load_state_dict or start= when the script resumes"
    ]
    assert (found.repeated, found.missed) == (103, 0)
    done = run_cli("doctor", str(run.path), "--order")
    assert done.code == 1
    assert "of 206 samples seen, 103 were repeated and 0 were missed" in done.out


def test_samples_that_were_left_out_are_counted(run, attempt) -> None:
    attempt(range(1, 4))
    attempt(range(4, 6), start=5)
    found = check_order(run)
    assert "skips the data's steps 4-5 at step 4" in found.problems[0]
    assert (found.repeated, found.missed) == (0, 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"seed": 5},
            "attempt 2 changed the seed from 4 to 5, so the order is different from step 4",
        ),
        ({"samples": 104}, "changed the number of samples from 103 to 104"),
        ({"global_batch": 8}, "changed the global batch from 16 to 8"),
    ],
)
def test_another_order_is_named(run, attempt, change: dict[str, Any], words: str) -> None:
    attempt(range(1, 4))
    attempt(range(4, 6), **change)
    assert words in check_order(run).problems[0]


@pytest.mark.parametrize("options", [{"shuffle": False}, {"drop_last": True}, {"samples": 16}])
def test_every_order_that_is_not_disturbed_is_fine(run, attempt, options) -> None:
    attempt(range(1, 8), **options)
    attempt(range(5, 33), **options)
    found = check_order(run)
    assert found.ok, found.problems
    assert found.stretches[-1].steps.stop == 33


def test_a_mix_and_a_recipe(run, attempt, run_cli) -> None:
    mix = trnslurm.mix({"a": (7, 0.5), "b": (9, 0.5)}, global_batch=4)
    attempt(range(1, 8), samples=mix, global_batch=None, seed=0)
    attempt(range(8, 12), samples=mix, global_batch=None, seed=0)
    found = check_order(run)
    assert (found.ok, found.counted, found.seen) == (True, False, 44)
    done = run_cli("doctor", str(run.path), "--order")
    assert done.code == 0
    assert "every step of the data was seen exactly once (44 samples in global ba" in done.out

    line = {
        "attempt": 3, "begin": 0, "step": 0, "ahead": 0, "workers": 2, "samples": 10,
        "global_batch": 4, "seed": 1, "data": "a", "joined": True,
    }  # fmt: skip
    text = "".join(json.dumps(each) + "\n" for each in (line, line | {"attempt": 4, "begin": 6}))
    run.order_file.write_text(text)
    run.metrics_file.write_text('{"attempt": 4, "step": 9}\n')
    found = check_order(run)
    assert (found.ok, found.seen, found.epochs) == (True, 36, 3)
    shown = json.loads(run_cli("doctor", str(run.path), "--order", "--json").out)
    assert shown["stretches"][1] == {"attempt": 4, "workers": 2, "steps": [7, 9], "data": [[7, 9]]}


def test_a_run_without_records_says_who_makes_them(run) -> None:
    with pytest.raises(TrnslurmError, match="has not recorded the order"):
        check_order(run)
    wild = '{"attempt": 1, "begin": 0, "step": 1, "ahead": 0, "global_batch": 4, "samples": "x"}'
    run.order_file.write_text(f'{{"attempt": 1, "begin": "x"}}\n[]\nnothing\n{wild}\n')
    with pytest.raises(TrnslurmError, match="has not recorded the order"):
        check_order(run)
