"""The programs of the nodes with Python 3.9, which containers and RHEL 9 have."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from pathlib import Path

import pytest

from ..processes import Done, run_process
from ..test_import_rule import BESIDE, PACKAGE, files, module_name, modules_behind

ROOT = Path(__file__).parents[2]
# mypy 2 refuses 3.9: its stubs of the standard library begin with 3.10.
MYPY = "mypy==1.18.2"
REPORTS = """
import sys, time, trnslurm
print("Python", *sys.version_info[:2], flush=True)
for step in range(1, 4):
    trnslurm.report(step=step, loss=1 / step)
    print("step", step, flush=True)
if "--fail" in sys.argv:
    {}["learning_rate"]
"""


def on_nodes() -> list[Path]:
    """Return the sources that the nodes of a custom script may run."""
    rooms = ("calls", "datasets", "samples", "saves", "node", "mirror", *BESIDE["node"])
    found = set(files("__init__", *rooms))
    sources = {module_name(file): file for file in PACKAGE.rglob("*.py")}
    left = list(found)
    while left:
        more = {sources[name] for name in modules_behind(left.pop())} - found
        found |= more
        left += more
    return sorted(found)


def python_of(version: str) -> str:
    """Return a Python on PATH, or pyenv's; skip the test if there is none."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # a test has another HOME
    pyenv = home.glob(f".pyenv/versions/{version}.*/bin/python")
    for path in (shutil.which(f"python{version}"), *sorted(map(str, pyenv))):
        if path and run_process([path, "-c", ""]).code == 0:
            return path
    pytest.skip(f"no Python {version} here")


def test_ruff_knows_what_nodes_run() -> None:
    import tomllib

    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    older = [ROOT.glob(f"{name}/*.py") if name.endswith("**") else [ROOT / name]
             for name in ruff["per-file-target-version"]]  # fmt: skip
    assert on_nodes() == sorted(file for found in older for file in found)


@pytest.mark.rest
def test_nodes_need_only_what_python_3_9_has(tmp_path: Path) -> None:
    uv = run_process([ROOT / ".ci/uv", sys.executable], cwd=ROOT).ok.strip()
    options = ("--config-file=", "--python-version=3.9", "--follow-imports=silent",
               "--ignore-missing-imports", f"--cache-dir={tmp_path}")  # fmt: skip
    checked = [str(file.relative_to(ROOT)) for file in on_nodes()]
    done = run_process(
        [uv, "tool", "run", "--quiet", "--python", sys.executable, "--from", MYPY, "mypy", *options,
         *checked],
        cwd=ROOT,
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert f"no issues found in {len(checked)} source files" in done.out


@pytest.mark.rest
def test_a_script_runs_and_its_failure_is_explained(run_cli, home: Path, monkeypatch) -> None:
    python = python_of("3.9")
    project = home / "project"
    project.mkdir()
    (project / "x.py").write_text(REPORTS)
    monkeypatch.chdir(project)

    def submit(*words: str) -> Done:
        return run_cli("submit", "./x.py", "--cluster", "local", "--nodes", "2", "--set",
                       f"python={python}", *words)  # fmt: skip

    done = submit()
    assert done.code == 0, done
    assert "Python 3 9" in done.out and "loss 1.0000 at step 1 -> 0.3333 at step 3" in done.out
    done = submit("--", "--fail")
    assert done.code == 1, done
    assert "KeyError: 'learning_rate' at x.py, line 8" in done.out


def test_an_older_python_is_refused_in_one_line() -> None:
    python = python_of("3.8")
    command = [python, "-m", "trnslurm.node.attempt", "--help"]
    done = run_process(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.error.startswith(f"{python} is Python 3.8.")
    assert done.error.endswith("nodes need 3.9 or newer: set python: in the cluster profile")
