"""Labelled data: samples that `trnslurm data prepare` made from rows, mapped into memory."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trnslurm.samples.order import indices
from trnslurm.train.data.prepared import PREPARE, File, Tokenizer, read_index
from trnslurm.train.errors import TrainError

UNLABELLED = -100
"""The label that PyTorch's cross entropy ignores: the token does not begin a word."""
_FIELDS = ("input_ids", "token_type_ids", "length", "label")


@dataclass(frozen=True, kw_only=True)
class LabelledSplit(File):
    """A file of samples."""

    samples: int
    labels: dict[str, int]
    """The number of samples with each label."""


@dataclass(frozen=True, kw_only=True)
class LabelledIndex:
    """index.json of labelled data."""

    format: int
    kind: str
    seq_len: int
    vocab_size: int
    pad_id: int
    labels: list[str]
    """The labels' names in the order of their numbers; empty if a label is a number on a scale."""
    task: str
    """A GLUE task, or ner, in which every word has a label."""
    metrics: list[str]
    """The scores that a model is judged by."""
    tokenizer: Tokenizer
    splits: dict[str, LabelledSplit]
    """train, and eval and eval_mismatched if they exist."""
    sources: list[Any]
    made: dict[str, Any]
    left_out: list[Any]
    """The number of omitted rows, for example rows without a text or a label."""
    cut: int
    """The number of samples whose text was truncated."""


class LabelledSamples(NamedTuple):
    """Some samples, one per row."""

    input_ids: Tensor
    attention_mask: Tensor
    """1 for text, 0 for padding."""
    token_type_ids: Tensor
    """1 in the second text of a pair."""
    labels: Tensor
    """Label numbers, or values on a scale; for words, the label of the word that begins here."""


class Labelled:
    """One split: an endless stream, reshuffled each epoch, or the samples in the file's order."""

    def __init__(self, directory: Path, index: LabelledIndex, name: str, *, seed: int) -> None:
        split = index.splits[name]
        self.index = index
        self.num_samples = split.samples
        self.labels = tuple(index.labels)
        self.task = index.task
        self.metrics = tuple(index.metrics)
        described = json.dumps([split.sha256, index.labels, index.seq_len])
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()
        self._samples = _map(directory / split.file, index, split)
        self._seed = seed

    @property
    def num_outputs(self) -> int:
        """How many numbers a model returns per sample: one for each label, or one on a scale."""
        return len(self.labels) or 1

    @property
    def of_words(self) -> bool:
        """Whether labels belong to words and not to samples."""
        return self._samples["label"].ndim == 2

    def labelled_words(self, first: int, count: int) -> int:
        """Return how many words of these samples of the stream have a label: a loss's weights."""
        return int((self._samples["label"][self._rows(first, count)] != UNLABELLED).sum())

    def samples(self, first: int, count: int) -> LabelledSamples:
        """Return the samples at positions first … first + count - 1 of the stream."""
        return self._take(self._rows(first, count))

    def fixed(self, first: int, count: int) -> LabelledSamples:
        """Return samples in the file's order, starting over after the last."""
        return self._take(np.arange(first, first + count) % self.num_samples)

    def _rows(self, first: int, count: int) -> NDArray[np.int64]:
        return indices(first, count, count=self.num_samples, seed=self._seed)

    def _take(self, rows: NDArray[np.int64]) -> LabelledSamples:
        taken = self._samples[rows]
        is_text = np.arange(self.index.seq_len) < taken["length"][:, None]
        columns = (taken["input_ids"], is_text, taken["token_type_ids"], taken["label"])
        types = (np.int64, np.int64, np.int64, np.int64 if self.labels else np.float32)
        return LabelledSamples(
            *(torch.from_numpy(c.astype(kind)) for c, kind in zip(columns, types, strict=True))
        )


def open_labelled(
    path: Path, split: str, *, seq_len: int, vocab_size: int, seed: int, pad_id: int | None = None
) -> Labelled:
    """Open a split of labelled data and check that it fits the model; this takes milliseconds."""
    index = read_index(path, "labelled", LabelledIndex)
    if split not in index.splits:
        more = ": add rows to evaluate on, use --holdout, or set train.eval_every=0"
        more = more if split == "eval" else ""
        raise TrainError(f"{path}: no split {split}, only {', '.join(index.splits)}{more}")
    if index.seq_len != seq_len:
        raise TrainError(
            f"seq_len is {seq_len}, but the samples of {path} have {index.seq_len} tokens: set "
            f"seq_len to that number, or {PREPARE} again"
        )
    if index.vocab_size > vocab_size:
        raise TrainError(
            f"model.vocab_size is {vocab_size}, but {path} has tokens up to "
            f"{index.vocab_size - 1}: the model must use the data's tokenizer "
            f"({index.tokenizer.name})"
        )
    if pad_id not in (None, index.pad_id):
        raise TrainError(
            f"model.pad_token_id is {pad_id}, but {path} is padded with {index.pad_id}: the model "
            f"must use the data's tokenizer ({index.tokenizer.name})"
        )
    return Labelled(path, index, split, seed=seed)


def _map(path: Path, index: LabelledIndex, split: LabelledSplit) -> NDArray[Any]:
    """Map the file of a split into memory if it matches the index."""
    try:
        size = path.stat().st_size
        samples = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise TrainError(f"{path}: cannot be read ({error.strerror}): {PREPARE} again") from None
    except (ValueError, EOFError):
        raise TrainError(f"{path}: damaged: {PREPARE} again") from None
    shape = (split.samples, index.seq_len)
    whole = size == split.bytes and samples.dtype.names == _FIELDS
    if not whole or samples["input_ids"].shape != shape:
        raise TrainError(f"{path}: does not match its index: {PREPARE} again")
    return np.asarray(samples)  # slices of np.memmap itself are several times as slow
