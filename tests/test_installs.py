"""The launcher from its wheel, with the oldest and the newest packages that it allows.

`make test-installs` runs this, on each Python that is here or that uv or Debian has. Everywhere
it plans, renders and submits the same bytes as the checkout.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from .conftest import FAKE_BIN
from .processes import Done, run_process

pytestmark = pytest.mark.installs
ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROFILE = """\
instance_type: trn1.32xlarge
python: /shared/venv/bin/python
run_root: {runs}
compile_cache: /shared/cache
slurm: {{partition: compute}}
"""
# Usage errors go through other code of click than the rest.
WRONG = (("plan", "--nope"), ("plann",), ("status",), (), ("cluster",), ("plan", "gpt2_zer"))


@cache
def uv() -> str:
    """Return the path of uv, which comes by pip where it is missing."""
    return run_process([ROOT / ".ci/uv", sys.executable], cwd=ROOT).ok.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    built = run_process([sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT])
    assert built.code == 0, built.err
    return next(out.glob("*.whl"))


class Launcher:
    """One installation, in a directory and with a Slurm of its own."""

    def __init__(self, command: Sequence[str | Path], place: Path) -> None:
        self._command, self._place = command, place
        for name in ("home", "slurm/calls", "site/cluster-config"):
            (place / name).mkdir(parents=True)
        for name in ("order", "queue", "places"):
            (place / "slurm" / name).touch()
        profile = PROFILE.format(runs=place / "runs")
        (place / "site/cluster-config/pc.yaml").write_text(profile)

    def run(self, *words: str) -> Done:
        environ = {
            "PATH": f"{FAKE_BIN}:{os.environ['PATH']}",
            "HOME": str(self._place / "home"),
            "TRNSLURM_PATH": str(self._place / "site"),
            "TRNSLURM_FAKE_SLURM": str(self._place / "slurm"),
        }
        return run_process([*self._command, *words], env=environ, cwd=self._place)

    def outcome(self) -> dict[str, object]:
        """What it plans, renders and submits, and how it ends on wrong usage."""
        rendered = self.run("render", "gpt2_zero1", "--nodes", "2", "-c", "trn1", "-o", "bundle")
        assert rendered.code == 0, rendered
        tiny = ("gpt2_zero1", "--preset", "tiny", "--allow-idle", "--time", "60")
        submitted = self.run("submit", *tiny, "-c", "pc")
        assert submitted.code == 0, submitted
        (run,) = (self._place / "runs").glob("[!.]*")
        return {
            "plan": self.run("plan", "gpt2_zero1", "-c", "trn1", "--json").ok,
            "help": self.run("submit", "--help").ok,
            "bundle": contents(self._place / "bundle"),
            "run": {n: data for n, data in contents(run).items() if n.endswith((".sbatch", ".sh"))},
            "calls": (self._place / "slurm/order").read_text().split(),
            "ends": {words: self.run(*words).code for words in WRONG},
        }


def contents(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from trnslurm.cli import main; main()"
    )
    found = Launcher([sys.executable, "-c", program], tmp_path_factory.mktemp("here")).outcome()
    assert found["ends"] == {w: 1 if w == ("plan", "gpt2_zer") else 2 for w in WRONG}
    return found


def python_of(version: str) -> str:
    """Return a Python on PATH, pyenv's, Debian's or uv's own; skip the test if there is none."""
    found = run_process([uv(), "python", "find", "--no-python-downloads", version], env=os.environ)
    if found.code == 0:
        return found.out.strip()
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in (*pyenv, ROOT / f".make/python-{version}/usr/bin/python{version}"):
        if path.exists():
            return str(path)
    fetched = run_process([uv(), "python", "install", "--no-bin", version], env=os.environ)
    if fetched.code:
        pytest.skip(f"no Python {version} here, and uv cannot fetch it")
    return python_of(version)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_an_installation(
    wheel: Path, here: dict[str, object], tmp_path: Path, python: str, resolution: str
) -> None:
    environment, pins = tmp_path / "venv", tmp_path / "pins.txt"
    there = environment / "bin/python"
    for words in (
        ("venv", "--python", python_of(python), environment),
        ("pip", "compile", "--python", there, "--resolution", resolution, "-o", pins,
         ROOT / "pyproject.toml"),
        ("pip", "install", "--python", there, "-r", pins, wheel),
    ):  # fmt: skip
        done = run_process([uv(), "--quiet", *words], env=os.environ)
        assert done.code == 0, done
    assert "click==" in pins.read_text()
    launcher = Launcher([environment / "bin/trnslurm"], tmp_path / "place")
    assert launcher.run("--version").ok.startswith("trnslurm ")
    assert launcher.outcome() == here
    shutil.rmtree(environment)
