"""plan.json is read strictly, and its arithmetic is checked against the workers that run."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from trnslurm.train.errors import TrainError
from trnslurm.train.loop.job import check_world
from trnslurm.train.plan import load_plan


@pytest.fixture
def values(make_plan):
    return asdict(make_plan(units=8, workers=3))


@pytest.fixture
def load(tmp_path):
    def write_and_load(values):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(values))
        return load_plan(path)

    return write_and_load


def world(workers, local=None):
    return SimpleNamespace(world=workers, local_world=local or workers)


def test_a_plan_is_read_as_written(values, load):
    plan = load(values)
    assert asdict(plan) == values
    check_world(plan, world(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, but this code reads 1"),
        ({"stepps": 3}, "unknown key stepps"),
        ({"steps": "3"}, "steps is '3', expected int"),
        ({"steps": True}, "steps is True, expected int"),
        ({"precision": "fp16"}, "precision 'fp16' is not"),
        ({"batch": {}}, "batch: key mode is missing"),
        ({"batch": 3}, "batch: expected keys and values"),
    ],
)
def test_a_wrong_plan_is_refused(values, load, change, message):
    with pytest.raises(TrainError, match=message):
        load(values | change)


def test_a_plan_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(TrainError, match="not JSON"):
        load_plan(path)


@pytest.mark.parametrize("running", [world(2), world(3, local=1), world(4)])
def test_another_world_is_refused(values, load, running):
    with pytest.raises(TrainError, match=r"plan\.json is for 3 workers"):
        check_world(load(values), running)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("units", 7),
        ("accumulation", 2),
        ("padding_units", 0),
        ("global_batch", 9),
        ("groups", 1),
        ("groups", 2),
    ],
)
def test_a_batch_that_does_not_add_up_is_refused(values, load, key, value):
    values["batch"][key] = value
    with pytest.raises(TrainError, match=r"are not|cannot form"):
        check_world(load(values), world(3))
