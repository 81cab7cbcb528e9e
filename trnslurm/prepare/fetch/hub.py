"""Fetches a dataset with a tokenizer, or a model, from the Hugging Face Hub, as files."""

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnslurm.prepare import tokenizer
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.fetch.fetched import Fetched
from trnslurm.prepare.files import partial, publish, read_json, replacing
from trnslurm.prepare.text.documents import JSON_LINES
from trnslurm.prepare.text.sources import DATASET

FORMAT = 1
_ROWS = 1000
# Datasets whose rows are parts of documents: the line that begins a document.
_DOCUMENT_STARTS = {"wikitext": r"^ = [^=].* = $"}
MODEL_NOTES = "model.json"
# Weights without pickle, in one file or in parts, and the files that describe them.
_MODEL_FILES = (
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """What to fetch."""

    output: Path
    dataset: str
    config: str | None
    revision: str | None
    tokenizer: str | None
    column: str | None
    """The text column, or None for all columns."""
    force: bool

    def notes(self) -> dict[str, Any]:
        """Return the contents of dataset.json, which depend only on this request."""
        return {
            "format": FORMAT,
            "dataset": self.dataset,
            "config": self.config,
            "revision": self.revision,
            "tokenizer": self.tokenizer,
            "column": self.column,
            "document_start": _DOCUMENT_STARTS.get(self.dataset.split("/")[-1]),
        }


def fetch_dataset(wanted: HubDataset) -> Fetched:
    """Fetch the dataset if it is not there yet."""
    output, notes = wanted.output, wanted.notes()
    if _is_there(output / DATASET, notes, force=wanted.force):
        return Fetched(output)
    _library("datasets")  # before anything is made
    with _finishing(output / DATASET, notes) as (finished, cache):
        rows = _fetch_rows(wanted, finished, cache)
        if wanted.tokenizer:
            download = _library("huggingface_hub").hf_hub_download
            path = _ask_hub(
                f"tokenizer {wanted.tokenizer}",
                lambda: download(wanted.tokenizer, tokenizer.FILE, cache_dir=str(cache)),
            )
            with replacing(finished / tokenizer.FILE) as stream:
                stream.write(Path(path).read_bytes())
    splits = ", ".join(f"{name} {count:,} rows" for name, count in rows.items())
    return Fetched(output, splits)


def fetch_model(model: str, revision: str | None, output: Path, *, force: bool) -> Fetched:
    """Fetch a model if it is not there yet."""
    notes = {"model": model, "revision": revision}
    if _is_there(output / MODEL_NOTES, notes, force=force):
        return Fetched(output)
    download = _library("huggingface_hub").snapshot_download
    with _finishing(output / MODEL_NOTES, notes) as (finished, cache):
        folder = _ask_hub(
            f"model {model}",
            lambda: download(
                model, revision=revision, allow_patterns=list(_MODEL_FILES), cache_dir=str(cache)
            ),
        )
        for file in sorted(path for path in Path(folder).iterdir() if path.is_file()):
            with replacing(finished / file.name) as stream, file.open("rb") as source:
                shutil.copyfileobj(source, stream)
        if not any(finished.glob("*.safetensors")):
            raise PrepareError(
                f"model {model}: has no weights in safetensors, the only supported format: choose "
                "another revision (--revision), or convert it and name the folder in "
                "train.init_from"
            )
        size = sum(file.stat().st_size for file in finished.iterdir())
    return Fetched(output, f"{size / 1e6:,.0f} MB")


def _is_there(notes: Path, wanted: dict[str, Any], *, force: bool) -> bool:
    """Check whether it was fetched before; refuse to replace anything else without force."""
    output = notes.parent
    if not output.exists() or not any(output.iterdir()):
        return False
    before = read_json(notes)
    if before is None:
        raise PrepareError(f"{output} already exists and was not fetched: choose another name")
    if force or before == wanted:
        return not force
    *others, last = [key for key in wanted if key not in ("format", "document_start")]
    raise PrepareError(
        f"{output} was fetched from another {', '.join(others)} or {last}: choose another name, "
        "or replace it with --force"
    )


@contextmanager
def _finishing(notes: Path, contents: dict[str, Any]) -> Iterator[tuple[Path, Path]]:
    """Yield the directory to fill and the Hub's cache; then write the notes and publish."""
    with partial(notes.parent, "fetch") as directory:
        finished = directory / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        finished.mkdir()
        yield finished, directory / "cache"
        with replacing(finished / notes.name) as stream:
            stream.write(f"{json.dumps(contents, indent=2)}\n".encode())
        publish(finished, notes.parent)


def _fetch_rows(wanted: HubDataset, finished: Path, cache: Path) -> dict[str, int]:
    load_dataset = _library("datasets").load_dataset
    splits = _ask_hub(
        f"dataset {wanted.dataset}",
        lambda: load_dataset(
            wanted.dataset, wanted.config, revision=wanted.revision, cache_dir=str(cache)
        ),
    )
    if not isinstance(splits, Mapping) or not splits:
        raise PrepareError(f"dataset {wanted.dataset} has no splits")
    return {name: _write_rows(wanted, name, rows, finished) for name, rows in splits.items()}


def _write_rows(wanted: HubDataset, split: str, rows: Any, finished: Path) -> int:
    columns = [wanted.column] if wanted.column else rows.column_names
    if columns[0] not in rows.column_names:
        raise PrepareError(
            f"dataset {wanted.dataset}: there is no column {wanted.column}, only "
            f"{', '.join(rows.column_names)}: choose one with --column"
        )
    count = 0
    with replacing(finished / f"{split}{JSON_LINES}") as stream:
        for batch in rows.iter(batch_size=_ROWS):
            for values in zip(*(batch[column] for column in columns), strict=True):
                row = dict(zip(columns, values, strict=True))
                stream.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
                count += 1
    return count


def _library(name: str) -> Any:
    """Import one of the Hub's libraries."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise PrepareError(
            f"fetch requires the Python package {name}: run {sys.executable} -m pip install "
            "'.[data]' in a clone of trnslurm, or fetch on any machine with a network and copy the "
            "result"
        ) from None


def _ask_hub(what: str, ask: Callable[[], Any]) -> Any:
    """Call the Hub. The libraries find a token themselves, in HF_TOKEN or its file."""
    try:
        return ask()
    except Exception as error:  # these libraries raise errors of every kind
        words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if token := os.environ.get("HF_TOKEN"):
            words = words.replace(token, "***")
        raise PrepareError(
            f"{what}: could not be fetched from the Hub ({words}): check the name, the network "
            "and HF_TOKEN"
        ) from None
