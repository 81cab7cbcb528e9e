"""The directory of all sandboxes: private to the user, with a path that Slurm accepts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trnslurm.sandbox.layout import base_dir


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Path]:
    """A base directory, not made yet, with a path short enough for sockets."""
    above = Path(tempfile.mkdtemp(dir="/tmp", prefix="tl-"))
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(above / "b"))
    yield above / "b"
    shutil.rmtree(above)


def writable_by(mode: int) -> Callable[[Path], Path]:
    def make(base: Path) -> Path:
        base.mkdir()
        base.chmod(mode)
        return base

    return make


def symlink(base: Path) -> Path:
    (base.parent / "elsewhere").mkdir(mode=0o700)
    base.symlink_to(base.parent / "elsewhere")
    return base


def dangling(base: Path) -> Path:
    base.symlink_to(base.parent / "elsewhere")
    return base


def of_another(base: Path) -> Path:
    if os.getuid():
        return Path("/usr")
    base.mkdir(mode=0o700)
    os.chown(base, 65534, 65534)
    return base


def a_file(base: Path) -> Path:
    base.write_text("")
    return base


MAKERS = {
    "world-writable": writable_by(0o777), "group-writable": writable_by(0o770),
    "symlink": symlink, "dangling": dangling, "another's": of_another, "file": a_file,
}  # fmt: skip


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_base_that_is_not_ours_alone(cli, base: Path, monkeypatch, make) -> None:
    path = make(base)
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(path))
    before = sorted(base.parent.rglob("*"))
    for command in ("up", "down"):
        done = cli("sandbox", command)
        assert (done.code, done.error.startswith(f"{path}: ")) == (1, True)
    assert cli("sandbox", "list").out == ""  # what lies there is not trusted either
    assert cli("clusters").code == 0
    assert sorted(base.parent.rglob("*")) == before


def test_base_whose_parent_is_missing(cli, base: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base / "b"))
    assert cli("sandbox", "up").error == f"{base}/b: No such file or directory"


@pytest.mark.parametrize("odd", ["a b", "a,b", "a#b", "a=b", "a'b", "ä", "a\nb", "a%nb", "a\\b"])
def test_base_that_slurm_conf_could_not_name(cli, base: Path, monkeypatch, odd: str) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base.parent / odd))
    done = cli("sandbox", "up")
    assert (done.code, "slurm.conf accepts no such path; set TRNSLURM_SANDBOXES" in done.error) == (
        1, True
    )  # fmt: skip


def test_base_that_is_relative(cli, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", "here")
    assert "set TRNSLURM_SANDBOXES" in cli("sandbox", "up").error
    assert not Path("here").exists()


def test_base_that_is_too_long_for_a_socket(cli, base: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_SANDBOXES", str(base / ("x" * 90)))
    assert "too long for a socket; set TRNSLURM_SANDBOXES" in cli("sandbox", "up").error


def test_default_base_is_the_users_own_and_local(monkeypatch) -> None:
    monkeypatch.delenv("TRNSLURM_SANDBOXES")
    assert base_dir() == Path(f"/tmp/trnslurm-{os.getuid()}")
    monkeypatch.setenv("TRNSLURM_SANDBOXES", "")
    assert base_dir() == Path(f"/tmp/trnslurm-{os.getuid()}")
