"""Writes the fixtures of these tests: small data, each by the library whose format it is.

    python tests/datasets/make_fixtures.py tests/datasets/written

It was run with datatrove 0.10.1, megatron-core 0.16.1, mosaicml-streaming 0.13.0, datasets 4.4.2,
pyarrow 26.0.1, webdataset 1.0.2 and wids 0.1.11. `expected.json` has what each
library's own reader gives.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENTS = 12


def main(output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    draw = random.Random(7)
    documents = [
        [draw.randrange(200) for _ in range(draw.randrange(20, 150))] for _ in range(DOCUMENTS)
    ]
    rows = [
        {"text": f"text {n} é", "number": n, "input_ids": ids} for n, ids in enumerate(documents)
    ]
    expected: dict[str, Any] = {"documents": documents, "rows": rows}
    write_datatrove(output / "datatrove", documents)
    write_megatron(output / "megatron", documents)
    expected["mds"] = write_mds(output / "mds", rows)
    write_datasets(output, rows)
    expected["webdataset"] = write_webdataset(output / "webdataset", rows)
    (output / "expected.json").write_text(json.dumps(expected))


def write_datatrove(output: Path, documents: list[list[int]]) -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from datatrove.utils.dataset import DatatroveFileDataset

    for shard, some in enumerate((documents[:7], documents[7:])):
        file = TokenizedFile(str(output), f"{shard:05d}_shuffled.ds", token_size=2 + 2 * shard)
        for document in some:
            file.write(document, None)
        file.close()
        tokens = [token for document in some for token in document]
        path = str(output / f"{shard:05d}_shuffled.ds")
        dataset = DatatroveFileDataset(path, 9, 2 + 2 * shard)
        read = [dataset[number]["input_ids"] for number in range(len(dataset))]
        assert np.concatenate(read).tolist() == tokens[: len(read) * 10]


def write_megatron(output: Path, documents: list[list[int]]) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    output.mkdir()
    for name, dtype, some in (
        ("a_text", np.uint16, documents[:7]),
        ("b_text", np.int32, documents[7:]),
    ):
        builder = IndexedDatasetBuilder(str(output / f"{name}.bin"), dtype=dtype)
        for document in some:  # of two sequences, where it is long
            halves = [document[:60], document[60:]] if len(document) > 60 else [document]
            for half in halves:
                builder.add_item(torch.tensor(half))
            builder.end_document()
        builder.finalize(str(output / f"{name}.idx"))
        read = IndexedDataset(str(output / name))
        assert np.concatenate([*read]).tolist() == [t for document in some for t in document]


def write_mds(output: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from streaming import LocalDataset, MDSWriter

    columns = {"text": "str", "number": "int", "tokens": "ndarray:uint16", "more": "json",
               "score": "float32", "raw": "bytes"}  # fmt: skip
    read: list[dict[str, Any]] = []
    for name, options in {
        "plain": {"hashes": ["sha1", "xxh64"]},
        "zstd": {"compression": "zstd:7", "hashes": ["sha256"]},
        "snappy": {"compression": "snappy"},
    }.items():
        with MDSWriter(
            out=str(output / name), columns=columns, size_limit=1500, **options
        ) as writer:
            for row in rows:
                writer.write({
                    "text": row["text"], "number": row["number"], "more": {"n": row["number"]},
                    "tokens": np.array(row["input_ids"], np.uint16), "score": row["number"] / 2,
                    "raw": bytes(row["input_ids"][:9]),
                })  # fmt: skip
        if name == "plain":  # the others only have other bytes of it
            dataset = LocalDataset(local=str(output / name))
            read = [dataset[number] for number in range(len(rows))]
    blocks = np.concatenate([row["input_ids"] for row in rows])[:320].reshape(-1, 32)
    for name, encoding in (("blocks", "ndarray:int32:32"), ("foundry", "bytes")):
        with MDSWriter(out=str(output / name / "train"), columns={"tokens": encoding}) as writer:
            for block in blocks:
                tokens = block.astype(np.int32)
                writer.write(
                    {"tokens": tokens if name == "blocks" else block.astype(np.int64).tobytes()}
                )
    with MDSWriter(out=str(output / "pickled"), columns={"anything": "pkl"}) as writer:
        writer.write({"anything": {1, 2}})
    return [
        {
            **row,
            "tokens": row["tokens"].tolist(),
            "score": float(row["score"]),
            "raw": list(row["raw"]),
        }
        for row in read
    ]


def write_datasets(output: Path, rows: list[dict[str, Any]]) -> None:
    from datasets import Dataset, DatasetDict, load_from_disk

    whole = Dataset.from_list(rows)
    both = DatasetDict({"train": whole.select(range(8)), "validation": whole.select(range(8, 12))})
    both.save_to_disk(str(output / "arrow"), num_shards={"train": 2, "validation": 1})
    assert [*load_from_disk(str(output / "arrow"))["train"]] == rows[:8]
    (output / "parquet").mkdir()
    (output / "jsonl").mkdir()
    for shard in range(2):
        part = whole.select(range(6 * shard, 6 * shard + 6))
        part.to_parquet(str(output / f"parquet/train-{shard:05d}-of-00002.parquet"), batch_size=4)
        part.to_json(str(output / f"jsonl/{shard}.jsonl"))


def write_webdataset(output: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import webdataset

    output.mkdir()
    with webdataset.ShardWriter(str(output / "shard-%06d.tar"), maxcount=4, verbose=False) as sink:
        for row in rows[:6]:
            sink.write({"__key__": f"{row['number']:04d}", "txt": row["text"], "seg.json": row})
    names = sorted(str(file) for file in output.glob("*.tar"))
    program = [sys.executable, str(Path(sys.executable).with_name("widsindex")), "create"]
    tars = [Path(name).name for name in names]
    subprocess.run([*program, *tars, "--output", "of-wids.json"], cwd=output, check=True)
    read = webdataset.WebDataset(names, shardshuffle=False)
    return [
        {name: value if name == "__key__" else value.decode() for name, value in sample.items()
         if name in ("__key__", "txt", "seg.json")}
        for sample in read
    ]  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
