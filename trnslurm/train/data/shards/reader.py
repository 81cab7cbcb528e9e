"""Samples of sharded data by their position in the training, the same for every worker."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trnslurm.train.data.shards.files import KEYS, Rows, masked, read_rows
from trnslurm.train.data.shards.index import index_shards, read_shard_index
from trnslurm.train.data.shards.windows import Windows
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError

KEPT_BEHIND = 2
"""Windows kept behind the newest: units of a step may lie in several, and padding repeats one."""
IGNORED = -100
"""The label of a place without a masked token; cross_entropy leaves it out."""


class Samples(NamedTuple):
    """Some samples, one a row."""

    input_ids: Tensor
    input_mask: Tensor
    segment_ids: Tensor
    positions: Tensor
    """Of masked tokens; 0 in places that have none."""
    labels: Tensor
    """The masked tokens, or IGNORED."""
    next_sentence: Tensor


class ShardedSamples:
    """An endless stream of samples: epoch after epoch of a split, reshuffled each time.

    A window of shards is decompressed as a whole, the next one in the background.
    """

    def __init__(
        self, directory: Path, *, split: str, beside: Path, vocab_size: int, seed: int
    ) -> None:
        """Open shards that index_shards(directory, split, beside=…) has indexed."""
        self._index = read_shard_index(directory, split, beside=beside)
        self._directory = directory
        self._vocab_size = vocab_size
        self._windows = Windows([shard.samples for shard in self._index.shards], seed=seed)
        self._loaded: dict[int, Future[Rows]] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self.num_samples = self._windows.num_samples
        self.seq_len = self._index.seq_len
        self.max_pred = self._index.max_pred
        self.fingerprint = self._index.fingerprint

    def samples(self, first: int, count: int) -> Samples:
        """Return the samples at positions first … first + count - 1 of the stream."""
        found = []
        for part in self._windows.parts(first, count):
            window = self._window(part.window)
            found.append({key: window[key][part.rows] for key in KEYS})
        rows = {key: np.concatenate([some[key] for some in found]) for key in KEYS}
        positions = rows["masked_lm_positions"]
        taken = masked(positions)
        columns = (
            rows["input_ids"],
            rows["input_mask"],
            rows["segment_ids"],
            np.where(taken, positions, 0),
            np.where(taken, rows["masked_lm_ids"], IGNORED),
            rows["next_sentence_labels"],
        )
        return Samples(*(torch.from_numpy(column.astype(np.int64)) for column in columns))

    def masked_tokens(self, first: int, count: int) -> int:
        """Count the masked tokens of the samples at these positions, without reading them.

        At least 1: the number is a divisor.
        """
        counts = self._index.masked
        parts = self._windows.parts(first, count)
        return max(1, sum(int(counts[self._windows.samples(part)].sum()) for part in parts))

    def _window(self, number: int) -> Rows:
        for wanted in (number, number + 1):
            if wanted not in self._loaded:
                self._loaded[wanted] = self._loader.submit(self._load, wanted)
        for old in [old for old in self._loaded if old < number - KEPT_BEHIND]:
            del self._loaded[old]
        return self._loaded[number].result()

    def _load(self, number: int) -> Rows:
        pieces = []
        for piece in self._windows.pieces(number):
            path = self._directory / self._index.shards[piece.shard].file
            rows = read_rows(path, piece.rows)
            self._check(path, rows)
            pieces.append(rows)
        return {key: np.concatenate([rows[key] for rows in pieces]) for key in KEYS}

    def _check(self, path: Path, rows: Rows) -> None:
        """Refuse numbers that an accelerator would silently take for others."""
        limits = {
            "input_ids": (self._vocab_size, "model.vocab_size"),
            "masked_lm_ids": (self._vocab_size, "model.vocab_size"),
            "masked_lm_positions": (self.seq_len, "the length of a sample"),
            "segment_ids": (2, "the number of segments"),
            "input_mask": (2, "the number of values of a mask"),
            "next_sentence_labels": (2, "the number of such labels"),
        }
        for key, (limit, name) in limits.items():
            values = rows[key]
            for value in (int(values.min(initial=0)), int(values.max(initial=0))):
                if not 0 <= value < limit:
                    raise TrainError(f"{path}: {key} has {value}, but {name} is {limit}")


def open_shards(
    directory: Path,
    split: str,
    *,
    beside: Path,
    device: Device,
    seq_len: int,
    max_pred: int,
    vocab_size: int,
    seed: int,
) -> ShardedSamples:
    """Open a split on every worker once worker 0 has indexed it; check that it fits the model."""
    if device.rank == 0:
        index_shards(directory, split, beside=beside)
    device.barrier(f"index of split {split}")
    samples = ShardedSamples(
        directory, split=split, beside=beside, vocab_size=vocab_size, seed=seed
    )
    if samples.seq_len != seq_len:
        raise TrainError(f"seq_len is {seq_len}, but {directory} has samples of {samples.seq_len}")
    if samples.max_pred != max_pred:
        raise TrainError(
            f"train.max_pred is {max_pred}, but {directory} has {samples.max_pred} places"
        )
    return samples
