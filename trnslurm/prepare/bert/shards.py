"""Shards: HDF5 files of samples, as NVIDIA's and AWS's pretraining scripts read them."""

import hashlib
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare import wordpiece
from trnslurm.prepare.bert.corpus import Corpus
from trnslurm.prepare.bert.pairs import RANDOM_NEXT, make_pairs
from trnslurm.prepare.bert.samples import make_samples
from trnslurm.prepare.bert.settings import SampleSettings
from trnslurm.prepare.files import replacing
from trnslurm.prepare.prepared import describe
from trnslurm.prepare.wordpiece import WordPieces
from trnslurm.prepare.workers import Work, read_arrays

# libdeflate, if it is installed: HDF5's zlib takes twice as long and its files are 5%
# larger. libdeflate makes the same bytes from the same samples
# (github.com/ebiggers/libdeflate/issues/400); Intel's igzip is faster, but its bytes sometimes
# differ between processes.
_deflate: Any = importlib.import_module("deflate") if importlib.util.find_spec("deflate") else None
COMPRESSOR: dict[str, str] = {"deflate": _deflate.__version__} if _deflate else {}
# As fast as level 1; higher levels are slower.
_LEVEL = 2
# The type of each array, as in NVIDIA's create_pretraining_data.py.
DTYPES = {
    "input_ids": "i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "i4",
    "masked_lm_ids": "i4",
    "next_sentence_labels": "i1",
}
# Samples that are compressed, and so read, together. They are few, for random reads. HDF5's
# default would cut samples into pieces.
_ROWS_TOGETHER = 128
_ROWS_AT_ONCE = 8 * _ROWS_TOGETHER


@dataclass(frozen=True, kw_only=True)
class ShardPart:
    """A shard to make: every step-th document of an order, from first to end."""

    split: str
    name: str
    first: int
    end: int
    step: int
    size: int = 1


FinishedShard = tuple[dict[str, Any], NDArray[np.uint16]]
"""The shard's entry in the index, and the number of masked tokens of each sample."""


@dataclass(frozen=True, kw_only=True)
class ShardWork(Work[ShardPart, FinishedShard]):
    """The work on a shard."""

    name: ClassVar = "sharding"
    unit: ClassVar = "shards"

    notes: Path
    """The directory with the facts about each shard."""
    corpus: Path
    order: Path
    """The documents' numbers in random order."""
    tokenizer: Path
    dtype: str
    settings: SampleSettings

    def find(self, shard: ShardPart) -> FinishedShard | None:
        """Return the shard that an earlier run made, if it is complete."""
        path = self.directory / shard.name
        notes = read_arrays(self._notes_of(shard))
        if notes is None or not path.is_file():
            return None
        found = describe(path)
        if found["sha256"] != notes["sha256"].item():
            return None
        return found | _count(notes["masked"], notes["random_next"].item()), notes["masked"]

    def start(self) -> Callable[[ShardPart], FinishedShard]:
        """Set up one worker; return the function that does its work."""
        pieces = wordpiece.load(self.tokenizer)
        corpus = Corpus(self.corpus, self.dtype)
        order = np.load(self.order, mmap_mode="r", allow_pickle=False)
        return lambda shard: self._make(shard, corpus, order, pieces)

    def _make(
        self, shard: ShardPart, corpus: Corpus, order: NDArray[np.int64], pieces: WordPieces
    ) -> FinishedShard:
        documents = order[shard.first : shard.end : shard.step].tolist()
        seed = f"{self.settings.seed} {shard.name}"
        pairs = make_pairs(corpus, documents, self.settings, seed)
        numbers = np.random.default_rng([*f"{seed} masks".encode()])
        masked = np.zeros(len(pairs), np.uint16)
        data = io.BytesIO()
        with h5py.File(data, "w") as file:
            arrays = {
                name: _create(file, name, dtype, len(pairs), self.settings)
                for name, dtype in DTYPES.items()
            }
            for first in range(0, len(pairs), _ROWS_AT_ONCE):
                rows = slice(first, first + _ROWS_AT_ONCE)
                samples = make_samples(corpus, pairs[rows], pieces, self.settings, numbers)
                for name, values in samples.items():
                    _write(arrays[name], first, values)
                masked[rows] = np.count_nonzero(samples["masked_lm_positions"], axis=1)
        random_next = int(pairs[:, RANDOM_NEXT].sum())
        sha256 = hashlib.sha256(data.getbuffer()).hexdigest()
        # The notes come first, so that a shard that exists is finished.
        with replacing(self._notes_of(shard)) as stream:
            np.savez(stream, sha256=sha256, masked=masked, random_next=random_next)
        with replacing(self.directory / shard.name) as stream:
            stream.write(data.getbuffer())
        entry = {"file": shard.name, "bytes": data.getbuffer().nbytes, "sha256": sha256}
        return entry | _count(masked, random_next), masked

    def _notes_of(self, shard: ShardPart) -> Path:
        return self.notes / f"{shard.name}.npz"


def _create(
    file: h5py.File, name: str, dtype: str, samples: int, settings: SampleSettings
) -> h5py.Dataset:
    widths = {"masked_lm_positions": settings.max_pred, "masked_lm_ids": settings.max_pred}
    columns = () if name == "next_sentence_labels" else (widths.get(name, settings.seq_len),)
    return file.create_dataset(
        name,
        (samples, *columns),
        dtype,
        chunks=(min(samples, _ROWS_TOGETHER), *columns),
        compression="gzip",
    )


def _write(dataset: h5py.Dataset, first: int, values: NDArray[Any]) -> None:
    """Write rows that begin at a chunk. Every chunk except the dataset's last one is full."""
    if _deflate is None:
        dataset[first : first + len(values)] = values
        return
    values, together = values.astype(dataset.dtype), dataset.chunks[0]
    for place in range(0, len(values), together):
        chunk = values[place : place + together]
        if len(chunk) < together:  # the format stores the last chunk at full size
            chunk = np.concatenate(
                [chunk, np.zeros((together - len(chunk), *chunk.shape[1:]), chunk.dtype)]
            )
        offset = (first + place, *(0 for _ in chunk.shape[1:]))
        dataset.id.write_direct_chunk(offset, _deflate.zlib_compress(chunk, _LEVEL))


def _count(masked: NDArray[np.uint16], random_next: int) -> dict[str, int]:
    return {
        "samples": len(masked),
        "masked_tokens": int(masked.sum()),
        "random_next": random_next,
    }
