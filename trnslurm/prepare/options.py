"""Options of the command line that several kinds of preparation take."""

import argparse
import os
import re
from pathlib import Path

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.text.documents import BY_FILE, JSON_LINES, PER, Rule
from trnslurm.prepare.text.sources import TABLES, Found, dataset_notes, text_files
from trnslurm.prepare.tokenizer import FILE

HOLDOUT = 0.005
_ROWS = (JSON_LINES, *TABLES)
# Also rows, but only for labelled data: as text, their commas would be learnt.
_OTHER_ROWS = (".json", ".csv", ".tsv")


def as_path(text: str) -> Path:
    """Read a path; what comes from a cluster's profile has not been through a shell."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise PrepareError(f"{text}: no such user here") from None


def as_output(text: str) -> Path:
    """Read the path of an output, made absolute: the work is done in its parent."""
    return as_path(text).resolve()


def tokenizer(name: str) -> str:
    """Read the name of a tokenizer: train:V, or a path."""
    return name if name.startswith("train:") else str(as_path(name))


def source_tokenizer(given: argparse.Namespace) -> str:
    """Return the tokenizer that was asked for, else the dataset's own."""
    if given.tokenizer:
        return tokenizer(given.tokenizer)
    if given.dataset and (given.dataset / FILE).is_file():
        return str(given.dataset)
    raise PrepareError("--tokenizer: name a tokenizer.json, a directory with one, or train:V")


def add_document(parser: argparse.ArgumentParser) -> None:
    """Add the options for where documents begin and end."""
    document = parser.add_mutually_exclusive_group()
    default = "default: blank-line; a row of JSON lines, tables and datasets"
    document.add_argument("--document-per", choices=PER, help=default)
    document.add_argument("--document-start", metavar="REGEX", help="lines that begin a document")
    parser.add_argument("--column", metavar="NAME", help="the text of a row (default: text)")


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options for how the work is done, which do not change the data."""
    add = parser.add_argument
    add("--processes", type=int, metavar="N", default=len(os.sched_getaffinity(0)))
    add("--chunk-bytes", type=int, metavar="N", help="text to work on at a time (default: by size)")
    add("--force", action="store_true", help="replace prepared data that is there")
    add("--json", action="store_true", help="print the result as JSON")


def check_work(options: argparse.Namespace) -> None:
    """Refuse impossible numbers."""
    if options.processes < 1 or (options.chunk_bytes is not None and options.chunk_bytes < 1):
        raise PrepareError("--processes and --chunk-bytes: must be 1 or more")


def own_text(paths: list[Path]) -> list[Found]:
    """Return the files that were named instead of a dataset."""
    files = text_files(paths)
    for file in files:
        if file.path.suffix in _OTHER_ROWS:
            raise PrepareError(
                f"{file.path}: rows are read of {', '.join(_ROWS)}: make JSON lines of it, or call "
                "it .txt if it is to be read as text"
            )
    return files


def rule(given: argparse.Namespace, files: list[Found]) -> Rule:
    """Return the rule for where documents begin and end, as asked or as the files have it."""
    notes = dataset_notes(given.dataset) if given.dataset else {}
    start = given.document_start
    if not given.document_per and start is None:
        start = notes.get("document_start")
    column = given.column or notes.get("column") or "text"
    if not start:
        are_rows = {bool(given.dataset) or file.path.suffix in _ROWS for file in files}
        default = BY_FILE if len(are_rows) > 1 else "line" if are_rows == {True} else "blank-line"
        return Rule(per=given.document_per or default, column=column)
    try:
        re.compile(start)
    except re.error as error:
        raise PrepareError(f"--document-start {start}: no regular expression ({error})") from None
    return Rule(per="start", start=start, column=column)
