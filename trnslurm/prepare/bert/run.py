"""A preparation of BERT's shards, from its request to the finished directory."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from trnslurm.prepare import tokenizer, wordpiece, workers
from trnslurm.prepare.bert import corpus
from trnslurm.prepare.bert.corpus import Corpus, Form, Tokenizing
from trnslurm.prepare.bert.settings import SHORT_SHARE, Settings
from trnslurm.prepare.bert.shards import COMPRESSOR, Made, Shard, Sharding
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing
from trnslurm.prepare.prepared import FORMAT, Result, describe, make_once
from trnslurm.prepare.text.cutting import choose_chunk_bytes, cut, in_turn
from trnslurm.prepare.text.documents import Rule
from trnslurm.prepare.text.sources import Found, read_through

# Text per shard, if their number is not set: WikiCorpus makes about a thousand.
_SHARD_BYTES = 16_000_000
_FILE_WORDS = {"train": "training", "eval": "test"}
VERSIONS = {"tokenizers": tokenizer.VERSION, "numpy": np.__version__, "h5py": h5py.__version__}
VERSIONS |= COMPRESSOR  # it decides the files' bytes


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to prepare, and where."""

    output: Path
    files: list[Found]
    rule: Rule
    form: Form
    tokenizer: str
    settings: Settings
    shards: int | None
    """None: by the size of the text."""
    test_shards: int
    holdout: float
    """The share of the documents that goes to test shards."""
    processes: int
    chunk_bytes: int | None
    """None: small enough to keep all processes busy, and large enough not to be too many."""
    force: bool


def prepare(request: Request) -> Result:
    """Make shards, unless they are there."""
    name = request.tokenizer
    if tokenizer.trained_size(name, wordpiece.LEAST) is None:
        path = tokenizer.find(name)
        wordpiece.load(path)  # its errors come before the reading
        name = describe(path)["sha256"]
    sources = read_through(request.files)
    shards = request.shards or -(-sum(source.bytes for source in sources) // _SHARD_BYTES)
    wanted = {
        "sources": [source.as_json() for source in sources],
        "made": {
            "tokenizer": name,
            "documents": request.rule.as_json(),
            **asdict(request.form),
            **asdict(request.settings),
            "short_share": SHORT_SHARE,
            "shards": shards,
            "test_shards": request.test_shards,
            "holdout": request.holdout if request.test_shards else 0.0,
        },
    }
    chunk_bytes = request.chunk_bytes or choose_chunk_bytes(sources)
    return make_once(
        request.output,
        wanted,
        [wanted, VERSIONS, chunk_bytes],
        lambda directory: _make(request, wanted, shards, chunk_bytes, directory),
        force=request.force,
    )


def _make(
    request: Request, wanted: dict[str, Any], shards: int, chunk_bytes: int, directory: Path
) -> dict[str, Any]:
    """Make the shards in directory/finished, from what earlier runs left in the directory."""
    tokenizer_file, dtype = _make_corpus(request, chunk_bytes, directory)
    splits = _make_shards(request, shards, tokenizer_file, dtype, directory)
    finished = directory / "finished"
    with replacing(finished / tokenizer.FILE) as stream:
        stream.write(tokenizer_file.read_bytes())
    return {
        "format": FORMAT,
        "kind": "bert_pretrain",
        "vocab_size": wordpiece.load(tokenizer_file).vocab_size,
        "seq_len": request.settings.seq_len,
        "max_pred": request.settings.max_pred,
        "tokenizer": describe(finished / tokenizer.FILE)
        | {"name": tokenizer.short_name(request.tokenizer)},
        "splits": splits,
        "sources": wanted["sources"],
        "made": wanted["made"] | {"by": "trnslurm.prepare"} | VERSIONS,
    }


def _make_corpus(request: Request, chunk_bytes: int, directory: Path) -> tuple[Path, str]:
    """Tokenize all text, unless that is done; return the tokenizer and the type of the tokens."""
    form, output = request.form, directory / "corpus"
    chunks = cut(request.files, request.rule, chunk_bytes, directory)

    def sentences(what: str) -> Iterator[str]:
        return (text for chunk in in_turn(chunks, what) for text in form.sentences(chunk))

    tokenizer_file = tokenizer.keep(
        request.tokenizer,
        directory,
        lambda size: wordpiece.train(sentences, size, request.processes),
    )
    dtype = tokenizer.dtype_for(wordpiece.load(tokenizer_file).vocab_size)
    if not output.exists():
        finished = directory / "chunks"
        work = Tokenizing(directory=finished, tokenizer=tokenizer_file, form=form, dtype=dtype)
        workers.finish(chunks, work, request.processes)
        corpus.assemble(chunks, finished, output, dtype)
    return tokenizer_file, dtype


def _make_shards(
    request: Request, shards: int, tokenizer_file: Path, dtype: str, directory: Path
) -> dict[str, Any]:
    """Make all shards; return the splits' entries in the index."""
    todo, num_documents = _deal(request, shards, dtype, directory)
    finished, notes = directory / "finished", directory / "notes"
    notes.mkdir(exist_ok=True)
    finished.mkdir(exist_ok=True)
    for path in finished.glob(".*.tmp-*"):  # what a killed run was writing
        path.unlink()
    work = Sharding(
        directory=finished,
        notes=notes,
        corpus=directory / "corpus",
        order=directory / "order.npy",
        tokenizer=tokenizer_file,
        dtype=dtype,
        settings=request.settings,
    )
    made = workers.finish(todo, work, request.processes)
    splits = {}
    for split in dict.fromkeys(shard.split for shard in todo):
        parts = [part for shard, part in zip(todo, made, strict=True) if shard.split == split]
        splits[split] = {"documents": num_documents[split]} | _join(parts, split, finished)
    return splits


def _deal(
    request: Request, shards: int, dtype: str, directory: Path
) -> tuple[list[Shard], dict[str, int]]:
    """Deal the documents out in random order, one to each shard of a split in turn."""
    total = Corpus(directory / "corpus", dtype).num_documents
    held_out = _hold_out(total, request.holdout, shards, request.test_shards)
    counts = {"train": total - held_out, "eval": held_out}
    numbers = np.random.default_rng([*f"{request.settings.seed} order".encode()])
    with replacing(directory / "order.npy") as stream:
        np.save(stream, np.argsort(numbers.random(total), kind="stable"))
    todo = []
    for split, number, first, end in (
        ("train", shards, held_out, total),
        ("eval", request.test_shards, 0, held_out),
    ):
        for place in range(number):
            name = f"bert_{_FILE_WORDS[split]}_{place:05}.hdf5"
            todo.append(Shard(split=split, name=name, first=first + place, end=end, step=number))
    return todo, counts


def _hold_out(total: int, share: float, shards: int, test_shards: int) -> int:
    """Return how many documents go to test shards: their share, but at least two for each shard."""
    asked = f"--shards {shards}" + (f" --test-shards {test_shards}" if test_shards else "")
    if total < 2 * (shards + test_shards):
        raise PrepareError(
            f"{asked}: too few documents ({total}) to have two in each, as pairs need: ask for "
            "fewer, or use another --document-per"
        )
    wanted = max(round(total * share), 2 * test_shards) if test_shards else 0
    return min(wanted, total - 2 * shards)


def _join(parts: list[Made], split: str, output: Path) -> dict[str, Any]:
    """Return a split's entry in the index; write its samples' counts of masked tokens.

    Training divides its loss by the masked tokens of a whole step, which it must know beforehand.
    """
    path = output / f"bert_{_FILE_WORDS[split]}_masked_tokens.bin"
    with replacing(path) as stream:
        for part in parts:
            stream.write(part.masked.astype("<u2").tobytes())
    entries = [part.entry for part in parts]
    totals = {
        key: sum(entry[key] for entry in entries)
        for key in ("samples", "masked_tokens", "random_next")
    }
    return totals | {"masked_tokens_per_sample": describe(path), "shards": entries}
