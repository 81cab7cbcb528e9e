"""The initial parameters of a sharded model, one tensor at a time: no worker holds them all."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trnslurm.rundir import CHECKPOINTS, checkpoint_name
from trnslurm.train.checkpoint import CheckpointManifest, is_checkpoint, newest_whole, prove
from trnslurm.train.checkpoint.pretrained import mismatches
from trnslurm.train.checkpoint.state import Read
from trnslurm.train.checkpoint.tensors import Reader
from trnslurm.train.data.units import derive_seed
from trnslurm.train.errors import TrainError


def new_values(shapes: Mapping[str, tuple[int, ...]], *, seed: int, std: float) -> Read:
    """Return new values, the same for any number of workers: each tensor has a separate seed.

    Matrices are normal with this deviation, norms begin with 1 and biases with 0, as transformers
    has it. The optimizer's state begins with 0.
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


def saved_values(source: str, model: nn.Module, *, asked_by: str = "train.init_from") -> Read:
    """Return the parameters of a saved model; names and shapes must equal this model's.

    The source is a directory of checkpoints or one of these, or a folder of Hugging Face with
    safetensors, also by its name in the local cache: jobs have no network.
    """
    path = Path(source).expanduser()
    if is_checkpoint(path):
        return _checkpoint_values(prove(path), path, model, asked_by)
    if path.name == CHECKPOINTS and path.is_dir():
        manifest, _ = newest_whole(path)
        if manifest is None:
            raise TrainError(f"{asked_by}: {path} has no whole checkpoint")
        return _checkpoint_values(manifest, path / checkpoint_name(manifest.step), model, asked_by)
    return _folder_values(source, model, asked_by)


def _checkpoint_values(
    manifest: CheckpointManifest, path: Path, model: nn.Module, asked_by: str
) -> Read:
    shapes = {name: tuple(shape) for name, shape in manifest.shapes.items()}
    _check(model, shapes, path, asked_by)
    reader = Reader(path, manifest)
    return _parameters_only(shapes, lambda name, rows: reader(name, "parameter", rows))


def _folder_values(source: str, model: nn.Module, asked_by: str) -> Read:
    folder = _find_folder(source, asked_by)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainError(f"{asked_by}: {folder} has no *.safetensors: convert its weights to them")
    try:
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    except SafetensorError as error:
        raise TrainError(f"{asked_by}: {folder} cannot be read ({error})") from None
    places: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
    # Older versions of transformers saved these, which are no parameters.
    places = {name: file for name, file in places.items() if not name.endswith("inv_freq")}
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in places.items()}
    _check(model, shapes, folder, asked_by)
    return _parameters_only(
        shapes, lambda name, rows: places[name].get_slice(name)[rows.start : rows.stop]
    )


def _find_folder(source: str, asked_by: str) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with suppress(HFValidationError, LocalEntryNotFoundError):
        return Path(snapshot_download(source, local_files_only=True))
    raise TrainError(
        f"{asked_by}: {source} is neither a directory with a model nor one in the local cache of "
        "Hugging Face"
    )


def _parameters_only(shapes: Mapping[str, tuple[int, ...]], parameter: Any) -> Read:
    def read(name: str, kind: str, rows: range) -> Tensor:
        if kind != "parameter":
            return torch.zeros(len(rows), *shapes[name][1:])
        values: Tensor = parameter(name, rows)
        return values

    return read


def _check(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], source: Path, asked_by: str
) -> None:
    found = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    wrong = mismatches(model, found)
    if wrong:
        raise TrainError(f"{asked_by}: {source} is of another model: {'; '.join(wrong)}")
