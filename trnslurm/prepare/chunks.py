"""Tokenizing chunks, and the files that their tokens end in."""

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare import tokenizer
from trnslurm.prepare.cutting import Chunk
from trnslurm.prepare.files import replacing
from trnslurm.prepare.tokenizer import Loaded


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A finished chunk: its documents' tokens one after another, and how many each has."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """The work on a chunk, which gives the number of its documents."""

    name = "tokenizing"
    unit = "bytes"

    directory: Path
    """Of the finished chunks."""
    tokenizer: Path
    end_of_text: str
    dtype: str

    def find(self, chunk: Chunk) -> int | None:
        """Look for what an earlier run made of the chunk."""
        finished = load(self.directory, chunk.number)
        return None if finished is None else len(finished.lengths)

    def start(self) -> Callable[[Chunk], int]:
        """Set up one worker."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one CPU
        loaded = tokenizer.load(self.tokenizer, self.end_of_text)
        return lambda chunk: _tokenize(chunk, loaded, self.dtype, self.directory)


def path_of(directory: Path, number: int) -> Path:
    """Give the file of a finished chunk."""
    return directory / f"{number:07}.npz"


def load(directory: Path, number: int) -> Tokens | None:
    """Read a finished chunk; None if it is not there or damaged."""
    arrays = read_arrays(path_of(directory, number))
    if arrays is None:
        return None
    return Tokens(tokens=arrays["tokens"], lengths=arrays["lengths"])


def read_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """Read a file of arrays; None if it is not there or damaged (the format has checksums)."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def _tokenize(chunk: Chunk, loaded: Loaded, dtype: str, directory: Path) -> int:
    tokens, lengths = [np.zeros(0, dtype)], []
    for documents in chunk.batches():
        for ids in tokenizer.encode(loaded, documents):
            lengths.append(len(ids))
            tokens.append(np.array(ids, dtype))
    with replacing(path_of(directory, chunk.number)) as stream:
        np.savez(stream, tokens=np.concatenate(tokens), lengths=np.array(lengths, np.int64))
    return len(lengths)
