"""The Hugging Face Trainer on this runtime: its loop and callbacks, our units, steps, checkpoints.

A script that trains with Trainer needs three changes: it opens the run as every job does, supplies
the loss of a unit instead of a data set, and has its own evaluation:

    job = open_job(Settings, "Fine-tune my model.")
    model = …
    optimizer = make_optimizer(job.settings, job.device, model.named_parameters(), zero1=False)
    run = TrainingRun(job, optimizer, data=…, samples_per_epoch=…, reporting=Reporting())
    UnitTrainer(run, model, unit_loss, evaluate=evaluate, callbacks=[…]).train()
    run.close(model.parameters)

`unit_loss(unit)` returns the unit's share of each number that a step reports, the loss first, as a
vector; it seeds the device with unit.seed before the forward pass. `evaluate()` returns scores by
name. jobs/bert_mrpc/train.py is a complete script. Arguments that Trainer would read from
TrainingArguments (rate, batch, steps, saving, logging) come from the recipe.

To Trainer and accelerate, every device is a CPU, and they communicate with no other worker. Device
and GlobalOptimizer handle everything on the device and between the workers, as in every other job:
gradients are summed once, a step is the same on any number of workers, and its graphs are known in
advance. Without this, the libraries (transformers 4.57.6, accelerate 1.15.0, torch-xla 2.9.0)

- use torch_xla as the device wherever it is installed, even with use_cpu=True; if its runtime does
  not find the other workers, each silently trains a separate copy;
- use the fused AdamW, which XLA does not have, and bias corrections that XLA compiles in;
- average gradients over workers and micro-batches, which is wrong if these are not equal.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils.import_utils import is_accelerate_available, is_torch_xla_available

import trnslurm
from trnslurm.contract.halving import rung_end
from trnslurm.contract.variables import Variable
from trnslurm.train.data.units import Unit
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.run import Evaluate, TrainingRun

# The longest time between reports, where Trainer logs seldom.
_REPORT_S = 5.0


class RunCallback(TrainerCallback):
    """Lets an unchanged Trainer report, stop on request, save and resume.

        trainer = Trainer(model, arguments, callbacks=[RunCallback()], …)
        trainer.train(resume_from_checkpoint=options.resume)

    with `--resume {resume}` among the script's arguments, and `--per_device_train_batch_size
    {micro_batch} --gradient_accumulation_steps {accumulation}` for the plan's batch.
    """

    def __init__(self) -> None:
        self._step, self._numbers = 0, dict[str, float]()
        self._reported = 0.0
        self._rung_end = rung_end(os.environ.get(Variable.RUN_DIR, ""))

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let workers on CPUs load their optimizer when resuming: PyTorch does not know cpu:0.

        Trainer loads it to args.device (transformers 4.57.6, _load_optimizer_and_scheduler), to
        which accelerate 1.15 adds this worker's number.
        """
        if args.device.type == "cpu" and args.device.index is not None:
            args.__dict__["_setup_devices"] = torch.device("cpu")  # it is a cached property

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let Trainer save and end if a stop is requested."""
        self._step = state.global_step
        if trnslurm.should_stop() or 0 < self._rung_end <= self._step:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the metrics of a step, and of the evaluation after it."""
        numbers = (logs or {}).items()
        self._numbers |= {name: value for name, value in numbers if isinstance(value, int | float)}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the checkpoint."""
        step = state.global_step
        trnslurm.saved(step, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the previous step, which is now complete, if it has metrics or a report is due."""
        if self._numbers or time.monotonic() - self._reported > _REPORT_S:
            self._report(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step."""
        self._report(state)

    def _report(self, state: Any) -> None:
        if self._step:
            trnslurm.report(step=self._step, steps=state.max_steps, **self._numbers)
        self._step, self._numbers, self._reported = 0, {}, time.monotonic()


class UnitTrainer(Trainer):
    """A Trainer whose batches are the units of a run."""

    def __init__(
        self,
        run: TrainingRun,
        model: nn.Module,
        unit_loss: Callable[[Unit], Tensor],
        *,
        evaluate: Evaluate | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        """Load the run's newest checkpoint; train() then runs the remaining steps."""
        _check_libraries()
        self._run = run
        self._unit_loss = unit_loss
        self._steps = run.begin()
        # Trainer adds up what its steps return, and checks that this is on the device that Trainer
        # knows. The run adds the numbers up instead: here they would take a graph.
        self._nothing = torch.zeros(())
        step = GlobalStep(model, run)
        # The rate of the step that comes next; after the last step there is none.
        schedule = LambdaLR(
            step, lambda done: run.lr(min(done, run.total) + 1), last_epoch=self._steps.start - 2
        )
        super().__init__(
            model=model,
            args=_arguments(run, self._steps),
            callbacks=[_EndStep(run, step, self._steps, evaluate), *callbacks],
            optimizers=(step, schedule),
        )
        handler: Any = self.callback_handler  # not annotated
        handler.remove_callback(PrinterCallback)
        self._check_world()

    def train(self, *args: Any, **options: Any) -> Any:
        """Run the remaining steps, if there are any."""
        return super().train(*args, **options) if self._steps else None

    def _check_world(self) -> None:
        """Compare accelerate's world with the plan and with our device.

        accelerate gets the world from torchrun, which starts even a single worker. Without
        torchrun, a single worker hangs on Trainium since transformers 4.44.
        """
        seen, rank, workers = self.accelerator, self._run.device.rank, self._run.plan.workers
        if (seen.num_processes, seen.process_index) != (workers, rank):
            raise TrainError(
                f"accelerate sees worker {seen.process_index} of {seen.num_processes}, but this is "
                f"{rank} of {workers}: start torchrun as node.sh does, and do not set accelerate's "
                "own variables"
            )

    def get_train_dataloader(self) -> Any:
        """Yield this worker's units and no tensors, because Trainer fetches all of a step first.

        There is no epoch, because the stream of samples is endless.
        """
        for step in self._steps:
            for unit in self._run.units(step):
                yield {"unit": unit}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, because the model is on its device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        # Anything but the model itself keeps accelerate from wrapping it (DistributedDataParallel),
        # which would sum the gradients a second time.
        return _Unwrapped(model)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a unit forward and backward."""
        numbers = self._unit_loss(inputs["unit"])
        torch.autograd.backward(numbers[0])
        self._run.add(numbers)
        return self._nothing

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0, because the run counts the FLOP."""
        return 0

    def store_flos(self) -> None:
        """Do nothing: a sum would fail if the process group supports only the device's tensors."""


class GlobalStep(torch.optim.Optimizer):
    """The run's optimizer in Trainer's interface, without any state."""

    def __init__(self, model: nn.Module, run: TrainingRun) -> None:
        super().__init__(model.parameters(), {"lr": 1.0, "initial_lr": 1.0})  # LambdaLR's factor
        self._run = run
        self.grad_norm = torch.zeros(())
        """The gradient norm of the last step, before clipping."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with all workers."""
        self.grad_norm = self._run.optimizer.step(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the run zeroes in place, because a new gradient would change the graphs."""


class _EndStep(TrainerCallback):
    """Ends each step, and sets the step that Trainer starts counting from."""

    def __init__(
        self, run: TrainingRun, step: GlobalStep, steps: range, evaluate: Evaluate | None
    ) -> None:
        self._run = run
        self._step = step
        self._steps = steps
        self._evaluate = evaluate

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let Trainer continue the count from the run's checkpoint."""
        state.global_step = self._steps.start - 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step as every job does."""
        self._run.end(state.global_step, self._step.grad_norm, evaluate=self._evaluate)
        control.should_training_stop |= self._run.over


class _Unwrapped(nn.Module):
    """The model as Trainer's loop calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because the run zeroes the gradients."""


def _arguments(run: TrainingRun, steps: range) -> TrainingArguments:
    """Make Trainer's arguments from the plan.

    Neither a precompile nor training has epochs. In AWS's tutorial, new graphs appear at the end of
    an epoch unless both runs have the same number of epochs.
    """
    batch = run.plan.batch
    return TrainingArguments(
        output_dir=str(run.environment.run_dir),
        # Without it Trainer looks for a GPU: "Your setup doesn't support bf16/gpu", and of older
        # versions "No CUDA GPUs are available". Bf16 arithmetic is Device's; there is no fp16.
        use_cpu=True,
        per_device_train_batch_size=batch.micro_batch,
        gradient_accumulation_steps=batch.accumulation,
        max_steps=steps.stop - 1,
        max_grad_norm=0.0,  # the optimizer clips, by the norm over all workers
        seed=run.plan.seed,
        average_tokens_across_devices=False,
        logging_strategy="no",  # the run reports
        # The run saves. Trainer's own save gathers all on a host by xm.save, which gets the process
        # killed on trn1.2xlarge.
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _check_libraries() -> None:
    if not is_accelerate_available():
        raise TrainError(
            "the Hugging Face Trainer needs accelerate: run pip install accelerate==1.15.0 in "
            "this cluster's Python environment"
        )
    if is_torch_xla_available():
        raise TrainError(
            "the Hugging Face Trainer would use torch_xla on its own: set USE_TORCH_XLA=0 in the "
            "environment, as the recipe's `env` does"
        )
