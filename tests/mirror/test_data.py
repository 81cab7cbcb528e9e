"""`data fetch s3://…` and `data prepare --from s3://…`: data from a server of S3's protocol."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig

from ..processes import Done, run_process
from ..stable_files import Stable
from ..waiting import eventually
from .server import BUCKET, Server
from .test_mirror import MIB, SECONDS, contents, environ

pytestmark = pytest.mark.rest

KEPT = "finished work is kept; run the command again to resume"


class Data:
    """A directory in S3, and where it is fetched to."""

    def __init__(self, server: Server, name: str, output: Path) -> None:
        self.server, self.name, self.output = server, name, output
        self.files: dict[str, bytes] = {}

    @property
    def place(self) -> str:
        return f"s3://{BUCKET}/{self.name}"

    def put(self, name: str, data: bytes, *, in_parts_of: int = 64 * MIB) -> None:
        self.files[name] = data
        config = TransferConfig(
            multipart_threshold=in_parts_of, multipart_chunksize=in_parts_of, use_threads=False
        )
        key = f"{self.name}/{name}"
        client = self.server.client(past_gate=True)
        client.upload_fileobj(io.BytesIO(data), BUCKET, key, Config=config)

    def command(self, *words: str) -> list[str]:
        program = [sys.executable, "-m", "trnslurm.prepare", "s3", self.place]
        return [*program, f"--output={self.output}", *words]

    def fetch(self, *words: str) -> Done:
        return run_process(self.command(*words), env=environ(), timeout_s=SECONDS)

    @contextmanager
    def fetching(self) -> Iterator[subprocess.Popen[str]]:
        """Fetch slowly, and go on once a part has arrived."""
        self.server.gate.sends_bytes_per_s = MIB
        with subprocess.Popen(
            self.command(), env=environ(), stderr=subprocess.PIPE, text=True
        ) as program:
            eventually(lambda: self.arrived >= 4 * MIB, SECONDS)
            yield program

    def refused(self) -> str:
        """Return the error; nothing may exist that looks whole."""
        done = self.fetch()
        assert done.code == 1 and done.out == "" and not self.output.exists(), done
        *progress, line = done.err.splitlines()
        assert all("%, " in said for said in progress), done
        return line.removeprefix("error: ")

    @property
    def beside(self) -> list[Path]:
        """What an unfinished fetch has left."""
        return list(self.output.parent.glob(f".{self.output.name}.*"))

    @property
    def arrived(self) -> int:
        files = [file for one in self.beside for file in (one / "finished").rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    def assert_whole(self) -> None:
        fetched = contents(self.output)
        del fetched[".s3.json"]
        assert fetched == self.files
        assert self.beside == []


@pytest.fixture
def data(server: Server, tmp_path: Path) -> Iterator[Data]:
    server.gate.sends_bytes_per_s = None
    data = Data(server, tmp_path.name, tmp_path / "it is data")
    data.put("a.txt", b"words\n")
    data.put("deep er/year=2026/ä.bin", os.urandom(3 * MIB))
    data.put("empty", b"")
    yield data


def test_all_below_a_prefix_is_fetched_once(data: Data, stable: Stable) -> None:
    data.put("large", os.urandom(21 * MIB), in_parts_of=8 * MIB)
    done = data.fetch()
    size = sum(map(len, data.files.values()))
    assert done.out == f"Fetched {data.output}: 4 files, {size:,} bytes\n", done
    assert "fetching: 100%" in done.err
    data.assert_whole()
    before = data.server.gate.received
    told = json.loads(data.fetch("--json").out)
    assert told == {"directory": str(data.output), "fetched": False, "what": ""}
    stable.json("data fetch", told)
    assert data.server.gate.received == before
    data.put("a.txt", b"other words\n")
    assert json.loads(data.fetch("--json", "--force").out)["fetched"] is True
    data.assert_whole()


def test_an_object_alone(data: Data) -> None:
    data.name += "/a.txt"
    assert data.fetch().code == 0
    assert (data.output / "a.txt").read_bytes() == b"words\n"


def test_killed_within_a_file_it_fetches_the_rest(data: Data) -> None:
    data.put("large", os.urandom(40 * MIB), in_parts_of=8 * MIB)
    with data.fetching() as program:
        program.kill()
    assert not data.output.exists()
    have, size = data.arrived, sum(map(len, data.files.values()))
    data.server.gate.heal()
    before = data.server.gate.sent
    assert data.fetch().code == 0
    assert size - have <= data.server.gate.sent - before < size - have + MIB
    data.assert_whole()


def test_stopped_it_ends_at_once_and_keeps_what_it_has(data: Data) -> None:
    data.put("large", os.urandom(40 * MIB))
    with data.fetching() as program:
        program.terminate()
        _, err = program.communicate(timeout=SECONDS)
    assert program.returncode == 143 and f"stopped: {KEPT}" in err
    data.server.gate.heal()
    assert data.fetch().code == 0
    data.assert_whole()


def test_a_connection_that_breaks_goes_on_by_itself(data: Data) -> None:
    data.put("large", os.urandom(20 * MIB))
    with data.fetching() as program:
        data.server.gate.cut()
        data.server.gate.heal()
        program.communicate(timeout=SECONDS)
    assert program.returncode == 0
    data.assert_whole()


def test_a_server_that_dies_leaves_what_has_arrived(data: Data) -> None:
    data.put("large", os.urandom(40 * MIB))
    with data.fetching() as program:
        data.server.gate.cut()
        _, err = program.communicate(timeout=SECONDS)
    assert program.returncode == 1
    assert err.splitlines()[-1].startswith(f"error: {data.place}: ")
    assert err.endswith(f": {KEPT}\n")
    data.server.gate.heal()
    data.put("large", os.urandom(30 * MIB))  # what is there of the former does not count
    assert data.fetch().code == 0
    data.assert_whole()


@pytest.mark.parametrize("in_parts_of", [64 * MIB, 5 * MIB])
def test_damaged_bytes_are_not_taken(data: Data, in_parts_of: int) -> None:
    data.put("large", os.urandom(12 * MIB), in_parts_of=in_parts_of)
    with data.fetching() as program:
        program.kill()
    (file,) = data.beside[0].rglob("large")
    with file.open("r+b") as stream:
        stream.write(bytes(100))
    data.server.gate.heal()
    expected = f"{data.place}/large: its checksum does not match"
    assert f"{expected}: {KEPT}" in data.refused()
    assert data.fetch().code == 0
    data.assert_whole()


def test_it_says_what_to_do(data: Data, home: Path) -> None:
    place = data.place
    data.name += "/nothing"
    assert data.refused() == f"{data.place}: there is nothing there: check with `aws s3 ls`"
    assert data.beside == []
    data.name = place.removeprefix(f"s3://{BUCKET}/")
    data.put("a.txt/b", b"x")
    assert "the key a.txt is the directory of b: rename one" in data.refused()
    data.server.client().delete_object(Bucket=BUCKET, Key=f"{data.name}/a.txt/b")
    data.server.be("writer", home)
    (home / ".aws" / "credentials").unlink()
    assert data.refused() == (
        f"{place}: Unable to locate credentials: give this host a role, or a profile with "
        "`aws configure`"
    )
    data.server.be("writer", home)
    command = [sys.executable, "-m", "trnslurm.prepare", "s3", "s3://no-such-bucket-here/a"]
    done = run_process([*command, f"--output={data.output}"], env=environ(), timeout_s=SECONDS)
    assert done.code == 1 and done.err == (
        "error: s3://no-such-bucket-here/a: ListObjectsV2: NoSuchBucket: The specified bucket "
        "does not exist: check the name\n"
    )
    data.output.mkdir()
    (data.output / "mine").touch()
    assert "already exists and was not fetched: choose another name" in data.fetch().err


def test_a_full_disk(data: Data, tmp_path: Path) -> None:
    """Limited as `ulimit -f` does it, which is not seen beforehand."""
    data.put("large", os.urandom(20 * MIB))
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 8192; exec "$@"', "bash", *data.command()]
    done = run_process(limited, env=environ(), timeout_s=SECONDS)
    assert done.code == 1 and done.err.splitlines()[-1].endswith(f": File too large: {KEPT}"), done
    assert not data.output.exists()
    assert data.fetch().code == 0
    data.assert_whole()


def test_prepared_data_is_checked_by_its_index(
    data: Data, run_cli: Callable[..., Done], tmp_path: Path
) -> None:
    """Prepared from S3 on one cluster, copied there, and fetched on another."""
    words = " ".join(f"word{n % 50}" for n in range(2000))
    data.files.clear()
    data.name += "/texts"
    data.put("a.txt", f"{words}\n\n{words}\n".encode())
    options = ["--cluster=local", "--set=data_root=" + str(tmp_path / "root")]
    recipe = ["gpt2_zero1", "--preset=small", *options]
    done = run_cli("data", "prepare", *recipe, "--from", data.place, "--json")
    assert json.loads(done.out)["made"], done
    text = tmp_path / "root" / "s3" / BUCKET / data.name
    assert contents(text)["a.txt"] == data.files["a.txt"]
    prepared = tmp_path / "root" / "gpt2-small"
    other = Data(data.server, f"{tmp_path.name}/prepared", tmp_path / "fetched")
    for name, found in contents(prepared).items():
        other.put(name, found)
    done = run_cli(
        "data", "fetch", other.place, "--cluster=local", "--output", other.output, "--json"
    )
    assert json.loads(done.out)["what"].endswith(
        f": prepared data, for --set data.path={other.output}"
    ), done
    assert run_cli("data", "verify", str(other.output), "--cluster=local").code == 0
    other.output = tmp_path / "damaged"
    other.put("train.bin", bytes(len(other.files["train.bin"])))
    assert other.refused() == (
        f"{other.place}: train.bin does not match index.json: copy the prepared directory to S3 "
        "again"
    )


def test_what_the_command_line_refuses(run_cli: Callable[..., Done]) -> None:
    for words, said in {
        ("fetch", "s3://Upper/x"): "expected s3://BUCKET/PREFIX",
        ("fetch", "s3://bucket/x", "--preset=small"): "--preset works only with recipes",
        ("fetch", "s3://bucket/x", "--set=seq_len=1"): "--set works only with recipes",
        ("fetch", "s3://bucket/x", "--checkpoint"): "--checkpoint works only with recipes",
        ("fetch", "gpt2_zero1", "--output=x"): "--output must be an s3:// URL",
        ("prepare", "gpt2_zero1", "--from=x"): "expected s3://BUCKET/PREFIX",
        ("prepare", "gpt2_zero1", "--from=s3://b/x", "--text=."): "pass only one of them",
    }.items():
        done = run_cli("data", *words, "--cluster=local")
        assert done.code in (1, 2) and said in done.err, done
