"""Chunks: parts of the text that are tokenized on their own, and the files they end in."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare import tokenizer
from trnslurm.prepare.documents import Lines
from trnslurm.prepare.files import replacing
from trnslurm.prepare.tokenizer import Loaded

# Text given to the tokenizer at once: its answer takes some fifty times as much memory.
_BATCH_CHARACTERS = 200_000


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a file, cut between documents."""

    number: int
    split: str
    lines: Lines
    first: int
    end: int

    @property
    def bytes(self) -> int:
        """The size of the text."""
        return self.end - self.first


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A finished chunk: its documents' tokens one after another, and how many each has."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]


def path_of(directory: Path, number: int) -> Path:
    """Give the file of a finished chunk."""
    return directory / f"{number:07}.npz"


def load(directory: Path, number: int) -> Tokens | None:
    """Read a finished chunk; None if it is not there or damaged (the format has checksums)."""
    try:
        with np.load(path_of(directory, number), allow_pickle=False) as arrays:
            return Tokens(tokens=arrays["tokens"], lengths=arrays["lengths"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def tokenize(chunk: Chunk, loaded: Loaded, dtype: str, directory: Path) -> int:
    """Tokenize a chunk into its file; give the number of its documents."""
    tokens, lengths = [np.zeros(0, dtype)], []
    for documents in _batches(chunk.lines.documents(chunk.first, chunk.end)):
        for ids in tokenizer.encode(loaded, documents):
            lengths.append(len(ids))
            tokens.append(np.array(ids, dtype))
    with replacing(path_of(directory, chunk.number)) as stream:
        np.savez(stream, tokens=np.concatenate(tokens), lengths=np.array(lengths, np.int64))
    return len(lengths)


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
