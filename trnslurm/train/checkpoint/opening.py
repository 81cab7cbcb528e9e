"""The checkpoints of a run, by its settings."""

from collections.abc import Sequence

from trnslurm.train.checkpoint.checkpoints import Checkpoints
from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import CommonSettings


def open_checkpoints(
    plan: JobPlan,
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
    if keep_best and keep_best not in scores:
        raise TrainError(
            f"train.keep_best is {keep_best!r}, but it can be {', '.join(scores)}, or empty"
        )
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
