"""One wheel carries everything: in an empty environment elsewhere it renders and plans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from trnslurm.remote import launcher

ROOT = Path(__file__).parent.parent


def run(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, timeout=600, check=False, **options
    )


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("dist"))


def make_release(out: Path) -> Path:
    """Make a release of the files that are here."""
    done = run([sys.executable, str(ROOT / ".ci/release.py"), "--draft", str(out)])
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    return next(release.glob("*.whl"))


@pytest.mark.rest
def test_a_release_is_the_same_when_made_again(release: Path, tmp_path: Path) -> None:
    again = make_release(tmp_path)
    sums = (release / "SHA256SUMS").read_text()
    assert sums == (again / "SHA256SUMS").read_text()
    assert len(sums.splitlines()) == 5
    assert "PyYAML" in (release / "licences.txt").read_text()


def test_wheel_holds_templates_jobs_and_profiles(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for part in ("templates", "jobs", "cluster-config"):
        here = {
            f"trnslurm/share/{f.relative_to(ROOT)}"
            for f in (ROOT / part).rglob("*")
            if f.is_file() and "__pycache__" not in f.parts
        }
        assert here and here <= names
    assert not [n for n in names if "__pycache__" in n or n.startswith("tests/")]


@pytest.mark.rest
def test_every_form_renders_and_plans_as_the_checkout_does(
    release: Path, wheel: Path, tmp_path: Path
) -> None:
    assert run([sys.executable, "-m", "venv", str(tmp_path / "venv")]).returncode == 0
    pip = run([str(tmp_path / "venv/bin/pip"), "install", "--quiet", str(wheel)])
    assert pip.returncode == 0, pip.stderr
    installed = str(tmp_path / "venv/bin/trnslurm")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    render = ["render", "gpt2_zero1", "--nodes", "2", "--cluster", "trn1", "-o"]
    for program, target in (
        ([installed], "installed"),
        ([sys.executable, "-I", str(release / "trnslurm.pyz")], "one-file"),
        ([sys.executable, "-m", "trnslurm"], "checkout"),
    ):
        done = run([*program, *render, target], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        new = ["new", f"c-{target}", "--example", "c"]
        done = run([*program, *new], cwd=tmp_path, env=environment)
        assert done.returncode == 0 and (tmp_path / f"c-{target}/train.c").is_file(), done.stderr
    for form in ("installed", "one-file"):
        same = run(["diff", "-r", form, "checkout"], cwd=tmp_path)
        assert same.returncode == 0, same.stdout
    plan = run([installed, "plan", "gpt2_zero1", "--nodes", "2"], cwd=tmp_path, env=environment)
    assert plan.returncode == 0 and "524,288" in plan.stdout
    # The launcher comes without the training stack.
    assert run([str(tmp_path / "venv/bin/python"), "-c", "import torch"]).returncode == 1

    # The man page is where man looks beside PATH; and nothing of it all stays.
    page = tmp_path / "venv/share/man/man1/trnslurm.1"
    assert page.read_bytes() == (ROOT / "share/man/man1/trnslurm.1").read_bytes()
    if shutil.which("man"):
        path = {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
        assert run(["man", "--path", "trnslurm"], env=path).stdout.strip() == str(page)
    pip = run([str(tmp_path / "venv/bin/pip"), "uninstall", "--quiet", "--yes", "trnslurm"])
    assert pip.returncode == 0, pip.stderr
    assert not [*(tmp_path / "venv").rglob("*trnslurm*")]


@pytest.mark.rest
def test_the_one_file_trains_where_only_python_is(release: Path, tmp_path: Path) -> None:
    python = str(tmp_path / "bare/bin/python")
    assert (
        run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")]).returncode == 0
    )
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    (tmp_path / "x.py").write_text('print("step 1 loss 0.5", flush=True)\n')

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python, str(release / "trnslurm.pyz"), *words]
        return run(command, cwd=tmp_path, env=env, umask=0o002)

    for words, said in (
        (("submit", "./x.py", "--cluster", "local"), "COMPLETED"),
        (("status", "last"), "COMPLETED"),
        (("render", "./x.py", "-c", "p5", "--time", "60", "-o", "bundle"), "Wrote"),
    ):
        done = call(*words)
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    (place,) = (tmp_path / ".cache/trnslurm").glob("one-file-*")
    assert not (place.stat().st_mode | place.parent.stat().st_mode) & 0o077
    # It sends the same launcher to another host as the checkout does.
    name = run(
        [python, "-c", "from trnslurm.remote import launcher; print(launcher.name())"],
        env=env | {"PYTHONPATH": str(place)},
        cwd=tmp_path,
    )
    assert name.stdout.strip() == launcher.name(), name.stderr
    place.chmod(0o777)
    done = call("--version")
    assert done.returncode == 1
    assert done.stderr == f"error: others can write to {place}: remove it, or chmod go-w it\n"


@pytest.mark.rest
def test_neuron_extra_fails_clearly_on_the_public_index(wheel: Path, tmp_path: Path) -> None:
    """The public index has empty placeholders of these names; they must never be installed."""
    done = run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed",
         "--disable-pip-version-check", *neuron_pins()],
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    assert "No matching distribution found for torch-neuronx==2.9.0.2.13.26312" in done.stderr
    assert "Would install" not in done.stdout


def neuron_pins() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins: list[str] = project["optional-dependencies"]["neuron"]
    assert all("==" in pin for pin in pins)
    return pins
