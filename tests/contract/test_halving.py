"""The rungs of a sweep, and the ranking by which runs go on: pure functions."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnslurm.contract.halving import Halving, divide, rank


def line(step: int, attempt: int = 1, **numbers: Any) -> dict[str, Any]:
    return {"attempt": attempt, "step": step, "steps": 30, **numbers}


@pytest.mark.parametrize(
    ("runs", "steps", "factor", "first", "expected"),
    [
        (27, 540, 3, 0, [(27, 20), (9, 60), (3, 180), (1, 540)]),
        (4, 12, 2, 0, [(4, 3), (2, 6), (1, 12)]),
        (10, 100, 3, 0, [(10, 11), (3, 33), (1, 100)]),
        (2, 100, 4, 0, [(2, 25), (1, 100)]),
        # The first rung's steps are named: the last rung has what is left to the end.
        (27, 540, 3, 5, [(27, 5), (9, 15), (3, 45), (1, 540)]),
        (27, 540, 3, 100, [(27, 100), (9, 300), (3, 540)]),
        (27, 540, 3, 180, [(27, 180), (9, 540)]),
        (27, 540, 3, 539, [(27, 539), (9, 540)]),
        (27, 8, 3, 0, [(27, 0), (9, 0), (3, 2), (1, 8)]),
    ],
)
def test_rungs(runs: int, steps: int, factor: int, first: int, expected: list[Any]) -> None:
    rungs = divide(runs, steps, factor, first)
    assert [(rung.runs, rung.stop_at) for rung in rungs] == expected


@given(st.integers(2, 1000), st.integers(2, 10**6), st.integers(2, 50), st.integers(0, 10**6))
def test_rungs_have_fewer_runs_and_more_steps(runs, steps, factor, first) -> None:
    first = 0 if first >= steps else first
    rungs = divide(runs, steps, factor, first)
    assert rungs[0].runs == runs and rungs[-1].stop_at == steps and len(rungs) > 1
    if rungs[0].stop_at:  # a submission refuses too few steps
        for one, two in itertools.pairwise(rungs):
            assert two.runs == max(1, one.runs // factor) and one.stop_at < two.stop_at
    assert Halving(factor=factor, rungs=rungs).share <= 1


def test_what_it_takes() -> None:
    halving = Halving(factor=3, rungs=divide(27, 540, 3))
    assert halving.steps == 27 * 20 + 9 * 40 + 3 * 120 + 360
    assert halving.share == halving.steps / (27 * 540)


def test_the_lowest_held_out_loss_at_the_end_of_the_rung_leads() -> None:
    told = {
        "a": [line(5, loss=1, eval_loss=9), line(10, loss=1, eval_loss=3.0), line(20, eval_loss=0)],
        "b": [line(10, loss=9, eval_loss=2.0)],
        "c": [line(10, loss=5, eval_loss=3.0)],
        "d": [line(10, loss=0), line(10, attempt=2, loss=0, eval_loss=4.0)],
    }
    found = rank(told, stop_at=10)
    assert found.metric == "eval_loss" and not found.out
    assert found.order == (("b", 2.0), ("a", 3.0), ("c", 3.0), ("d", 4.0))  # of equals the first
    assert [found.rank(run) for run in ("b", "d", "x")] == [1, 4, 0]


def test_without_held_out_samples_the_loss() -> None:
    found = rank({"a": [line(10, loss=2)], "b": [line(10, loss=1)]}, stop_at=10)
    assert found.metric == "loss" and found.order == (("b", 1.0), ("a", 2.0))


def test_a_metric_of_ones_own() -> None:
    told = {"a": [line(9, f1=0.5), line(10)], "b": [line(10, f1=0.9)], "c": [line(10, loss=1)]}
    found = rank(told, stop_at=10, metric="f1", highest=True)
    assert found.order == (("b", 0.9), ("a", 0.5)) and found.out == {"c": "it reports no f1"}
    assert rank(told, stop_at=10, metric="f1").order == (("a", 0.5), ("b", 0.9))


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), None, "high", True])
def test_runs_that_failed_have_no_rank(worst: Any) -> None:
    told = {
        "none": [],
        "short": [line(9, loss=0.1)],
        "bad": [line(5, loss=0.1), line(10, loss=worst)],
        "good": [line(10, loss=9.0)],
    }
    found = rank(told, stop_at=10)
    assert found.order == (("good", 9.0),)
    assert found.out == {
        "none": "it did not reach step 10",
        "short": "it did not reach step 10",
        "bad": "its loss is not a finite number",
    }


def test_a_training_that_ends_before_its_rung_has_reached_it() -> None:
    told = {"a": [{"attempt": 1, "step": 7, "steps": 7, "loss": 1.0}]}
    assert rank(told, stop_at=10).order == (("a", 1.0),)


@given(st.lists(st.floats(0, 3).map(lambda x: round(x, 1)), min_size=1, max_size=9), st.randoms())
def test_what_comes_later_changes_no_rank(losses: list[float], chance: random.Random) -> None:
    """Tasks start at different times: some runs have gone on when the last one looks."""
    told = {str(n): [line(5, loss=7), line(10, loss=x)] for n, x in enumerate(losses)}
    later = {
        run: [
            *lines,
            *(line(n, 2, loss=chance.random()) for n in range(11, 11 + chance.choice((0, 9)))),
        ]
        for run, lines in told.items()
    }
    found = rank(told, stop_at=10)
    assert rank(later, stop_at=10) == found
    assert [score for _, score in found.order] == sorted(losses)
