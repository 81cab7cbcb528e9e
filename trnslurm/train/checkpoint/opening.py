"""The checkpoints of a run, by its settings."""

from trnslurm.train.checkpoint.checkpoints import Checkpoints
from trnslurm.train.device import Device
from trnslurm.train.environment import Environment
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
) -> Checkpoints:
    """Give the checkpoints of a run, as its settings want them; data tells what it trains on."""
    return Checkpoints(
        environment.run_dir / "checkpoints",
        device,
        plan,
        environment,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        keep_best=keep_best,
        save_optimizer=settings.save_optimizer,
        facts={"data": data},
    )
