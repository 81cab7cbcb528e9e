"""What other libraries wrote is what they read themselves, sample by sample."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trnslurm
from trnslurm.datasets.errors import DataError

WRITTEN = Path(__file__).with_name("written")
EXPECTED = json.loads((WRITTEN / "expected.json").read_text())
STREAM = [token for document in EXPECTED["documents"] for token in document]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def plain(value: Any) -> Any:
    """Numpy's values as Python's, to compare them."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, bytes | np.ndarray):
        return value.tolist() if isinstance(value, np.ndarray) else [*value]
    return value.item() if isinstance(value, np.generic) else value


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    return {name: each.decode() if isinstance(each, bytes) else each for name, each in row.items()}


ROWS = {
    "mds/plain": ("MDS", EXPECTED["mds"], plain),
    "mds/zstd": ("MDS", EXPECTED["mds"], plain),
    "mds/snappy": ("MDS", EXPECTED["mds"], plain),
    "parquet": ("Parquet", EXPECTED["rows"], plain),
    "jsonl": ("JSON lines", EXPECTED["rows"], plain),
    "webdataset": ("WebDataset", EXPECTED["webdataset"], as_text),
    "arrow/train": ("Arrow", EXPECTED["rows"][:8], plain),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_of_the_library(name: str, cache: Path) -> None:
    kind, expected, as_read = ROWS[name]
    split = "train" if name == "parquet" else None
    found = trnslurm.dataset(WRITTEN / name, cache=cache, split=split)
    assert repr(found) == f"<Dataset {kind}, {len(expected)} samples>"
    backwards = {number: as_read(found[number]) for number in reversed(range(len(found)))}
    assert [backwards[number] for number in range(len(found))] == expected
    assert as_read(pickle.loads(pickle.dumps(found))[-1]) == expected[-1]  # as for a worker process
    with pytest.raises(IndexError):
        found[len(found)]


TOKENS = {
    "datatrove": ("datatrove, 12 documents, 1,052 tokens", STREAM),
    "megatron": ("Megatron, 12 documents, 1,052 tokens", STREAM),
    "megatron/a_text": ("Megatron, 7 documents, 601 tokens", STREAM[:601]),
    "mds/zstd": ("MDS, 1,052 tokens", STREAM),
    "mds/blocks": ("MDS, 320 tokens", STREAM[:320]),
    "mds/foundry": ("MDS, 320 tokens", STREAM[:320]),
    "arrow": ("Arrow, 699 tokens", STREAM[:699]),
    "parquet": ("Parquet, 1,052 tokens", STREAM),
    "jsonl": ("JSON lines, 1,052 tokens", STREAM),
}


def write_gzip(file: Path, data: bytes) -> None:
    """In two members, as `cat a.gz b.gz` or bgzip write it."""
    file.write_bytes(gzip.compress(data[:700]) + gzip.compress(data[700:]))


def write_zstd(file: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(file), "zstd") as stream:
        stream.write(data)


@pytest.mark.parametrize(
    ("suffix", "write"), [(".jsonl.gz", write_gzip), (".json.zst", write_zstd)]
)
def test_compressed_json_lines_are_the_same_rows(
    suffix: str, write: Callable[[Path, bytes], None], tmp_path: Path, cache: Path
) -> None:
    (top := tmp_path / "lines").mkdir()
    for file in (WRITTEN / "jsonl").glob("*.jsonl"):
        write(top / f"train-{file.stem}{suffix}", file.read_bytes())
    found = trnslurm.dataset(top, cache=cache, split="train")
    assert [plain(found[number]) for number in range(len(found))] == EXPECTED["rows"]
    again = pickle.loads(pickle.dumps(found))
    blocks = trnslurm.dataset(top, cache=cache, split="train", seq_len=50)
    assert plain(again[5]) == EXPECTED["rows"][5] and blocks[3].tolist() == STREAM[150:200]
    file = sorted(top.iterdir())[0]
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"{file}: damaged, or larger than the cache: "):
        trnslurm.dataset(top, cache=cache, split="train")
    with pytest.raises(DataError, match=r"larger than the cache: is larger than 1,000 bytes"):
        trnslurm.dataset(sorted(top.iterdir())[1], cache=tmp_path / "small", cache_gb=1e-6)


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_come_in_blocks_as_of_prepared_data(name: str, cache: Path) -> None:
    described, stream = TOKENS[name]
    split = "train" if name in ("arrow", "parquet", "mds/blocks", "mds/foundry") else None
    found = trnslurm.dataset(WRITTEN / name, seq_len=50, cache=cache, split=split)
    assert repr(found) == f"<Dataset {described}>"
    blocks = np.concatenate([found[number] for number in range(len(found))])
    filled = [*stream, *stream[: -len(stream) % 50]]
    assert blocks.tolist() == filled


def test_the_index_of_wids_saves_reading_tars_through(tmp_path: Path, cache: Path) -> None:
    shutil.copytree(WRITTEN / "webdataset", tmp_path / "tars")
    (tmp_path / "tars/of-wids.json").rename(tmp_path / "tars/index.json")
    found = trnslurm.dataset(tmp_path / "tars", cache=cache)
    assert not [*cache.iterdir()]  # it says how many samples there are
    assert [as_text(found[number]) for number in range(len(found))] == EXPECTED["webdataset"]
    text = (tmp_path / "tars/index.json").read_text()
    (tmp_path / "tars/index.json").write_text(text.replace('"nsamples": 2', '"nsamples": 3'))
    with pytest.raises(DataError, match=r"damaged: has 2 samples, but its index says 3"):
        trnslurm.dataset(tmp_path / "tars", cache=cache)[5]
    tar = tmp_path / "tars/shard-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b"text 1", b"text 8"))
    with pytest.raises(DataError, match=r"shard-000000.tar: its md5 does not .* \(sample 1\)"):
        trnslurm.dataset(tmp_path / "tars", cache=cache)[1]
