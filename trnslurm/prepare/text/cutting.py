"""Chunks: parts of the text that are worked on alone, cut between documents."""

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trnslurm.prepare.progress import Progress
from trnslurm.prepare.text import tables
from trnslurm.prepare.text.documents import JSON_LINES, Rule, TextFile
from trnslurm.prepare.text.sources import TABLES, InputFile, Source

_MOST_CHUNKS = 4096
# Characters per call of a tokenizer, whose answer takes some fifty times as much memory.
_BATCH_CHARACTERS = 500_000


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a file, cut between documents."""

    number: int
    split: str
    lines: TextFile
    first: int
    end: int

    @property
    def size(self) -> int:
        """Return the size of the text in bytes."""
        return self.end - self.first

    def documents(self) -> Iterator[str]:
        """Yield the documents, none of them blank."""
        return self.lines.documents(self.first, self.end)

    def batches(self) -> Iterator[list[str]]:
        """Yield the documents, as many at once as a tokenizer should get."""
        documents = list(self.documents())
        ends = list(itertools.accumulate(map(len, documents)))
        first = characters = 0
        while first < len(documents):
            end = bisect_left(ends, characters + _BATCH_CHARACTERS) + 1
            yield documents[first:end]
            first, characters = end, ends[min(end, len(ends)) - 1]


def choose_chunk_bytes(sources: list[Source]) -> int:
    """Return a size that keeps all processes busy without making too many chunks."""
    total = sum(source.bytes for source in sources)
    # Not by the number of processes: a run with another number resumes with the same chunks.
    return min(max(total // _MOST_CHUNKS, 1 << 20), 64 << 20)


def cut(files: list[InputFile], rule: Rule, chunk_bytes: int, directory: Path) -> list[Chunk]:
    """Cut the files into chunks; tables are first unpacked into the directory."""
    chunks: list[Chunk] = []
    for number, file in enumerate(files):
        path = file.path
        if path.suffix in TABLES:
            path = directory / f"{number:05}{JSON_LINES}"
            if not path.exists():
                tables.unpack(file.path, rule.column, path)
        lines = TextFile(path=path.absolute(), rule=rule.of(path))
        for first, end in itertools.pairwise(lines.cuts(chunk_bytes)):
            chunks.append(
                Chunk(number=len(chunks), split=file.split, lines=lines, first=first, end=end)
            )
    return chunks


def in_turn(chunks: list[Chunk], what: str) -> Iterator[Chunk]:
    """Yield the chunks in order, and show the progress."""
    progress = Progress(what, sum(chunk.size for chunk in chunks))
    done = 0
    for chunk in chunks:
        yield chunk
        done += chunk.size
        progress.show(done)
    progress.finish()
