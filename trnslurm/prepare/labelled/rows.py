"""Rows to tokenize: checked, written as one JSON line each, and cut into blocks."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.labelled.formats import Values, read_rows, unit
from trnslurm.prepare.labelled.labels import Labels
from trnslurm.prepare.progress import Progress
from trnslurm.prepare.text.documents import JSON_LINES
from trnslurm.prepare.text.sources import InputFile

NO_TEXT = "no text"
NOT_TEXT = "a value that is not text"
NO_LABEL = "no label"
UNEQUAL = "more or fewer words than labels"
NAMED = 5
"""How many of the rows left out for one reason are listed."""


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Consecutive rows of a split."""

    number: int
    split: str
    path: Path
    first: int
    end: int

    @property
    def size(self) -> int:
        """The size of the block in bytes."""
        return self.end - self.first

    def rows(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the label and the texts of every row. If words have labels, both are lists."""
        with self.path.open("rb") as stream:
            stream.seek(self.first)
            for line in stream.read(self.size).splitlines():
                label, *texts = json.loads(line)
                yield label, texts


def gather(
    files: list[InputFile],
    columns: list[str],
    labels: Labels,
    chunk_bytes: int,
    directory: Path,
    *,
    of_words: bool,
) -> tuple[list[RowBlock], list[dict[str, Any]]]:
    """Read all rows, by split, into the directory; the last column is the label.

    Return the blocks, and for each file and reason the number of rows left out and the first of
    them.
    """
    blocks: list[RowBlock] = []
    left_out: list[dict[str, Any]] = []
    sizes = [file.path.stat().st_size for file in files]
    progress = Progress("reading rows", sum(sizes))
    for split in dict.fromkeys(file.split for file in files):
        output = directory / f"{split}{JSON_LINES}"
        cuts = [0]
        with replacing(output) as stream:
            for number, file in enumerate(files):
                if file.split != split:
                    continue
                take = _take_words if of_words else _take
                for line in _checked(file, columns, labels, left_out, take):
                    stream.write(line)
                    if stream.tell() - cuts[-1] >= chunk_bytes:
                        cuts.append(stream.tell())
                progress.show(sum(sizes[: number + 1]))
            end = stream.tell()
        if not end:
            names = ", ".join(str(file.path) for file in files if file.split == split)
            raise PrepareError(
                f"{names}: no row has both a text and a label, so there are no samples"
            )
        cuts += [end] if cuts[-1] < end else []
        blocks += [
            RowBlock(number=len(blocks) + place, split=split, path=output, first=a, end=b)
            for place, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
    progress.finish()
    return blocks, left_out


def _checked(
    file: InputFile,
    columns: list[str],
    labels: Labels,
    left_out: list[dict[str, Any]],
    take: Callable[[Values, Labels, str], list[Any] | str],
) -> Iterator[bytes]:
    """Yield valid rows as JSON lines; record the others in `left_out`."""
    bad: dict[str, list[int]] = {}
    for number, values in read_rows(file.path, columns):
        where = f"{file.path}: {unit(file.path)} {number}"
        row = take(values, labels, where)
        if isinstance(row, list):
            yield f"{json.dumps(row)}\n".encode()
        else:
            bad.setdefault(row, []).append(number)
    for reason, numbers in bad.items():
        left_out.append(
            {
                "name": file.name,
                "reason": reason,
                "rows": len(numbers),
                f"first_{unit(file.path)}s": numbers[:NAMED],
            }
        )


def _take(values: Values, labels: Labels, where: str) -> list[str] | str:
    """Return a row's label and texts, or the reason it is left out."""
    if isinstance(values, str):
        return values
    *texts, label = values
    if any(text is None or (isinstance(text, str) and not text.strip()) for text in texts):
        return NO_TEXT
    if not all(_is_text(text) for text in texts):
        return NOT_TEXT
    taken = labels.take(label, where)
    return NO_LABEL if taken is None else [taken, *texts]


def _take_words(values: Values, labels: Labels, where: str) -> list[Any] | str:
    """Return the labels of a row's words and the words, or the reason the row is left out."""
    if isinstance(values, str):
        return values
    words, tags = values
    if not all(isinstance(part, list | tuple) for part in values):
        raise PrepareError(
            f"{where}: expected a list of words and a list of their labels: choose the columns "
            "with --text-column and --label-column"
        )
    if not words:
        return NO_TEXT
    if len(words) != len(tags):
        return UNEQUAL
    if not all(_is_text(word) and word.strip() for word in words):
        return NOT_TEXT
    taken = [labels.take(tag, where) for tag in tags]
    return NO_LABEL if None in taken else [taken, words]


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()  # JSON can contain half a surrogate pair, which is not text
    except UnicodeEncodeError:
        return False
    return True
