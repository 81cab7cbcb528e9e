"""Parses the program's arguments with the options of a format, and finds the input they name."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trnslurm.prepare import options
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.options import Option
from trnslurm.prepare.text.documents import BY_FILE, JSON_LINES, Rule
from trnslurm.prepare.text.sources import TABLES, InputFile, dataset_notes, text_files
from trnslurm.prepare.tokenizer import FILE

_DESCRIPTIONS = {
    "tokens": "Tokenize text into the files that training reads.",
    "bert": "Make shards of samples for BERT's pretraining: masked tokens, and pairs.",
    "labelled": "Make samples for a classifier from rows with one or two strings and a label.",
}
_OTHERS = (
    "Others: bert (shards for BERT's pretraining), labelled (rows with labels), fetch (a dataset "
    "from the Hub), model (a model from the Hub), download (a published file), s3 (files in "
    "S3), verify DIR (check all files of prepared data)."
)
_ROWS = (JSON_LINES, *TABLES)
# Also rows, but only for labelled data: read as text, they would teach a model their commas.
_OTHER_ROWS = (".json", ".csv", ".tsv")


def parse(data_format: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the values of a format's options; reject numbers that are out of range."""
    tokens = data_format == "tokens"
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare" + ("" if tokens else f" {data_format}"),
        description=_DESCRIPTIONS[data_format],
        epilog=_OTHERS if tokens else None,
    )
    own = options.FORMATS[data_format]
    source = parser.add_mutually_exclusive_group(required=True)
    document = parser.add_mutually_exclusive_group()
    for option in own:
        target: argparse._ActionsContainer = parser
        if option in options.SOURCES:
            target = source
        elif option in (options.DOCUMENT_PER, options.DOCUMENT_START):
            target = document
        add_option(target, option)
    given = parser.parse_args(arguments)
    if given.processes is None:
        given.processes = len(os.sched_getaffinity(0))
    for option in own:
        value = getattr(given, option.name)
        if value is not None and (problem := option.problem(value)):
            raise PrepareError(problem)
    return given


def add_option(
    parser: argparse._ActionsContainer, option: Option, *, required: bool = False
) -> None:
    """Add an option to a parser."""
    details: dict[str, Any] = {"help": option.usage(of_recipe=False).replace("%", "%%")}
    if option.type is bool:
        parser.add_argument(*option.names, action="store_true", **details)
        return
    if option.many:
        details |= {"nargs": "+", "action": "extend"}
    if option.metavar:
        details["metavar"] = option.metavar
    kind = option.type
    parser.add_argument(
        *option.names,
        type=as_output if option is options.OUTPUT else as_path if kind is Path else kind,
        choices=option.choices or None,
        default=option.default,
        required=required or option is options.OUTPUT,
        **details,
    )


def as_path(text: str) -> Path:
    """Read a path and expand ~, because a path from a profile has not passed through a shell."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise PrepareError(f"{text}: there is no such user on this machine") from None


def as_output(text: str) -> Path:
    """Read the path of an output and make it absolute, because the work is done in its parent."""
    return as_path(text).resolve()


def source_tokenizer(given: argparse.Namespace) -> str:
    """Return the tokenizer from the command line (train:V or a path), or else the dataset's."""
    name: str | None = given.tokenizer
    if name:
        return name if name.startswith("train:") else str(as_path(name))
    if given.dataset and (given.dataset / FILE).is_file():
        return str(given.dataset)
    raise PrepareError(
        "--tokenizer is required: pass a tokenizer.json, a directory with one, or train:V"
    )


def own_text(paths: list[Path]) -> list[InputFile]:
    """Return the files that were given instead of a dataset."""
    files = text_files(paths)
    for file in files:
        if file.path.suffix in _OTHER_ROWS:
            raise PrepareError(
                f"{file.path}: only {', '.join(_ROWS)} are read as rows: convert it to JSON "
                "lines, or "
                "rename it to .txt to read it as text"
            )
    return files


def rule(given: argparse.Namespace, files: list[InputFile]) -> Rule:
    """Return the rule for where documents begin and end, from the options or the files."""
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
        raise PrepareError(
            f"--document-start {start}: not a valid regular expression ({error})"
        ) from None
    return Rule(per="start", start=start, column=column)
