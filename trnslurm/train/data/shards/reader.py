"""Samples of sharded data by their position in the run, the same for every worker."""

import functools
import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trnslurm.train.data.shards.files import KEYS, Rows, masked, read_rows
from trnslurm.train.data.shards.index import ShardSplit, index_shards, read_shard_index
from trnslurm.train.data.shards.node import NodeArrays, share
from trnslurm.train.data.shards.windows import Windows
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError

KEPT_BEHIND = 2
"""How many older windows to keep: a step's units may need them, and padding repeats a unit."""
IGNORED = -100
"""The label of a place without a masked token; cross_entropy ignores it."""


class Samples(NamedTuple):
    """Some samples, one per row."""

    input_ids: Tensor
    input_mask: Tensor
    segment_ids: Tensor
    positions: Tensor
    """The positions of masked tokens; 0 in unused places."""
    labels: Tensor
    """The masked tokens, or IGNORED."""
    next_sentence: Tensor


class ShardedSamples:
    """An endless stream of samples: the epochs of a split, reshuffled each time.

    A window of shards is decompressed in full and put in order; the next window is prepared in the
    background. The workers of a node share the windows.
    """

    def __init__(
        self,
        split: ShardSplit,
        *,
        vocab_size: int,
        seed: int,
        shared: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """Open shards that index_shards has indexed."""
        self._index = read_shard_index(split)
        self._directory = split.directory
        self._vocab_size = vocab_size
        self._windows = Windows([shard.samples for shard in self._index.shards], seed=seed)
        self._loaded: dict[int, Future[NDArray[Any]]] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._masked_before = functools.lru_cache(maxsize=2)(self._count_masked)
        self.num_samples = self._windows.num_samples
        self.seq_len = self._index.seq_len
        self.max_pred = self._index.max_pred
        self.fingerprint = self._index.fingerprint
        self._dtype = _dtype_of(self.seq_len, self.max_pred, vocab_size)
        self._node: NodeArrays | None = None
        if shared:
            # For this run only: runs are at different windows, and drop old ones.
            place = str(split.fallback.absolute())
            name = repr((place, split.name, self.fingerprint, seed, self._dtype.descr))
            key = hashlib.sha256(name.encode()).hexdigest()[:16]
            kept = (KEPT_BEHIND + 2) * self._windows.largest * self._dtype.itemsize
            self._node = share(key, kept, self._dtype, say)

    def samples(self, first: int, count: int) -> Samples:
        """Return the samples at positions first … first + count - 1 of the stream."""
        parts = self._windows.parts(first, count)
        found = [self._window(window)[places] for window, places in parts]
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        return Samples(*(torch.from_numpy(rows[name].astype(np.int64)) for name in Samples._fields))

    def masked_tokens(self, first: int, count: int) -> int:
        """Count the masked tokens of the samples at these positions, without reading them.

        The result is at least 1, because it is a divisor.
        """
        total = 0
        for window, places in self._windows.parts(first, count):
            before = self._masked_before(window)
            total += int(before[places.stop] - before[places.start])
        return max(1, total)

    def close(self) -> None:
        """Release the arrays that the workers of the node share."""
        self._loader.shutdown(cancel_futures=True)
        if self._node:
            self._node.close()

    def _count_masked(self, window: int) -> NDArray[np.int64]:
        """Count the masked tokens before each place of a window."""
        counts = self._index.masked[self._windows.samples(window, slice(None))]
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def _window(self, number: int) -> NDArray[Any]:
        for wanted in (number, number + 1):
            if wanted not in self._loaded:
                self._loaded[wanted] = self._loader.submit(self._load, wanted)
        for old in [old for old in self._loaded if old < number - KEPT_BEHIND]:
            del self._loaded[old]
            if self._node:
                self._node.drop(old)
        return self._loaded[number].result()

    def _load(self, number: int) -> NDArray[Any]:
        if self._node is None:
            return self._decode(number)
        return self._node.get(number, self._windows.size(number), lambda: self._decode(number))

    def _decode(self, number: int) -> NDArray[Any]:
        """Return the samples of a window in the order of the stream."""
        pieces = []
        for shard, places in self._windows.pieces(number):
            path = self._directory / self._index.shards[shard].file
            rows = read_rows(path, places)
            self._check(path, rows)
            pieces.append(rows)
        order = self._windows.order(number)
        columns = {key: np.concatenate([rows[key] for rows in pieces])[order] for key in KEYS}
        taken = masked(columns["masked_lm_positions"])
        samples = np.empty(len(order), self._dtype)
        for name in ("input_ids", "input_mask", "segment_ids"):
            samples[name] = columns[name]
        samples["positions"] = np.where(taken, columns["masked_lm_positions"], 0)
        samples["labels"] = np.where(taken, columns["masked_lm_ids"], IGNORED)
        samples["next_sentence"] = columns["next_sentence_labels"]
        return samples

    def _check(self, path: Path, rows: Rows) -> None:
        """Refuse numbers out of range, which an accelerator would silently misread."""
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
                    raise TrainError(f"{path}: {key} contains {value}, but {name} is {limit}")


def _dtype_of(seq_len: int, max_pred: int, vocab_size: int) -> np.dtype[Any]:
    """Return the type of a sample, as small as the limits of _check allow."""
    ids, places = (np.int16 if limit <= 1 << 15 else np.int32 for limit in (vocab_size, seq_len))
    return np.dtype(
        [
            ("input_ids", ids, (seq_len,)),
            ("input_mask", np.int8, (seq_len,)),
            ("segment_ids", np.int8, (seq_len,)),
            ("positions", places, (max_pred,)),
            ("labels", ids, (max_pred,)),
            ("next_sentence", np.int8),
        ]
    )


def open_shards(
    split: ShardSplit,
    *,
    device: Device,
    seq_len: int,
    max_pred: int,
    vocab_size: int,
    seed: int,
) -> ShardedSamples:
    """Open a split on every worker after worker 0 has indexed it; check that it fits the model."""
    if device.rank == 0:
        index_shards(split)
    device.barrier(f"index of split {split.name}")
    samples = ShardedSamples(
        split,
        vocab_size=vocab_size,
        seed=seed,
        shared=device.local_world > 1,
        # One line per node.
        say=print if device.rank % device.local_world == 0 else lambda text: None,
    )
    if samples.seq_len != seq_len:
        raise TrainError(
            f"seq_len is {seq_len}, but {split.directory} has samples of {samples.seq_len}"
        )
    if samples.max_pred != max_pred:
        raise TrainError(
            f"train.max_pred is {max_pred}, but {split.directory} has {samples.max_pred} per sample"
        )
    return samples
