"""A login node: the real sshd, an account with its own home, Slurm's stand-ins on its PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trnslurm.remote import launcher as made

from .login import Login

FAKE_BIN = Path(__file__).parents[1] / "fake_bin"

PROFILE = """\
description: a cluster that this machine does not see
remote: login1
run_root: {home}/runs
data_root: {home}/data
compile_cache: {home}/cache
python: /usr/bin/python3
slurm:
  partition: compute
"""


def home_of_user() -> Path:
    """Where the user here has profiles."""
    return Path(os.environ["XDG_CONFIG_HOME"], "trnslurm")


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher as an account has it that has used it before: its modules are compiled."""
    directory = tmp_path_factory.mktemp("launcher") / made.name()
    for name, data in made.files().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    argv = ["/usr/bin/python3", "-m", "compileall", "-qq", "-j", "2", directory]
    subprocess.run(argv, check=True)
    return directory


@pytest.fixture
def login(
    launcher: Path, fake_slurm: Any, path_without_slurm: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Login]:
    """A login node whose Slurm is the stand-in; this machine has none, and no profile's Python."""
    above = Path(tempfile.mkdtemp(dir="/tmp", prefix="lg-"))  # short: sockets lie below
    home = above / "home"
    home.mkdir(mode=0o700)
    kept = home / ".cache/trnslurm" / launcher.name
    kept.parent.mkdir(mode=0o700, parents=True)
    shutil.copytree(launcher, kept, copy_function=os.link)
    environ = {
        "HOME": str(home), "TRNSLURM_FAKE_SLURM": os.environ["TRNSLURM_FAKE_SLURM"],
        "PATH": f"{FAKE_BIN}:{path_without_slurm}",
    }  # fmt: skip
    login = Login(above, home, environ)
    login.start()
    monkeypatch.setenv("PATH", path_without_slurm)
    monkeypatch.setattr("trnslurm.remote.ask._WAITS_S", (0.02,) * 7)
    monkeypatch.setenv("TRNSLURM_CLUSTER", "far")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(above / "run"))
    (above / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TRNSLURM_SSH", f"ssh -F {above}/ssh_config")
    profile = home_of_user() / "cluster-config/far.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE.format(home=home))
    try:
        yield login
    finally:
        subprocess.run(
            ["ssh", "-F", above / "ssh_config", f"-oControlPath={above}/run/trnslurm/%C", "-Oexit",
             "login1"], capture_output=True, check=False,
        )  # fmt: skip
        shutil.rmtree(above)
