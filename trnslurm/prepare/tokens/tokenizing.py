"""Chunks of text to files of tokens."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare import bytepairs, tokenizer
from trnslurm.prepare.arrays import path_of, read_arrays
from trnslurm.prepare.bytepairs import BytePairs
from trnslurm.prepare.files import replacing
from trnslurm.prepare.text.cutting import Chunk
from trnslurm.prepare.tokenizer import Loaded


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A finished chunk: the tokens of its documents, joined, and how many each has."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """The work on a chunk; its result is the number of documents."""

    name = "tokenizing"
    unit = "bytes"

    directory: Path
    """Holds the finished chunks."""
    tokenizer: Path
    end_of_text: str
    dtype: str

    def find(self, chunk: Chunk) -> int | None:
        """Return what an earlier run made of the chunk, if anything."""
        finished = load(self.directory, chunk.number)
        return None if finished is None else len(finished.lengths)

    def start(self) -> Callable[[Chunk], int]:
        """Set up one worker."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one CPU
        loaded = tokenizer.load(self.tokenizer, self.end_of_text)
        pairs = bytepairs.find(loaded.tokenizer)
        return lambda chunk: self._tokenize(chunk, loaded, pairs)

    def _tokenize(self, chunk: Chunk, loaded: Loaded, pairs: BytePairs | None) -> int:
        tokens, lengths = [np.zeros(0, self.dtype)], [np.zeros(0, np.int64)]
        for documents in chunk.batches():
            ids, counts = tokenizer.encode(loaded, documents, pairs)
            tokens.append(ids.astype(self.dtype))
            lengths.append(counts)
        counts = np.concatenate(lengths)
        # Unsynced: what a crash leaves of it is damaged, which its checksums tell.
        with replacing(path_of(self.directory, chunk.number), durable=False) as stream:
            np.savez(stream, tokens=np.concatenate(tokens), lengths=counts)
        return len(counts)


def load(directory: Path, number: int) -> Tokens | None:
    """Read a finished chunk; None if it is missing or damaged."""
    arrays = read_arrays(path_of(directory, number))
    if arrays is None:
        return None
    return Tokens(tokens=arrays["tokens"], lengths=arrays["lengths"])
