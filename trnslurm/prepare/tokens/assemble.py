"""Finished chunks to token files, split by split."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.arrays import path_of
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.text.cutting import Chunk
from trnslurm.prepare.tokens.tokenizing import Tokens, load


class TokenFile:
    """A token file in the making; its checksum is computed beside the writing."""

    def __init__(self, stream: BinaryIO, beside: Executor) -> None:
        self._stream = stream
        self._beside = beside
        self._digest = hashlib.sha256()
        self._hashing: Future[None] | None = None
        self.bytes = self.tokens = self.documents = 0

    def write(self, tokens: NDArray[Any], documents: int) -> None:
        """Append the tokens of some documents."""
        data = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data
        self._await_hashing()
        self._hashing = self._beside.submit(self._digest.update, data)
        self._stream.write(data)
        self.bytes += data.nbytes
        self.tokens += len(tokens)
        self.documents += documents

    def entry(self, name: str) -> dict[str, Any]:
        """Return its entry in the index."""
        self._await_hashing()
        return {
            "file": name,
            "bytes": self.bytes,
            "sha256": self._digest.hexdigest(),
            "tokens": self.tokens,
            "documents": self.documents,
        }

    def _await_hashing(self) -> None:
        if self._hashing:
            self._hashing.result()


def write_splits(
    todo: list[Chunk], counts: list[int], finished: Path, output: Path, holdout: float
) -> dict[str, Any]:
    """Write the token files from all chunks in order; return their entries in the index.

    With a holdout, eval has that share of the documents (at least one), evenly spread: the last of
    each n-th part. Files of a split eval go there whole.
    """
    total = sum(counts[chunk.number] for chunk in todo if chunk.split == "train")
    held_out = max(1, round(total * holdout)) if holdout else 0
    if total <= held_out:
        if not total:
            raise PrepareError("no text to train on: the input is blank")
        raise PrepareError(
            f"too few documents ({total}) to hold out a share of {holdout}: use --holdout 0, or "
            "another --document-per"
        )
    first = 0
    with (
        ThreadPoolExecutor(2) as beside,
        replacing(output / "train.bin") as train,
        replacing(output / "eval.bin") as evaluation,
    ):
        files = {"train": TokenFile(train, beside), "eval": TokenFile(evaluation, beside)}
        for chunk, part in zip(todo, _read_ahead(todo, finished, beside), strict=True):
            if chunk.split == "eval":
                files["eval"].write(part.tokens, len(part.lengths))
                continue
            numbers = np.arange(first, first + len(part.lengths) + 1)
            held = np.flatnonzero(np.diff(numbers * held_out // total))
            bounds = np.concatenate([[0], np.cumsum(part.lengths)])
            # By turns to train on and held out.
            pieces = np.split(part.tokens, np.stack([bounds[held], bounds[held + 1]], 1).ravel())
            files["train"].write(np.concatenate(pieces[::2]), len(part.lengths) - len(held))
            if len(held):
                files["eval"].write(np.concatenate(pieces[1::2]), len(held))
            first += len(part.lengths)
        entries = {name: file.entry(f"{name}.bin") for name, file in files.items()}
    if not entries["eval"]["documents"]:
        (output / "eval.bin").unlink()
        del entries["eval"]
    return entries


def _read_ahead(todo: list[Chunk], finished: Path, beside: Executor) -> Iterator[Tokens]:
    """Yield the chunks' tokens, while those of the next are being read."""
    reading = [beside.submit(load, finished, todo[0].number)]
    for number, chunk in enumerate(todo):
        part = reading.pop().result()
        if part is None:
            raise KeptError(f"{path_of(finished, chunk.number)} is damaged")
        if number + 1 < len(todo):
            reading.append(beside.submit(load, finished, todo[number + 1].number))
        yield part
