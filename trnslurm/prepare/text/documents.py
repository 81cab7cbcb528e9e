"""Documents, which are made of lines or rows, and chunks, which are cut between documents."""

import functools
import io
import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import parse
from trnslurm.prepare.text import tables
from trnslurm.prepare.text.sources import TABLES, InputFile, Source

JSON_LINES = ".jsonl"
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
BY_FILE = "line of JSON lines, else blank-line"
"""The default for text and rows together."""
_MOST_CHUNKS = 4096
# Characters per tokenizer call. Its result uses about fifty times as much memory.
_BATCH_CHARACTERS = 500_000


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a file is cut into documents."""

    per: str
    """line (a line of text or a row), blank-line (a blank line ends a document), file, start (a
    matching line starts a document), or BY_FILE."""
    start: str = ""
    """The regular expression for a line that starts a document."""
    column: str = "text"
    """The key of a row's text in JSON lines."""

    def of(self, path: Path) -> "Rule":
        """Return the rule for one file."""
        if self.per != BY_FILE:
            return self
        return replace(self, per="line" if path.suffix == JSON_LINES else "blank-line")

    def as_json(self) -> dict[str, str]:
        """Return the rule as stored in the index."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file whose lines are text or, in JSON lines, rows with a text."""

    path: Path
    rule: Rule

    @functools.cached_property
    def _is_rows(self) -> bool:
        return self.path.suffix == JSON_LINES  # needed for each line, and slow to compute

    def text(self, line: bytes, offset: int) -> str | None:
        """Return the text of one line, or None for an empty line between rows."""
        if not self._is_rows:
            text = line.decode("utf-8")
            return text.removeprefix("\ufeff") if offset == 0 else text
        if not line.strip():
            return None
        try:
            row = parse(line)
        except ValueError as error:
            raise PrepareError(
                f"{self._line_at(offset)} is not valid JSON ({error}): each line must be a row"
            ) from None
        try:
            text = row[self.rule.column]
            if not isinstance(text, str):
                raise TypeError
            text.encode("utf-8")  # JSON can contain half a surrogate pair, which is not text
        except (ValueError, LookupError, TypeError):
            raise PrepareError(
                f"{self._line_at(offset)} is not a row with a text {self.rule.column!r}: choose "
                "another column with --column"
            ) from None
        # Rows that are documents are not changed.
        return text if self.rule.per == "line" or text.endswith("\n") else text + "\n"

    def _line_at(self, offset: int) -> str:
        return f"{self.path}: the line at byte {offset}"

    def documents(self, first: int, end: int) -> Iterator[str]:
        """Return the documents between two cuts, none of them blank."""
        with self.path.open("rb") as stream:
            stream.seek(first)
            data = stream.read(end - first)
        if self._is_rows or self.rule.per not in ("line", "blank-line"):
            found: Iterable[str] = _join(self._texts(data, first), self.rule)
        else:
            found = _split(self.text(data, first) or "", self.rule.per)
        return iter([text for text in found if text and not text.isspace()])

    def _texts(self, data: bytes, offset: int) -> Iterator[str]:
        # Lines of bytes end only at a line feed; str.splitlines knows many other ends.
        for line in io.BytesIO(data):
            text = self.text(line, offset)
            offset += len(line)
            if text is not None:
                yield text

    def cuts(self, chunk_bytes: int) -> list[int]:
        """Return the offsets, from 0 to the end, that cut the file between documents."""
        cuts = [0]
        with self.path.open("rb") as stream:
            size = stream.seek(0, io.SEEK_END)
            while cuts[-1] < size:
                cuts.append(self._next_cut(stream, cuts[-1] + chunk_bytes, size))
        return cuts

    def _next_cut(self, stream: BinaryIO, offset: int, size: int) -> int:
        if offset >= size or self.rule.per == "file":
            return size
        stream.seek(offset)
        stream.readline()  # the rest of a line
        starts = re.compile(self.rule.start)
        while True:
            here = stream.tell()
            line = stream.readline()
            if not line:
                return size
            text = self.text(line, here)
            if text is None:
                continue
            if self.rule.per == "blank-line":
                if not text.strip():
                    return stream.tell()
            elif self.rule.per == "line" or starts.search(text):
                return here


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
        """Yield lists of documents, each as long as a tokenizer should get at once."""
        documents = list(self.documents())
        ends = list(itertools.accumulate(map(len, documents)))
        first = characters = 0
        while first < len(documents):
            end = bisect_left(ends, characters + _BATCH_CHARACTERS) + 1
            yield documents[first:end]
            first, characters = end, ends[min(end, len(ends)) - 1]


def choose_chunk_bytes(sources: list[Source]) -> int:
    """Return a size that keeps all processes busy without making too many chunks."""
    total: int = sum(source["bytes"] for source in sources)
    # Independent of the number of processes, so that a run with another number resumes the same
    # chunks.
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


def _split(text: str, per: str) -> list[str]:
    """Return the lines or paragraphs of a text, without line ends."""
    # Only line feeds: str.splitlines knows many other ends.
    found = text.split("\n") if per == "line" else _BLANK_LINES.split(f"\n{text}\n")
    if per == "blank-line":
        found[0] = found[0].removeprefix("\n")
        found[-1] = found[-1].removesuffix("\n")
    if "\r" in text:
        found = [part.removesuffix("\r") for part in found]
    return found


def _join(texts: Iterable[str], rule: Rule) -> Iterator[str]:
    if rule.per == "line":
        yield from texts
        return
    starts = re.compile(rule.start)
    lines: list[str] = []
    for text in texts:
        blank_ends = rule.per == "blank-line" and not text.strip()
        if lines and (blank_ends or (rule.per == "start" and starts.search(text))):
            yield "".join(lines)
            lines = []
        if not blank_ends:
            lines.append(text)
    if lines:
        yield "".join(lines)
