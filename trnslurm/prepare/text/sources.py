"""The files that text comes from: which files, their splits and their contents."""

import codecs
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import parse
from trnslurm.prepare.progress import Progress

DATASET = "dataset.json"
TEXT_OPTION = "--text or --input"
TEXTS = (".txt", ".jsonl")
TABLES = (".parquet", ".arrow")
# The names that libraries use, and our names for them.
_SPLITS = {"train": "train", "validation": "eval", "valid": "eval", "dev": "eval", "test": "test"}
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file to read, with the name that the index will use for it."""

    name: str
    path: Path
    split: str


Source = dict[str, Any]
"""The index's entry for an input file: name, split, bytes and sha256."""


def text_files(
    paths: list[Path], suffixes: tuple[str, ...] = TEXTS, *, option: str = TEXT_OPTION
) -> list[InputFile]:
    """Return the given text files, and the files in the given directories, all for training."""
    found = []
    for path in paths:
        if not path.is_dir():
            found.append(InputFile(name=path.name, path=path, split="train"))
            continue
        inside = [file for file in files_below(path, "*") if file.path.suffix in suffixes]
        if not inside:
            words = ", ".join(suffixes)
            raise PrepareError(f"{option} {path}: this directory contains no text files ({words})")
        found += inside
    return found


def files_below(directory: Path, pattern: str) -> list[InputFile]:
    """Return the files in a directory, for training; skip hidden files."""
    return [
        InputFile(name=f"{directory.name}/{path.relative_to(directory)}", path=path, split="train")
        for path in _files(directory)
        if path.match(pattern)
    ]


def _files(directory: Path) -> list[Path]:
    """Return every file in a directory except hidden ones, in order."""

    def refuse(error: OSError) -> NoReturn:
        raise PrepareError(f"{error.filename}: cannot be read ({error.strerror})")

    found = []
    for parent, directories, names in os.walk(directory, onerror=refuse):
        directories[:] = [name for name in directories if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def dataset_files(
    directory: Path, suffixes: tuple[str, ...] = (*TEXTS, *TABLES)
) -> list[InputFile]:
    """Return the files of a dataset, whose names or directories begin with their split."""
    if not directory.is_dir():
        raise PrepareError(f"--dataset {directory}: no such directory")
    found = []
    for path in _files(directory):
        name = path.relative_to(directory)
        if path.suffix in suffixes:
            found.append(InputFile(name=str(name), path=path, split=split_of(name) or "train"))
    if not any(file.split == "train" for file in found):
        raise PrepareError(
            f"--dataset {directory}: contains no files of a train split ({', '.join(suffixes)})"
        )
    return [file for file in found if file.split != "test"]


def split_of(name: Path) -> str | None:
    """Return a file's split, from the beginning of its name or of a parent directory's."""
    words = [part.replace(".", "-").replace("_", "-").split("-")[0] for part in name.parts]
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def dataset_notes(directory: Path) -> dict[str, Any]:
    """Read the notes that fetch left about a dataset; other datasets have none."""
    path = directory / DATASET
    try:
        notes = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PrepareError(f"{path}: cannot be read ({error}): fetch the dataset again") from None
    if not isinstance(notes, dict):
        raise PrepareError(f"{path} does not contain keys and values: fetch the dataset again")
    return notes


def read_through(files: list[InputFile]) -> list[Source]:
    """Read every file once for its checksum, and check that text is UTF-8."""
    sizes = []
    for file in files:
        try:
            with file.path.open("rb") as stream:
                sizes.append(stream.seek(0, os.SEEK_END))
        except OSError as error:
            raise PrepareError(f"{file.path}: cannot be read ({error.strerror})") from None
    progress = Progress("reading", sum(sizes))
    sources, done = [], 0
    for file, size in zip(files, sizes, strict=True):
        digest = hashlib.sha256()
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = 0
        with file.path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                if file.path.suffix not in TABLES:
                    _check_utf8(file.path, decoder, block, position)
                position += len(block)
                progress.show(done + position)
        if file.path.suffix not in TABLES:
            _check_utf8(file.path, decoder, b"", position)
        if position != size:
            raise PrepareError(f"{file.path} changed while it was read: run the command again")
        entry = {"name": file.name, "split": file.split}
        sources.append(entry | {"bytes": size, "sha256": digest.hexdigest()})
        done += size
    progress.finish()
    if not done:
        raise PrepareError(
            f"there is no text: {', '.join(str(file.path) for file in files)} is empty"
        )
    return sources


def _check_utf8(
    path: Path, decoder: codecs.IncrementalDecoder, block: bytes, position: int
) -> None:
    held = len(decoder.getstate()[0])
    if not held and block.isascii():
        return  # several times faster than decoding it
    try:
        decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        place = position - held + error.start
        raise PrepareError(
            f"{path}: not UTF-8 at byte {place}, on line {_line_at(path, place)}: convert it "
            "first, for example with iconv"
        ) from None


def _line_at(path: Path, place: int) -> int:
    """Return the number of the line that contains a byte."""
    line = 1
    with path.open("rb") as stream:
        while place > 0 and (block := stream.read(min(place, _BLOCK))):
            line += block.count(b"\n")
            place -= len(block)
    return line
