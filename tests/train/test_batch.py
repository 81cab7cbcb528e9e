"""Every sample exactly once in a step, and the same units whatever the number of workers."""

from dataclasses import replace

import pytest

from trnslurm.samples.order import derive_seed
from trnslurm.train.data.units import eval_units, worker_units


def step_units(plan, step):
    workers = [worker_units(plan, worker=w, step=step) for w in range(plan.workers)]
    assert {len(units) for units in workers} == {plan.batch.accumulation}
    return [unit for units in workers for unit in units]


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("units", [3, 8, 12])
def test_every_sample_exactly_once_in_a_step(make_plan, units, workers):
    plan = make_plan(units=units, workers=workers)
    for step in (1, 2, 6):
        valid = [unit for unit in step_units(plan, step) if unit.weight]

        positions = [p for unit in valid for p in range(unit.first, unit.first + unit.size)]
        first = (step - 1) * plan.batch.global_batch
        assert sorted(positions) == list(range(first, first + plan.batch.global_batch))
        assert {unit.weight for unit in valid} == {1.0}


@pytest.mark.parametrize("workers", range(2, 9))
def test_units_do_not_depend_on_the_worker_count(make_plan, workers):
    alone = step_units(make_plan(units=8, workers=1), 3)
    together = [unit for unit in step_units(make_plan(units=8, workers=workers), 3) if unit.weight]

    assert sorted(together, key=lambda unit: unit.index) == alone


@pytest.mark.parametrize("workers", [3, 5, 8])
def test_padding_repeats_a_valid_unit_with_weight_zero(make_plan, workers):
    plan = make_plan(units=7, workers=workers)
    units = step_units(plan, 2)
    valid = {unit.index: unit for unit in units if unit.weight}
    padding = [unit for unit in units if not unit.weight]

    assert len(padding) == plan.batch.padding_units > 0
    for unit in padding:
        assert replace(unit, weight=1.0) == valid[unit.index]


def test_a_group_of_neighbours_runs_the_same_units(make_plan):
    plan, alone = make_plan(units=7, workers=6, group=2), make_plan(units=7, workers=3)
    for worker in range(6):
        assert worker_units(plan, worker=worker, step=2) == worker_units(
            alone, worker=worker // 2, step=2
        )
        assert eval_units(plan, worker=worker, samples=9) == eval_units(
            alone, worker=worker // 2, samples=9
        )


def test_seeds_differ_between_units_steps_and_runs():
    seeds = {derive_seed(seed, step, unit) for seed in (1, 2) for step in (0, 1) for unit in (0, 1)}

    assert len(seeds) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)
