"""What every reader of rows provides, and where a row is among the shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.datasets.place import Place


class Shards:
    """Where the rows of each shard are in the order of all rows."""

    def __init__(self, counts: Any) -> None:
        self.ends = np.cumsum(np.asarray(counts, np.int64))

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def at(self, number: int) -> tuple[int, int]:
        """Return the shard of a row, and the row's number in that shard."""
        shard = int(self.ends.searchsorted(number, side="right"))
        return shard, number - int(self.ends[shard - 1]) if shard else number


class Rows:
    """Rows with named columns."""

    kind = ""
    """The format's name in messages."""

    def __init__(self, place: Place, files: list[str]) -> None:
        self.place = place
        self.files = files
        """Files whose size or time changes when the data does."""
        self.shards = Shards([])

    def __len__(self) -> int:
        return len(self.shards)

    def row(self, number: int) -> dict[str, Any]:
        """Return a row."""
        raise NotImplementedError

    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.row(0)) if len(self) else []

    def tokens(self, number: int, column: str) -> NDArray[Any]:
        """Return a row's tokens."""
        return self.as_tokens(self.row(number).get(column), number, column)

    def lengths(self, column: str) -> Iterator[NDArray[np.int64]]:
        """Yield the token counts of all rows, in batches."""
        for start in range(0, len(self), 4096):
            some = range(start, min(start + 4096, len(self)))
            yield np.array([len(self.tokens(number, column)) for number in some], np.int64)

    def length(self, column: str) -> int | None:
        """Return the number of tokens in every row if the format guarantees that it is constant."""
        return None

    def as_tokens(self, value: Any, number: int, column: str) -> NDArray[Any]:
        """Return a value as a row of tokens."""
        try:
            found = np.asarray(value)
        except (TypeError, ValueError, OverflowError):
            found = np.array(None)
        if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
            raise self.place.error("", f"{column} of sample {number} is not a list of token ids")
        return found
