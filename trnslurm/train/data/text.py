"""Text in blocks of seq_len tokens: the interface, and plain text, whose tokens are its bytes."""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trnslurm.train.data.order import indices
from trnslurm.train.data.tokens import TokenText
from trnslurm.train.errors import TrainError

END_OF_TEXT = 256
VOCAB_SIZE = END_OF_TEXT + 1
HELD_OUT = 20
"""The last 1/20 of a plain text is never trained on: the split eval."""


class Text(Protocol):
    """An endless stream of samples: epoch after epoch of a text's blocks, each time reshuffled."""

    num_blocks: int
    """Blocks in an epoch; the last is filled up from the text's beginning, so no token is lost."""
    num_tokens: int
    vocab_size: int
    end_of_text: int
    fingerprint: str
    """Of the tokens: a run can only resume on the text that it began with."""

    def samples(self, first: int, count: int) -> Tensor:
        """Return the samples at positions first … first + count - 1 of the stream, one a row."""


def open_text(path: Path, *, split: str = "train", seq_len: int, seed: int) -> Text:
    """Open prepared data, which is a directory, or a text file, whose bytes are the tokens.

    The splits are train and eval.
    """
    if path.is_dir():
        return TokenText(path, split=split, seq_len=seq_len, seed=seed)
    return ByteText(path, split=split, seq_len=seq_len, seed=seed)


class ByteText:
    """A split of a text file as byte tokens, with an end of text behind."""

    def __init__(self, path: Path, *, split: str = "train", seq_len: int, seed: int) -> None:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise TrainError(f"data: {path} cannot be read ({error.strerror})") from None
        cut = len(text) - len(text) // HELD_OUT
        tokens = np.frombuffer({"train": text[:cut], "eval": text[cut:]}[split], np.uint8)
        tokens = np.append(tokens.astype(np.int64), END_OF_TEXT)
        if len(tokens) < seq_len:
            part = "the last twentieth, which is held out," if split == "eval" else "the text"
            raise TrainError(f"data: {part} of {path} is shorter than one block of {seq_len} bytes")
        self.num_tokens = len(tokens)
        self.num_blocks = -(-len(tokens) // seq_len)
        self.vocab_size = VOCAB_SIZE
        self.end_of_text = END_OF_TEXT
        self.fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()
        # np.resize continues from the beginning after the last token.
        filled = np.resize(tokens, self.num_blocks * seq_len)
        self._blocks = torch.from_numpy(filled).view(-1, seq_len)
        self._seed = seed

    def samples(self, first: int, count: int) -> Tensor:
        """Return the samples at positions first … first + count - 1 of the stream, one a row."""
        rows = indices(first, count, count=self.num_blocks, seed=self._seed)
        return self._blocks[torch.from_numpy(rows)]
