"""Write a checkpoint as a Hugging Face folder, which from_pretrained loads. In a run directory:

    python code/jobs/gpt2_zero1/export.py plan.json checkpoints/step-00000030 exported

It needs no device and no other worker.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trnslurm.train.checkpoint import open_checkpoint
from trnslurm.train.errors import TrainError, run_job
from trnslurm.train.plan import Plan, load_plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Export as the command line says."""
    parser = argparse.ArgumentParser(description="Export a checkpoint of GPT-2.")
    parser.add_argument("plan", type=Path, help="plan.json of the run")
    parser.add_argument("checkpoint", type=Path, help="directory of the checkpoint")
    parser.add_argument("output", type=Path, help="directory to make")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")
    options = parser.parse_args()
    plan = load_plan(options.plan)
    if options.output.exists():
        raise TrainError(f"{options.output} is there already: name another directory")

    model = load_model(plan, options.checkpoint).to(DTYPES[options.dtype])
    partial = options.output.with_name(f".{options.output.name}.partial-{os.getpid()}")
    try:
        model.save_pretrained(partial, safe_serialization=True)
        copy_tokenizer(plan, partial)
        partial.rename(options.output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {options.output}")


def load_model(plan: Plan, checkpoint: Path) -> GPT2LMHeadModel:
    """Make the model of a plan with the parameters of a checkpoint, every byte of it proven."""
    manifest, read = open_checkpoint(checkpoint)
    model = GPT2LMHeadModel(GPT2Config(**plan.model))
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    if shapes != manifest.shapes:
        raise TrainError(f"{checkpoint} is not of the model in plan.json")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name, "parameter", range(parameter.shape[0])))
    return model


def copy_tokenizer(plan: Plan, directory: Path) -> None:
    """Put the tokenizer of prepared data beside the model."""
    tokenizer = Path(plan.data).expanduser() / "tokenizer.json"
    if plan.data and tokenizer.is_file():
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)).save_pretrained(directory)


if __name__ == "__main__":
    run_job(main)
