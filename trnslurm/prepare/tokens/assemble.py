"""Finished chunks to token files, split by split."""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.arrays import path_of
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.text.cutting import Chunk
from trnslurm.prepare.tokens.tokenizing import load


class TokenFile:
    """A token file in the making."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.bytes = self.tokens = self.documents = 0

    def write(self, tokens: NDArray[Any], documents: int) -> None:
        """Append the tokens of some documents."""
        data = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data
        self._stream.write(data)
        self._digest.update(data)
        self.bytes += data.nbytes
        self.tokens += len(tokens)
        self.documents += documents

    def entry(self, name: str) -> dict[str, Any]:
        """Return its entry in the index."""
        return {
            "file": name,
            "bytes": self.bytes,
            "sha256": self._digest.hexdigest(),
            "tokens": self.tokens,
            "documents": self.documents,
        }


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
    with replacing(output / "train.bin") as train, replacing(output / "eval.bin") as evaluation:
        files = {"train": TokenFile(train), "eval": TokenFile(evaluation)}
        for chunk in todo:
            part = load(finished, chunk.number)
            if part is None:
                raise KeptError(f"{path_of(finished, chunk.number)} is damaged")
            if chunk.split == "eval":
                files["eval"].write(part.tokens, len(part.lengths))
                continue
            numbers = np.arange(first, first + len(part.lengths) + 1)
            held = np.flatnonzero(np.diff(numbers * held_out // total)).tolist()
            bounds = np.concatenate([[0], np.cumsum(part.lengths)])
            done = 0
            for number in held:
                start, stop = bounds[number : number + 2]
                files["train"].write(part.tokens[bounds[done] : start], number - done)
                files["eval"].write(part.tokens[start:stop], 1)
                done = number + 1
            files["train"].write(part.tokens[bounds[done] :], len(part.lengths) - done)
            first += len(part.lengths)
    entries = {name: file.entry(f"{name}.bin") for name, file in files.items()}
    if not entries["eval"]["documents"]:
        (output / "eval.bin").unlink()
        del entries["eval"]
    return entries
