"""A job, several trainings one after another: starting the workers takes longest.

torchrun starts it, with a JSON file as its only argument:

    {"job": "jobs/gpt2_zero1/train.py", "device": "xla-cpu",
     "cache": {"path": "cache", "readonly": false} or null, "scenarios":
     [{"run_dir": "a", "plan": "a/plan-1.json", "attempt": 1, "phase": "train",
       "change": "nothing"}, …]}

Each scenario leaves in its run directory what the job leaves there, and a result of each worker.
"""

import hashlib
import json
import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from measures import FROZEN, cache_misses, import_job, state_bytes, use_cache

from trnslurm.train.data.units import Unit
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import read_environment
from trnslurm.train.loop import job as opening
from trnslurm.train.loop.job import run_job
from trnslurm.train.loop.run import TrainingRun


def main():
    options = json.loads(Path(sys.argv[1]).read_text())
    job = import_job(options["job"])
    environment = read_environment()
    if options["cache"]:
        use_cache(options["cache"], environment.rank)
    device = open_device(options["device"], environment)
    closes = device.close
    # The device, and the process group under it, are those of all trainings.
    device.close = lambda: device.barrier("close")
    opening.open_device = lambda name, environment: device
    for number, scenario in enumerate(options["scenarios"]):
        os.environ |= {
            # What the workers told each other about the former checkpoints must not count.
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TRNSLURM_RUN_DIR": scenario["run_dir"],
            "TRNSLURM_PHASE": scenario["phase"],
            "TRNSLURM_ATTEMPT": str(scenario["attempt"]),
        }
        sys.argv[1:] = [scenario["plan"]]
        with CHANGES[scenario["change"]](job):
            result = train(job, device)
        name = f"result-{device.rank}.attempt-{scenario['attempt']}.json"
        Path(scenario["run_dir"], name).write_text(json.dumps(result))
    closes()


def train(job, device):
    """Run the job's main function; return what a worker has at the end."""
    result = {}
    started, closed = TrainingRun.begin, TrainingRun.close
    misses = []

    def begin(run):
        misses.append(cache_misses(device))
        return started(run)

    def close(run, tensors, **options):
        result["state_bytes"] = state_bytes(run.optimizer)
        # Of a sharded model there is a part only.
        if hasattr(run.optimizer, "_gradients"):
            result["parameters"] = digest(tensors())
        closed(run, tensors, **options)

    patch = mock.patch.object
    with (
        ledger_of(job) as ledger,
        patch(TrainingRun, "begin", begin),
        patch(TrainingRun, "close", close),
    ):
        job.main()
    result["functional"] = torch._is_functional_tensor(device.put(torch.ones(2)))
    return result | {"ledger": ledger, "misses": cache_misses(device) - misses[0]}


@contextmanager
def ledger_of(job):
    """Take down the samples that count: their places in the stream, and what was read there."""
    ledger, read = [], {}
    deal, open_split = TrainingRun.units, job.open_split

    def watched_deal(run, step):
        units = deal(run, step)
        for unit in units:
            if unit.weight:
                ledger.extend([place, ""] for place in range(unit.first, unit.first + unit.size))
        return units

    def watched_split(first, split, **options):
        text = open_split(first, split, **options)
        if split == "train":
            text.samples = watched_samples(text.samples)
        return text

    def watched_samples(samples):
        def watched(first, count):
            found = samples(first, count)
            rows = zip(*_columns(found), strict=True)
            read.update({first + number: digest(row) for number, row in enumerate(rows)})
            return found

        return watched

    with (
        mock.patch.object(TrainingRun, "units", watched_deal),
        mock.patch.object(job, "open_split", watched_split),
    ):
        yield ledger
    ledger[:] = [[place, read[place]] for place, _ in ledger]


def _columns(samples):
    """Give the tensors of samples, whatever holds them, each with a row for every sample."""
    if isinstance(samples, torch.Tensor):
        return (samples,)
    return samples if isinstance(samples, tuple) else vars(samples).values()


@contextmanager
def nothing(job):
    yield


@contextmanager
def scale_left_in(job):
    """ZeRO's own division of the gradients by the number of workers."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer as Zero

    step = Zero.step
    Zero.step = lambda self, *args, sharding_scheme=None, **options: step(self, *args, **options)
    yield
    Zero.step = step


@contextmanager
def norm_groups_set(job):
    """The norms of the shards added up over all workers once more."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer as Zero

    make = Zero.__init__

    def changed(self, *args, **options):
        make(self, *args, grad_norm_groups=options["sharding_groups"], **options)

    Zero.__init__ = changed
    yield
    Zero.__init__ = make


@contextmanager
def padding_counts(job):
    """Padding units with a weight."""

    def changed(*args):
        return real(*(replace(arg, weight=1.0) if isinstance(arg, Unit) else arg for arg in args))

    real = job.unit_loss
    with mock.patch.object(job, "unit_loss", changed):
        yield


@contextmanager
def stock_adamw(job):
    """Rates and bias corrections as Python numbers: exactly 0 or 1 they are part of the graph."""
    from trnslurm.train.optim import xla

    rate, step = xla.rate_for, xla.XlaZero1.step

    def changed(self, lr):
        for group in [*self._zero.param_groups, *self._base.param_groups]:
            group["capturable"] = False
        return step(self, lr)

    xla.rate_for, xla.XlaZero1.step = lambda device, lr, kinds: lr, changed
    yield
    xla.rate_for, xla.XlaZero1.step = rate, step


@contextmanager
def average_left_in(job):
    """The mean over the workers, which FSDP takes where the sum is meant."""
    from trnslurm.train.sharded.strategy import Sharded

    real = Sharded.backward
    Sharded.backward = lambda self, loss: loss.backward()
    yield
    Sharded.backward = real


@contextmanager
def frozen(job):
    """Some parameters of a Llama, and all in the embeddings of a BERT, that are not trained."""
    makes = "make_model" if hasattr(job, "make_model") else "make_classifier"
    real = getattr(job, makes)

    def changed(*args):
        model = real(*args)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in FROZEN and ".embeddings." not in name)
        return model

    with mock.patch.object(job, makes, changed):
        yield


@contextmanager
def without_trainers_own(job):
    """Nothing of Hugging Face's Trainer and accelerate that AWS's tutorial has to work around."""
    from accelerate import Accelerator
    from transformers import Trainer

    def never(*args, **options):
        raise AssertionError("called")

    with ExitStack() as changed:
        for name in ("evaluation_loop", "_nested_gather", "save_model", "_save_checkpoint"):
            changed.enter_context(mock.patch.object(Trainer, name, never))
        for name in ("pad_across_processes", "gather", "gather_for_metrics", "reduce"):
            changed.enter_context(mock.patch.object(Accelerator, name, never))
        yield


CHANGES = {
    function.__name__: function
    for function in (
        nothing,
        scale_left_in,
        norm_groups_set,
        padding_counts,
        stock_adamw,
        average_left_in,
        frozen,
        without_trainers_own,
    )
}


def digest(tensors):
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


if __name__ == "__main__":
    run_job(main)
