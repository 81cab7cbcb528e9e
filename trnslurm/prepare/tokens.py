"""Token files, which language models train on: the joined tokens of documents."""

import argparse
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trnslurm.prepare import arguments, bytepairs, tokenizer, workers
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.pipeline import Preparation
from trnslurm.prepare.progress import in_turn
from trnslurm.prepare.text.documents import Chunk, cut
from trnslurm.prepare.text.sources import Source, dataset_files
from trnslurm.prepare.workers import Work, read_arrays

HOLDOUT = 0.005

Encode = Callable[[list[str]], tuple[NDArray[np.uint32], NDArray[np.int64]]]
"""Returns the tokens of documents, and the number of tokens of each."""


class TokenPreparation(Preparation):
    """Turns text into token files."""

    versions: ClassVar = {"tokenizers": tokenizer.VERSION}
    least_tokens = tokenizer.LEAST

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.files = (
            dataset_files(given.dataset) if given.dataset else arguments.own_text(given.text)
        )
        self._holdout = self.choose_holdout(given.holdout, HOLDOUT)
        self._rule = arguments.rule(given, self.files)
        self.tokenizer = arguments.source_tokenizer(given)
        self._end_of_text: str = given.end_of_text or ""
        if self.tokenizer.startswith("train:") and self._end_of_text not in (
            "",
            tokenizer.END_OF_TEXT,
        ):
            raise PrepareError(
                f"--end-of-text {self._end_of_text}: a trained tokenizer has no such token, "
                f"only {tokenizer.END_OF_TEXT}: remove the option"
            )

    def load_tokenizer(self, path: Path) -> tuple[Tokenizer, int]:
        """Load a tokenizer that has the end-of-text token."""
        return tokenizer.load(path, self._end_of_text)

    def settings(self, sources: list[Source]) -> dict[str, Any]:
        """Return the settings that determine the tokens."""
        return {
            "end_of_text": self._end_of_text,
            "documents": self._rule.as_json(),
            "holdout": self._holdout,
        }

    def work(self, wanted: dict[str, Any]) -> list[Any]:
        """Return what identifies the work, except the holdout, which comes after tokenizing."""
        return [wanted["sources"], wanted["made"] | {"holdout": None} | self.versions]

    def make(
        self, directory: Path, finished: Path, chunk_bytes: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Write the token files."""
        todo = cut(self.files, self._rule, chunk_bytes, directory)
        chunks = in_turn(todo, "training the tokenizer")
        documents = (document for chunk in chunks for document in chunk.documents())
        tokenizer_file = tokenizer.keep(
            self.tokenizer,
            directory,
            lambda size: tokenizer.train(documents, size, self.processes),
        )
        loaded, end_of_text = self.load_tokenizer(tokenizer_file)
        vocab_size = tokenizer.vocab_size(loaded)
        dtype = tokenizer.dtype_for(vocab_size)
        work = TokenWork(
            directory=directory / "chunks",
            tokenizer=tokenizer_file,
            end_of_text=self._end_of_text,
            dtype=dtype,
        )
        counts = workers.finish(todo, work, self.processes)
        splits = _write_splits(todo, counts, work, finished, self._holdout)
        first = {"vocab_size": vocab_size, "dtype": dtype, "end_of_text": end_of_text}
        return first, splits, {}

    @staticmethod
    def summary(index: dict[str, Any]) -> str:
        """Return the numbers of tokens and documents."""
        splits = [
            f"{name} {entry['tokens']:,} tokens in {entry['documents']:,} documents"
            for name, entry in index["splits"].items()
        ]
        return f"{', '.join(splits)}, vocabulary {index['vocab_size']:,}"


start = TokenPreparation


@dataclass(frozen=True, kw_only=True)
class TokenWork(Work[Chunk, int]):
    """Tokenizes a chunk; returns the number of its documents."""

    tokenizer: Path
    end_of_text: str
    dtype: str

    def find(self, chunk: Chunk) -> int | None:
        """Return the number of documents, if an earlier run finished the chunk."""
        arrays = read_arrays(self.path(chunk.number))
        return None if arrays is None else len(arrays["lengths"])

    def start(self) -> Callable[[Chunk], int]:
        """Set up one worker; return the function that does its work."""
        loaded, end_of_text = tokenizer.load(self.tokenizer, self.end_of_text)
        pairs = bytepairs.find(loaded)
        return lambda chunk: self._tokenize(
            chunk, lambda documents: tokenizer.encode(loaded, documents, end_of_text, pairs)
        )

    def _tokenize(self, chunk: Chunk, encode: Encode) -> int:
        tokens, lengths = [np.zeros(0, self.dtype)], [np.zeros(0, np.int64)]
        for documents in chunk.batches():
            ids, counts = encode(documents)
            tokens.append(ids.astype(self.dtype))
            lengths.append(counts)
        counts = np.concatenate(lengths)
        # Not synced: checksums show whether a crash has damaged the file.
        with replacing(self.path(chunk.number), durable=False) as stream:
            np.savez(stream, tokens=np.concatenate(tokens), lengths=counts)
        return len(counts)


class TokenFile:
    """A token file that is being written; a thread computes its checksum."""

    def __init__(self, stream: BinaryIO, threads: Executor) -> None:
        self._stream = stream
        self._threads = threads
        self._digest = hashlib.sha256()
        self._hashing: Future[None] | None = None
        self.bytes = self.tokens = self.documents = 0

    def write(self, tokens: NDArray[Any], documents: int) -> None:
        """Append the tokens of some documents."""
        data = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data
        self._await_hashing()
        self._hashing = self._threads.submit(self._digest.update, data)
        self._stream.write(data)
        self.bytes += data.nbytes
        self.tokens += len(tokens)
        self.documents += documents

    def entry(self, name: str) -> dict[str, Any]:
        """Return its entry in the index."""
        self._await_hashing()
        return {
            "file": name,
            "bytes": self.bytes,
            "sha256": self._digest.hexdigest(),
            "tokens": self.tokens,
            "documents": self.documents,
        }

    def _await_hashing(self) -> None:
        if self._hashing:
            self._hashing.result()


def _write_splits(
    todo: list[Chunk], counts: list[int], work: TokenWork, output: Path, holdout: float
) -> dict[str, Any]:
    """Write the token files from all chunks in order; return their entries in the index.

    With a holdout, eval gets this share of the documents (at least one), evenly spread: the last
    document of each n-th part. Files of an eval split go completely into eval.
    """
    total = sum(counts[chunk.number] for chunk in todo if chunk.split == "train")
    held_out = max(1, round(total * holdout)) if holdout else 0
    if total <= held_out:
        if not total:
            raise PrepareError("there is no text to train on: the input is blank")
        raise PrepareError(
            f"too few documents ({total}) to hold out a share of {holdout}: use --holdout 0, or "
            "another --document-per"
        )
    first = 0
    with (
        ThreadPoolExecutor(2) as threads,
        replacing(output / "train.bin") as train,
        replacing(output / "eval.bin") as evaluation,
    ):
        files = {"train": TokenFile(train, threads), "eval": TokenFile(evaluation, threads)}
        for chunk, part in zip(todo, _read_ahead(todo, work, threads), strict=True):
            if chunk.split == "eval":
                files["eval"].write(part["tokens"], len(part["lengths"]))
                continue
            numbers = np.arange(first, first + len(part["lengths"]) + 1)
            held = np.flatnonzero(np.diff(numbers * held_out // total))
            bounds = np.concatenate([[0], np.cumsum(part["lengths"])])
            # Alternating between training and held-out documents.
            pieces = np.split(part["tokens"], np.stack([bounds[held], bounds[held + 1]], 1).ravel())
            files["train"].write(np.concatenate(pieces[::2]), len(part["lengths"]) - len(held))
            if len(held):
                files["eval"].write(np.concatenate(pieces[1::2]), len(held))
            first += len(part["lengths"])
        entries = {name: file.entry(f"{name}.bin") for name, file in files.items()}
    if not entries["eval"]["documents"]:
        (output / "eval.bin").unlink()
        del entries["eval"]
    return entries


def _read_ahead(
    todo: list[Chunk], work: TokenWork, threads: Executor
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the chunks' tokens, while a thread reads the next chunk."""
    reading = threads.submit(work.arrays, todo[0].number)
    for following in todo[1:]:
        part = reading.result()
        reading = threads.submit(work.arrays, following.number)
        yield part
    yield reading.result()
