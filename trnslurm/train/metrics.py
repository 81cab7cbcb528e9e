"""What a run says of its progress: a line in the log and one in metrics.jsonl, from rank 0."""

import json
import math
import time

from trnslurm.train.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import Plan

# The first optimizer step makes state and differs from the second; after that nothing is new.
STEADY_AFTER = 2


class Progress:
    """Reports steps; later attempts of a run go on in the same file. A precompile writes none."""

    def __init__(
        self, plan: Plan, environment: Environment, device: Device, *, steps: int, log_every: int
    ) -> None:
        self._plan = plan
        self._attempt = environment.attempt
        # In a precompile on Neuron every number is invalid.
        self._training = environment.phase == "train"
        self._device = device
        self._steps = steps
        self._log_every = log_every
        self._steady_graphs: int | None = None
        self._last_step = 0
        self._last_time = time.monotonic()
        self._file = None
        if device.rank == 0 and self._training:
            # Line buffered: every line reaches the file system as soon as it is whole.
            path = environment.run_dir / "metrics.jsonl"
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def due(self, step: int) -> bool:
        """Tell whether a step (counted from 1) is to be reported.

        Reading numbers waits for the device, so not every step. The first are, because the
        reduction of the numbers is a graph too and should not come as a surprise later.
        """
        return step <= STEADY_AFTER or step % self._log_every == 0 or step == self._steps

    def report(self, step: int, *, loss: float, grad_norm: float, lr: float) -> None:
        """Report a step; rates are means since the last report."""
        now = time.monotonic()
        batch = self._plan.batch.global_batch
        samples_per_s = batch * (step - self._last_step) / (now - self._last_time)
        self._last_step, self._last_time = step, now
        line: dict[str, int | float] = {
            "attempt": self._attempt,
            "step": step,
            "steps": self._plan.steps,
            "samples": step * batch,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "samples_per_s": round(samples_per_s, 3),
            "tokens_per_s": round(samples_per_s * self._plan.seq_len, 1),
            "graphs": self._device.graphs(),
            "time": round(time.time(), 3),
        }
        if self._file:
            # JSON has no NaN.
            kept = {k: v if math.isfinite(v) else None for k, v in line.items()}
            self._file.write(json.dumps(kept) + "\n")
        if self._device.rank == 0:
            print(_format(line), flush=True)
        if self._training and not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise TrainError(
                f"loss {loss} and gradient norm {grad_norm} at step {step}: this training is lost; "
                "a lower train.lr or a longer warm-up may help"
            )
        if step == STEADY_AFTER:
            self._steady_graphs = self._device.graphs()

    def close(self) -> None:
        """Close the file and say how many graphs came late: there should be none."""
        if self._file:
            self._file.close()
        if self._device.rank == 0 and self._steady_graphs is not None:
            late = self._device.graphs() - self._steady_graphs
            print(f"graphs compiled after step {STEADY_AFTER}: {late}", flush=True)


def _format(line: dict[str, int | float]) -> str:
    return (
        f"step {line['step']}/{line['steps']}  loss {line['loss']:.4f}  "
        f"grad_norm {line['grad_norm']:.4f}  lr {line['lr']:.3g}  "
        f"tokens/s {line['tokens_per_s']:.0f}"
    )
