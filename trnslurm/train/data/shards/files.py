"""Finds, checks and reads shards on disk.

create_pretraining_data.py in NVIDIA's DeepLearningExamples (PyTorch, BERT), which AWS's tutorial
also uses, defines the format: one HDF5 file per shard, one row per sample, usually gzipped in
chunks of about a thousand rows. Labels of the next sentence are 0 (it follows) or 1 (it is random).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from trnslurm.train.errors import TrainError

PATTERNS = {"train": "*_training_*.hdf5", "eval": "*_test_*.hdf5"}
"""The file names that NVIDIA's preparation gives the shards of each split, in one directory."""

BY_TOKEN = ("input_ids", "input_mask", "segment_ids")
BY_PREDICTION = ("masked_lm_positions", "masked_lm_ids")
KEYS = (*BY_TOKEN, *BY_PREDICTION, "next_sentence_labels")

Rows = dict[str, NDArray[Any]]
"""Samples by key, in the types they are stored in."""


def find_shards(directory: Path, split: str) -> list[Path]:
    """Return the shards of a split, sorted by name."""
    if not directory.is_dir():
        raise TrainError(f"data: {directory} is not a directory")
    found = sorted(directory.glob(PATTERNS[split]))
    if not found:
        more = ": create some, or set train.eval_every=0" if split == "eval" else ""
        raise TrainError(
            f"data: {directory} has no shards of split {split} ({PATTERNS[split]}){more}"
        )
    return found


def check_shard(path: Path) -> tuple[int, int, int]:
    """Return a shard's number of samples, and the tokens and masked places per sample.

    Raise a TrainError if the shard is damaged. Unused places for masked tokens have position 0.
    """
    with _open(path) as file:
        missing = [key for key in KEYS if not isinstance(file.get(key), h5py.Dataset)]
        if missing:
            raise TrainError(
                f"{path}: not a BERT pretraining shard: it has no {', '.join(missing)}"
            )
        shapes = {key: file[key].shape for key in KEYS}
        others = [key for key in KEYS if not np.issubdtype(file[key].dtype, np.integer)]
    if others:
        raise TrainError(f"{path}: not a BERT pretraining shard: {others[0]} has no integers")
    if any(len(shapes[key]) != 2 for key in (*BY_TOKEN, *BY_PREDICTION)):
        raise TrainError(f"{path}: not a BERT pretraining shard: its samples differ in length")
    samples, seq_len = shapes["input_ids"]
    max_pred = shapes["masked_lm_ids"][1]
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(BY_TOKEN, (samples, seq_len))
    expected |= dict.fromkeys(BY_PREDICTION, (samples, max_pred))
    expected["next_sentence_labels"] = (samples,)
    for key in KEYS:
        if shapes[key] != expected[key]:
            raise TrainError(
                f"{path}: {key} has shape {shapes[key]}, but input_ids has {shapes['input_ids']}"
            )
    return samples, seq_len, max_pred


def read_rows(path: Path, rows: slice, keys: Iterable[str] = KEYS) -> Rows:
    """Read consecutive samples of a shard."""
    with _open(path) as file:
        try:
            return {key: file[key][rows] for key in keys}
        except OSError as error:
            raise TrainError(f"{path}: damaged ({error}): fetch or create it again") from None


def masked(positions: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which places for masked tokens are in use: those before the first position 0."""
    taken: NDArray[np.bool_] = np.logical_and.accumulate(positions != 0, axis=1)
    return taken


def _open(path: Path) -> Any:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        reason = error.strerror or "truncated, or not an HDF5 file"
        raise TrainError(f"{path}: cannot be read ({reason}): fetch or create it again") from None
