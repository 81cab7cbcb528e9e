"""The checkpoints of a run, by its settings."""

from collections.abc import Sequence

from trnslurm.train.checkpoint.checkpoints import Checkpoints
from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import Plan
from trnslurm.train.settings import CommonSettings


def open_checkpoints(
    plan: Plan,
    settings: CommonSettings,
    device: Device,
    environment: Environment,
    *,
    data: str,
    keep_best: str = "",
    scores: Sequence[str] = (),
) -> Checkpoints:
    """Open the checkpoints of a run with its settings; data is the fingerprint of what it reads.

    Scores are what an evaluation gives: one of them decides which checkpoint is the best.
    """
    if keep_best:
        _check_best(keep_best, scores, settings)
    return Checkpoints(
        environment.files.checkpoints,
        device,
        plan,
        environment,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        keep_best=keep_best,
        save_optimizer=settings.save_optimizer,
        facts={"data": data},
    )


def _check_best(name: str, scores: Sequence[str], settings: CommonSettings) -> None:
    """Refuse a score that does not exist, or that the checkpoints would not have."""
    if name not in scores:
        raise TrainError(
            f"train.keep_best is {name!r}, but it can be {', '.join(scores)}, or empty"
        )
    every, saves = settings.eval_every, settings.save_every
    if saves and (not every or saves % every):
        raise TrainError(
            f"train.keep_best is {name}, but checkpoints are made of steps that are not evaluated: "
            f"make train.save_every ({saves}) a multiple of train.eval_every ({every}), or set "
            "train.keep_best="
        )
