"""Labelled data: samples that `trnslurm data prepare` made of rows, mapped into memory."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trnslurm.train.data.order import indices
from trnslurm.train.data.tokens import File, Tokenizer
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import read_section

FORMAT = 1
KIND = "labelled"
INDEX = "index.json"
UNLABELLED = -100
"""What PyTorch's cross entropy leaves out: a token that begins no word."""
_FIELDS = ("input_ids", "token_type_ids", "length", "label")
_PREPARE = "make it with trnslurm data prepare"


@dataclass(frozen=True, kw_only=True)
class LabelledSplit(File):
    """A file of samples."""

    samples: int
    labels: dict[str, int]
    """How many of each label."""


@dataclass(frozen=True, kw_only=True)
class LabelledIndex:
    """index.json of labelled data."""

    format: int
    kind: str
    seq_len: int
    vocab_size: int
    pad_id: int
    labels: list[str]
    """Their names in the order of their numbers; none: a label is a number on a scale."""
    task: str
    """Of GLUE, or ner: every word has a label."""
    metrics: list[str]
    """The scores that a model is judged by."""
    tokenizer: Tokenizer
    splits: dict[str, Any]
    """A LabelledSplit by name: train, and eval, eval_mismatched where there is one."""
    sources: list[Any]
    made: dict[str, Any]
    left_out: list[Any]
    """Rows without a text or a label, for example."""
    cut: int
    """Samples whose text was longer."""


@dataclass(frozen=True, kw_only=True)
class LabelledSamples:
    """Some samples, one a row."""

    input_ids: Tensor
    attention_mask: Tensor
    """1 for text, 0 for padding."""
    token_type_ids: Tensor
    """1 in the second text of a pair."""
    labels: Tensor
    """Label numbers; on a scale, the values. For words: the label of the word that each token
    begins, else UNLABELLED."""


class Labelled:
    """One split: an endless stream, reshuffled each epoch, and the same in the file's order."""

    def __init__(
        self, directory: Path, index: LabelledIndex, split: LabelledSplit, *, seed: int
    ) -> None:
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
        """How many numbers a model gives for a sample: one for each label, or one on a scale."""
        return len(self.labels) or 1

    @property
    def of_words(self) -> bool:
        """Whether every word has a label, and not every sample."""
        return self._samples["label"].ndim == 2

    def labelled_words(self, first: int, count: int) -> int:
        """Return how many words of these samples of the stream have a label: a loss's weights."""
        rows = indices(first, count, count=self.num_samples, seed=self._seed)
        return int((self._samples["label"][rows] != UNLABELLED).sum())

    def samples(self, first: int, count: int) -> LabelledSamples:
        """Return the samples at positions first … first + count - 1 of the stream."""
        return self._take(indices(first, count, count=self.num_samples, seed=self._seed))

    def fixed(self, first: int, count: int) -> LabelledSamples:
        """Return samples in the file's order; after the last comes the first again."""
        return self._take(np.arange(first, first + count) % self.num_samples)

    def _take(self, rows: NDArray[np.int64]) -> LabelledSamples:
        taken = self._samples[rows]
        places = np.arange(self.index.seq_len)
        labels = taken["label"].astype(np.int64 if self.labels else np.float32)
        return LabelledSamples(
            input_ids=_as_tensor(taken["input_ids"]),
            attention_mask=_as_tensor(places < taken["length"][:, None]),
            token_type_ids=_as_tensor(taken["token_type_ids"]),
            labels=torch.from_numpy(labels),
        )


def _as_tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def open_labelled(
    path: Path, split: str, *, seq_len: int, vocab_size: int, seed: int, pad_id: int | None = None
) -> Labelled:
    """Open a split of labelled data and check that it fits the model: milliseconds at any size."""
    index = read_labelled_index(path)
    if split not in index.splits:
        more = ": give rows to evaluate on, --holdout, or train.eval_every=0"
        more = more if split == "eval" else ""
        raise TrainError(f"{path}: no split {split}, but {', '.join(index.splits)}{more}")
    if index.seq_len != seq_len:
        raise TrainError(
            f"seq_len is {seq_len}, but {path} has samples of {index.seq_len}: set it to that, or "
            f"{_PREPARE} again"
        )
    if index.vocab_size > vocab_size:
        raise TrainError(
            f"model.vocab_size is {vocab_size}, but {path} has tokens up to "
            f"{index.vocab_size - 1}: its tokenizer ({index.tokenizer.name}) is not the model's"
        )
    if pad_id not in (None, index.pad_id):
        raise TrainError(
            f"model.pad_token_id is {pad_id}, but {path} is padded with {index.pad_id}: its "
            f"tokenizer ({index.tokenizer.name}) is not the model's"
        )
    found = read_section(LabelledSplit, index.splits[split], where=f"{path}: splits: {split}")
    return Labelled(path, index, found, seed=seed)


def read_labelled_index(directory: Path) -> LabelledIndex:
    """Read the index of labelled data."""
    path = directory / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise TrainError(
            f"{directory}: no prepared data ({INDEX} is missing): {_PREPARE}"
        ) from None
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: cannot be read ({error}): {_PREPARE} again") from None
    kind = values.get("kind", "tokens") if isinstance(values, dict) else None
    if kind != KIND:
        raise TrainError(f"{directory}: its data is of kind {kind}, not {KIND}: name another")
    if values.get("format") != FORMAT:
        raise TrainError(
            f"{path}: format {values.get('format')}, but this code reads {FORMAT}: {_PREPARE} again"
        )
    try:
        return read_section(LabelledIndex, values, where="index")
    except TrainError as error:
        raise TrainError(f"{path}: {error}: {_PREPARE} again") from None


def _map(path: Path, index: LabelledIndex, split: LabelledSplit) -> NDArray[Any]:
    """Map the file of a split into memory, if it is what the index says."""
    # A foreign index must not lead out of its directory.
    if Path(split.file).name != split.file:
        raise TrainError(
            f"{path.parent}: {split.file!r} is not the name of a file beside its index"
        )
    try:
        size = path.stat().st_size
        samples = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise TrainError(f"{path}: cannot be read ({error.strerror}): {_PREPARE} again") from None
    except (ValueError, EOFError):
        raise TrainError(f"{path}: damaged: {_PREPARE} again") from None
    shape = (split.samples, index.seq_len)
    whole = size == split.bytes and samples.dtype.names == _FIELDS
    if not whole or samples["input_ids"].shape != shape:
        raise TrainError(f"{path}: not as its index says: {_PREPARE} again")
    # A plain array over the mapping: slices of np.memmap are several times as slow.
    return np.asarray(samples)
