"""The launcher as it is sent: all that it needs, the same bytes each time, whole or not at all."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from trnslurm.errors import RemoteError
from trnslurm.remote import launcher, receive
from trnslurm.remote.ask import ask
from trnslurm.remote.launcher import NEEDED
from trnslurm.remote.request import RemoteCommand
from trnslurm.remote.ssh import Place

from .login import Login

HEAD = receive.HEAD_BYTES


def needed_by(name: str) -> set[str]:
    """What a package asks for on Linux and a Python from 3.11 on, without its extras."""
    lines = importlib.metadata.requires(name) or []
    kept = (line for line in lines if "extra ==" not in line and "win32" not in line)
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in kept}


def test_all_that_it_needs_is_sent() -> None:
    sent = {name.lower() for name in NEEDED}
    for name in ("trnslurm", *NEEDED):
        lacking = {word for word in needed_by(name) if "colorama" not in word} - sent
        assert not lacking, (name, lacking)
    names = launcher.files()
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert {"trnslurm/share/templates/node.sh.j2", "trnslurm/cli/remote_main.py"} <= {*names}


def test_the_same_files_are_the_same_bytes() -> None:
    first = launcher.name(), launcher.archive()
    for read in (launcher.files, launcher.name, launcher.archive):
        read.cache_clear()
    assert (launcher.name(), launcher.archive()) == first


def received(directory: Path, sent: bytes, size: int, sha256: str) -> tuple[int, bytes]:
    """Have a process receive a file; return its exit code and what it said."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(receive.__file__).parents[2])!r})\n"
        "from pathlib import Path\nfrom trnslurm.remote.receive import receive\n"
        "receive(Path(sys.argv[1]), b'p')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, directory / "file"], capture_output=True, timeout=600,
        input=f"{size} {sha256}\n".encode() + sent, check=False,
    )  # fmt: skip
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_file_comes_in_pieces(tmp_path: Path) -> None:
    data = os.urandom(200_000)
    sha256 = hashlib.sha256(data).hexdigest()
    assert received(tmp_path, data[:70_000], len(data), sha256) == (0, b"p000000010")
    assert not (tmp_path / "file").exists()
    assert received(tmp_path, data[70_000:70_001], len(data), sha256)[1] == b"p0000000570000"
    code, said = received(tmp_path, data[70_001:], len(data), sha256)
    assert (code, said) == (0, b"p0000000570001")
    assert [f.name for f in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == data


def test_what_arrives_damaged_is_not_kept(tmp_path: Path) -> None:
    data = b"x" * 1000
    code, said = received(tmp_path, data[:-1] + b"y", 1000, hashlib.sha256(data).hexdigest())
    assert (code, said[HEAD + 1 :]) == (1, receive.frame(receive.DAMAGED))
    assert not list(tmp_path.iterdir())


def test_what_no_launcher_sends_is_one_line(tmp_path: Path, monkeypatch) -> None:
    """Neither a loop without end nor a traceback."""
    frames = tmp_path / "frames"
    monkeypatch.setattr(Place, "argv", lambda *_: ["cat", str(frames)])
    ends = (b"{", b"[1]", b'{"code": null}', b'{"code": Infinity}', b"[" * 100_000)
    for said in (
        b"o-9999999", b"o+0000001", b"o  000001", b"Z00000000", b"\xff" * 90,
        receive.frame(receive.PARCEL, b"-1"), receive.frame(receive.LAUNCHER, b"all"),
        *(receive.frame(receive.END, end) for end in ends),
    ):  # fmt: skip
        frames.write_bytes(b"Welcome\n" + receive.MARK + said)
        with pytest.raises(RemoteError, match=r"^host: the answer is not from trnslurm's launcher"):
            ask(RemoteCommand(place=Place("host"), argv=[], shows=True), say=print)


def test_a_login_shell_talks_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(Place, "argv", lambda *_: ["head", "-c", "2M", "/dev/zero"])
    with pytest.raises(RemoteError, match=r"^host: the answer is not from trnslurm's launcher: b"):
        ask(RemoteCommand(place=Place("host"), argv=[], shows=True), say=print)


def test_a_login_node_without_a_python(login: Login, cli) -> None:
    few = login.above / "few"
    few.mkdir()
    for name in ("bash", "base64", "cat", "mkdir", "env", "sed", "touch"):
        (few / name).symlink_to(str(shutil.which(name)))
    fake = login.environ["PATH"].partition(":")[0]
    login.environ = {**login.environ, "PATH": f"{fake}:{few}"}
    login.start_again()
    assert cli("runs").code == 0  # the profile's
    profile = Path(os.environ["XDG_CONFIG_HOME"], "trnslurm/cluster-config/far.yaml")
    text = profile.read_text()
    profile.write_text(text.replace("python: /usr/bin/python3", "python: python9"))
    login.alone()
    assert "login1 has no Python 3.11 or newer (python3, " in cli("runs").error
    activate = "activate: ['PATH=$PATH:/usr/bin']\npython: python9"
    profile.write_text(text.replace("python: /usr/bin/python3", activate))
    assert cli("runs").code == 0  # after the lines of `activate`


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../out", tarfile.REGTYPE), ("/tmp/out", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)],
)
def test_an_archive_unpacks_nothing_elsewhere(tmp_path: Path, name: str, kind: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("plain"))
        tar.addfile(entry)
    with (
        tarfile.open(tmp_path / "a.tar") as tar,
        pytest.raises(tarfile.TarError, match=f"{name}'? does not belong"),
    ):
        receive.extract(tar, tmp_path / "here")
    assert not (tmp_path / "here").exists()
