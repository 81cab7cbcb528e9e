"""From finished chunks to prepared data: the split, the token files, the index."""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare import chunks
from trnslurm.prepare.chunks import Chunk
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.files import replacing

FORMAT = 1
INDEX = "index.json"
SPLITS = ("train", "eval")
_BLOCK = 1 << 20


class TokenFile:
    """A token file in the making."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.bytes = self.tokens = self.documents = 0

    def write(self, tokens: NDArray[Any], documents: int) -> None:
        """Append the tokens of some documents."""
        data = tokens.astype(tokens.dtype.newbyteorder("<")).tobytes()
        self._stream.write(data)
        self._digest.update(data)
        self.bytes += len(data)
        self.tokens += len(tokens)
        self.documents += documents

    def entry(self, name: str) -> dict[str, Any]:
        """Give its entry in the index."""
        return {
            "file": name,
            "bytes": self.bytes,
            "sha256": self._digest.hexdigest(),
            "tokens": self.tokens,
            "documents": self.documents,
        }


def write_splits(
    todo: list[Chunk], counts: dict[int, int], finished: Path, output: Path, holdout: float
) -> dict[str, Any]:
    """Write the token files from all chunks in order; give their entries in the index.

    With a holdout, eval gets that share of the documents (at least one), evenly spread: the last of
    each n-th part of them. Files of a split eval go there as a whole.
    """
    total = sum(counts[chunk.number] for chunk in todo if chunk.split == "train")
    held_out = max(1, round(total * holdout)) if holdout else 0
    if total <= held_out:
        if not total:
            raise PrepareError("no text to train on: there are but blanks in the input")
        raise PrepareError(
            f"too few documents ({total}) to hold out a share of {holdout}: use --holdout 0, or "
            "another --document-per"
        )
    first = 0
    with replacing(output / "train.bin") as train, replacing(output / "eval.bin") as evaluation:
        files = {"train": TokenFile(train), "eval": TokenFile(evaluation)}
        for chunk in todo:
            part = chunks.load(finished, chunk.number)
            if part is None:
                raise KeptError(f"{chunks.path_of(finished, chunk.number)} is damaged")
            if chunk.split == "eval":
                files["eval"].write(part.tokens, len(part.lengths))
                continue
            numbers = np.arange(first, first + len(part.lengths))
            eval_mask = (numbers + 1) * held_out // total > numbers * held_out // total
            for name, mask in (("train", ~eval_mask), ("eval", eval_mask)):
                files[name].write(part.tokens[np.repeat(mask, part.lengths)], int(mask.sum()))
            first += len(part.lengths)
    entries = {name: file.entry(f"{name}.bin") for name, file in files.items()}
    if not entries["eval"]["documents"]:
        (output / "eval.bin").unlink()
        del entries["eval"]
    return entries


def write_index(output: Path, index: dict[str, Any]) -> None:
    """Write index.json; nothing in it tells one run on the same input from another."""
    with replacing(output / INDEX) as stream:
        stream.write(f"{json.dumps(index, indent=2)}\n".encode())


def read_index(directory: Path) -> dict[str, Any] | None:
    """Read the index of prepared data; None if there is none, or none of this format."""
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return None
    return index if {"made", "sources", "splits", "tokenizer"} <= index.keys() else None


def describe(path: Path) -> dict[str, Any]:
    """Give the name, size and checksum of a file, as the index has them."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def find_damage(directory: Path, index: dict[str, Any]) -> str | None:
    """Read the files of prepared data whole; give the name of one that is not as the index says."""
    if not isinstance(index["splits"], dict) or "train" not in index["splits"]:
        return INDEX
    for entry in (index["tokenizer"], *index["splits"].values()):
        if not isinstance(entry, dict) or not {"file", "bytes", "sha256"} <= entry.keys():
            return INDEX
        path = directory / str(entry["file"])
        if not path.is_file() or any(entry[k] != v for k, v in describe(path).items()):
            return str(entry["file"])
    return None
