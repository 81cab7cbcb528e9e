"""The learning rate of each step, and when checkpoints are due."""

from types import SimpleNamespace

import pytest

from trnslurm.train.loop import schedule
from trnslurm.train.loop.schedule import SaveTimes, learning_rate, total_steps


def rates(name, warmup_steps=2, steps=6):
    settings = SimpleNamespace(schedule=name, lr=1.0, warmup_steps=warmup_steps)
    return [learning_rate(settings, step=step, steps=steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("name", "after_warmup"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_warmup_then_decay(name, after_warmup):
    assert rates(name) == pytest.approx([0.5, 1.0, *after_warmup])


def test_no_warmup_starts_at_the_peak():
    assert rates("linear", warmup_steps=0)[0] == 1.0


def test_checkpoints_are_due_by_steps_by_worker_0s_minutes_and_at_the_end(monkeypatch):
    now = 0.0
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now)

    def due_at(every, minutes):
        nonlocal now
        saves = SaveTimes(SimpleNamespace(save_every=every, save_minutes=minutes), last=10)
        for step in range(1, 11):
            now += 30.0
            if saves.due(step, overdue=saves.overdue()):
                yield step

    assert list(due_at(4, 0.0)) == [4, 8, 10]
    assert list(due_at(0, 0.0)) == []
    assert list(due_at(0, 1.5)) == [3, 6, 9, 10]
    # One that is due by its step makes the minutes begin again.
    assert list(due_at(4, 1.5)) == [3, 4, 7, 8, 10]


def test_a_worker_follows_what_worker_0_has_said(monkeypatch):
    monkeypatch.setattr(schedule.time, "monotonic", lambda: 0.0)
    saves = SaveTimes(SimpleNamespace(save_every=0, save_minutes=5.0), last=10)
    assert not saves.overdue()
    assert saves.due(1, overdue=True)


@pytest.mark.parametrize(
    ("steps", "epochs", "total", "begun"),
    [
        (100_000, 0, 100_000, 29),  # GPT-2's tutorial prints 29
        (1_000_000, 2, 7141, 2),
        (100, 2, 100, 1),
        (7000, 0, 7000, 2),
    ],
)
def test_the_epochs_of_the_log(steps: int, epochs: int, total: int, begun: int) -> None:
    samples, batch = (114_248, 32) if steps == 100_000 else (28_562, 8)
    plan = SimpleNamespace(steps=steps, batch=SimpleNamespace(global_batch=batch))
    assert total_steps(plan, epochs=epochs, samples_per_epoch=samples) == (total, begun)
