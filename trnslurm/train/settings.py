"""What every job's train section has.

An annotation says what a key accepts: its type; with Literal, its choices; with the marks below,
more. The text below a field is its line in `trnslurm recipes NAME`. REFUSED lists values that do
not go together, and why. The launcher reads all this from the source, without importing it, and
refuses what is wrong before anything is queued; the job refuses the same: trnslurm/declared.py.

Marks are texts. "at least X", "less than X" and "divides X" take a number or another key, which may
be seq_len; a number is at least 0 unless a mark says otherwise. REFUSED may also name precision,
device and data.path.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

Value = TypeVar("Value")

Free = Annotated[Value, "free"]
"""Does not shape the compiled graphs: a run with another value needs no precompile."""
OnOff = Annotated[Value, "on or off"]
"""Shapes the compiled graphs only by being 0 or not."""
Positive = Annotated[Value, "at least 1"]
"""At least 1, where other numbers may be 0."""
Share = Annotated[Value, "at least 0", "less than 1"]
"""A probability, or what decays by it."""

OptimizerPrecision = Literal["fp32_copy", "fp32_state", "as_model"]
"""Where parameters have fewer bits than fp32: the optimizer updates fp32 copies of them; or has
copies for a step only and keeps its state in fp32; or does all in the parameters' own type."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the optimizer is made from."""

    optimizer: Literal["adamw", "adam", "lamb", "sgd"]
    """AdamW; Adam; LAMB (needs timm); or plain SGD, for comparing runs exactly."""
    weight_decay: float
    """Decay of matrices; biases and norms have none."""
    beta1: Share[float]
    """Decay of the first moment."""
    beta2: Share[float]
    """Decay of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    max_norm: float
    """Gradients are clipped to this global norm; 0: they are not."""


@dataclass(frozen=True, kw_only=True)
class CommonSettings(OptimizerSettings):
    """The base of a job's own Settings."""

    init_from: Free[str]
    """First parameters: a folder, a checkpoint, a .pt file or a model; empty: data.model or new."""
    epochs: Free[int]
    """End after this many passes over the data, if sooner; 0: no."""
    stop_at: Free[int]
    """End this run after that step; the schedule stays that of all steps; 0: no."""
    lr: Free[float]
    """The learning rate after the warm-up."""
    schedule: Free[Literal["cosine", "linear", "constant"]]
    """How the rate goes down to 0 at the last step, or stays."""
    warmup_steps: Free[int]
    """Steps in which the rate goes up linearly."""
    log_every: Positive[int]
    """Report every this many steps; reading a loss makes the host wait for the device."""
    eval_every: OnOff[int]
    """Evaluate on held-out data every this many steps, and at the end; 0: never."""
    eval_samples: Free[int]
    """This many held-out samples; 0: all."""
    save_every: OnOff[int]
    """A checkpoint every this many steps, and at the end; 0: none."""
    save_minutes: Free[float]
    """A checkpoint this many minutes after the last one; 0: no."""
    save_optimizer: Free[bool]
    """With false parameters only: a resumed run starts its moments at zero."""
    keep_last: Free[Positive[int]]
    """Keep this many of the newest checkpoints."""
    keep_every: Free[int]
    """Keep one checkpoint every this many steps for good; 0: none."""
    watchdog: Free[float]
    """End an attempt without progress for this many steps' time; 0: never."""
    watchdog_min_s: Free[float]
    """The watchdog waits for at least this many seconds."""
    verify_every: Free[int] = 0
    """Compare the gradients of two workers bit for bit every this many steps; 0: never."""
    compile: Free[bool] = False
    """Compile the model's layers with torch.compile (cpu, cuda, torchneuron)."""

    REFUSED = (
        (
            {"compile": True, "device": "by XLA"},
            "XLA compiles everything already: leave it out, or take another device",
        ),
        (
            {"verify_every": "not empty", "device": "by XLA"},
            "gradients are compared on cpu and cuda only: set it to 0",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ScoredSettings(CommonSettings):
    """The base of the Settings of a job that keeps the best checkpoint by a score."""

    keep_best: Free[str]
    """The best checkpoint by this score of the evaluation is kept, too; empty: no."""

    REFUSED = (  # type: ignore[assignment]
        (
            {"keep_best": "not empty", "save_every": "not a multiple of eval_every"},
            "checkpoints are made of steps that are not evaluated: make train.save_every a "
            "multiple of train.eval_every, or set train.keep_best=",
        ),
    )
