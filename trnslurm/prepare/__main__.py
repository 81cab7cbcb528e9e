"""The command line: python -m trnslurm.prepare …, … verify DIR, and … fetch."""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trnslurm.prepare import fetching, tokenizer
from trnslurm.prepare.documents import PER, Rule
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.prepared import Result, find_damage, read_index
from trnslurm.prepare.run import Request, prepare
from trnslurm.prepare.sources import dataset_files, dataset_notes, text_files

HOLDOUT = 0.005
_KEPT = "what is finished is kept, run again to go on"


class _Stopped(BaseException):
    """A signal asked to stop."""


def main() -> None:
    """Run, and turn what a user can mend into one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    commands = {"fetch": _fetch, "verify": _verify}
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in commands:
            commands[arguments[0]](arguments[1:])
        else:
            _prepare(arguments)
    except PrepareError as error:
        sys.exit(f"error: {error}")
    except KeptError as error:
        sys.exit(f"error: {error}: {_KEPT}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except _Stopped as stopped:
        print(f"\nstopped: {_KEPT}", file=sys.stderr)
        sys.exit(128 + stopped.args[0])


def _stop(number: int, frame: object) -> NoReturn:
    raise _Stopped(number)


def _path(text: str) -> Path:
    # No shell has seen what comes from a cluster's profile.
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise PrepareError(f"{text}: no such user here") from None


def _output(text: str) -> Path:
    # Its parent is where the work is done, so a name such as "." will not do.
    return _path(text).resolve()


def _prepare(arguments: Sequence[str]) -> None:
    options = _prepare_parser().parse_args(arguments)
    result = prepare(_request(options))
    if options.json:
        made = {"output": str(result.output), "made": result.made, "index": result.index}
        print(json.dumps(made))
    else:
        print(_describe(result))


def _prepare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare",
        description="Tokenize text into the files that training reads.",
        epilog="Others: fetch (a dataset from the Hub), verify DIR (read prepared data whole).",
    )
    add = parser.add_argument
    add("--output", type=_output, required=True, metavar="DIR", help="the prepared data")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=_path, nargs="+", metavar="FILE", help="text or JSON lines")
    source.add_argument("--dataset", type=_path, metavar="DIR", help="by split, as from fetch")
    add("--tokenizer", metavar="FILE|DIR|train:V", help="default: the dataset's own, if it has one")
    add("--end-of-text", default="", metavar="TOKEN", help="default: the tokenizer's usual one")
    document = parser.add_mutually_exclusive_group()
    document.add_argument(
        "--document-per", choices=PER, help="default: blank-line; a dataset's row"
    )
    document.add_argument("--document-start", metavar="REGEX", help="lines that begin a document")
    add("--column", metavar="NAME", help="the text of a row (default: text)")
    add("--holdout", type=float, metavar="SHARE", help=f"of documents, for eval ({HOLDOUT})")
    add("--processes", type=int, metavar="N", default=len(os.sched_getaffinity(0)))
    add("--chunk-bytes", type=int, metavar="N", help="text done at a time (default: by size)")
    add("--force", action="store_true", help="replace prepared data that is there")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def _request(options: argparse.Namespace) -> Request:
    if options.processes < 1 or (options.chunk_bytes is not None and options.chunk_bytes < 1):
        raise PrepareError("--processes and --chunk-bytes: must be 1 or more")
    files = dataset_files(options.dataset) if options.dataset else text_files(options.text)
    splits = {file.split for file in files}
    if "eval" in splits and options.holdout:
        raise PrepareError(
            f"--holdout {options.holdout}: the dataset has a split for evaluation: leave it out"
        )
    holdout = 0.0 if "eval" in splits else HOLDOUT if options.holdout is None else options.holdout
    if not 0 <= holdout < 1:
        raise PrepareError(f"--holdout {holdout}: must be 0 or more, and less than 1")
    return Request(
        output=options.output,
        files=files,
        rule=_rule(options),
        tokenizer=_tokenizer(options),
        end_of_text=options.end_of_text,
        holdout=holdout,
        processes=options.processes,
        chunk_bytes=options.chunk_bytes,
        force=options.force,
    )


def _rule(options: argparse.Namespace) -> Rule:
    notes = dataset_notes(options.dataset) if options.dataset else {}
    column = options.column or notes.get("column", "text")
    start = options.document_start
    if not options.document_per and start is None:
        start = notes.get("document_start")
    if not start:
        per = options.document_per or ("line" if options.dataset else "blank-line")
        return Rule(per=per, column=column)
    try:
        re.compile(start)
    except re.error as error:
        raise PrepareError(f"--document-start {start}: no regular expression ({error})") from None
    return Rule(per="start", start=start, column=column)


def _tokenizer(options: argparse.Namespace) -> str:
    if options.tokenizer:
        name: str = options.tokenizer
        return name if name.startswith("train:") else str(_path(name))
    if options.dataset and (options.dataset / tokenizer.FILE).is_file():
        return str(options.dataset)
    raise PrepareError("--tokenizer: name a tokenizer.json, a directory with one, or train:V")


def _describe(result: Result) -> str:
    splits = [
        f"{name} {entry['tokens']:,} tokens in {entry['documents']:,} documents"
        for name, entry in result.index["splits"].items()
    ]
    summary = f"{', '.join(splits)}, vocabulary {result.index['vocab_size']:,}"
    if result.made:
        return f"Prepared {result.output}: {summary}"
    return f"{result.output} is prepared from this very input, nothing to do: {summary}"


def _verify(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare verify", description="Read prepared data whole."
    )
    parser.add_argument("directory", type=_path)
    directory = parser.parse_args(arguments).directory
    index = read_index(directory)
    if index is None:
        raise PrepareError(f"{directory}: no prepared data")
    if damaged := find_damage(directory, index):
        raise PrepareError(f"{directory}: {damaged} is damaged: make it again with --force")
    print(f"{directory}: as its index says")


def _fetch(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare fetch",
        description="Fetch a dataset and a tokenizer from the Hugging Face Hub.",
    )
    add = parser.add_argument
    add("--output", type=_output, required=True, metavar="DIR", help="what --dataset shall read")
    add("--dataset", required=True, metavar="NAME", help="for example wikitext")
    add("--config", metavar="NAME", help="for example wikitext-103-raw-v1")
    add("--revision", metavar="NAME", help="a branch, tag or commit of the dataset")
    add("--tokenizer", metavar="NAME", help="a model on the Hub, for example gpt2")
    add("--column", default="text", metavar="NAME", help="the column of the text")
    add("--force", action="store_true", help="replace what is there")
    options = parser.parse_args(arguments)
    print(fetching.fetch(fetching.Wanted(**vars(options))))


if __name__ == "__main__":
    main()
