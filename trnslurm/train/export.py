"""From a checkpoint to a Hugging Face folder: all that is not particular to one job's model."""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError

from trnslurm.train.checkpoint import Manifest, directory, newest_whole, prove, read_parameters
from trnslurm.train.data import END_OF_TEXT
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import Plan, load_plan
from trnslurm.train.tokens import read_index

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MakeModel = Callable[[Plan, int | None], Any]
"""Makes the transformers model of a plan, given the token that ends a text, if it is known."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What the model's tokens mean."""

    end_of_text: int | None
    tokenizer: Path | None


def export_job(make_model: MakeModel) -> None:
    """Export as the command line says. No device is needed, and no other worker."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    options = _parse()
    plan = load_plan(options.plan)
    run_dir = options.plan.resolve().parent
    manifest = _choose(run_dir / "checkpoints", options.step)
    checkpoint = directory.step_directory(run_dir / "checkpoints", manifest.step)
    output = options.output or run_dir / "exported" / f"step-{manifest.step}"
    output = output.resolve()
    _check_place(output, force=options.force)

    tokens = _find_tokens(plan, manifest)
    with torch.device("meta"):  # neither memory nor time for parameters that are replaced
        model = make_model(plan, tokens.end_of_text)
    _load(model, checkpoint, manifest, DTYPES[options.dtype])
    _write(model, tokens, plan.seq_len, output)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.json:
        values = {"directory": str(output), "step": manifest.step, "parameters": parameters}
        print(json.dumps(values | {"dtype": options.dtype, "tokenizer": bool(tokens.tokenizer)}))
    else:
        print(f"Wrote {output} (step {manifest.step}, {parameters / 1e6:,.1f} M parameters)")


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a checkpoint as a Hugging Face folder.")
    add = parser.add_argument
    add("plan", type=Path, help="plan.json of the run")
    add("--step", type=int, metavar="N", help="this checkpoint; default: the newest whole one")
    add("--output", type=Path, metavar="DIR", help="default: exported/step-N in the run directory")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights")
    add("--force", action="store_true", help="replace an export that is there already")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def _choose(root: Path, step: int | None) -> Manifest:
    """Find the checkpoint of a step, or else the newest whole one, and prove it."""
    there = directory.checkpoints_in(root) if root.is_dir() else []
    if not there:
        raise TrainError(f"{root.parent} has no checkpoint: train.save_every says when one is made")
    if step is not None:
        steps = [directory.step_of(path) for path in reversed(there)]
        if step not in steps:
            raise TrainError(f"{root}: none of step {step}, but of {', '.join(map(str, steps))}")
        return prove(directory.step_directory(root, step))
    manifest, damaged = newest_whole(root)
    for path, reason in damaged:
        if path.exists():  # else it was deleted meanwhile, by a run that has newer ones
            _warn(f"{path} is damaged ({reason})")
    if manifest is None:
        raise TrainError(f"{root}: no checkpoint is whole")
    return manifest


def _check_place(output: Path, *, force: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / "config.json").is_file():
        raise TrainError(f"{output} is there already and is no export: choose another --output")
    if not force:
        raise TrainError(f"{output} is there already: pass --force to replace it")


def _find_tokens(plan: Plan, manifest: Manifest) -> Tokens:
    path = Path(plan.data).expanduser()
    if not plan.data or path.is_file():
        return Tokens(end_of_text=END_OF_TEXT, tokenizer=None)
    try:
        index = read_index(path)
        split = index.split("train")
        if split is None or manifest.facts.get("data", split.sha256) != split.sha256:
            raise TrainError(f"{path} is not what this run was trained on any more")
    except TrainError as error:
        _warn(f"exported without a tokenizer: {error}")
        return Tokens(end_of_text=None, tokenizer=None)
    return Tokens(end_of_text=index.end_of_text, tokenizer=path / index.tokenizer.file)


def _load(model: Any, checkpoint: Path, manifest: Manifest, dtype: torch.dtype) -> None:
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if shapes != manifest.shapes:
        raise TrainError(f"{checkpoint} is not of the model in plan.json")
    parameters = read_parameters(checkpoint, manifest)
    converted = {name: parameter.to(dtype) for name, parameter in parameters.items()}
    # Not strict, as of two that are tied only one was saved.
    model.load_state_dict(converted, strict=False, assign=True)
    model.tie_weights()


def _write(model: Any, tokens: Tokens, seq_len: int, output: Path) -> None:
    """Write the folder, whole or not at all."""
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        if tokens.tokenizer:
            _write_tokenizer(tokens, seq_len, partial)
        for path in partial.iterdir():
            with path.open("rb") as file:
                directory.fsync_file(file)
        directory.fsync_directory(partial)
        _put_in_place(partial, output)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrainError(f"{output}: cannot be written ({reason})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(tokens: Tokens, seq_len: int, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast  # it has no annotations
    tokenizer = fast(tokenizer_file=str(tokens.tokenizer), model_max_length=seq_len)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens.end_of_text)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)


def _put_in_place(partial: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if output.exists():
        output.rename(replaced)
    directory.rename_durably(partial, output)
    shutil.rmtree(replaced, ignore_errors=True)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
