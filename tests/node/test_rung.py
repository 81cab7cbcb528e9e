"""A task of a rung takes its run: all tasks agree, each run is taken once, and by whom is noted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.halving import Halving, divide, place_in, read_place, read_ranking
from trnslurm.contract.rundir import HALVING, RunFiles
from trnslurm.contract.states import State
from trnslurm.node import rung

LOSSES = {"s-1": 3.0, "s-2": 1.0, "s-3": 2.0, "s-4": 4.0}
RUNGS = divide(4, 12, 2)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of four runs that have done rung 1 of 3; the second is the best."""
    for name, loss in LOSSES.items():
        run = RunFiles(tmp_path / name)
        run.state.mkdir(parents=True)
        write_json(run.rung_file, place_in(RUNGS, 1))
        write_json(
            run.record_file, {"nodes": 2, "jobs": {"train": f"7_{name[-1]}"}, "behind": "s-9"}
        )
        Attempt(phase="train", attempt=1, state=State.COMPLETED).write(run)
        run.metrics_file.write_text(json.dumps({"attempt": 1, "step": 3, "loss": loss}) + "\n")
    sweep = tmp_path / "s"
    for number in (2, 3):
        (sweep / f"rung-{number}").mkdir(parents=True)
    write_json(sweep / HALVING, Halving(factor=2, rungs=RUNGS, runs=tuple(LOSSES)).facts())
    return sweep


def run_of(sweep: Path, name: str) -> RunFiles:
    return RunFiles(sweep.parent / name)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_best_runs_are_taken(sweep: Path, order: tuple[int, ...]) -> None:
    place = sweep / "rung-2"
    assert {n: rung.take(place, n, f"8_{n}") for n in order} == {1: "s-2", 2: "s-3"}
    assert (place / "1").resolve() == run_of(sweep, "s-2").path
    at = read_place(run_of(sweep, "s-2"))
    assert at and (at.rung, at.rungs, at.stop_at) == (2, 3, 6)
    record = read_json(run_of(sweep, "s-2").record_file)
    assert record["jobs"] == {"train": "8_1"} and record["earlier"] == {"train": 1}
    assert record["history"][0]["jobs"] == {"train": "7_2"} and record["behind"] == ""
    assert read_place(run_of(sweep, "s-1")).rung == 1  # it has stopped


def test_a_task_that_is_requeued_takes_the_same_run(sweep: Path) -> None:
    place = sweep / "rung-2"
    rung.take(place, 1, "8_1")
    run = run_of(sweep, "s-2")
    Attempt(phase="train", attempt=2).write(run)
    run.metrics_file.write_text('{"attempt": 2, "step": 4, "loss": 99}\n')
    run.cancelled_file.touch()  # its script sees that by itself
    before = run.record_file.read_text()
    assert rung.take(place, 1, "8_1") == "s-2"
    assert run.record_file.read_text() == before
    assert rung.take(place, 2, "8_2") == "s-3"


def test_a_task_that_was_cut_off_is_completed(sweep: Path) -> None:
    """The link comes first, so that no other task takes the run."""
    (sweep / "rung-2/1").symlink_to("../../s-2")
    assert rung.take(sweep / "rung-2", 1, "8_1") == "s-2"
    assert read_json(run_of(sweep, "s-2").record_file)["jobs"] == {"train": "8_1"}


def test_the_ranking_is_of_one_moment(sweep: Path) -> None:
    rung.take(sweep / "rung-2", 1, "8_1")
    run_of(sweep, "s-4").metrics_file.write_text('{"attempt": 1, "step": 3, "loss": 0}\n')
    assert rung.take(sweep / "rung-2", 2, "8_2") == "s-3"


def test_too_few_are_left(sweep: Path, capfd) -> None:
    for name in ("s-1", "s-2", "s-3"):
        run_of(sweep, name).metrics_file.write_text('{"attempt": 1, "step": 2, "loss": 0}\n')
    assert rung.main([str(sweep / "rung-2"), "1", "8_1"]) == 0
    assert rung.main([str(sweep / "rung-2"), "2", "8_2"]) == 0
    said = capfd.readouterr()
    assert said.out == "s-4\n"
    assert "task 2 of rung 2 has nothing to do: no run is left for it" in said.err
    assert "rung 1, no rank: s-2: it did not reach step 3" in said.err
    assert [*(sweep / "rung-2").glob("[0-9]")] == [sweep / "rung-2/1"]


def test_runs_that_are_out(sweep: Path, capfd) -> None:
    run_of(sweep, "s-2").cancelled_file.touch()
    run_of(sweep, "s-3").rung_file.unlink()  # trnslurm resume
    assert [rung.take(sweep / "rung-2", n, f"8_{n}") for n in (1, 2)] == ["s-1", "s-4"]
    assert read_ranking(sweep, 1).out == {"s-2": "it was cancelled"}


def test_a_run_that_leaves_after_the_ranking(sweep: Path, capfd) -> None:
    rung.take(sweep / "rung-2", 1, "8_1")
    run_of(sweep, "s-3").cancelled_file.touch()
    assert rung.take(sweep / "rung-2", 2, "8_2") == ""
    assert "has nothing to do: s-3 was cancelled" in capfd.readouterr().err
    run_of(sweep, "s-3").cancelled_file.unlink()
    run_of(sweep, "s-3").rung_file.unlink()
    assert rung.take(sweep / "rung-2", 2, "8_2") == ""
    assert "s-3 was resumed without the others" in capfd.readouterr().err


def test_the_next_rung_compares_those_that_have_come_to_it(sweep: Path) -> None:
    for task in (1, 2):
        rung.take(sweep / "rung-2", task, f"8_{task}")
    for name, loss in (("s-2", 5.0), ("s-3", 0.5)):
        with run_of(sweep, name).metrics_file.open("a") as file:
            file.write(json.dumps({"attempt": 2, "step": 6, "loss": loss}) + "\n")
    assert rung.take(sweep / "rung-3", 1, "9_1") == "s-3"
    assert read_ranking(sweep, 2).order == (("s-3", 0.5), ("s-2", 5.0))
    assert read_place(run_of(sweep, "s-3")).stop_at == 12


def test_the_metric_that_the_user_named(sweep: Path) -> None:
    halving = Halving(factor=2, rungs=RUNGS, runs=tuple(LOSSES))
    write_json(sweep / HALVING, replace(halving, metric="loss", highest=True).facts())
    assert [rung.take(sweep / "rung-2", n, f"8_{n}") for n in (1, 2)] == ["s-4", "s-1"]


def test_rungs_that_cannot_be_read(sweep: Path) -> None:
    (sweep / HALVING).write_text("{")
    with pytest.raises(SystemExit, match="does not define its rungs"):
        rung.take(sweep / "rung-2", 1, "8_1")
