"""JSON lines and WebDataset's tars: files that must be read once to find where the samples are.

How tar members form a sample is described at
https://github.com/webdataset/webdataset/blob/main/src/webdataset/tariterators.py, and the index of
shards at https://github.com/webdataset/webdataset/blob/main/src/wids/wids_specs.py.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.datasets.arrow import Stream, decompressed
from trnslurm.datasets.place import Place
from trnslurm.datasets.rows import Rows, Shards

SHARDS = "shardlist"
"""The key that only an index of tars has."""
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
"""A `.json` that is not compressed is often one list. A compressed one never is, by convention."""
_CODECS = {"gz": "gzip", "zst": "zstd"}
_OPEN = 32
_MOST_SAMPLE = 1 << 30
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")


class _Spans(Rows):
    """Rows that are each a byte range of a file. The ranges are kept in the cache."""

    def __init__(self, place: Place, names: list[str], counts: list[int] | None = None) -> None:
        super().__init__(place, names)
        self._known: dict[int, NDArray[np.int64]] = {}
        if counts is None:
            counts = [len(self._spans(shard)) for shard in range(len(names))]
        self.shards = Shards(counts)
        self._counts = counts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def _scan(self, name: str) -> list[tuple[int, int]] | NDArray[np.int64]:
        """Return the start and end of each row in a file."""
        raise NotImplementedError

    def _spans(self, shard: int) -> NDArray[np.int64]:
        if shard not in self._known:
            name = self.files[shard]

            def make() -> bytes:
                found = np.asarray(self._scan(name), np.int64).reshape(-1, 2).tobytes()
                return found or b"\0"  # a file without samples has no pairs

            data = self.place.cache.map(self.place.key(name, self.kind), make)
            self._known[shard] = np.frombuffer(data[: len(data) // 16 * 16], np.int64).reshape(
                -1, 2
            )
        return self._known[shard]

    def _span(self, number: int) -> tuple[str, bytes]:
        shard, inside = self.shards.at(number)
        name, spans = self.files[shard], self._spans(shard)
        if len(spans) != self._counts[shard]:
            raise self.place.error(name, f"damaged: has {len(spans):,} samples, but its index says "
                                   f"{self._counts[shard]:,}")  # fmt: skip
        start, end = spans[inside].tolist()
        if end - start > _MOST_SAMPLE:
            raise self.place.error(name, f"one sample is {end - start:,} bytes, which is too large")
        return name, bytes(self._read(name, start, end - start))

    def _read(self, name: str, start: int, length: int) -> Any:
        return self.place.read(name, start, length)


class Lines(_Spans):
    """Files with one JSON object per line, plain or compressed.

    A compressed file is decompressed once per node, into the cache.
    """

    kind = "JSON lines"

    def __init__(self, place: Place, names: list[str]) -> None:
        self._plain: OrderedDict[str, Any] = OrderedDict()
        super().__init__(place, names)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_plain": OrderedDict()}

    def row(self, number: int) -> dict[str, Any]:
        name, line = self._span(number)
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.place.error(name, f"a line is not valid JSON: {str(error)[:100]}") from None
        if not isinstance(found, dict):
            raise self.place.error(name, "a line is not a JSON object")
        return found

    def _scan(self, name: str) -> NDArray[np.int64]:
        ends, done = [], 0
        for chunk in [self._whole(name)] if _codec(name) else self.place.chunks(name):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + done)
            done += len(chunk)
        stops = np.concatenate([*ends, [done]])
        starts = np.concatenate([[0], stops[:-1] + 1])
        filled = stops - starts > 1  # an empty line, even with a Windows line end, is not a sample
        return np.stack([starts[filled], stops[filled]], axis=1)

    def _read(self, name: str, start: int, length: int) -> Any:
        if _codec(name):
            return self._whole(name)[start : start + length]
        return super()._read(name, start, length)

    def _whole(self, name: str) -> Any:
        """Return a decompressed file."""
        if name not in self._plain:
            place = self.place

            def make() -> Any:
                data = b"".join(place.chunks(name))
                try:
                    return decompressed(data, _codec(name), place.cache.limit)
                except ValueError as error:
                    raise place.error(name, f"damaged, or larger than the cache: {error}") from None

            self._plain[name] = place.cache.map(place.key(name, "plain"), make)
            if len(self._plain) > _OPEN:
                self._plain.popitem(last=False)
        return self._plain[name]


def _codec(name: str) -> str:
    return _CODECS.get(name.rpartition(".")[2], "")


class Tars(_Spans):
    """WebDataset's tars: members that share a name up to the first dot are one sample's columns."""

    kind = "WebDataset"
    md5: Mapping[str, str] = {}
    """The MD5 sums of the tars that have one in the index."""

    def row(self, number: int) -> dict[str, Any]:
        name, data = self._span(number)
        sample: dict[str, Any] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                for member in tar:
                    if found := _key(member):
                        file = tar.extractfile(member)
                        assert file is not None
                        sample |= {"__key__": found[0], found[1]: file.read()}
        except (tarfile.TarError, OSError, ValueError) as error:
            raise self.place.error(name, f"damaged ({error})") from None
        return sample

    def _scan(self, name: str) -> list[tuple[int, int]]:
        if name in self.md5:
            self.place.check(name, {"md5": self.md5[name]})
        spans: list[tuple[int, int]] = []
        key, end = None, 0
        try:
            stream: Any = io.BufferedReader(Stream(self.place, name), 4096)
            tar: Any
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                for member in tar:
                    tar.members = []  # otherwise it keeps them all
                    found = _key(member)
                    end = member.offset_data + -(-member.size // 512) * 512
                    if end > self.place.file(name).size:
                        raise tarfile.ReadError(f"{member.name} extends past the end of the file")
                    if found and found[0] == key:
                        spans[-1] = (spans[-1][0], end)
                    elif found:
                        key = found[0]
                        spans.append((member.offset, end))
        except (tarfile.TarError, OSError, ValueError) as error:
            raise self.place.error(name, f"damaged, or not a tar file ({error})") from None
        return spans


def _key(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return a member's sample and column, or None if it is not part of a sample."""
    found = _MEMBER.fullmatch(member.name) if member.isreg() and not member.issparse() else None
    if not found or PurePosixPath(member.name).name.startswith("__"):
        return None
    return found[1], found[2].lower()


def read_shard_list(place: Place, told: Any) -> Tars:
    """Open the tars of an index. The index gives their sample counts, so no tar is read in full."""
    try:
        listed = [(str(each["url"]), int(each["nsamples"])) for each in told[SHARDS]]
    except (LookupError, TypeError, ValueError) as error:
        raise place.error("index.json", f"is not an index of tar files ({error!r})") from None
    for name, count in listed:
        if PurePosixPath(name).name != name or count < 0:
            raise place.error("index.json", f"{name!r} is not in the same directory")
    tars = Tars(place, [name for name, _ in listed], [count for _, count in listed])
    tars.md5 = {each["url"]: str(each["md5sum"]) for each in told[SHARDS] if each.get("md5sum")}
    return tars
