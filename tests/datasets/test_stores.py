"""Object stores: a server of S3's protocol that is cut and slow, https, and fsspec's memory."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import trnslurm
from trnslurm.datasets import place
from trnslurm.datasets.errors import DataError

from ..mirror.server import BUCKET, Server, serving
from .test_formats import EXPECTED, STREAM, WRITTEN, plain

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3") / "server") as server:
        client = server.client(past_gate=True)
        for file in WRITTEN.rglob("*"):
            if file.is_file():
                client.upload_file(str(file), BUCKET, f"corpus/{file.relative_to(WRITTEN)}")
        yield server


@pytest.fixture
def url(one_server: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    one_server.gate.heal()
    one_server.be("reader", home)
    monkeypatch.setattr(place, "_WAIT_S", 0.01)
    yield f"s3://{BUCKET}/corpus"
    one_server.gate.heal()


def test_every_format_is_read_from_s3(url: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("mds/plain", "mds/zstd"):
        found = trnslurm.dataset(f"{url}/{name}", cache=cache)
        assert [plain(found[n]) for n in range(12)] == EXPECTED["mds"]
    for name, split in (("parquet", "train"), ("jsonl", None)):
        found = trnslurm.dataset(f"{url}/{name}", cache=cache, split=split)
        assert [plain(found[n]) for n in range(12)] == EXPECTED["rows"]
    found = trnslurm.dataset(f"{url}/arrow", cache=cache, split="validation")
    assert [plain(found[n]) for n in range(4)] == EXPECTED["rows"][8:]
    found = trnslurm.dataset(f"{url}/webdataset", cache=cache)
    assert found[5]["txt"].decode() == "text 5 é"
    for name in ("megatron", "datatrove", "megatron/a_text"):
        found = trnslurm.dataset(f"{url}/{name}", cache=cache, seq_len=50)
        assert found[3].tolist() == STREAM[150:200]


@pytest.mark.first
def test_a_read_that_is_cut_is_repeated_and_then_named(
    url: str, one_server: Server, tmp_path: Path
) -> None:
    found = trnslurm.dataset(f"{url}/mds/zstd", cache=tmp_path / "cache")
    gate = one_server.gate
    gate.cut()  # also the connections that are open
    gate.heal()
    gate.answers = [700]  # in the midst of the object
    assert plain(found[0]) == EXPECTED["mds"][0]
    assert not gate.answers
    gate.sends_bytes_per_s = 10_000
    assert plain(found[5]) == EXPECTED["mds"][5]
    gate.cut()
    with pytest.raises(DataError) as caught:
        found[11]
    assert f"{url}/mds/zstd/shard.00002.mds.zstd: could not be read in 5 attempts" in str(
        caught.value
    )
    assert str(caught.value).endswith("(sample 11)") and "\n" not in str(caught.value)
    assert plain(found[0]) == EXPECTED["mds"][0]  # from the cache
    gate.heal()
    assert plain(found[11]) == EXPECTED["mds"][11]


def test_worker_processes_read_from_s3_for_the_loader(url: str, tmp_path: Path) -> None:
    rows = trnslurm.dataset(f"{url}/mds/zstd", cache=tmp_path / "cache")
    blocks = trnslurm.dataset(f"{url}/megatron", cache=tmp_path / "cache", seq_len=50)
    assert rows[0]["number"] == 0  # a client that the worker processes must not use
    loader = trnslurm.loader(
        rows,
        global_batch=4,
        seed=1,
        num_workers=2,
        collate_fn=lambda some: [n["number"] for n in some],
    )
    assert sorted(number for batch in loader for number in batch) == [*range(12)]
    mix = trnslurm.mix({"a": (len(blocks), 1), "b": (len(blocks), 1)}, global_batch=4)
    mixed = trnslurm.loader({"a": blocks, "b": blocks}, mix=mix, steps_per_epoch=3, num_workers=2)
    assert [batch.shape for batch in mixed] == [(4, 50)] * 3


def test_an_object_that_changes_is_not_mixed_with_what_it_was(
    url: str, one_server: Server, tmp_path: Path
) -> None:
    found = trnslurm.dataset(f"{url}/megatron/b_text", cache=tmp_path / "cache", seq_len=8)
    client = one_server.client(past_gate=True)
    key = "corpus/megatron/b_text.bin"
    old = (WRITTEN / "megatron/b_text.bin").read_bytes()
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(len(old)))
    try:
        with pytest.raises(DataError, match="PreconditionFailed"):
            found[0]
    finally:
        client.put_object(Bucket=BUCKET, Key=key, Body=old)


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Python's file server, with the ranges that every store has."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = self.headers.get("Range")
        if not asked or not path.is_file():
            super().do_GET()
            return
        first, last = (int(each) for each in asked.removeprefix("bytes=").split("-"))
        data = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_https_and_the_other_stores_of_fsspec(tmp_path: Path) -> None:
    import fsspec

    handler = partial(_Handler, directory=str(WRITTEN))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        top = f"http://127.0.0.1:{server.server_address[1]}"
        for path, split in (("mds/zstd", None), ("parquet", "train")):
            found = trnslurm.dataset(f"{top}/{path}", cache=tmp_path / "cache", split=split)
            assert found[7]["text"] == "text 7 é"
        server.shutdown()
    fsspec.filesystem("memory").put(str(WRITTEN / "megatron"), "memory://corpus", recursive=True)
    found = trnslurm.dataset("memory://corpus", cache=tmp_path / "cache", seq_len=50)
    assert found[3].tolist() == STREAM[150:200]
    with pytest.raises(
        DataError, match=r"nostore://x/index.json: .*: run pip install '\.\[stores\]' in a clone"
    ):
        trnslurm.dataset("nostore://x")
