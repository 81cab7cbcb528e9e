"""A preparation from its request to the finished directory."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnslurm.prepare import assemble, tables, tokenizer, workers
from trnslurm.prepare.chunks import Chunk
from trnslurm.prepare.documents import JSON_LINES, Lines, Rule
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import partial, publish, replacing
from trnslurm.prepare.progress import Progress
from trnslurm.prepare.sources import TABLES, Found, read_through

# Ids below this fit two bytes.
_LARGEST_UINT16 = 65535
_MOST_CHUNKS = 4096


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be prepared, and where."""

    output: Path
    files: list[Found]
    rule: Rule
    tokenizer: str
    end_of_text: str
    """Empty: the tokenizer's usual one."""
    holdout: float
    processes: int
    chunk_bytes: int | None
    """None: small enough to keep everyone busy, and not too many."""
    force: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """Prepared data, and whether this run made it."""

    output: Path
    made: bool
    index: dict[str, Any]


def prepare(request: Request) -> Result:
    """Make prepared data, unless it is there."""
    wanted = _wanted(request)
    if (found := _finished(request, wanted)) is not None:
        return Result(output=request.output, made=False, index=found)
    # The share held out is decided when all is tokenized, so another one can use the same work.
    decisive = wanted["made"] | {"holdout": None, "tokenizers": tokenizer.VERSION}
    chunk_bytes = request.chunk_bytes or _chunk_bytes(sum(s["bytes"] for s in wanted["sources"]))
    parts = [wanted["sources"], decisive, chunk_bytes]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    with partial(request.output, key) as directory:
        index = _make(request, wanted, chunk_bytes, directory)
        publish(directory / "finished", request.output)
    return Result(output=request.output, made=True, index=index)


def _wanted(request: Request) -> dict[str, Any]:
    """Give what decides the result: the parts of an index that are known beforehand."""
    name = request.tokenizer
    if tokenizer.trained_size(name) is None:
        path = tokenizer.find(name)
        tokenizer.load(path, request.end_of_text)  # its errors should come before the reading
        name = assemble.describe(path)["sha256"]
    return {
        "sources": [source.as_json() for source in read_through(request.files)],
        "made": {
            "tokenizer": name,
            "end_of_text": request.end_of_text,
            "documents": request.rule.as_json(),
            "holdout": request.holdout,
        },
    }


def _finished(request: Request, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Give the index of data that is there, whole and as wanted; refuse to replace any other."""
    output = request.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    index = assemble.read_index(output)
    if index is None:
        raise PrepareError(f"{output}: is there, and is no prepared data: choose another name")
    if request.force:
        return None
    if differing := _differences(index, wanted):
        raise PrepareError(
            f"{output}: was prepared from other input ({'; '.join(differing)}): choose another "
            "name, or replace it with --force"
        )
    if damaged := assemble.find_damage(output, index):
        raise PrepareError(f"{output}: {damaged} is damaged: make it again with --force")
    return index


def _differences(index: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    differing = [
        f"{key} was {_short(index['made'].get(key))}, is {_short(value)}"
        for key, value in wanted["made"].items()
        if index["made"].get(key) != value
    ]
    before, now = ({s["name"]: s for s in part["sources"]} for part in (index, wanted))
    differing += [f"{name} is new" for name in now.keys() - before.keys()]
    differing += [f"{name} is gone" for name in before.keys() - now.keys()]
    differing += [f"{n} has changed" for n in now.keys() & before.keys() if now[n] != before[n]]
    if not differing and index["sources"] != wanted["sources"]:
        differing.append("other files, or in another order")
    return sorted(differing)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    # The beginning is enough of a checksum.
    return text[:12] if len(text) == 64 else text or "(none)"


def _chunk_bytes(total: int) -> int:
    # Not by the number of processes: a run with another number can go on with the same chunks.
    return min(max(total // _MOST_CHUNKS, 1 << 20), 64 << 20)


def _make(
    request: Request, wanted: dict[str, Any], chunk_bytes: int, directory: Path
) -> dict[str, Any]:
    """Make the data in directory/finished, from what earlier runs left in the directory."""
    lines = _open_files(request, directory)
    todo = _cut(lines, chunk_bytes)
    tokenizer_file = _get_tokenizer(request, todo, directory)
    loaded = tokenizer.load(tokenizer_file, request.end_of_text)
    dtype = "uint16" if loaded.vocab_size <= _LARGEST_UINT16 else "uint32"
    work = workers.Work(
        directory=directory / "chunks",
        tokenizer=tokenizer_file,
        end_of_text=request.end_of_text,
        dtype=dtype,
    )
    counts = workers.tokenize(todo, work, request.processes)
    finished = directory / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    splits = assemble.write_splits(todo, counts, work.directory, finished, request.holdout)
    with replacing(finished / tokenizer.FILE) as stream:
        stream.write(tokenizer_file.read_bytes())
    name = tokenizer.short_name(request.tokenizer)
    index = {
        "format": assemble.FORMAT,
        "vocab_size": loaded.vocab_size,
        "dtype": dtype,
        "end_of_text": loaded.end_of_text,
        "tokenizer": assemble.describe(finished / tokenizer.FILE) | {"name": name},
        "splits": splits,
        "sources": wanted["sources"],
        "made": wanted["made"] | {"by": "trnslurm.prepare", "tokenizers": tokenizer.VERSION},
    }
    assemble.write_index(finished, index)
    return index


def _open_files(request: Request, directory: Path) -> list[tuple[str, Lines]]:
    """Give the split and the lines of each file; tables are unpacked first."""
    opened = []
    for number, file in enumerate(request.files):
        path = file.path
        if path.suffix in TABLES:
            path = directory / f"{number:05}{JSON_LINES}"
            if not path.exists():
                tables.unpack(file.path, request.rule.column, path)
        opened.append((file.split, Lines(path=path.absolute(), rule=request.rule)))
    return opened


def _cut(lines: list[tuple[str, Lines]], chunk_bytes: int) -> list[Chunk]:
    todo: list[Chunk] = []
    for split, file in lines:
        cuts = file.cuts(chunk_bytes)
        for first, end in itertools.pairwise(cuts):
            todo.append(Chunk(number=len(todo), split=split, lines=file, first=first, end=end))
    return todo


def _get_tokenizer(request: Request, todo: list[Chunk], directory: Path) -> Path:
    """Give the tokenizer.json to use, trained on all the text if that was asked for."""
    path = directory / tokenizer.FILE
    if path.exists():
        return path
    if size := tokenizer.trained_size(request.tokenizer):
        progress = Progress("training the tokenizer", sum(chunk.bytes for chunk in todo))
        data = tokenizer.train(_documents(todo, progress), size, request.processes)
        progress.finish()
    else:
        data = tokenizer.find(request.tokenizer).read_bytes()
    with replacing(path) as stream:
        stream.write(data)
    return path


def _documents(todo: list[Chunk], progress: Progress) -> Iterator[str]:
    done = 0
    for chunk in todo:
        yield from chunk.lines.documents(chunk.first, chunk.end)
        done += chunk.bytes
        progress.show(done)
