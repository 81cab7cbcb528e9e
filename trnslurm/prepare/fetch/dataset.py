"""A dataset and a tokenizer from the Hugging Face Hub, as files."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnslurm.prepare import tokenizer
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.fetch.hub import ask_hub, library
from trnslurm.prepare.files import partial, publish, read_json, replacing
from trnslurm.prepare.text.documents import JSON_LINES
from trnslurm.prepare.text.sources import DATASET

FORMAT = 1
_ROWS = 1000
# Where a row is less than a document: the line that begins one, by the last part of the name.
_DOCUMENT_STARTS = {"wikitext": r"^ = [^=].* = $"}


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """What to fetch."""

    output: Path
    dataset: str
    config: str | None
    revision: str | None
    tokenizer: str | None
    column: str | None
    """None: all columns."""
    force: bool

    def notes(self) -> dict[str, Any]:
        """Return the contents of dataset.json, which depend on this request alone."""
        return {
            "format": FORMAT,
            "dataset": self.dataset,
            "config": self.config,
            "revision": self.revision,
            "tokenizer": self.tokenizer,
            "column": self.column,
            "document_start": _DOCUMENT_STARTS.get(self.dataset.split("/")[-1]),
        }


def fetch_dataset(wanted: HubDataset) -> str:
    """Fetch what is not there; return in one line what was done."""
    if wanted.output.exists() and any(wanted.output.iterdir()):
        before = read_json(wanted.output / DATASET)
        if before is None:
            raise PrepareError(f"{wanted.output}: exists, and was not fetched: choose another name")
        if not wanted.force and before == wanted.notes():
            return f"{wanted.output} was fetched before, nothing to do"
        if not wanted.force:
            raise PrepareError(
                f"{wanted.output}: was fetched from another dataset, config, revision, tokenizer "
                "or column: choose another name, or replace it with --force"
            )
    library("datasets")  # before anything is made
    with partial(wanted.output, "fetch") as directory:
        finished = directory / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        finished.mkdir()
        rows = _fetch_rows(wanted, finished, directory / "cache")
        if wanted.tokenizer:
            download = library("huggingface_hub").hf_hub_download
            path = ask_hub(
                f"tokenizer {wanted.tokenizer}",
                lambda: download(
                    wanted.tokenizer, tokenizer.FILE, cache_dir=str(directory / "cache")
                ),
            )
            with replacing(finished / tokenizer.FILE) as stream:
                stream.write(Path(path).read_bytes())
        with replacing(finished / DATASET) as stream:
            stream.write(f"{json.dumps(wanted.notes(), indent=2)}\n".encode())
        publish(finished, wanted.output)
    splits = ", ".join(f"{name} {count:,} rows" for name, count in rows.items())
    return f"Fetched {wanted.output}: {splits}"


def _fetch_rows(wanted: HubDataset, finished: Path, cache: Path) -> dict[str, int]:
    load_dataset = library("datasets").load_dataset
    splits = ask_hub(
        f"dataset {wanted.dataset}",
        lambda: load_dataset(
            wanted.dataset, wanted.config, revision=wanted.revision, cache_dir=str(cache)
        ),
    )
    if not isinstance(splits, Mapping) or not splits:
        raise PrepareError(f"dataset {wanted.dataset}: has no splits")
    return {name: _write_rows(wanted, name, rows, finished) for name, rows in splits.items()}


def _write_rows(wanted: HubDataset, split: str, rows: Any, finished: Path) -> int:
    columns = [wanted.column] if wanted.column else rows.column_names
    if columns[0] not in rows.column_names:
        raise PrepareError(
            f"dataset {wanted.dataset}: no column {wanted.column}, but "
            f"{', '.join(rows.column_names)}: choose one with --column"
        )
    count = 0
    with replacing(finished / f"{split}{JSON_LINES}") as stream:
        for batch in rows.iter(batch_size=_ROWS):
            values = list(zip(*(batch[column] for column in columns), strict=True))
            lines = (
                json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False)
                for row in values
            )
            stream.write("".join(f"{line}\n" for line in lines).encode())
            count += len(values)
    return count
