"""Fetching what was published, from a real server on this machine, as S3 would answer."""

import hashlib
import io
import json
import shutil
import signal
import tarfile
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from .bucket import Bucket

SAMPLES = {"wiki_training_0": 5, "wiki_training_1": 3, "wiki_test_0": 2}
WIDTHS = {"input_ids": 16, "input_mask": 16, "segment_ids": 16, "masked_lm_positions": 4,
          "masked_lm_ids": 4, "next_sentence_labels": None}  # fmt: skip
WHAT = "3 shards with 10 samples of 16 tokens, at most 4 of them masked"
TAR = "/data/shards.tar"


def shard(samples, **changes):
    """The bytes of a shard, of random tokens so that nothing shrinks them."""
    widths = WIDTHS | changes
    numbers, stream = np.random.default_rng(samples), io.BytesIO()
    with h5py.File(stream, "w") as file:
        for name, width in widths.items():
            shape = (samples,) if width is None else (samples, width)
            file.create_dataset(name, data=numbers.integers(0, 100, shape), compression="gzip")
    return stream.getvalue()


def tar_of(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
    return stream.getvalue()


SHARDS = {f"{name}.hdf5": shard(count) for name, count in SAMPLES.items()}
CHECKSUMS = {name: hashlib.sha256(data).hexdigest() for name, data in SHARDS.items()}
ARCHIVE = tar_of(
    {f"a directory/{name}": data for name, data in SHARDS.items()}
    | {"a directory/README": b"words", "a directory/._wiki_training_0.hdf5": b"of another system"}
)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Bucket(files={TAR: ARCHIVE, "/ckpt_7.pt": b"parameters" * 1000}) as bucket:
        yield bucket


@pytest.fixture
def output(tmp_path):
    return tmp_path / "it is data"


@pytest.fixture
def fetch(prepare, bucket, output):
    """Fetch the tar of shards."""

    def run(*arguments, path=TAR):
        return prepare(
            "download", "--url", bucket.url(path), "--output", output, "--shards",
            "--seq-len", 16, "--max-pred", 4, *arguments,
        )  # fmt: skip

    return run


@pytest.fixture
def refused(fetch, output, left_beside):
    """Return the error line; nothing may exist."""

    def run(*arguments, **more):
        error = fetch(*arguments, **more).error
        assert not output.exists()
        assert left_beside(output) == []
        return error

    return run


def checksums(output):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in output.iterdir()
        if path.suffix == ".hdf5"
    }


def test_shards_are_fetched_once_and_verified(fetch, prepare, bucket, output, left_beside):
    done = fetch()
    assert done.out == f"Fetched {output}: {WHAT}\n", done
    for what in ("fetching", "checking", "unpacking", "reading shards"):
        assert f"{what}: 100%" in done.err
    assert checksums(output) == CHECKSUMS
    notes = json.loads((output / "published.json").read_text())
    assert notes == {
        "format": 1,
        "url": bucket.url(TAR),
        "files": {name: len(data) for name, data in sorted(SHARDS.items())},
    }
    assert left_beside(output) == []
    assert len(bucket.asked) == 1

    assert fetch().out == f"{output} is already fetched; there is nothing to do\n"
    assert len(bucket.asked) == 1
    assert prepare("verify", output).out == f"{output}: {WHAT}, all read completely\n"
    assert "was fetched from http" in fetch(path="/other.tar").error
    (output / "wiki_test_0.hdf5").write_bytes(b"x")
    damaged = f"{output}: wiki_test_0.hdf5 is damaged: fetch it again with --force"
    assert fetch().error == damaged
    assert prepare("verify", output).error == damaged
    assert fetch("--force").code == 0
    assert checksums(output) == CHECKSUMS


@pytest.mark.parametrize("etag", [None, '"0123456789abcdef0123456789abcdef-7"'])
def test_what_was_cut_off_goes_on(fetch, bucket, output, etag):
    bucket.cut_after, bucket.etag = 5000, etag
    kept = "finished work is kept; run the command again to resume"
    said = fetch().error
    assert said == f"{bucket.url(TAR)}: cut off after 5,000 of {len(ARCHIVE):,} bytes: {kept}"
    bucket.refusals[TAR] = 503
    assert fetch().error.endswith(
        f"the server answered 503 Service Unavailable: try again later: {kept}"
    )
    bucket.refusals.clear()
    assert "cut off after 10,000 of" in fetch().error
    bucket.cut_after = None
    assert fetch().code == 0
    assert [asked for _, asked in bucket.asked] == [
        None, "bytes=5000-", "bytes=5000-", "bytes=10000-"
    ]  # fmt: skip
    assert checksums(output) == CHECKSUMS


def test_killed_between_two_steps_it_asks_for_nothing_twice(
    fetch, bucket, output, monkeypatch, left_beside
):
    """When the whole tar was fetched, only unpacking is left."""
    copy, copied = shutil.copyfileobj, []

    def stop_at_the_second(source, target):
        copied.append(source)
        copy(source, target)
        if len(copied) == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(shutil, "copyfileobj", stop_at_the_second)
    assert fetch().code == 143
    assert not output.exists() and len(left_beside(output)) == 1
    assert fetch().code == 0
    assert len(bucket.asked) == 1 and len(copied) == 4
    assert checksums(output) == CHECKSUMS


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("etag", [None, "", 'W/"weak"'])
def test_what_changed_on_the_server_is_fetched_again(fetch, bucket, output, etag, parts):
    bucket.files[TAR] = bytes(30_000)
    bucket.cut_after, bucket.etag = 5000, etag
    assert "cut off" in fetch().error
    bucket.files[TAR], bucket.cut_after, bucket.parts = ARCHIVE, None, parts
    done = fetch()
    assert done.code == 0, done
    assert ("has changed or cannot be resumed: starting again" in done.err) == (etag is None)
    assert checksums(output) == CHECKSUMS


@pytest.mark.parametrize("status", [412, 416])
def test_a_server_that_refuses_the_missing_part_is_asked_for_everything(
    fetch, bucket, output, status
):
    bucket.cut_after = 5000
    assert "cut off" in fetch().error
    bucket.cut_after, bucket.refuse_part = None, status
    done = fetch()
    assert done.code == 0, done
    assert "has changed or cannot be resumed: starting again" in done.err
    assert [part for _, part in bucket.asked] == [None, "bytes=5000-", None]
    assert checksums(output) == CHECKSUMS


def test_what_is_not_as_the_server_says(refused, bucket):
    bucket.etag = f'"{hashlib.md5(b"other").hexdigest()}"'
    assert refused() == f"{bucket.url(TAR)} was corrupted in transit: fetch it again"


@pytest.mark.parametrize("status", [403, 404])
def test_what_is_not_there(refused, bucket, status):
    bucket.refusals[TAR] = status
    assert f"{bucket.url(TAR)}: the server answered {status} " in (error := refused())
    assert error.endswith(": the file does not exist or is not public: check the URL")


def test_no_network(prepare, bucket, output):
    for url, reason in (
        ("http://127.0.0.1:9/x.tar", "Connection refused"),
        ("http://no-such-host.invalid/x.tar", "Name or service not known"),
    ):
        error = prepare("download", "--url", url, "--output", output).error
        assert error.startswith(f"{url}: the server did not answer (")
        assert reason in error or "resolution" in error
        assert error.endswith("or fetch the file on a machine with a network and copy it")


def test_no_room(fetch, bucket, output, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * len(ARCHIVE) - 1)
    )
    assert fetch().error.startswith(f"{output.parent}: no space for 0.0 GB, only 0.0 GB are free")
    monkeypatch.undo()
    assert fetch().code == 0


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"../../wiki_training_0.hdf5": b""}, "contains ../../wiki_training_0.hdf5, which leads"),
        ({"/tmp/wiki_training_0.hdf5": b""}, "contains /tmp/wiki_training_0.hdf5, which leads"),
        ({"wiki_training_0.hdf5": "/etc/passwd"}, "wiki_training_0.hdf5, which is not a file"),
        ({"a/x.hdf5": b"", "b/x.hdf5": b""}, "not unpacked, because it contains two shards x.hdf5"),
        ({"README": b"words"}, "contains no shards (*.hdf5)"),
        ({"x.hdf5": SHARDS["wiki_test_0.hdf5"][:-100]}, "x.hdf5: cannot be read (truncated"),
        ({"x.hdf5": shard(2, input_mask=15)}, "not a BERT shard: input_mask is int64 (2, 15)"),
        ({"x.hdf5": shard(2), "y.hdf5": shard(2, masked_lm_ids=5, masked_lm_positions=5)},
         "16 tokens and at most 5 masked tokens, but those in x.hdf5 have 16 and 4"),
    ],
)  # fmt: skip
def test_a_tar_of_something_else(refused, bucket, files, words):
    bucket.files[TAR] = tar_of(files)
    assert words in refused()


def test_no_tar_or_half_a_tar(refused, bucket):
    for content in (b"<html>Log in</html>", ARCHIVE[:3000]):
        bucket.files[TAR] = content
        assert f"{bucket.url(TAR)}: not a complete tar file (" in refused()


def test_shards_of_another_length_are_kept_for_a_right_request(fetch, bucket):
    why = "which contradicts --seq-len 128: finished work is kept"
    words = f"{bucket.url(TAR)}: contains {WHAT}, {why}"
    assert words in fetch("--seq-len", 128).error
    assert fetch().code == 0
    assert len(bucket.asked) == 1


def test_a_file_is_taken_as_it_is(prepare, bucket, output):
    arguments = ("download", "--url", bucket.url("/ckpt_7.pt"), "--output", output)
    assert prepare(*arguments).out == f"Fetched {output}: 10,000 bytes\n"
    assert (output / "ckpt_7.pt").read_bytes() == bucket.files["/ckpt_7.pt"]
    assert "nothing to do" in prepare(*arguments).out
    error = prepare("download", "--url", "file:///etc/passwd", "--output", output).error
    assert error.startswith("--url file:///etc/passwd: must be the http")


def test_what_was_not_fetched_is_not_replaced(fetch, output):
    output.mkdir()
    (output / "mine.hdf5").touch()
    said = f"{output} already exists and was not fetched: choose another name"
    assert fetch("--force").error == said


def test_verify_reads_shards_of_others_whole(prepare, tmp_path):
    for name, data in SHARDS.items():
        (tmp_path / name).write_bytes(data)
    assert prepare("verify", tmp_path).out == f"{tmp_path}: {WHAT}, all read completely\n"
    path = tmp_path / "wiki_training_1.hdf5"
    with h5py.File(path) as file:
        place, _ = file["segment_ids"].id.get_chunk_info(0)[2:]
    data = bytearray(path.read_bytes())
    data[place : place + 4] = b"\0\0\0\0"  # what is compressed there
    path.write_bytes(data)
    assert f"{path}: cannot be read (truncated, damaged" in prepare("verify", tmp_path).error
