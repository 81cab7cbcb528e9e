"""Rows to samples: tokens of one length, as BERT reads a text or a pair, and the label's number."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing

from trnslurm.prepare import tokenizer, wordpiece
from trnslurm.prepare.arrays import path_of, read_arrays
from trnslurm.prepare.files import replacing
from trnslurm.prepare.labelled.rows import Piece

_ROWS_AT_ONCE = 1000

Samples = NDArray[Any]
"""Records of sample_type."""


def sample_type(seq_len: int, vocab_size: int, *, scale: bool) -> np.dtype[Any]:
    """Return the type of a sample in files: all its fields together, to be read in one piece."""
    return np.dtype(
        [
            ("input_ids", np.dtype(tokenizer.dtype_for(vocab_size)).newbyteorder("<"), (seq_len,)),
            ("token_type_ids", "u1", (seq_len,)),
            ("length", "<u4"),
            ("label", "<f4" if scale else "<i4"),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Made:
    """The facts about a finished piece."""

    samples: int
    cut: int
    """Those whose text was longer than a sample."""


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """The work on a piece."""

    name = "tokenizing"
    unit = "bytes"

    directory: Path
    """Holds the finished pieces."""
    tokenizer: Path
    seq_len: int
    numbers: dict[str, int]
    """The number of each label; empty: labels are numbers on a scale."""

    def find(self, piece: Piece) -> Made | None:
        """Return what an earlier run made of the piece, if anything."""
        arrays = read_arrays(self._path(piece))
        if arrays is None:
            return None
        return Made(samples=len(arrays["samples"]), cut=int(arrays["cut"]))

    def start(self) -> Callable[[Piece], Made]:
        """Set up one worker."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one CPU
        pieces = wordpiece.load(self.tokenizer)
        framed = frame(pieces.tokenizer, cls=pieces.cls, sep=pieces.sep, seq_len=self.seq_len)
        kind = sample_type(self.seq_len, pieces.vocab_size, scale=not self.numbers)
        return lambda piece: self._make(piece, framed, kind, pieces.pad)

    def samples(self, piece: Piece) -> Samples | None:
        """Return the samples of a finished piece; None if it is damaged."""
        arrays = read_arrays(self._path(piece))
        return None if arrays is None else arrays["samples"]

    def _path(self, piece: Piece) -> Path:
        return path_of(self.directory, piece.number)

    def _make(self, piece: Piece, framed: Tokenizer, kind: np.dtype[Any], pad: int) -> Made:
        made, cut = [], 0
        left = piece.rows()
        while rows := list(itertools.islice(left, _ROWS_AT_ONCE)):
            samples = np.zeros(len(rows), kind)
            samples["input_ids"] = pad
            texts = [tuple(texts) if len(texts) == 2 else texts[0] for _, texts in rows]
            for sample, (label, _), found in zip(
                samples, rows, framed.encode_batch_fast(texts), strict=True
            ):
                sample["input_ids"][: len(found.ids)] = found.ids
                sample["token_type_ids"][: len(found.ids)] = found.type_ids
                sample["length"] = len(found.ids)
                sample["label"] = self.numbers[label] if self.numbers else float(label)
                cut += bool(found.overflowing)
            made.append(samples)
        with replacing(self._path(piece)) as stream:
            np.savez(stream, samples=np.concatenate(made), cut=cut)
        return Made(samples=sum(map(len, made)), cut=cut)


def frame(read: Tokenizer, *, cls: int, sep: int, seq_len: int) -> Tokenizer:
    """Make a tokenizer frame texts as BERT's does, and cut the longer of a pair first."""
    read.post_processor = BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    read.enable_truncation(seq_len, strategy="longest_first")
    return read
