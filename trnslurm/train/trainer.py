"""Hugging Face's Trainer on this runtime: its loop, arguments and callbacks, our units and steps.

To Trainer and accelerate every device is a CPU, and they talk to no other worker. What happens on
the device, and between the workers, is Device's and GlobalOptimizer's, so that it is what all other
jobs do: gradients are summed once, a step is the same on any number of workers, and its graphs are
known ahead. Left to themselves (transformers 4.57.6, accelerate 1.15.0, torch-xla 2.9.0) they

- take torch_xla for the device wherever it is installed, use_cpu=True or not; where its runtime
  does not find the other workers, each trains a copy of its own, and nothing is said;
- take AdamW's fused version, which XLA has not, and bias corrections that XLA compiles in;
- average gradients over workers and micro-batches, which is wrong where these are not equal.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils.import_utils import is_accelerate_available, is_torch_xla_available

from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.schedule import learning_rate
from trnslurm.train.optim.optimizer import GlobalOptimizer
from trnslurm.train.plan import Plan
from trnslurm.train.settings import CommonSettings


class UnitTrainer(Trainer):
    """A Trainer whose batches are the units of a plan.

    unit_loss gives a unit's share of each number that a step reports, the loss first.
    """

    def __init__(
        self,
        device: Device,
        plan: Plan,
        settings: CommonSettings,
        environment: Environment,
        *,
        model: nn.Module,
        optimizer: GlobalOptimizer,
        steps: range,
        total_steps: int,
        units: Callable[[int], Sequence[Unit]],
        unit_loss: Callable[[Unit], Tensor],
        parts: int = 1,
    ) -> None:
        """Run these steps (counted from 0) of so many; `units` gives a step's of this worker."""
        _check_libraries()
        self._device = device
        self._steps = steps
        self._batches = Batches(steps, plan.batch.accumulation, units)
        self._unit_loss = unit_loss
        self._sums = device.put(torch.zeros(parts))
        # Trainer adds up what its steps give, and checks that it lies on what it takes for the
        # device. The sums are kept above instead: here they would take a graph.
        self._nothing = torch.zeros(())
        self.global_step = GlobalStep(model, optimizer)
        schedule = Schedule(self.global_step, settings, done=steps.start, steps=total_steps)
        super().__init__(
            model=model,
            args=_arguments(plan, steps, environment),
            callbacks=[_From(steps.start)],
            optimizers=(self.global_step, schedule),
        )
        handler: Any = self.callback_handler  # not annotated
        handler.remove_callback(PrinterCallback)
        self._check_world(plan)

    def _check_world(self, plan: Plan) -> None:
        """Hold what accelerate takes for the world against the plan, and against our device.

        It knows the world from torchrun, which starts a single worker too: without it one hangs on
        Trainium, with transformers from 4.44 on.
        """
        seen = self.accelerator
        if (seen.num_processes, seen.process_index) != (plan.workers, self._device.rank):
            raise TrainError(
                f"accelerate sees worker {seen.process_index} of {seen.num_processes}, but this is "
                f"{self._device.rank} of {plan.workers}: start torchrun as node.sh does, and set "
                "none of accelerate's own variables"
            )

    def get_train_dataloader(self) -> Any:
        """Give this worker's units; there is no epoch, the stream of samples is endless."""
        return self._batches

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        # Anything but the model itself keeps accelerate from wrapping it (DistributedDataParallel),
        # which would sum the gradients a second time.
        return _Unwrapped(model, self.global_step)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a unit, forwards and backwards."""
        unit = inputs["unit"]
        self._device.seed(unit.seed)
        numbers = self._unit_loss(unit)
        torch.autograd.backward(numbers[0])
        self._sums += numbers.detach()
        self._device.sync()
        return self._nothing

    def end_step(self) -> Tensor:
        """End a step's graph, when Trainer has zeroed the gradients; give this worker's sums."""
        sums = self._sums.clone()
        self._sums.zero_()
        self._device.sync()
        return sums

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count nothing: Progress does."""
        return 0

    def store_flos(self) -> None:
        """Sum nothing over the workers: the process group may know the device's tensors only."""


class Batches:
    """What Trainer takes for a data loader: no tensors, because it fetches a whole step's ahead."""

    def __init__(
        self, steps: range, accumulation: int, units: Callable[[int], Sequence[Unit]]
    ) -> None:
        self._steps = steps
        self._accumulation = accumulation
        self._units = units

    def __len__(self) -> int:
        return len(self._steps) * self._accumulation

    def __iter__(self) -> Iterator[dict[str, Unit]]:
        for step in self._steps:
            for unit in self._units(step):
                yield {"unit": unit}


class GlobalStep(torch.optim.Optimizer):
    """A GlobalOptimizer as Trainer wants one: it has no state of its own."""

    def __init__(self, model: nn.Module, optimizer: GlobalOptimizer) -> None:
        super().__init__(model.parameters(), {"lr": 0.0})
        self._optimizer = optimizer
        self.grad_norm = torch.zeros(())
        """Before clipping, of the last step."""
        self.lr = 0.0
        """Of the last step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with all workers."""
        self.lr = self.param_groups[0]["lr"]
        self.grad_norm = self._optimizer.step(self.lr)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero in place, whatever is asked for: a new gradient would change the graphs."""
        self._optimizer.zero_grad()


class Schedule(LRScheduler):
    """The recipe's learning rate, from a step on."""

    def __init__(
        self, optimizer: GlobalStep, settings: CommonSettings, *, done: int, steps: int
    ) -> None:
        self._settings = settings
        self._steps = steps
        for group in optimizer.param_groups:
            group["initial_lr"] = settings.lr  # which PyTorch asks for where it goes on
        super().__init__(optimizer, last_epoch=done - 1)

    def get_lr(self) -> Any:
        """Give the rate of the step that comes next; beyond the last one there is none."""
        step = min(self.last_epoch, self._steps)
        return [learning_rate(self._settings, step=step, steps=self._steps)]


class _Arguments(TrainingArguments):
    """Trainer's arguments, but the model stays where it is."""

    @property
    def place_model_on_device(self) -> bool:
        return False


def _arguments(plan: Plan, steps: range, environment: Environment) -> TrainingArguments:
    """Give Trainer the plan's numbers.

    There are no epochs, in a precompile no more than later: AWS's tutorial meets new graphs at the
    end of one, unless both runs have as many.
    """
    return _Arguments(
        output_dir=str(environment.run_dir),
        # Without it Trainer looks for a GPU: "Your setup doesn't support bf16/gpu", and of older
        # versions "No CUDA GPUs are available". Bf16 arithmetic is Device's; there is no fp16.
        use_cpu=True,
        per_device_train_batch_size=plan.batch.micro_batch,
        gradient_accumulation_steps=plan.batch.accumulation,
        max_steps=steps.stop,
        max_grad_norm=0.0,  # GlobalOptimizer clips, by the norm over all workers
        seed=plan.seed,
        average_tokens_across_devices=False,
        logging_strategy="no",  # Progress reports
        # Checkpoints saves. Trainer's own save gathers all on a host by xm.save, which gets the
        # process killed on trn1.2xlarge.
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _check_libraries() -> None:
    if not is_accelerate_available():
        raise TrainError(
            "Hugging Face's Trainer needs accelerate: pip install accelerate==1.15.0 into the "
            "Python of this cluster"
        )
    if is_torch_xla_available():
        raise TrainError(
            "Hugging Face's Trainer would take torch_xla into its own hands here: set "
            "USE_TORCH_XLA=0 in the environment, as the recipe's `env` does"
        )


class _From(TrainerCallback):
    """Lets Trainer count from a step on, without a checkpoint of its own."""

    def __init__(self, done: int) -> None:
        self._done = done

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the step."""
        state.global_step = self._done


class _Unwrapped(nn.Module):
    """The model as Trainer's loop calls it."""

    def __init__(self, model: nn.Module, step: GlobalStep) -> None:
        super().__init__()
        self.model = model
        self._step = step

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients in place."""
        self._step.zero_grad()
