"""What every job's train section has; docs/recipes.md says what each key means.

The annotations say more than the type. The launcher reads Free and OnOff from the source when it
works out which graphs a run needs, without importing it.
"""

from dataclasses import dataclass
from typing import Annotated, TypeVar

Value = TypeVar("Value")

Free = Annotated[Value, "free"]
"""Does not shape the compiled graphs: a run with another value needs no precompile."""
OnOff = Annotated[Value, "on or off"]
"""Shapes the compiled graphs only by being 0 or not."""
Positive = Annotated[Value, "positive"]
"""At least 1, where other numbers may be 0."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the optimizer is made from."""

    optimizer: str
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_norm: float


@dataclass(frozen=True, kw_only=True)
class CommonSettings(OptimizerSettings):
    """The base of a job's own Settings."""

    init_from: Free[str]
    epochs: Free[int]
    stop_at: Free[int]
    lr: Free[float]
    schedule: Free[str]
    warmup_steps: Free[int]
    log_every: Positive[int]
    eval_every: OnOff[int]
    eval_samples: Free[int]
    save_every: OnOff[int]
    save_minutes: Free[float]
    save_optimizer: Free[bool]
    keep_last: Free[int]
    keep_every: Free[int]
    watchdog: Free[float]
    watchdog_min_s: Free[float]
