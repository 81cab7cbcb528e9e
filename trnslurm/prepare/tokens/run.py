"""A preparation of token files, from its request to the finished directory."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnslurm.prepare import tokenizer, workers
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.prepared import FORMAT, Result, describe, make_once
from trnslurm.prepare.text.cutting import choose_chunk_bytes, cut, in_turn
from trnslurm.prepare.text.documents import Rule
from trnslurm.prepare.text.sources import Found, read_through
from trnslurm.prepare.tokens.assemble import write_splits
from trnslurm.prepare.tokens.tokenizing import Tokenizing


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to prepare, and where."""

    output: Path
    files: list[Found]
    rule: Rule
    tokenizer: str
    end_of_text: str
    """Empty: the tokenizer's default."""
    holdout: float
    processes: int
    chunk_bytes: int | None
    """None: small enough to keep all processes busy, and large enough not to be too many."""
    force: bool


def prepare(request: Request) -> Result:
    """Make prepared data, unless it is there."""
    made = _made(request)  # first: the tokenizer's errors come before the reading
    sources = read_through(request.files)
    wanted = {"sources": [source.as_json() for source in sources], "made": made}
    chunk_bytes = request.chunk_bytes or choose_chunk_bytes(sources)
    # Documents are held out after tokenizing, so another share can use the same work.
    decisive = made | {"holdout": None, "tokenizers": tokenizer.VERSION}
    return make_once(
        request.output,
        wanted,
        [wanted["sources"], decisive, chunk_bytes],
        lambda directory: _make(request, wanted, chunk_bytes, directory),
        force=request.force,
    )


def _made(request: Request) -> dict[str, Any]:
    """Return what decides the result besides the sources, as far as it is known beforehand."""
    name = request.tokenizer
    if tokenizer.trained_size(name) is None:
        path = tokenizer.find(name)
        tokenizer.load(path, request.end_of_text)
        name = describe(path)["sha256"]
    elif request.end_of_text not in ("", tokenizer.END_OF_TEXT):
        raise PrepareError(
            f"--end-of-text {request.end_of_text}: a trained tokenizer has no such token, "
            f"only {tokenizer.END_OF_TEXT}: leave it out"
        )
    return {
        "tokenizer": name,
        "end_of_text": request.end_of_text,
        "documents": request.rule.as_json(),
        "holdout": request.holdout,
    }


def _make(
    request: Request, wanted: dict[str, Any], chunk_bytes: int, directory: Path
) -> dict[str, Any]:
    """Make the data in directory/finished, from what earlier runs left in the directory."""
    todo = cut(request.files, request.rule, chunk_bytes, directory)
    chunks = in_turn(todo, "training the tokenizer")
    documents = (document for chunk in chunks for document in chunk.documents())
    tokenizer_file = tokenizer.keep(
        request.tokenizer,
        directory,
        lambda size: tokenizer.train(documents, size, request.processes),
    )
    loaded = tokenizer.load(tokenizer_file, request.end_of_text)
    dtype = tokenizer.dtype_for(loaded.vocab_size)
    work = Tokenizing(
        directory=directory / "chunks",
        tokenizer=tokenizer_file,
        end_of_text=request.end_of_text,
        dtype=dtype,
    )
    counts = workers.finish(todo, work, request.processes)
    finished = directory / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    splits = write_splits(todo, counts, work.directory, finished, request.holdout)
    with replacing(finished / tokenizer.FILE) as stream:
        stream.write(tokenizer_file.read_bytes())
    name = tokenizer.short_name(request.tokenizer)
    return {
        "format": FORMAT,
        "vocab_size": loaded.vocab_size,
        "dtype": dtype,
        "end_of_text": loaded.end_of_text,
        "tokenizer": describe(finished / tokenizer.FILE) | {"name": name},
        "splits": splits,
        "sources": wanted["sources"],
        "made": wanted["made"] | {"by": "trnslurm.prepare", "tokenizers": tokenizer.VERSION},
    }
