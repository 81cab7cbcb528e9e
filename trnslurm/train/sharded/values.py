"""The initial parameters of a sharded model, one tensor at a time, so that no worker holds all."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trnslurm.samples.order import derive_seed
from trnslurm.train.checkpoint.foreign import open_foreign
from trnslurm.train.checkpoint.pretrained import find_checkpoint, mismatches
from trnslurm.train.checkpoint.state import Read
from trnslurm.train.checkpoint.tensors import open_rows
from trnslurm.train.errors import TrainError

ASKED_BY = "train.init_from"


def new_values(shapes: Mapping[str, tuple[int, ...]], *, seed: int, std: float) -> Read:
    """Return new values, the same for any number of workers: each tensor has a separate seed.

    Matrices are normally distributed with this deviation, norms start at 1 and biases at 0, as in
    transformers. The optimizer's state starts at 0.
    """
    numbers = {name: number for number, name in enumerate(shapes)}

    def read(name: str, kind: str, rows: range) -> Tensor:
        shape = shapes[name]
        if kind != "parameter" or name.endswith(".bias"):
            return torch.zeros(len(rows), *shape[1:])
        if len(shape) == 1:
            return torch.ones(len(rows))
        generator = torch.Generator().manual_seed(derive_seed(seed, numbers[name]))
        whole = torch.empty(shape).normal_(std=std, generator=generator)
        return whole[rows.start : rows.stop]

    return read


def saved_values(source: str, model: nn.Module) -> Read:
    """Return the parameters of a saved model, whose names and shapes must equal this model's.

    The source is a checkpoint or a directory of checkpoints, another library's distributed
    checkpoint, or a Hugging Face folder with safetensors. A folder in the local cache can be given
    by its model's name, because jobs have no network.
    """
    place = Path(source).expanduser()
    read: Read
    if foreign := open_foreign(place, model):
        shapes, read = foreign.shapes, foreign.read
    elif found := find_checkpoint(place, ASKED_BY):
        place, manifest = found
        shapes = {name: tuple(shape) for name, shape in manifest.shapes.items()}
        read = open_rows(place, manifest)
    else:
        place, shapes, read = _open_folder(source)
    on_meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if wrong := mismatches(model, on_meta):
        raise TrainError(f"{ASKED_BY}: {place} does not match the model: {'; '.join(wrong)}")

    def read_parameter(name: str, kind: str, rows: range) -> Tensor:
        if kind != "parameter":
            return torch.zeros(len(rows), *shapes[name][1:])
        return read(name, kind, rows)

    return read_parameter


def _open_folder(source: str) -> tuple[Path, dict[str, tuple[int, ...]], Read]:
    """Return a Hugging Face folder, its tensors' shapes, and a function that reads their rows."""
    folder = _find_folder(source)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainError(
            f"{ASKED_BY}: {folder} has no *.safetensors: convert its weights to that format"
        )
    try:
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    except SafetensorError as error:
        raise TrainError(f"{ASKED_BY}: {folder} cannot be read ({error})") from None
    # Older versions of transformers saved inv_freq, which is not a parameter.
    places: dict[str, Any] = {
        name: file
        for file in opened
        for name in file.keys()  # noqa: SIM118
        if not name.endswith("inv_freq")
    }
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in places.items()}

    def read(name: str, kind: str, rows: range) -> Tensor:
        values: Tensor = places[name].get_slice(name)[rows.start : rows.stop]
        return values

    return folder, shapes, read


def _find_folder(source: str) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    with suppress(HFValidationError, LocalEntryNotFoundError):
        return Path(snapshot_download(source, local_files_only=True))
    raise TrainError(
        f"{ASKED_BY}: {source} is neither a model directory nor a model in the local Hugging "
        "Face cache"
    )
