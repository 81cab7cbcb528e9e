"""Shards for BERT's pretraining, from the input text to the entries of the index."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

from trnslurm.prepare import arguments, tokenizer, wordpiece, workers
from trnslurm.prepare.bert import corpus, wikiextractor
from trnslurm.prepare.bert.corpus import Corpus, CorpusWork
from trnslurm.prepare.bert.settings import SHORT_SHARE, SampleSettings
from trnslurm.prepare.bert.shards import COMPRESSOR, FinishedShard, ShardPart, ShardWork
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.pipeline import Preparation
from trnslurm.prepare.prepared import describe
from trnslurm.prepare.progress import in_turn
from trnslurm.prepare.text.documents import Rule, cut
from trnslurm.prepare.text.sources import TEXT_OPTION, InputFile, Source, dataset_files
from trnslurm.prepare.wordpiece import WordPieces

HOLDOUT = 0.005
# Text per shard without --shards: Wikipedia becomes about a thousand shards.
_SHARD_BYTES = 16_000_000
_FILE_WORDS = {"train": "training", "eval": "test"}


class BertPreparation(Preparation):
    """Turns text into shards of samples for BERT's pretraining."""

    kind: ClassVar = {"kind": "bert_pretrain"}
    # The compressor determines the bytes of the shards.
    versions: ClassVar = {
        "tokenizers": tokenizer.VERSION,
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        **COMPRESSOR,
    }
    least_tokens = wordpiece.LEAST
    resumes_finished = True

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        _find_articles(given)
        self._holdout = HOLDOUT if given.holdout is None else given.holdout
        if not self._holdout:
            raise PrepareError(f"--holdout {self._holdout}: must be more than 0 and less than 1")
        given.articles = given.wikiextractor is not None
        names = (field.name for field in fields(SampleSettings))
        self._settings = SampleSettings(**{name: getattr(given, name) for name in names})
        self._settings.check()
        self.files, self._rule = _source(given)
        self.tokenizer = arguments.source_tokenizer(given)
        self._shards: int = given.shards or 0
        self._test_shards: int = given.test_shards

    def load_tokenizer(self, path: Path) -> WordPieces:
        """Load a WordPiece tokenizer."""
        return wordpiece.load(path)

    def settings(self, sources: list[Source]) -> dict[str, Any]:
        """Return the settings that determine the shards."""
        size = sum(source["bytes"] for source in sources)
        self._shards = self._shards or -(-size // _SHARD_BYTES)
        return {
            "documents": self._rule.as_json(),
            **asdict(self._settings),
            "short_share": SHORT_SHARE,
            "shards": self._shards,
            "test_shards": self._test_shards,
            "holdout": self._holdout if self._test_shards else 0.0,
        }

    def make(
        self, directory: Path, finished: Path, chunk_bytes: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Write the shards."""
        tokenizer_file, dtype = self._make_corpus(chunk_bytes, directory)
        splits = self._make_shards(tokenizer_file, dtype, directory)
        first = {
            "vocab_size": wordpiece.load(tokenizer_file).vocab_size,
            "seq_len": self._settings.seq_len,
            "max_pred": self._settings.max_pred,
        }
        return first, splits, {}

    @staticmethod
    def summary(index: dict[str, Any]) -> str:
        """Return the numbers of samples, documents and shards."""
        splits = [
            f"{name} {entry['samples']:,} samples from {entry['documents']:,} documents in "
            f"{len(entry['shards']):,} shards"
            for name, entry in index["splits"].items()
        ]
        return f"{', '.join(splits)}, vocabulary {index['vocab_size']:,}"

    def _make_corpus(self, chunk_bytes: int, directory: Path) -> tuple[Path, str]:
        """Tokenize the text, unless that is done; return the tokenizer and the tokens' type."""
        output = directory / "corpus"
        chunks = cut(self.files, self._rule, chunk_bytes, directory)

        def sentences(what: str) -> Iterator[str]:
            return (
                text for chunk in in_turn(chunks, what) for text in self._settings.sentences(chunk)
            )

        tokenizer_file = tokenizer.keep(
            self.tokenizer,
            directory,
            lambda size: wordpiece.train(sentences, size, self.processes),
        )
        dtype = tokenizer.dtype_for(wordpiece.load(tokenizer_file).vocab_size)
        if not output.exists():
            work = CorpusWork(
                directory=directory / "chunks",
                tokenizer=tokenizer_file,
                settings=self._settings,
                dtype=dtype,
            )
            workers.finish(chunks, work, self.processes)
            corpus.assemble(chunks, work, output)
        return tokenizer_file, dtype

    def _make_shards(self, tokenizer_file: Path, dtype: str, directory: Path) -> dict[str, Any]:
        """Make all shards; return the splits' entries in the index."""
        todo, num_documents = self._deal(dtype, directory)
        finished, notes = directory / "finished", directory / "notes"
        notes.mkdir(exist_ok=True)
        for path in finished.glob(".*.tmp-*"):  # left by a killed run
            path.unlink()
        work = ShardWork(
            directory=finished,
            notes=notes,
            corpus=directory / "corpus",
            order=directory / "order.npy",
            tokenizer=tokenizer_file,
            dtype=dtype,
            settings=self._settings,
        )
        made = workers.finish(todo, work, self.processes)
        splits = {}
        for split in dict.fromkeys(shard.split for shard in todo):
            parts = [part for shard, part in zip(todo, made, strict=True) if shard.split == split]
            splits[split] = {"documents": num_documents[split]} | _join(parts, split, finished)
        return splits

    def _deal(self, dtype: str, directory: Path) -> tuple[list[ShardPart], dict[str, int]]:
        """Deal out the documents in random order, one to each shard of a split in turn."""
        total = Corpus(directory / "corpus", dtype).num_documents
        held_out = _hold_out(total, self._holdout, self._shards, self._test_shards)
        counts = {"train": total - held_out, "eval": held_out}
        numbers = np.random.default_rng([*f"{self._settings.seed} order".encode()])
        with replacing(directory / "order.npy") as stream:
            np.save(stream, np.argsort(numbers.random(total), kind="stable"))
        todo = []
        for split, number, first, end in (
            ("train", self._shards, held_out, total),
            ("eval", self._test_shards, 0, held_out),
        ):
            for place in range(number):
                name = f"bert_{_FILE_WORDS[split]}_{place:05}.hdf5"
                todo.append(
                    ShardPart(split=split, name=name, first=first + place, end=end, step=number)
                )
        return todo, counts


start = BertPreparation


def _find_articles(given: argparse.Namespace) -> None:
    """Move --text to --wikiextractor if it names WikiExtractor's output."""
    theirs = [path for path in given.text or () if wikiextractor.is_output(path)]
    if not theirs:
        return
    if others := [str(path) for path in given.text if path not in theirs]:
        raise PrepareError(
            f"{TEXT_OPTION} {others[0]} is not WikiExtractor output, but {theirs[0]} is: "
            "prepare them separately"
        )
    given.text, given.wikiextractor = None, theirs


def _source(given: argparse.Namespace) -> tuple[list[InputFile], Rule]:
    """Return the input files, and where their documents begin and end."""
    if given.text:
        files = arguments.own_text(given.text)
        return files, arguments.rule(given, files)
    if given.dataset:
        # Test shards are held out from the training split, whatever other splits exist.
        files = [file for file in dataset_files(given.dataset) if file.split == "train"]
        return files, arguments.rule(given, files)
    for name in ("document_per", "document_start", "column", "wrapped"):
        if getattr(given, name):
            option = f"--{name.replace('_', '-')}"
            raise PrepareError(f"remove {option}, because WikiExtractor's files mark documents")
    return wikiextractor.article_files(given.wikiextractor), wikiextractor.RULE


def _hold_out(total: int, share: float, shards: int, test_shards: int) -> int:
    """Return how many documents go to test shards: their share, at least two per shard."""
    asked = f"--shards {shards}" + (f" --test-shards {test_shards}" if test_shards else "")
    if total < 2 * (shards + test_shards):
        raise PrepareError(
            f"{asked}: too few documents ({total}). Each shard needs two for sentence pairs: use "
            "fewer shards, or another --document-per"
        )
    wanted = max(round(total * share), 2 * test_shards) if test_shards else 0
    return min(wanted, total - 2 * shards)


def _join(parts: list[FinishedShard], split: str, output: Path) -> dict[str, Any]:
    """Return a split's entry in the index; write the number of masked tokens of each sample.

    Training divides a step's loss by the step's masked tokens, so it must know their number in
    advance.
    """
    path = output / f"bert_{_FILE_WORDS[split]}_masked_tokens.bin"
    with replacing(path) as stream:
        for _, masked in parts:
            stream.write(masked.astype("<u2").tobytes())
    entries = [entry for entry, _ in parts]
    totals = {
        key: sum(entry[key] for entry in entries)
        for key in ("samples", "masked_tokens", "random_next")
    }
    return totals | {"masked_tokens_per_sample": describe(path), "shards": entries}
