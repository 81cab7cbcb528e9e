"""Labelled samples, from the input rows to the entries in the index."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

from trnslurm.prepare import arguments, tokenizer, wordpiece, workers
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.labelled.formats import FORMATS, FOUND
from trnslurm.prepare.labelled.labels import Labels
from trnslurm.prepare.labelled.rows import RowBlock, gather
from trnslurm.prepare.labelled.samples import (
    SampleWork,
    begin_words,
    load_framing,
    write_splits,
)
from trnslurm.prepare.labelled.tasks import NER, find_metrics, find_task
from trnslurm.prepare.pipeline import Preparation
from trnslurm.prepare.progress import in_turn
from trnslurm.prepare.text.sources import (
    TEXT_OPTION,
    InputFile,
    Source,
    dataset_files,
    split_of,
    text_files,
)

HOLDOUT = 0.1


class LabelledPreparation(Preparation):
    """Turns labelled rows into samples for a classifier."""

    kind: ClassVar = {"kind": "labelled"}
    versions: ClassVar = {"tokenizers": tokenizer.VERSION, "numpy": np.__version__}
    least_tokens = wordpiece.LEAST

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.files = _files(given)
        self._holdout = self.choose_holdout(given.holdout, HOLDOUT)
        self.tokenizer = arguments.source_tokenizer(given)
        self._seq_len: int = given.seq_len
        self._task_name: str = given.task or ""
        self._task = task = find_task(self._task_name)
        self._text: list[str] = given.text_column or list(task.text if task else ("text",))
        label = given.label_column or (task.label if task else "label")
        self._columns = [*self._text, label]
        self._labels: list[str] = given.label or []
        self._check()
        self._names = self._labels or list(task.labels if task else ())

    def _check(self) -> None:
        """Reject columns and labels that contradict each other."""
        if len(self._text) > 2:
            raise PrepareError(
                f"--text-column names {len(self._text)} columns: use one for a text, or two for a "
                "pair"
            )
        *text, label = self._columns
        if label in text:
            raise PrepareError(
                f"--text-column {label} is also the label column, which would reveal the label: "
                "choose "
                "another --text-column or --label-column"
            )
        if len(set(self._labels)) < len(self._labels):
            raise PrepareError(f"--label: {', '.join(self._labels)} contains a label twice")
        task = self._task
        if task and task.of_words and len(text) > 1:
            raise PrepareError(
                f"--text-column: --task {self._task_name} reads only one column, of words"
            )
        if task and not task.of_words and self._labels and len(self._labels) != len(task.labels):
            its = f"{len(task.labels)} labels" if task.labels else "numbers and no labels"
            raise PrepareError(
                f"--label or the recipe's data.labelled.labels gives {len(self._labels)} names "
                f"({', '.join(self._labels)}), but --task {self._task_name} has {its}: give the "
                "same number, or omit the labels or the task"
            )
        if len(self._labels) == 1:
            raise PrepareError(
                f"--label {self._labels[0]} is the only label given: list all labels"
            )

    def load_tokenizer(self, path: Path) -> tuple[Tokenizer, int]:
        """Load a tokenizer that adds special tokens around texts."""
        return load_framing(path)

    def settings(self, sources: list[Source]) -> dict[str, Any]:
        """Return the settings that determine the samples."""
        return {
            "columns": self._columns,
            "labels": self._names,
            "task": self._task_name,
            "seq_len": self._seq_len,
            "holdout": self._holdout,
        }

    def make(
        self, directory: Path, finished: Path, chunk_bytes: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Write the samples of each split."""
        # A copy, because names found in the rows are not a setting.
        labels = Labels(names=[*self._names], scale=self._task.scale if self._task else None)
        of_words = bool(self._task and self._task.of_words)
        blocks, left_out = gather(
            self.files, self._columns, labels, chunk_bytes, directory, of_words=of_words
        )
        work = SampleWork(
            directory=directory / "pieces",
            tokenizer=self._keep_tokenizer(blocks, directory),
            seq_len=self._seq_len,
            numbers=labels.numbers(),
            of_words=of_words,
        )
        cut = workers.finish(blocks, work, self.processes)
        splits = write_splits(blocks, work, labels.names, self._holdout, finished)
        framed, pad = load_framing(work.tokenizer)
        first = {
            "seq_len": self._seq_len,
            "vocab_size": tokenizer.vocab_size(framed),
            "pad_id": pad,
            "labels": labels.names,
            "task": self._task_name,
            "metrics": list(find_metrics(self._task, labels.names)),
        }
        return first, splits, {"left_out": left_out, "cut": sum(cut)}

    @staticmethod
    def summary(index: dict[str, Any]) -> str:
        """Return the numbers of samples and labels; warn about rows that were left out."""
        for part in index["left_out"]:
            print(f"warning: {_bad_rows(part)}", file=sys.stderr)
        for label in index["labels"]:
            if not any(entry["labels"].get(label) for entry in index["splits"].values()):
                print(f"warning: no sample has the label {label}", file=sys.stderr)
        splits = []
        for name, entry in index["splits"].items():
            labels = ", ".join(f"{label} {count:,}" for label, count in entry["labels"].items())
            splits.append(
                f"{name} {entry['samples']:,} samples" + (f" ({labels})" if labels else "")
            )
        cut = f", {index['cut']:,} of them truncated" if index["cut"] else ""
        return f"{', '.join(splits)}{cut}, vocabulary {index['vocab_size']:,}"

    def _keep_tokenizer(self, blocks: list[RowBlock], directory: Path) -> Path:
        """Put the tokenizer into the directory; train:V trains it on the training rows."""
        train = [block for block in blocks if block.split == "train"]

        def texts(what: str) -> Iterator[str]:
            for block in in_turn(train, what):
                for _, row in block.rows():
                    yield from (" ".join(part) if isinstance(part, list) else part for part in row)

        path = tokenizer.keep(
            self.tokenizer,
            directory,
            lambda size: wordpiece.train(texts, size, self.processes),
        )
        if self._task_name == NER:
            begin_words(path)
        return path


start = LabelledPreparation


def _files(given: argparse.Namespace) -> list[InputFile]:
    """Return the files of every split; --eval replaces a dataset's evaluation files."""
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
            raise PrepareError(
                f"{file.path}: the suffix of a file of rows must be one of {formats}"
            )
    return found


def _split_of(file: InputFile) -> InputFile:
    """Return the file; MNLI's validation_mismatched becomes a separate evaluation split."""
    mismatched = file.split == "eval" and "mismatched" in file.name
    return replace(file, split="eval_mismatched") if mismatched else file


def _to_train_on(file: InputFile, named: list[Path]) -> InputFile:
    """Reject files of another split: scores would not show that they were used for training."""
    inside = Path(*Path(file.name).parts[1:])
    if file.path not in named and (split := split_of(inside)) not in (None, "train"):
        raise PrepareError(
            f"{TEXT_OPTION} {file.path.parent}: {file.path.name} looks like part of the "
            f"{split} split: name the files to train on, and pass those to evaluate on with --eval"
        )
    return file


def _bad_rows(part: dict[str, Any]) -> str:
    """Return a sentence about the rows that were left out of a file, and their places."""
    unit = "line" if "first_lines" in part else "row"
    first = part[f"first_{unit}s"]
    places = ", ".join(map(str, first)) + (", …" if len(first) < part["rows"] else "")
    end = "" if part["rows"] == 1 else "s"
    return (
        f"{part['name']}: left out {part['rows']:,} row{end} with {part['reason']}: "
        f"{unit}{end} {places}"
    )
