"""trnslurm.mirror: copies in S3 of what a run saves, and back."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trnslurm
from trnslurm.contract.checkpoints import checkpoint_name, newest_checkpoint, newest_step
from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.mirror.copies import read_copy
from trnslurm.mirror.store import ChangedError, MirrorError, Object, Store

from ..processes import Done, run_process
from ..waiting import eventually
from .server import BUCKET, Server

pytestmark = pytest.mark.rest

SECONDS = 600
MIB = 1 << 20


class Run(RunFiles, kw_only=False):
    """A run directory with checkpoints that no training made."""

    @property
    def name(self) -> str:
        return self.path.name

    def make(self, place: str) -> Run:
        self.state.mkdir(parents=True)
        self.checkpoints.mkdir()
        self.code.mkdir()
        write_json(self.mirror_file, {"place": place, "mib_per_s": 500, "wait_min": 0.02})
        write_json(self.record_file, {"run": self.name, "created": place})
        return self

    def save(self, step: int, *sizes: int) -> Path:
        """Make a checkpoint with files of these sizes, as the runtime does."""
        checkpoint = self.checkpoints / checkpoint_name(step)
        checkpoint.mkdir()
        files = {}
        for number, size in enumerate(sizes):
            data = os.urandom(size)
            (checkpoint / f"rank-{number}").write_bytes(data)
            files[f"rank-{number}"] = {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
        write_json(checkpoint / "manifest.json", {"step": step, "files": files})
        return checkpoint

    def mirror(self, *words: str) -> Done:
        return run_process(self.command(*words), cwd=self.path, env=environ(), timeout_s=SECONDS)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*words), cwd=self.path, env=environ(), stdin=subprocess.PIPE
        )

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "trnslurm.mirror", *words]

    @property
    def why(self) -> str:
        """Why the newest checkpoint is not copied."""
        return str(json.loads(self.mirrored_file.read_text())["why"])


def environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(trnslurm.__file__).parents[1])}


@pytest.fixture
def make_run(server: Server, tmp_path: Path) -> Callable[[str], Run]:
    def make(name: str = "a run") -> Run:
        return Run(tmp_path / name.replace(" ", "-")).make(f"s3://{BUCKET}/{tmp_path.name}")

    return make


def contents(directory: Path) -> dict[str, bytes]:
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def in_s3(server: Server, run: Run) -> set[str]:
    """Return what S3 has of the run's checkpoints, without the prefix."""
    prefix = f"{run.path.parent.name}/{run.name}/checkpoints/"
    return {key.removeprefix(prefix) for key in server.sizes() if key.startswith(prefix)}


@pytest.mark.first
def test_a_copy_is_whole_or_it_does_not_exist(server: Server, make_run: Callable[..., Run]) -> None:
    """The copying is killed within a file; what had arrived is not sent again."""
    run = make_run()
    checkpoint = run.save(10, 104 * MIB, 1000)
    server.gate.bytes_per_s = 40 * MIB  # on each of four connections
    with run.start("send") as program:
        eventually(lambda: server.parts() >= 2, SECONDS)
        program.kill()
    eventually(lambda: not server.gate.open, SECONDS)
    assert "step-00000010.json" not in in_s3(server, run)

    server.gate.heal()
    before = server.gate.received
    assert run.mirror("send").code == 0
    assert server.gate.received - before < 80 * MIB
    assert "step-00000010.json" in in_s3(server, run)
    before = server.gate.received
    assert run.mirror("send").code == 0
    assert server.gate.received - before < MIB

    other = make_run("elsewhere")
    assert other.mirror("fetch", f"s3://{BUCKET}/{run.path.parent.name}/{run.name}").code == 0
    assert contents(other.checkpoints) == {
        f"{checkpoint.name}/{name}": data for name, data in contents(checkpoint).items()
    }


def test_it_keeps_what_the_disk_keeps(server: Server, make_run: Callable[..., Run]) -> None:
    run = make_run()
    old = run.save(10, 1000)
    assert run.mirror("send").code == 0
    run.save(20, 1000)
    damaged = run.save(30, 1000)
    (damaged / "rank-0").write_bytes(bytes(1000))
    shutil.rmtree(old)
    done = run.mirror("send")
    assert done.code == 3
    assert "step-00000030/rank-0: its sha256 has changed" in run.why
    files = {f"step-00000020{rest}" for rest in ("/rank-0", "/manifest.json", ".json")}
    assert in_s3(server, run) - {"step-00000030/manifest.json"} == files

    shutil.rmtree(run.checkpoints)  # as after the loss of a disk
    assert run.mirror("send").code == 0
    assert files <= in_s3(server, run)


def test_a_damaged_copy_is_passed_over(server: Server, make_run: Callable[..., Run]) -> None:
    run = make_run()
    good, _ = run.save(10, 1000), run.save(20, 1000)
    assert run.mirror("send").code == 0
    place = f"{run.path.parent.name}/{run.name}"
    key = f"{place}/checkpoints/step-00000020/rank-0"
    server.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(1000))
    other = make_run("elsewhere")
    done = other.mirror("fetch", f"s3://{BUCKET}/{place}")
    assert done.code == 0 and "step 20 is damaged" in done.err
    assert contents(other.checkpoints / good.name) == contents(good)
    assert not (other.checkpoints / "step-00000020").exists()


def test_a_script_reports_a_file_and_a_directory(
    server: Server, make_run: Callable[..., Run]
) -> None:
    """Where it is saved again, the older copy goes; it is fetched to the same place."""
    run = make_run()
    write_json(run.project_file, {})
    place = f"s3://{BUCKET}/{run.path.parent.name}/{run.name}"

    def save(step: int, path: Path, name: str = "") -> None:
        (path / name if name else path).write_bytes(os.urandom(1000))
        write_json(run.saved_file, {"step": step, "path": str(path)})
        assert run.mirror("send").code == 0

    directory = run.path / "work" / "out"
    (directory / "deep er").mkdir(parents=True)
    save(1, run.checkpoints / "last.pt")
    save(2, run.checkpoints / "last.pt")
    assert in_s3(server, run) == {"step-00000002.json", "step-00000002/last.pt"}
    save(3, directory, "deep er/ä.bin")
    other = make_run("elsewhere")
    write_json(other.project_file, {})
    (other.path / "work" / "out").mkdir(parents=True)
    for _ in range(2):  # an earlier attempt may have ended after the fetch
        other.saved_file.unlink(missing_ok=True)
        assert other.mirror("fetch", place).code == 0
        assert newest_checkpoint(other) == other.path / "work" / "out"
    assert contents(other.path / "work") == contents(run.path / "work")
    assert newest_step(other) == 3


def test_what_a_library_wrote_is_copied(server: Server, make_run: Callable[..., Run]) -> None:
    """If the script takes it, and its name tells the step."""
    run = make_run()
    write_json(run.project_file, {})
    (run.path / "train.sh").write_text("#\nexport TRNSLURM_CHECKPOINT_GLOB='out/*.bin'\n")
    place = run.path / "work" / "out"
    place.mkdir(parents=True)
    (place / "step-1.bin").write_bytes(b"1")
    os.utime(place / "step-1.bin", (1, 1))
    (place / "x.bin").write_bytes(b"PK\x03\x04")
    done = run.mirror("send")
    assert done.code == 3
    assert run.why == (
        "step-1.bin of the pattern out/*.bin is not copied: "
        "the script does not resume from a checkpoint"
    )
    with (run.path / "train.sh").open("a") as script:
        script.write("export TRNSLURM_RESUMES=told\n")
    assert run.mirror("send").code == 0
    assert in_s3(server, run) == {"step-00000001.json", "step-00000001/step-1.bin"}
    other = make_run("elsewhere")
    write_json(other.project_file, {})
    (other.path / "train.sh").write_text("\nexport TRNSLURM_RESUMES=told\n")
    assert other.mirror("fetch", f"s3://{BUCKET}/{run.path.parent.name}/{run.name}").code == 0
    assert newest_checkpoint(other) == other.path / "work/out/step-1.bin"
    (place / "step-1.bin").rename(place / "one.bin")  # no step
    assert run.mirror("send").code == 3
    assert "out/*.bin is not copied: its name does not contain a step" in run.why


def test_it_says_what_s3_says(server: Server, make_run: Callable[..., Run], home: Path) -> None:
    run = make_run()
    run.save(10, 1000)
    server.be("reader", home)
    done = run.mirror("send")
    assert done.code == 3 and "PutObject: AccessDenied: Access Denied" in done.err
    assert run.why == "PutObject: AccessDenied: Access Denied"
    server.be("writer", home)
    server.gate.refuses = True
    assert run.mirror("send").code == 3
    assert "Connection was closed" in run.why
    server.gate.heal()
    assert run.mirror("send").code == 0 and run.why == ""
    write_json(run.record_file, {"run": run.name, "created": "then"})
    done = run.mirror("send")
    assert done.code == 3 and "contains the copies of another run" in done.err


@pytest.mark.first
def test_objects_of_others_stop_nothing(server: Server, make_run: Callable[..., Run]) -> None:
    """S3's console makes an empty object for a folder."""
    run = make_run()
    run.save(10, 1000)
    prefix = f"{run.path.parent.name}/{run.name}/"
    others = {
        "",
        "checkpoints/",
        "checkpoints/step-00000010/",
        "checkpoints/.json",
    }
    for name in others | {"checkpoints/step-00000005/"}:
        server.client().put_object(Bucket=BUCKET, Key=prefix + name, Body=b"")
    assert run.mirror("send").code == 0 and run.why == ""
    assert "step-00000010.json" in in_s3(server, run)
    left = {key.removeprefix(prefix) for key in server.sizes() if key.startswith(prefix)}
    assert others - left == {"checkpoints/step-00000010/"}
    assert "checkpoints/step-00000005/" not in left  # a part of a copy, of a step that is gone


class Endless:
    """A client of an S3 that answers far too long, as a broken gateway may."""

    def get_paginator(self, what: str) -> Endless:
        return self

    def paginate(self, **asked: str) -> Iterator[dict[str, Any]]:
        return itertools.repeat({}, 3_000)

    def get_object(self, **asked: str) -> dict[str, Any]:
        return {"Body": self}

    def read(self, size: int) -> bytes:
        return bytes(size)

    def iter_chunks(self, size: int) -> Iterator[bytes]:
        return itertools.repeat(bytes(size), 9)


@pytest.mark.first
def test_answers_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trnslurm.mirror.store._client", lambda connections: Endless())
    store, file = Store("s3://bucket/a"), tmp_path / "file"
    for listing in (store.names, store.all_names, store.remove):
        with pytest.raises(MirrorError, match=r"more than 2,000 pages of names: choose"):
            list(listing("checkpoints/") or ())
    for fetch in (
        lambda: store.fetch("x", file, 3 * MIB, "0" * 64),
        lambda: store.fetch_rest(Object("x", 3 * MIB, '"0"'), file),
    ):
        file.unlink(missing_ok=True)
        with pytest.raises(ChangedError, match="a/x: S3 sends more bytes than it listed"):
            fetch()
        assert file.stat().st_size == 3 * MIB
    assert read_copy(store, 10) == {}  # a damaged one is passed over


def test_it_ends_with_its_attempt(server: Server, make_run: Callable[..., Run]) -> None:
    """Beside a training it copies what appears, and sends the rest when the training has ended."""
    run = make_run()
    with run.start("beside") as program:
        run.save(10, 1000)
        eventually(lambda: "step-00000010.json" in in_s3(server, run), SECONDS)
        run.save(20, 1000)
        program.communicate(b"finish\n", SECONDS)
    assert program.returncode == 0
    assert "step-00000020.json" in in_s3(server, run)
    with run.start("beside") as program:
        program.communicate(timeout=SECONDS)
    assert program.returncode == 3
