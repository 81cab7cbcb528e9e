"""Rows to samples: tokens of one length, as a model reads a text or a pair, and labels."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trnslurm.prepare import tokenizer
from trnslurm.prepare.arrays import path_of, read_arrays
from trnslurm.prepare.files import replacing
from trnslurm.prepare.labelled import framing
from trnslurm.prepare.labelled.rows import Piece

_ROWS_AT_ONCE = 1000

Samples = NDArray[Any]
"""Records of sample_type."""


UNLABELLED = -100
"""In the place of a label: the token begins no word. PyTorch's cross entropy leaves these out."""


def sample_type(
    seq_len: int, vocab_size: int, *, scale: bool, of_words: bool = False
) -> np.dtype[Any]:
    """Return the type of a sample in files: all its fields together, to be read in one piece."""
    label: Any = ("label", "<i2", (seq_len,)) if of_words else ("label", "<f4" if scale else "<i4")
    return np.dtype(
        [
            ("input_ids", np.dtype(tokenizer.dtype_for(vocab_size)).newbyteorder("<"), (seq_len,)),
            ("token_type_ids", "u1", (seq_len,)),
            ("length", "<u4"),
            label,
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
    of_words: bool = False
    """Every word has a label."""

    def find(self, piece: Piece) -> Made | None:
        """Return what an earlier run made of the piece, if anything."""
        arrays = read_arrays(self._path(piece))
        if arrays is None:
            return None
        return Made(samples=len(arrays["samples"]), cut=int(arrays["cut"]))

    def start(self) -> Callable[[Piece], Made]:
        """Set up one worker."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one CPU
        framed = framing.load(self.tokenizer)
        # Of a pair the longer one is cut first.
        framed.tokenizer.enable_truncation(self.seq_len, strategy="longest_first")
        scale = not self.numbers
        kind = sample_type(self.seq_len, framed.vocab_size, scale=scale, of_words=self.of_words)
        return lambda piece: self._make(piece, framed.tokenizer, kind, framed.pad)

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
            encode = framed.encode_batch if self.of_words else framed.encode_batch_fast
            encoded = encode(texts, is_pretokenized=self.of_words)
            for sample, (label, _), found in zip(samples, rows, encoded, strict=True):
                sample["input_ids"][: len(found.ids)] = found.ids
                sample["token_type_ids"][: len(found.ids)] = found.type_ids
                sample["length"] = len(found.ids)
                if self.of_words:
                    sample["label"] = UNLABELLED
                    for place, word in first_pieces(found.word_ids):
                        sample["label"][place] = self.numbers[label[word]]
                else:
                    sample["label"] = self.numbers[label] if self.numbers else float(label)
                cut += bool(found.overflowing)
            made.append(samples)
        with replacing(self._path(piece)) as stream:
            np.savez(stream, samples=np.concatenate(made), cut=cut)
        return Made(samples=sum(map(len, made)), cut=cut)


def first_pieces(words: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield the place of each word's first token, and which word it is; None is of no word."""
    before = None
    for place, word in enumerate(words):
        if word is not None and word != before:
            yield place, word
        before = word
