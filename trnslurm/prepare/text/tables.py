"""Reads rows of Parquet and Arrow files, or unpacks them to JSON lines; needs pyarrow."""

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing

_ROWS = 1000


def unpack(path: Path, column: str, output: Path) -> None:
    """Write the text column of a table as JSON lines; the output appears only when complete."""
    with replacing(output) as stream:
        for (texts,) in _batches(path, [column]):
            lines = (json.dumps({column: text}, ensure_ascii=False) for text in texts)
            stream.write("".join(f"{line}\n" for line in lines).encode())


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns, row by row."""
    for batch in _batches(path, columns):
        yield from zip(*batch, strict=True)


def _batches(path: Path, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
    """Yield the values of each column, some rows at a time."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise PrepareError(
            f"{path}: reading {path.suffix} requires pyarrow: run pip install pyarrow, or convert "
            "it to JSON "
            "lines"
        ) from None
    try:
        if path.suffix == ".parquet":
            batches = parquet.ParquetFile(path).iter_batches(_ROWS, columns=list(columns))
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        for batch in batches:
            for column in columns:
                if column not in batch.schema.names:
                    names = ", ".join(batch.schema.names)
                    raise PrepareError(
                        f"{path}: there is no column {column}, only {names}: choose another"
                    )
            yield [batch.column(column).to_pylist() for column in columns]
    except (pyarrow.ArrowException, OSError) as error:
        raise PrepareError(f"{path}: cannot be read ({str(error).partition(chr(10))[0]})") from None
