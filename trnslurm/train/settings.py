"""What every job's train section has; docs/recipes.md says what each key means."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """The base of a job's own Settings."""

    init_from: str
    epochs: int
    stop_at: int
    optimizer: str
    lr: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_norm: float
    log_every: int
    eval_every: int
    eval_samples: int
    save_every: int
    save_minutes: float
    save_optimizer: bool
    keep_last: int
    keep_every: int
    watchdog: float
    watchdog_min_s: float
