"""Prepared data: token files that `trnslurm data prepare` made, mapped into memory."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trnslurm.train.data.order import indices
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import read_section

FORMAT = 1
INDEX = "index.json"
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_PREPARE = "make it with trnslurm data prepare"


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of prepared data, other than the index."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TokenSplit(File):
    """A token file: documents one after another, each with an end of text behind it."""

    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Tokenizer(File):
    """The tokenizer that made the tokens, for users of the model."""

    name: str


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """index.json of prepared data."""

    format: int
    vocab_size: int
    dtype: str
    """uint16 or uint32, little-endian."""
    end_of_text: int
    tokenizer: Tokenizer
    splits: dict[str, Any]
    """A TokenSplit by name: train, and eval where text was held out."""
    sources: list[Any]
    """Name, bytes and sha256 of every file that was read."""
    made: dict[str, Any]
    """With what settings and versions."""

    def split(self, name: str) -> TokenSplit | None:
        """Return a split, or None where there is none of this name."""
        values = self.splits.get(name)
        return None if values is None else read_section(TokenSplit, values, where=f"splits: {name}")

    def files(self) -> list[File]:
        """Return every file that must be next to the index."""
        splits = [self.split(name) for name in self.splits]
        return [self.tokenizer, *(split for split in splits if split)]


class TokenText:
    """One split of prepared data in blocks of seq_len tokens, reshuffled each epoch.

    Documents follow one another, each with an end of text behind it; blocks are cut without regard
    to them. The last block is filled up from the split's beginning, so no token is lost.
    """

    def __init__(self, directory: Path, *, split: str = "train", seq_len: int, seed: int) -> None:
        index = read_token_index(directory)
        found = index.split(split)
        if found is None:
            more = ", or set train.eval_every=0" if split == "eval" else ""
            raise TrainError(f"{directory}: no split {split}: {_PREPARE} and --holdout{more}")
        if found.tokens < seq_len:
            holdout = " or with a larger --holdout" if split == "eval" else ""
            raise TrainError(
                f"{directory}: split {split} has {found.tokens} tokens, fewer than one block of "
                f"{seq_len}: {_PREPARE} from more text{holdout}"
            )
        self.directory = directory
        self.index = index
        self.num_tokens = found.tokens
        self.num_blocks = -(-found.tokens // seq_len)
        self.vocab_size = index.vocab_size
        self.end_of_text = index.end_of_text
        self.fingerprint = found.sha256
        mapped = np.memmap(directory / found.file, _DTYPES[index.dtype], mode="r")
        # A plain array over the mapping: slices of np.memmap are several times as slow.
        self._tokens = np.asarray(mapped)
        self._seq_len = seq_len
        self._seed = seed

    def samples(self, first: int, count: int) -> Tensor:
        """Return the samples at positions first … first + count - 1 of the stream, one a row."""
        rows = indices(first, count, count=self.num_blocks, seed=self._seed)
        samples = np.empty((count, self._seq_len), np.int64)
        for sample, row in zip(samples, rows.tolist(), strict=True):
            block = self._tokens[row * self._seq_len : (row + 1) * self._seq_len]
            sample[: len(block)] = block
            sample[len(block) :] = self._tokens[: self._seq_len - len(block)]
        return torch.from_numpy(samples)


def read_token_index(directory: Path) -> TokenIndex:
    """Read the index of prepared data and compare the sizes of its files: milliseconds."""
    path = directory / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainError(
            f"{directory}: no prepared data ({INDEX} is missing): {_PREPARE}"
        ) from None
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: cannot be read ({error}): {_PREPARE} again") from None
    if isinstance(values, dict) and values.get("format") != FORMAT:
        raise TrainError(
            f"{path}: format {values.get('format')}, but this code reads {FORMAT}: {_PREPARE} again"
        )
    try:
        index = read_section(TokenIndex, values, where="index")
        _check(index)
    except TrainError as error:
        raise TrainError(f"{path}: {error}: {_PREPARE} again") from None
    for file in index.files():
        _check_size(directory, file)
    return index


def verify(directory: Path) -> None:
    """Read every file of prepared data whole and compare it with the index."""
    for file in read_token_index(directory).files():
        with (directory / file.file).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            raise TrainError(f"{directory}: {file.file} is damaged (sha256): {_PREPARE} again")


def _check(index: TokenIndex) -> None:
    if index.dtype not in _DTYPES:
        raise TrainError(f"dtype {index.dtype!r} is not one of {', '.join(_DTYPES)}")
    itemsize = _DTYPES[index.dtype].itemsize
    if not 0 <= index.end_of_text < index.vocab_size <= 256**itemsize:
        raise TrainError("end_of_text, vocab_size and dtype do not fit together")
    for file in index.files():
        # A foreign index must not lead out of its directory.
        if Path(file.file).name != file.file:
            raise TrainError(f"{file.file!r} is not the name of a file beside it")
        if isinstance(file, TokenSplit) and file.bytes != file.tokens * itemsize:
            raise TrainError(f"{file.file}: {file.tokens} tokens are not {file.bytes} bytes")


def _check_size(directory: Path, file: File) -> None:
    try:
        size = (directory / file.file).stat().st_size
    except OSError as error:
        raise TrainError(f"{directory}: {file.file}: {error.strerror}: {_PREPARE} again") from None
    if size != file.bytes:
        raise TrainError(
            f"{directory}: {file.file} has {size} bytes, expected {file.bytes}: {_PREPARE} again"
        )
