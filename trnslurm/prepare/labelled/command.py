"""The command line: python -m trnslurm.prepare labelled …."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm.prepare import options
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.labelled.formats import FORMATS, FOUND
from trnslurm.prepare.labelled.tasks import NER, TASKS
from trnslurm.prepare.options import as_output, as_path
from trnslurm.prepare.prepared import Result, report
from trnslurm.prepare.text.sources import TEXT_OPTION, Found, dataset_files, split_of, text_files

HOLDOUT = 0.1


def run(arguments: Sequence[str]) -> None:
    """Prepare, and print what there is now."""
    given = _parser().parse_args(arguments)
    result = _prepare(given)
    for part in result.index["left_out"]:
        print(f"warning: {_bad_rows(part)}", file=sys.stderr)
    splits = []
    for name, entry in result.index["splits"].items():
        labels = ", ".join(f"{label} {count:,}" for label, count in entry["labels"].items())
        splits.append(f"{name} {entry['samples']:,} samples" + (f" ({labels})" if labels else ""))
    cut = f", {result.index['cut']:,} of them cut off" if result.index["cut"] else ""
    summary = f"{', '.join(splits)}{cut}, vocabulary {result.index['vocab_size']:,}"
    report(result, summary, as_json=given.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trnslurm.prepare labelled",
        description="Make samples for a classifier of rows that have a text, or two, and a label.",
    )
    add = parser.add_argument
    add("--output", type=as_output, required=True, metavar="DIR", help="the prepared data")
    source = parser.add_mutually_exclusive_group(required=True)
    rows = f"rows to train on ({', '.join(FORMATS)}), or a directory of them"
    source.add_argument("--text", "--input", type=as_path, nargs="+", metavar="FILE|DIR", help=rows)
    source.add_argument("--dataset", type=as_path, metavar="DIR", help="by split, as from fetch")
    evaluation = "rows to evaluate on; default: the dataset's, else the holdout"
    add("--eval", type=as_path, nargs="+", metavar="FILE|DIR", help=evaluation)
    tokenizer = "one of BERT's or a relative's, or trained on the text; default: the dataset's own"
    add("--tokenizer", metavar="FILE|DIR|train:V", help=tokenizer)
    task = f"its columns, labels and metrics: {', '.join([*TASKS, NER])}"
    add("--task", default="", metavar="NAME", help=task)
    column = "twice for a pair; default: the task's, else text"
    add("--text-column", action="append", default=[], metavar="NAME", help=column)
    add("--label-column", default="", metavar="NAME", help="default: label")
    names = "all labels, in the order of their numbers; default: the task's, else as found"
    add("--label", action="append", default=[], metavar="NAME", help=names)
    add("--seq-len", type=int, default=128, metavar="N", help="tokens of a sample (128)")
    share = f"share of the rows of each label for eval ({HOLDOUT})"
    add("--holdout", type=float, metavar="SHARE", help=share)
    options.add_work(parser)
    return parser


def _prepare(given: argparse.Namespace) -> Result:
    # Late: other preparations do not need it.
    from trnslurm.prepare.labelled.run import Request, prepare

    options.check_work(given)
    files = _files(given)
    own = any(file.split == "eval" for file in files)
    if own and given.holdout:
        raise PrepareError(
            f"--holdout {given.holdout}: there are rows for evaluation already: leave it out, or a "
            "recipe's data.holdout"
        )
    holdout = 0.0 if own else HOLDOUT if given.holdout is None else given.holdout
    return prepare(
        Request(
            output=given.output,
            files=files,
            text=given.text_column,
            label=given.label_column,
            labels=given.label,
            task=given.task,
            tokenizer=options.source_tokenizer(given),
            seq_len=given.seq_len,
            holdout=holdout,
            processes=given.processes,
            chunk_bytes=given.chunk_bytes,
            force=given.force,
        )
    )


def _files(given: argparse.Namespace) -> list[Found]:
    """Return the files of every split; those of --eval replace a dataset's own."""
    if given.dataset:
        found = [_split_of(file) for file in dataset_files(given.dataset, FOUND)]
    else:
        found = [_to_train_on(file, given.text) for file in text_files(given.text, FOUND)]
    if given.eval:
        evaluated = text_files(given.eval, FOUND, option="--eval")
        found = [file for file in found if file.split == "train"]
        found += [replace(file, split="eval") for file in evaluated]
    for file in found:
        if file.path.suffix not in FORMATS:
            formats = ", ".join(FORMATS)
            raise PrepareError(f"{file.path}: its name says no format of rows: {formats}")
    return found


def _split_of(file: Found) -> Found:
    """Return the file, with MNLI's second evaluation split, validation_mismatched, kept apart."""
    mismatched = file.split == "eval" and "mismatched" in file.name
    return replace(file, split="eval_mismatched") if mismatched else file


def _to_train_on(file: Found, named: list[Path]) -> Found:
    """Refuse files of another split: scores would not show that they were trained on."""
    inside = Path(*Path(file.name).parts[1:])
    if file.path not in named and (split := split_of(inside)) not in (None, "train"):
        raise PrepareError(
            f"{TEXT_OPTION} {file.path.parent}: {file.path.name} is called as if it were of the "
            f"split {split}: name the files to train on, and those to evaluate on with --eval"
        )
    return file


def _bad_rows(part: dict[str, Any]) -> str:
    """Return what was left out of a file, and where, as a sentence."""
    unit = "line" if "first_lines" in part else "row"
    first = part[f"first_{unit}s"]
    places = ", ".join(map(str, first)) + (", …" if len(first) < part["rows"] else "")
    end = "" if part["rows"] == 1 else "s"
    return (
        f"{part['name']}: left out {part['rows']:,} row{end} with {part['reason']}: "
        f"{unit}{end} {places}"
    )
