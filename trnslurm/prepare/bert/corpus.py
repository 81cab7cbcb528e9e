"""A tokenized corpus on disk: documents, their sentences, and the sentences' tokens."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare import wordpiece
from trnslurm.prepare.bert.settings import SampleSettings
from trnslurm.prepare.files import replacing
from trnslurm.prepare.text.documents import Chunk
from trnslurm.prepare.wordpiece import TOKEN, WordPieces
from trnslurm.prepare.workers import Work, read_arrays


@dataclass(frozen=True, kw_only=True)
class CorpusWork(Work[Chunk, bool]):
    """Tokenizes the sentences of a chunk."""

    tokenizer: Path
    settings: SampleSettings
    dtype: str

    def find(self, chunk: Chunk) -> bool | None:
        """Return True if an earlier run finished the chunk."""
        return read_arrays(self.path(chunk.number)) is not None or None

    def start(self) -> Callable[[Chunk], bool]:
        """Set up one worker; return the function that does its work."""
        pieces = wordpiece.load(self.tokenizer)
        return lambda chunk: self._tokenize(chunk, pieces)

    def _tokenize(self, chunk: Chunk, pieces: WordPieces) -> bool:
        """Write all tokens, and the numbers of tokens per sentence and sentences per document.

        Sentences and documents without tokens are left out.
        """
        tokens = [np.zeros(0, self.dtype)]
        lengths: list[int] = []
        documents: list[int] = []
        for batch in chunk.batches():
            split = [list(self.settings.split(text, chunk.lines.path)) for text in batch]
            encoded = pieces.encode([sentence for document in split for sentence in document])
            tokens.append(np.frombuffer(b"".join(encoded), TOKEN).astype(self.dtype))
            lengths += [len(sentence) // TOKEN.itemsize for sentence in encoded]
            left = iter(encoded)
            documents += [sum(map(bool, islice(left, len(document)))) for document in split]
        with replacing(self.path(chunk.number)) as stream:
            np.savez(
                stream,
                tokens=np.concatenate(tokens),
                sentences=np.array([count for count in lengths if count], np.int64),
                documents=np.array([count for count in documents if count], np.int64),
            )
        return True


class Corpus:
    """A corpus mapped into memory; only the parts that are read use memory."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._starts = _map(directory / "sentences.bin", "int64")
        self._documents = _map(directory / "documents.bin", "int64")
        self.tokens = _map(directory / "tokens.bin", dtype)
        self.num_documents = len(self._documents) - 1

    def starts(self, document: int) -> list[int]:
        """Return where a document's sentences start in the tokens, and where the last one ends."""
        first, end = self._documents[document : document + 2]
        starts: list[int] = self._starts[first : end + 1].tolist()
        return starts


def assemble(chunks: list[Chunk], work: CorpusWork, output: Path) -> None:
    """Join finished chunks into a corpus, in order; the output appears only when complete."""
    making = output.with_name(f"{output.name}.new")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    with (
        replacing(making / "tokens.bin") as tokens,
        replacing(making / "sentences.bin") as starts,
        replacing(making / "documents.bin") as documents,
    ):
        num_tokens = num_sentences = 0
        starts.write(np.zeros(1, np.int64).tobytes())
        documents.write(np.zeros(1, np.int64).tobytes())
        for chunk in chunks:
            arrays = work.arrays(chunk.number)
            tokens.write(arrays["tokens"].astype(work.dtype).tobytes())
            starts.write((num_tokens + np.cumsum(arrays["sentences"])).tobytes())
            documents.write((num_sentences + np.cumsum(arrays["documents"])).tobytes())
            num_tokens += len(arrays["tokens"])
            num_sentences += len(arrays["sentences"])
    making.rename(output)
    shutil.rmtree(work.directory)


def _map(path: Path, dtype: str) -> NDArray[Any]:
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")
