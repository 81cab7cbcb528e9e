"""Reads rows from files: the values of some columns, and which rows are unreadable."""

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import parse
from trnslurm.prepare.text import tables
from trnslurm.prepare.text.documents import JSON_LINES
from trnslurm.prepare.text.sources import TABLES

CONLL = ".conll"
FOUND = (".csv", ".tsv", JSON_LINES, CONLL, *TABLES)
"""The suffixes of files that are read from a directory."""
FORMATS = (*FOUND, ".json")
FIELDS = "a different number of fields than the first line"
QUOTE = "a quote within a quoted field"
UNTAGGED = "a word without a tag"
JOINED = "a backslash at the end of the line outside quotes"
# The reader's default, 128 KiB, is too small for some texts.
_MOST_OF_A_FIELD = 1 << 24

Values = list[Any] | str
"""A row's values in the order of the columns, or one of the reasons above for having none."""


def unit(path: Path) -> str:
    """Return what row numbers count: lines, or rows in a file without lines."""
    return "row" if path.suffix in (*TABLES, ".json") else "line"


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Values]]:
    """Return every row of a UTF-8 file, with the number of its first line."""
    if path.suffix == ".tsv":
        # As in GLUE's files: a quote is part of the text, and no field holds a tab.
        return _read_fields(path, columns, delimiter="\t", quoting=csv.QUOTE_NONE)
    if path.suffix == ".csv":
        return _read_fields(path, columns, escapechar="\\", strict=True)
    if path.suffix == ".json":
        return _read_objects(path, columns, _objects_of_list(path))
    if path.suffix == CONLL:
        return _read_sentences(path)
    if path.suffix == JSON_LINES:
        return _read_objects(path, columns, _objects_of_lines(path))
    return enumerate((list(row) for row in tables.read_rows(path, columns)), start=1)


def _read_fields(
    path: Path, columns: Sequence[str], **form: Any
) -> Iterator[tuple[int, list[Any] | str]]:
    csv.field_size_limit(_MOST_OF_A_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        lines: list[str] = []
        rows = csv.reader(_remember(stream, lines), **form)
        header = _next_fields(rows, lines, path) or []
        if isinstance(header, str):
            raise PrepareError(f"{path}: line 1: not valid column names: {header}")
        places = [_find(column, header, path) for column in columns]
        while (fields := _next_fields(rows, lines, path)) is not None:
            line = rows.line_num - len(lines) + 1
            if isinstance(fields, list) and len(fields) == len(header):
                yield line, [fields[place] for place in places]
            elif fields:  # an empty line has none
                # Each line that a stray quote or backslash has joined may have been a row.
                why = fields if isinstance(fields, str) else FIELDS
                yield from ((line + place, why) for place in range(len(lines)))


def _read_sentences(path: Path) -> Iterator[tuple[int, Values]]:
    """Yield the words and tags of each sentence: the first and last fields of its lines."""
    first, fields = 0, list[list[str]]()
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(itertools.chain(stream, [""]), start=1):
            words = line.split("\t") if "\t" in line else line.split()
            if words := [word.strip() for word in words if word.strip()]:
                first = first if fields else number
                fields.append(words)
                continue
            # -DOCSTART- begins a document and is not a sentence.
            if fields and fields[0][0] != "-DOCSTART-":
                whole = min(map(len, fields)) > 1
                yield (
                    first,
                    list(zip(*((f[0], f[-1]) for f in fields), strict=True)) if whole else UNTAGGED,
                )
            fields = []


def _remember(stream: Iterable[str], lines: list[str]) -> Iterator[str]:
    """Yield the lines, and append each to `lines`."""
    for line in stream:
        lines.append(line)
        yield line


def _next_fields(rows: Any, lines: list[str], path: Path) -> list[str] | str | None:
    """Return the next row's fields, the reason it is invalid, or None at the end; fill `lines`."""
    line = rows.line_num + 1
    lines.clear()
    try:
        fields: list[str] | None = next(rows, None)
        return JOINED if len(lines) > 1 and '"' not in "".join(lines) else fields
    except csv.Error as error:
        if "expected after" in str(error):  # the reader continues with the next line
            return QUOTE
        raise PrepareError(
            f"{path}: line {line}: the row that starts here does not end ({error}): close or "
            "escape its quote"
        ) from None


def _find(column: str, header: list[str], path: Path) -> int:
    if header.count(column) > 1:
        raise PrepareError(f"{path}: line 1: two columns are named {column}: rename one of them")
    if column not in header:
        raise _no_column(path, "line 1: ", column, header)
    return header.index(column)


def _no_column(path: Path, where: str, column: str, found: Sequence[str]) -> PrepareError:
    return PrepareError(
        f"{path}: {where}there is no column {column}, only {', '.join(found) or 'none'}: choose "
        "with "
        "--text-column and --label-column"
    )


def _read_objects(
    path: Path, columns: Sequence[str], rows: Iterator[tuple[int, Any]]
) -> Iterator[tuple[int, Values]]:
    first = True
    for number, row in rows:
        where = f"{unit(path)} {number}: "
        if not isinstance(row, dict):
            raise PrepareError(f"{path}: {where}not a row: expected {{{columns[0]!r}: …, …}}")
        for column in columns if first else ():
            if column not in row:
                raise _no_column(path, where, column, list(row))
        first = False
        yield number, [row.get(column) for column in columns]


def _objects_of_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _parse(line.removeprefix(b"\xef\xbb\xbf"), f"{path}: line {number}")


def _objects_of_list(path: Path) -> Iterator[tuple[int, Any]]:
    rows = _parse(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))
    if not isinstance(rows, list):
        raise PrepareError(f"{path} is not a list of rows: for one row per line, use a .jsonl file")
    return enumerate(rows, start=1)


def _parse(data: bytes, where: str) -> Any:
    try:
        return parse(data)
    except ValueError as error:
        raise PrepareError(f"{where}: not valid JSON ({error})") from None
