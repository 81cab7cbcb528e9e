"""A model's first parameters from elsewhere: a folder of Hugging Face, or a checkpoint of ours."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.train.checkpoint import is_checkpoint, newest_whole, read_parameters
from trnslurm.train.checkpoint.directory import step_directory
from trnslurm.train.errors import TrainError
from trnslurm.train.reports import say


def load_parameters(model: nn.Module, source: str) -> None:
    """Set every parameter of a transformers model; one that is missing or does not fit is an error.

    The source is a directory, also one of checkpoints, of which the newest whole one is taken; or
    the name of a model in the local cache of Hugging Face: jobs run without a network.
    """
    directory = Path(source).expanduser()
    if is_checkpoint(directory):
        found: Mapping[str, Tensor] = read_parameters(directory)
    elif directory.name == "checkpoints" and directory.is_dir():
        found = _read_newest(directory)
    else:
        found = _read_folder(model, str(directory) if directory.is_dir() else source)
    wanted = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [
        f"{name} has shape {list(found[name].shape)} instead of {list(parameter.shape)}"
        for name, parameter in wanted.items()
        if name in found and found[name].shape != parameter.shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise TrainError(f"train.init_from: {source} is of another model: {wrong[0]}{more}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(found[name])


def _read_newest(root: Path) -> dict[str, Tensor]:
    manifest, damaged = newest_whole(root)
    if manifest is None:
        why = f": {damaged[0][0].name}: {damaged[0][1]}" if damaged else ""
        raise TrainError(f"train.init_from: {root} has no whole checkpoint{why}")
    checkpoint = step_directory(root, manifest.step)
    if os.environ.get("RANK", "0") == "0":
        say(f"first parameters: {checkpoint}")
    return read_parameters(checkpoint, manifest)


def _read_folder(model: Any, source: str) -> dict[str, Tensor]:
    try:
        loaded, report = type(model).from_pretrained(
            source,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise TrainError(
            f"train.init_from: {source} is neither a directory with a model nor one in the local "
            f"cache of Hugging Face ({first_line})"
        ) from None
    missing = set(report["missing_keys"])
    return {name: value for name, value in loaded.named_parameters() if name not in missing}
