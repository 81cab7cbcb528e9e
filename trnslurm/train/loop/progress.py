"""Worker 0's reports about a run: the log, metrics.jsonl and TensorBoard events.

A step's loss and norm stay on the device until a report is due. To read them earlier, the host
would have to wait for the device.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.train.errors import TrainError
from trnslurm.train.loop.job import TrainingJob
from trnslurm.train.loop.reports import JsonLines, TensorBoardEvents
from trnslurm.train.settings import CommonSettings

# The share of the expected rate below which a warning is printed.
EXPECTED_SHARE = 0.95
# The first optimizer step makes state and differs from the second; after that nothing is new.
STEADY_AFTER = 2
TOKENS = {"tokens/s": "tokens_per_s"}
"""The rates that the log can print, and the metrics that contain them."""
_DIVERGED = 1e9


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What a job reports about its steps."""

    flops_per_sample: float = 0.0
    parts: Sequence[str] = ("loss",)
    """The names of the numbers that each unit has a share of, the loss first."""
    rates: Mapping[str, str] = field(default_factory=lambda: TOKENS)
    """The rates that the log shows."""
    expected_samples_per_s: float = 0.0
    """A mean rate well below this causes a warning at the end. 0 means that none is expected."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A step whose numbers have not been read yet."""

    step: int
    loss: Tensor
    """This worker's share of each of Reporting.parts. The shares of all workers add up."""
    grad_norm: Tensor
    lr: float
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds by name."""
    scores: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, float | Tensor] = field(default_factory=dict)
    """What the job itself measures, as this worker has it."""


class StepReporter:
    """Reports steps. Later attempts append to the same file. A precompile writes no file."""

    def __init__(
        self,
        job: TrainingJob[CommonSettings],
        reporting: Reporting,
        *,
        steps: range,
        total: int = 0,
    ) -> None:
        """Report on these steps of a run with `total` steps; 0 means that it ends with these."""
        environment, device = job.environment, job.device
        self._plan = job.plan
        self._reporting = reporting
        self._attempt = environment.attempt
        # In a precompile on Neuron every number is invalid.
        self._training = environment.phase == "train"
        self._device = device
        self._num_steps = len(steps)
        self._first, self._last = steps.start, steps.stop - 1
        self._total = total or self._last
        self._log_every = job.settings.log_every
        self._steady_graphs: int | None = None
        self._steady_since = 0.0
        self._warned = False
        self._pending: list[StepDone] = []
        self._last_time = time.monotonic()
        files = environment.files
        writes = device.rank == 0 and self._training
        self._lines = JsonLines(files.metrics_file) if writes else None
        self._events = TensorBoardEvents(files.tensorboard) if writes else None

    def due(self, step: int) -> bool:
        """Return whether a report is due after a step.

        The first steps are reported at once, because the reduction of the numbers is also a graph,
        which must be compiled early.
        """
        early = step - self._first < STEADY_AFTER
        return early or step % self._log_every == 0 or step == self._last

    def note(self, done: StepDone, *, flag: bool = False) -> bool:
        """Note a step, and report all pending steps if a report is due.

        Worker 0's flag is sent with the report's reduction, so it needs no communication of its
        own. Return the flag at a report, and False between reports.
        """
        self._pending.append(done)
        return self.report(flag=flag) if self.due(done.step) else False

    def report(self, *, flag: bool = False) -> bool:
        """Report the pending steps. Call it before a save, because saved steps are not repeated.

        All workers must call it at the same step, because it adds up their numbers.
        """
        steps, self._pending = self._pending, []
        if not steps:
            return False
        fetched = self._device.fetch(t for done in steps for t in (done.loss, done.grad_norm))
        # Always the same count of numbers, because it is part of the graph that sums them.
        mine = [number for loss in fetched[::2] for number in loss.tolist()]
        width = len(self._reporting.parts)
        mine += [0.0] * (self._log_every * width - len(mine))
        *totals, flag_of_0 = self._device.total([*mine, float(self._device.rank == 0 and flag)])
        now = time.monotonic()
        seconds = (now - self._last_time) / len(steps)
        self._last_time = now
        # The rest includes a device's work while its host continues: on neuron, all of it.
        spent = sum(sum(done.spent.values()) for done in steps) / len(steps)
        same = {"step_s": round(seconds, 6), "compute_s": round(max(0.0, seconds - spent), 6)}
        same |= {key: round(value) for key, value in self._device.memory().items()}
        lines = []
        for place, done in enumerate(steps):
            loss, norm = totals[place * width :][:width], fetched[2 * place + 1].item()
            lines.append(self._line(done, loss, norm, seconds) | same)
            self._write(lines[-1], done.logged)
        self._device.say(_format(lines[-1], self._reporting))
        if self._training and (lost := [line for line in lines if not _is_sane(line)]):
            raise TrainError(_refusal(lost[0]))
        if steps[-1].step - self._first + 1 == STEADY_AFTER:
            self._steady_graphs, self._steady_since = self._device.graphs(), now
        if lines[-1]["late_graphs"] and not self._warned:
            self._warn_of_late_graphs(lines[-1])
        return flag_of_0 > 0

    def _warn_of_late_graphs(self, line: Mapping[str, float]) -> None:
        self._warned = True
        if self._training:
            self._device.say(
                f"warning: {line['late_graphs']} graphs had to be compiled by step {line['step']} "
                "because no cache contained them: the precompile's trial run did not reach them"
            )

    def close(self) -> None:
        """Close the files, and print how many graphs were compiled late, which should be none."""
        if self._lines:
            self._lines.close()
        if self._events:
            self._events.close()
        if self._device.rank == 0 and self._steady_graphs is not None:
            late = self._device.graphs() - self._steady_graphs
            self._device.say(f"graphs compiled after step {STEADY_AFTER}: {late}")
            self._compare_rate()

    def _compare_rate(self) -> None:
        """Warn if the mean rate of the steady steps is well below the expected rate."""
        steps, expected = self._num_steps - STEADY_AFTER, self._reporting.expected_samples_per_s
        if not (expected and self._training and steps > 0):
            return
        rate = steps * self._plan.batch.global_batch / (self._last_time - self._steady_since)
        if rate < EXPECTED_SHARE * expected:
            self._device.say(
                f"warning: {rate:,.1f} samples/s on average, less than {EXPECTED_SHARE:.0%} of the "
                f"expected {expected:,.1f} (train.expected_samples_per_s)"
            )

    def _line(
        self, done: StepDone, loss: list[float], norm: float, seconds: float
    ) -> dict[str, int | float]:
        """Return a step's line; `seconds` is the mean since the last report."""
        batch, graphs = self._plan.batch, self._device.graphs()
        samples_per_s = batch.global_batch / seconds
        tokens_per_s = samples_per_s * self._plan.seq_len
        # Graphs that the precompile missed; where no cache can tell, graphs after the first steps.
        late = self._device.graphs_missed()
        if late is None:
            late = 0 if self._steady_graphs is None else graphs - self._steady_graphs
        line: dict[str, int | float] = {
            "attempt": self._attempt,
            "step": done.step,
            "steps": self._total,
            "samples": done.step * batch.global_batch,
            **dict(zip(self._reporting.parts, loss, strict=True)),
            "grad_norm": norm,
            "lr": done.lr,
            **done.scores,
            "samples_per_s": round(samples_per_s, 3),
            "tokens_per_s": round(tokens_per_s, 1),
            "tokens_per_s_per_device": round(tokens_per_s / self._plan.workers, 1),
            **{f"{name}_s": round(value, 6) for name, value in done.spent.items()},
            "padding": batch.padding_units / (batch.units + batch.padding_units),
            "graphs": graphs,
            "late_graphs": late,
            "time": round(time.time(), 3),
        }
        if self._plan.peak_tflops and self._reporting.flops_per_sample:
            achieved = samples_per_s * self._reporting.flops_per_sample
            line["mfu"] = round(achieved / (self._plan.peak_tflops * 1e12), 6)
        return line

    def _write(self, line: dict[str, int | float], logged: Mapping[str, float | Tensor]) -> None:
        if self._lines is None or self._events is None:
            return
        if logged:
            line |= self._measured(line, logged)
        self._lines.write(line)
        self._events.write(line)

    def _measured(
        self, line: Mapping[str, float], logged: Mapping[str, float | Tensor]
    ) -> dict[str, float]:
        """Return the job's own numbers of a step; a tensor with many also becomes a histogram."""
        found: dict[str, float] = {}
        for name, value in logged.items():
            if not isinstance(value, Tensor):
                found[name] = float(value)
                continue
            [values] = self._device.fetch([value])
            if values.numel() == 1:
                found[name] = values.item()
                continue
            values = values.float()
            deviation, mean = torch.std_mean(values, correction=0)
            numbers = {"mean": mean, "std": deviation, "min": values.min(), "max": values.max()}
            found |= {f"{name}_{key}": number.item() for key, number in numbers.items()}
            if self._events:
                self._events.write_histogram(name, values, line)
        if taken := found.keys() & line.keys():
            raise TrainError(
                "run.log: each step's metrics already contain "
                f"{', '.join(sorted(taken))}: choose another name"
            )
        return found


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_sample(model: nn.Module, config: Any, seq_len: int) -> float:
    """Count the FLOP to train a transformer on one sample."""
    return transformer_flops(count_parameters(model), config, seq_len)


def transformer_flops(parameters: int, config: Any, seq_len: int) -> float:
    """Count the same from the number of parameters, for sharded models.

    The count is 6 per parameter and token, plus the attention's products. Recomputation does not
    count.
    """
    attention: float = 12.0 * config.num_hidden_layers * config.hidden_size * seq_len
    return seq_len * (6.0 * parameters + attention)


def _is_sane(line: Mapping[str, float]) -> bool:
    return math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])


def _refusal(line: Mapping[str, float]) -> str:
    return (
        f"loss {line['loss']} and gradient norm {line['grad_norm']} at step {line['step']}: the "
        "run has diverged: try a lower train.lr or a longer warm-up"
    )


def _format(line: dict[str, int | float], reporting: Reporting) -> str:
    parts = [
        f"step {line['step']}/{line['steps']}",
        *(f"{name} {line[name]:.4f}" for name in reporting.parts),
        f"grad_norm {line['grad_norm']:.4f}",
        f"lr {line['lr']:.3g}",
        *(
            f"{name} {line[key]:.{0 if line[key] >= 10 else 1}f}"
            for name, key in reporting.rates.items()
        ),
    ]
    if "mfu" in line:
        parts.append(f"mfu {100 * line['mfu']:.1f}%")
    if scores := [name for name in line if name.startswith("eval_") and name != "eval_s"]:
        parts += _format_scores(line, scores)  # eval_s is a time
    return "  ".join(parts)


def _format_scores(line: Mapping[str, float], scores: Sequence[str]) -> list[str]:
    if "perplexity" not in line:
        return [f"{name} {line[name]:.4f}" for name in scores]
    form = ".2f" if line["perplexity"] < _DIVERGED else ".3g"  # exp(700) has 305 digits
    return [f"eval_loss {line['eval_loss']:.4f}  perplexity {line['perplexity']:{form}}"]
