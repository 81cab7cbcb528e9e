"""Damaged, missing and hostile data is named in one line: where, and which sample."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trnslurm
from trnslurm.datasets.errors import DataError

from .test_formats import WRITTEN

Damage = Callable[[Path], object]


def flip(name: str, at: int) -> Damage:
    def damage(top: Path) -> None:
        data = bytearray((top / name).read_bytes())
        data[at] ^= 0xFF
        (top / name).write_bytes(data)

    return damage


def cut(name: str, size: int) -> Damage:
    return lambda top: (top / name).write_bytes((top / name).read_bytes()[:size])


def put(name: str, at: int, data: bytes) -> Damage:
    def damage(top: Path) -> None:
        old = (top / name).read_bytes()
        (top / name).write_bytes(old[:at] + data + old[at + len(data) :])

    return damage


def index(change: Callable[[Any], object]) -> Damage:
    def damage(top: Path) -> None:
        told = json.loads((top / "index.json").read_text())
        change(told["shards"][1])
        (top / "index.json").write_text(json.dumps(told))

    return damage


SHARD = "shard.00001.mds"
PARQUET = "train-00001-of-00002.parquet"
ARROW = "train/data-00001-of-00002.arrow"
CASES: list[tuple[str, Damage, str]] = [
    ("mds/plain", flip(SHARD, 900), f"/{SHARD}: its sha1 does not match the index"),
    ("mds/plain", cut(SHARD, 900), f"/{SHARD}: damaged: is 900 bytes, not 1,475"),
    ("mds/plain", lambda top: (top / SHARD).unlink(), f"/{SHARD}: does not exist"),
    ("mds/zstd", flip(f"{SHARD}.zstd", 500), f"/{SHARD}.zstd: damaged: its sha256 does not"),
    (
        "mds/snappy",
        cut(f"{SHARD}.snappy", 500),
        f"/{SHARD}.snappy: damaged: cannot be decompressed",
    ),
    (
        "mds/zstd",
        index(lambda s: s["raw_data"].update(bytes=1000)),
        "is larger than 1,000 bytes",
    ),
    (
        "mds/plain",
        index(lambda s: s["raw_data"].update(basename="../x")),
        "is outside the directory",
    ),
    ("mds/plain", index(lambda s: s.update(samples=10**9)), "cannot have 1,000,000,000 samples"),
    ("mds/plain", index(lambda s: s.update(samples=3)), "its header does not match the index"),
    ("mds/pickled", lambda top: None, "anything is encoded as pkl, which can run arbitrary code"),
    (
        "mds/plain",
        lambda top: (top / "index.json").write_text('{"shards": [1]}'),
        "is not an MDS index",
    ),
    (
        "megatron",
        cut("b_text.bin", 1000),
        "/b_text.bin: damaged: is 1,000 bytes, but its index says 1,804",
    ),
    ("megatron", put("b_text.idx", 18, struct.pack("<Q", 1 << 60)), "does not match its header"),
    ("megatron", put("b_text.idx", 34, struct.pack("<i", -5)), "its sequences are not contiguous"),
    ("megatron", put("b_text.idx", 17, b"\x07"), "type 7, which are not supported"),
    ("megatron", put("a_text.idx", 0, b"x"), "/a_text.idx: is not a Megatron index"),
    ("datatrove", cut("00001_shuffled.ds", 1000), "is 1,000 bytes, but its index lists 451 tokens"),
    (
        "datatrove",
        put("00001_shuffled.ds.index", 0, b"\xff" * 7),
        "documents are not in ascending order",
    ),
    ("datatrove", lambda top: (top / "00001_shuffled.ds.loss").touch(), "masks the loss"),
    ("parquet", flip(PARQUET, 30), f"/{PARQUET}: damaged"),
    ("parquet", cut(PARQUET, 2000), f"/{PARQUET}: damaged"),
    ("arrow", cut(ARROW, 1500), f"{ARROW}: damaged"),
    ("arrow", put(ARROW, 4, struct.pack("<i", 1 << 30)), f"{ARROW}: damaged"),
    ("webdataset", cut("shard-000001.tar", 900), "/shard-000001.tar: damaged"),
    ("webdataset", flip("shard-000001.tar", 3), "/shard-000001.tar: damaged"),
    ("jsonl", flip("1.jsonl", 0), "/1.jsonl: a line is not valid JSON"),
]


@pytest.mark.parametrize(("name", "damage", "words"), CASES)
def test_damage_is_named(name: str, damage: Damage, words: str, tmp_path: Path) -> None:
    top = tmp_path / "corpus"
    shutil.copytree(WRITTEN / name, top)
    damage(top)
    tokens = name in ("megatron", "datatrove")
    split = "train" if name in ("parquet", "arrow") else None
    with pytest.raises(DataError) as caught:
        found = trnslurm.dataset(
            top, cache=tmp_path / "cache", split=split, seq_len=8 if tokens else None
        )
        for number in range(len(found)):
            found[number]
        raise AssertionError("nothing was noticed")
    said = str(caught.value)
    assert words in said and said.startswith(str(top)) and "\n" not in said


def test_the_sample_is_named(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "mds/plain", tmp_path / "corpus")
    found = trnslurm.dataset(tmp_path / "corpus", cache=tmp_path / "cache")
    flip(SHARD, 900)(tmp_path / "corpus")
    assert found[0]["number"] == 0
    with pytest.raises(DataError, match=r"/shard\.00001\.mds: its sha1 does not .* \(sample 5\)$"):
        found[5]


@pytest.mark.parametrize("name", ["mds/zstd", "parquet"])
def test_nothing_is_decompressed_beyond_what_the_cache_may_hold(name: str, tmp_path: Path) -> None:
    found = trnslurm.dataset(
        WRITTEN / name,
        cache=tmp_path / "cache",
        cache_gb=1e-7,
        split="train" if name == "parquet" else None,
    )
    with pytest.raises(DataError, match=r"than the cache's limit|more than the whole cache"):
        found[0]


@pytest.mark.parametrize(
    "name", ["mds/plain", "mds/snappy", "parquet", "arrow", "megatron", "datatrove", "webdataset"]
)
def test_random_damage_is_one_line_or_harmless(name: str, tmp_path: Path) -> None:
    tokens = name in ("megatron", "datatrove")
    split = "train" if name in ("parquet", "arrow") else None
    files = [file for file in (WRITTEN / name).rglob("*") if file.is_file()]
    refused = 0
    for seed in range(40):
        draw, top = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(WRITTEN / name, top)
        file = top / draw.choice(files).relative_to(WRITTEN / name)
        data = bytearray(file.read_bytes())
        at = draw.randrange(len(data))
        data[at : at + 4] = draw.choice([b"\xff\xff\xff\x7f", b"", draw.randbytes(4), bytes(4)])
        file.write_bytes(data)
        try:
            found = trnslurm.dataset(
                top, cache=tmp_path / "c", split=split, seq_len=16 if tokens else None
            )
            for number in range(min(len(found), 40)):
                found[number]
        except DataError as error:
            refused += 1
            assert str(error).startswith(str(top)) and "\n" not in str(error)
    assert refused > 5
