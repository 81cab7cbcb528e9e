"""What every job's train section has.

An annotation says what a key accepts: its type; with Literal, its choices; with the marks below,
more. The text below a field is its line in `trnslurm recipes NAME`. REFUSED lists combinations of
values that are not allowed, and why. The launcher reads all this from the source, without importing
it, and refuses wrong values before anything is queued. The job refuses the same values:
trnslurm/declared.py.

Marks are strings. "at least X", "less than X" and "divides X" take a number or another key, which
may be seq_len. A number must be at least 0 unless a mark says otherwise. REFUSED may also name
precision, device and data.path.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

Value = TypeVar("Value")

Free = Annotated[Value, "free"]
"""Does not affect the compiled graphs: a run with another value needs no precompile."""
OnOff = Annotated[Value, "on or off"]
"""Affects the compiled graphs only by being 0 or not."""
Positive = Annotated[Value, "at least 1"]
"""At least 1; other numbers may be 0."""
Share = Annotated[Value, "at least 0", "less than 1"]
"""A probability or a decay rate."""

OptimizerPrecision = Literal["fp32_copy", "fp32_state", "as_model"]
"""How the optimizer updates parameters that have fewer bits than fp32.

It updates fp32 copies of them; or it makes copies only for a step, and keeps its state in fp32; or
it does everything in the parameters' own type.
"""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the optimizer is made from."""

    optimizer: Literal["adamw", "adam", "lamb", "sgd"]
    """AdamW, Adam, LAMB (needs timm), or plain SGD to compare runs exactly."""
    weight_decay: float
    """Decay of matrices; biases and norms do not decay."""
    beta1: Share[float]
    """Decay rate of the first moment."""
    beta2: Share[float]
    """Decay rate of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    max_norm: float
    """Gradients are clipped to this global norm; 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class CommonSettings(OptimizerSettings):
    """Base class of a job's own Settings."""

    init_from: Free[str]
    """Initial parameters: folder, checkpoint, .pt file or model name; empty: data.model or new."""
    epochs: Free[int]
    """End after this many passes over the data, if that is sooner; 0: no limit."""
    stop_at: Free[int]
    """End this run after that step; the schedule is still that of all steps; 0: no limit."""
    lr: Free[float]
    """The learning rate after the warm-up."""
    schedule: Free[Literal["cosine", "linear", "constant"]]
    """How the rate falls to 0 at the last step, or stays constant."""
    warmup_steps: Free[int]
    """The number of steps in which the rate rises linearly."""
    log_every: Positive[int]
    """Report every so many steps; reading a loss makes the host wait for the device."""
    eval_every: OnOff[int]
    """Evaluate on held-out data every so many steps, and at the end; 0: never."""
    eval_samples: Free[int]
    """The number of held-out samples; 0: all."""
    save_every: OnOff[int]
    """Save a checkpoint every so many steps, and at the end; 0: never."""
    save_minutes: Free[float]
    """Save a checkpoint this many minutes after the last one; 0: never."""
    save_optimizer: Free[bool]
    """If false, save only parameters: a resumed run starts its moments at zero."""
    keep_last: Free[Positive[int]]
    """The number of newest checkpoints to keep."""
    keep_every: Free[int]
    """Keep one checkpoint every so many steps permanently; 0: none."""
    watchdog: Free[float]
    """End an attempt that makes no progress for the time of this many steps; 0: never."""
    watchdog_min_s: Free[float]
    """The watchdog waits for at least this many seconds."""
    verify_every: Free[int] = 0
    """Compare the gradients of two workers bit for bit every so many steps; 0: never."""
    compile: Free[bool] = False
    """Compile the model's layers with torch.compile (cpu, cuda, torchneuron)."""

    REFUSED = (
        (
            {"compile": True, "device": "by XLA"},
            "XLA already compiles everything: remove the setting, or use another device",
        ),
        (
            {"verify_every": "not empty", "device": "by XLA"},
            "gradients can be compared only on cpu and cuda: set it to 0",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ScoredSettings(CommonSettings):
    """Base class for the Settings of jobs that keep the best checkpoint by a score."""

    keep_best: Free[str]
    """Also keep the checkpoint with the best value of this evaluation score; empty: no."""

    REFUSED = (  # type: ignore[assignment]
        (
            {"keep_best": "not empty", "save_every": "not a multiple of eval_every"},
            "checkpoints would be saved at steps without an evaluation: make train.save_every a "
            "multiple of train.eval_every, or set train.keep_best=",
        ),
    )
