"""A preparation, from its arguments to the finished directory. Each format is a plug-in."""

import argparse
import hashlib
import importlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from trnslurm.prepare import tokenizer
from trnslurm.prepare.arguments import parse
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import partial, publish, replacing
from trnslurm.prepare.prepared import FORMAT, INDEX, describe, find_finished
from trnslurm.prepare.text.documents import choose_chunk_bytes
from trnslurm.prepare.text.sources import InputFile, Source, read_through

# Imported only if named, because a format may need packages that the others do not.
_MODULES = {"tokens": "tokens", "bert": "bert.preparation", "labelled": "labelled.preparation"}


class Preparation(ABC):
    """A preparation of one format, which turns input files into splits of prepared data."""

    kind: ClassVar[dict[str, str]] = {}
    """The index's entry for the format."""
    versions: ClassVar[dict[str, str]]
    """The packages that determine the output's bytes."""
    least_tokens: ClassVar[int]
    """The smallest vocabulary that can be trained."""
    resumes_finished: ClassVar[bool] = False
    """Whether files in finished/ of an interrupted run are reused."""

    files: list[InputFile]
    tokenizer: str
    """A path, or train:V."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.output: Path = given.output
        self.processes: int = given.processes
        self.force: bool = given.force

    def choose_holdout(self, asked: float | None, default: float) -> float:
        """Return the share to hold out: none if some files are only for evaluation."""
        if not any(file.split == "eval" for file in self.files):
            return default if asked is None else asked
        if asked:
            raise PrepareError(
                f"--holdout {asked}: there is already an evaluation split. Remove --holdout, or "
                "the "
                "recipe's data.holdout"
            )
        return 0.0

    @abstractmethod
    def load_tokenizer(self, path: Path) -> Any:
        """Load a tokenizer; reject one that is unsuitable for the format."""

    @abstractmethod
    def settings(self, sources: list[Source]) -> dict[str, Any]:
        """Return the settings that determine the result, besides sources and tokenizer."""

    def work(self, wanted: dict[str, Any]) -> list[Any]:
        """Return what identifies work that an interrupted run can resume."""
        return [wanted, self.versions]

    @abstractmethod
    def make(
        self, directory: Path, finished: Path, chunk_bytes: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Write the splits to `finished`, and the tokenizer to `directory`.

        Return the index's first entries, the splits' entries and the index's last entries.
        """

    @staticmethod
    @abstractmethod
    def summary(index: dict[str, Any]) -> str:
        """Return a one-line summary of prepared data."""


def run(data_format: str, arguments: Sequence[str]) -> None:
    """Prepare data, unless it exists, and print a summary or the index."""
    given = parse(data_format, arguments)
    preparation: Preparation = import_late(_MODULES[data_format]).start(given)
    index, is_new = _prepare(preparation, given.chunk_bytes)
    if given.json:
        print(json.dumps({"output": str(given.output), "made": is_new, "index": index}))
        return
    summary = preparation.summary(index)
    if is_new:
        print(f"Prepared {given.output}: {summary}")
    else:
        print(
            f"{given.output} is already prepared from this input; there is nothing to do: {summary}"
        )


def import_late(name: str) -> Any:
    """Import a module of this package that may need h5py."""
    try:
        return importlib.import_module(f"trnslurm.prepare.{name}")
    except ModuleNotFoundError as error:
        if error.name != "h5py":
            raise
        raise PrepareError(
            "shards are HDF5 files, which require h5py: run pip install h5py"
        ) from None


def _prepare(preparation: Preparation, chunk_bytes: int | None) -> tuple[dict[str, Any], bool]:
    """Return the index, and whether this run made the data."""
    name, output = preparation.tokenizer, preparation.output
    if tokenizer.trained_size(name, preparation.least_tokens) is None:
        path = tokenizer.find(name)
        preparation.load_tokenizer(path)  # so that its errors come before the text is read
        name = describe(path)["sha256"]
    sources = read_through(preparation.files)
    made = {"tokenizer": name, **preparation.settings(sources)}
    wanted = {"sources": sources, "made": made}
    if (found := find_finished(output, wanted, force=preparation.force)) is not None:
        return found, False
    # Without a size, chunks are small enough to keep all processes busy, but not too many.
    chunk_bytes = chunk_bytes or choose_chunk_bytes(sources)
    work = json.dumps([*preparation.work(wanted), chunk_bytes], sort_keys=True)
    with partial(output, hashlib.sha256(work.encode()).hexdigest()[:16]) as directory:
        finished = directory / "finished"
        if not preparation.resumes_finished:
            shutil.rmtree(finished, ignore_errors=True)
        finished.mkdir(exist_ok=True)
        first, splits, last = preparation.make(directory, finished, chunk_bytes)
        with replacing(finished / tokenizer.FILE) as stream:
            stream.write((directory / tokenizer.FILE).read_bytes())
        index = {
            "format": FORMAT,
            **preparation.kind,
            **first,
            "tokenizer": describe(finished / tokenizer.FILE)
            | {"name": tokenizer.short_name(preparation.tokenizer)},
            "splits": splits,
            "sources": wanted["sources"],
            "made": {**made, "by": "trnslurm.prepare", **preparation.versions},
            **last,
        }
        with replacing(finished / INDEX) as stream:
            stream.write(f"{json.dumps(index, indent=2)}\n".encode())
        publish(finished, output)
    return index, True
