"""The learning rate of each step."""

import pytest

from trnslurm.train.errors import TrainError
from trnslurm.train.schedule import learning_rate


def rates(name, warmup_steps=2, steps=6):
    return [
        learning_rate(name, peak=1.0, warmup_steps=warmup_steps, step=step, steps=steps)
        for step in range(steps)
    ]


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


def test_an_unknown_schedule_is_refused():
    with pytest.raises(TrainError, match="'cosin' is not one of cosine, linear, constant"):
        rates("cosin")
