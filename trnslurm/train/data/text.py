"""Text in blocks of seq_len tokens: prepared, from other libraries, or bytes of plain text."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trnslurm.contract.files import read_json
from trnslurm.datasets.errors import NoDataError
from trnslurm.datasets.open import OTHERS
from trnslurm.datasets.place import URL
from trnslurm.datasets.tokens import Blocks
from trnslurm.samples.order import indices
from trnslurm.train.data.foreign import ForeignTokens
from trnslurm.train.data.prepared import INDEX, PREPARE, File, Tokenizer, read_index
from trnslurm.train.errors import TrainError

END_OF_TEXT = 256
VOCAB_SIZE = END_OF_TEXT + 1
HELD_OUT = 20
"""The last 1/20 of a plain text is never trained on: it is the split eval."""
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


Source = tuple[Any, int, int | None, str]
"""A split's tokens, its vocabulary size, the end-of-text token if known, and a fingerprint."""
_FOREIGN = (".idx", ".bin", ".ds", ".parquet", ".arrow", ".tar")


@dataclass(frozen=True, kw_only=True)
class TokenSplit(File):
    """A token file: documents one after another, each followed by an end-of-text token."""

    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """index.json of prepared tokens."""

    format: int
    vocab_size: int
    dtype: str
    """uint16 or uint32, little-endian."""
    end_of_text: int
    tokenizer: Tokenizer
    splits: dict[str, TokenSplit]
    """train, and eval if text was held out."""
    sources: list[Any]
    """Name, bytes and sha256 of every file that was read."""
    made: dict[str, Any]
    """The settings and versions that the data was made with."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise TrainError(f"dtype {self.dtype!r} is not one of {', '.join(_DTYPES)}")
        itemsize = _DTYPES[self.dtype].itemsize
        if not 0 <= self.end_of_text < self.vocab_size <= 256**itemsize:
            raise TrainError("end_of_text, vocab_size and dtype are inconsistent")
        for split in self.splits.values():
            if split.bytes != split.tokens * itemsize:
                raise TrainError(
                    f"{split.file}: {split.tokens} tokens do not match the file's "
                    f"{split.bytes} bytes"
                )


class Text:
    """An endless stream of samples: epoch after epoch of a text's blocks, reshuffled each time.

    Documents follow one another, each with an end-of-text token after it. Blocks are cut without
    regard to document boundaries.
    """

    def __init__(
        self,
        tokens: Any,
        vocab_size: int,
        end_of_text: int | None,
        fingerprint: str,
        *,
        seq_len: int,
        seed: int,
    ) -> None:
        self._blocks = Blocks(tokens, seq_len)
        self._seed = seed
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self.fingerprint = fingerprint
        """Identifies the tokens: a run can resume only with the text that it started with."""
        self.num_tokens = len(tokens)
        self.num_blocks = len(self._blocks)
        """Blocks per epoch. The text's start fills up the last block, so no token is lost."""

    def samples(self, first: int, count: int) -> Tensor:
        """Return the samples at positions first … first + count - 1 of the stream, one per row."""
        rows = indices(first, count, count=self.num_blocks, seed=self._seed)
        return torch.from_numpy(self._blocks.read(rows.tolist()))


def open_text(
    path: str | Path,
    *,
    split: str = "train",
    seq_len: int,
    seed: int,
    vocab_size: int | None = None,
) -> Text:
    """Open a split (train or eval) of a directory or URL of tokens, or of a text file.

    With `vocab_size`, the model's, tokens that the model does not have are refused.
    """
    path = path if URL in str(path) else Path(path).expanduser()
    source = _read_foreign(path, split, seq_len, vocab_size)
    if source is None:
        path = Path(path)
        source = (_read_tokens if path.is_dir() else _read_bytes)(path, split, seq_len)
    text = Text(*source, seq_len=seq_len, seed=seed)
    if vocab_size is not None and vocab_size < text.vocab_size:
        raise TrainError(f"model.vocab_size is {vocab_size}: {path} needs {text.vocab_size}")
    return text


def read_token_index(directory: Path) -> TokenIndex:
    """Read the index of prepared tokens and compare its files' sizes; this takes milliseconds."""
    index = read_index(directory, "tokens", TokenIndex)
    for file in (index.tokenizer, *index.splits.values()):
        file.check_size(directory)
    return index


def _read_tokens(path: Path, split: str, seq_len: int) -> Source:
    index = read_token_index(path)
    found = index.splits.get(split)
    if found is None:
        more = ", or set train.eval_every=0" if split == "eval" else ""
        raise TrainError(f"{path}: no split {split}: {PREPARE} with --holdout{more}")
    if found.tokens < seq_len:
        holdout = " or with a larger --holdout" if split == "eval" else ""
        raise TrainError(
            f"{path}: split {split} has {found.tokens} tokens, fewer than one block of "
            f"{seq_len}: {PREPARE} from more text{holdout}"
        )
    mapped = np.memmap(path / found.file, _DTYPES[index.dtype], mode="r")
    # A plain array, because slices of np.memmap are several times as slow.
    return np.asarray(mapped), index.vocab_size, index.end_of_text, found.sha256


def _read_foreign(
    path: str | Path, split: str, seq_len: int, vocab_size: int | None
) -> Source | None:
    """Return tokens that another library wrote, or None if it did not."""
    if isinstance(path, Path):
        if path.is_file() and path.suffix not in _FOREIGN:
            return None
        if path.is_dir() and is_ours(path):
            return None
    try:
        tokens = ForeignTokens(str(path), split, vocab_size)
    except NoDataError as error:
        if isinstance(path, Path):
            return None
        raise TrainError(str(error)) from None
    if len(tokens) < seq_len:
        raise TrainError(f"{path}: {len(tokens)} tokens are fewer than one block of {seq_len}")
    return tokens, tokens.vocab_size, None, tokens.fingerprint


def is_ours(directory: Path) -> bool:
    """Check for the index of `trnslurm data prepare`, not an MDS or WebDataset index.json."""
    index = directory / INDEX
    return index.exists() and not {*OTHERS} & read_json(index).keys()


def _read_bytes(path: Path, split: str, seq_len: int) -> Source:
    """Return the bytes of a split of a text file, followed by an end-of-text token."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TrainError(f"data: {path} cannot be read ({error.strerror})") from None
    cut = len(text) - len(text) // HELD_OUT
    part = text[cut:] if split == "eval" else text[:cut]
    tokens = np.append(np.frombuffer(part, np.uint8).astype(np.int64), END_OF_TEXT)
    if len(tokens) < seq_len:
        name = "the last twentieth, which is held out," if split == "eval" else "the text"
        raise TrainError(f"data: {name} of {path} is shorter than one block of {seq_len} bytes")
    return tokens, VOCAB_SIZE, END_OF_TEXT, hashlib.sha256(tokens.tobytes()).hexdigest()
