"""A preparation of labelled data, from its request to the finished directory."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trnslurm.prepare import tokenizer, wordpiece, workers
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.labelled import framing
from trnslurm.prepare.labelled.labels import Labels
from trnslurm.prepare.labelled.rows import Piece, gather
from trnslurm.prepare.labelled.samples import Tokenizing
from trnslurm.prepare.labelled.splits import write_splits
from trnslurm.prepare.labelled.tasks import NER, find_metrics, find_task
from trnslurm.prepare.prepared import FORMAT, Result, describe, make_once
from trnslurm.prepare.progress import Progress
from trnslurm.prepare.text.cutting import choose_chunk_bytes
from trnslurm.prepare.text.sources import Found, read_through

LEAST_SEQ_LEN = 8
VERSIONS = {"tokenizers": tokenizer.VERSION, "numpy": np.__version__}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to prepare, and where."""

    output: Path
    files: list[Found]
    text: list[str]
    """The columns of the text, one or a pair; empty: the task's, else text."""
    label: str
    """The column of the label; empty: label."""
    labels: list[str]
    """In the order of their numbers; empty: the task's, else those in the rows."""
    task: str
    """A task of GLUE, ner, or empty."""
    tokenizer: str
    seq_len: int
    holdout: float
    """The share of the rows for evaluation; 0: none, or there are files for it."""
    processes: int
    chunk_bytes: int | None
    """None: small enough to keep all processes busy, and large enough not to be too many."""
    force: bool


def prepare(request: Request) -> Result:
    """Make labelled data, unless it is there."""
    _check(request)
    name = request.tokenizer
    if tokenizer.trained_size(name, wordpiece.LEAST) is None:
        path = tokenizer.find(name)
        framing.load(path)  # its errors come before the reading
        name = describe(path)["sha256"]
    sources = read_through(request.files)
    wanted = {
        "sources": [source.as_json() for source in sources],
        "made": {
            "tokenizer": name,
            "columns": _columns(request),
            "labels": _names(request),
            "task": request.task,
            "seq_len": request.seq_len,
            "holdout": request.holdout,
        },
    }
    chunk_bytes = request.chunk_bytes or choose_chunk_bytes(sources)
    return make_once(
        request.output,
        wanted,
        [wanted, VERSIONS, chunk_bytes],
        lambda directory: _make(request, wanted, chunk_bytes, directory),
        force=request.force,
    )


def _check(request: Request) -> None:
    """Refuse impossible values."""
    if len(request.text) > 2:
        raise PrepareError(
            f"--text-column: {len(request.text)} columns: name one of a text, or two of a pair"
        )
    *text, label = _columns(request)
    if label in text:
        raise PrepareError(
            f"--text-column {label}: is the label's column too, and would reveal it: name another, "
            "or another --label-column"
        )
    if len(set(request.labels)) < len(request.labels):
        raise PrepareError(f"--label: twice the same in {', '.join(request.labels)}")
    task = find_task(request.task)
    if task and task.of_words and len(text) > 1:
        raise PrepareError(f"--text-column: --task {request.task} reads one column, of words")
    if task and not task.of_words and request.labels and len(request.labels) != len(task.labels):
        its = f"{len(task.labels)} labels" if task.labels else "numbers and no labels"
        raise PrepareError(
            f"--label, or a recipe's data.labelled.labels: {len(request.labels)} names "
            f"({', '.join(request.labels)}), but --task {request.task} has {its}: name as many, or "
            "leave out the labels or the task"
        )
    if len(request.labels) == 1:
        raise PrepareError(f"--label {request.labels[0]}: is the only one: name all labels")
    if request.seq_len < LEAST_SEQ_LEN:
        raise PrepareError(f"--seq-len {request.seq_len}: must be {LEAST_SEQ_LEN} or more")
    if not 0 <= request.holdout < 1:
        raise PrepareError(f"--holdout {request.holdout}: must be 0 or more, and less than 1")


def _columns(request: Request) -> list[str]:
    """Return the columns of the text, then that of the label."""
    task = find_task(request.task)
    text = request.text or list(task.text if task else ("text",))
    return [*text, request.label or (task.label if task else "label")]


def _names(request: Request) -> list[str]:
    task = find_task(request.task)
    return request.labels or list(task.labels if task else ())


def _make(
    request: Request, wanted: dict[str, Any], chunk_bytes: int, directory: Path
) -> dict[str, Any]:
    """Make the data in directory/finished, from what earlier runs left in the directory."""
    task = find_task(request.task)
    names = _names(request)
    labels = Labels(names=names, scale=task.scale if task else None)
    of_words = bool(task and task.of_words)
    gathered = gather(
        request.files, _columns(request), labels, chunk_bytes, directory, of_words=of_words
    )
    work = Tokenizing(
        directory=directory / "pieces",
        tokenizer=_keep_tokenizer(request, gathered.pieces, directory),
        seq_len=request.seq_len,
        numbers=labels.numbers(),
        of_words=of_words,
    )
    made = workers.finish(gathered.pieces, work, request.processes)
    finished = directory / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    splits = write_splits(gathered.pieces, work, labels.names, request.holdout, finished)
    with replacing(finished / tokenizer.FILE) as stream:
        stream.write(work.tokenizer.read_bytes())
    framed = framing.load(work.tokenizer)
    return {
        "format": FORMAT,
        "kind": "labelled",
        "seq_len": request.seq_len,
        "vocab_size": framed.vocab_size,
        "pad_id": framed.pad,
        "labels": labels.names,
        "task": request.task,
        "metrics": list(find_metrics(task, labels.names)),
        "tokenizer": describe(finished / tokenizer.FILE)
        | {"name": tokenizer.short_name(request.tokenizer)},
        "splits": splits,
        "sources": wanted["sources"],
        "made": wanted["made"] | {"by": "trnslurm.prepare"} | VERSIONS,
        "left_out": gathered.left_out,
        "cut": sum(part.cut for part in made),
    }


def _keep_tokenizer(request: Request, pieces: list[Piece], directory: Path) -> Path:
    """Put the tokenizer into the directory, trained on the training rows if asked for."""
    train = [piece for piece in pieces if piece.split == "train"]

    def texts(what: str) -> Iterator[str]:
        progress, done = Progress(what, sum(piece.size for piece in train)), 0
        for piece in train:
            for _, row in piece.rows():
                yield from (" ".join(part) if isinstance(part, list) else part for part in row)
            done += piece.size
            progress.show(done)
        progress.finish()

    path = tokenizer.keep(
        request.tokenizer,
        directory,
        lambda size: wordpiece.train(texts, size, request.processes),
    )
    if request.task == NER:
        framing.begin_words(path)
    return path
