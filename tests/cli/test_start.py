"""What a command costs to start, without a clock: modules, files, templates and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import trnslurm

CHECKOUT = Path(trnslurm.__file__).parent.parent
# Writes down what a command opens, compiles and starts, and which modules it has at its end.
COUNTER = """
import json, sys
file, seen = sys.argv.pop(1), {"open": [], "compile": [], "subprocess.Popen": []}
def note(event, details):
    if event in seen:
        seen[event].append([repr(detail)[:200] for detail in details[:2]])
sys.addaudithook(note)
from trnslurm.cli import main
try:
    main(sys.argv[1:])
finally:
    with open(file, "w") as out:
        json.dump(seen | {"modules": sorted(sys.modules)}, out)
"""
SLOW = {
    "asyncio", "cloudpickle", "email", "importlib.metadata", "jinja2", "logging", "matplotlib",
    "multiprocessing", "numpy", "pickle", "pathspec", "rich", "shutil", "socket", "ssl", "submitit",
    "tarfile", "tempfile", "textual", "tomllib", "torch", "typing_extensions",
}  # fmt: skip


@pytest.fixture
def seen(site, fake_slurm, make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Call a command, and return what it did."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    site.recipe()

    def call(*words: str) -> dict[str, Any]:
        file = tmp_path / "seen.json"
        subprocess.run(
            [sys.executable, "-c", COUNTER, str(file), *words], check=True, timeout=180,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(file.read_text())

    return call


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "toy", "--cluster", "pc", "--nodes", "1,2"],
        ["show", "toy", "--cluster", "pc"],
        ["recipes"],
        ["clusters"],
        ["runs"],
        ["status", "last"],
    ],
    ids=lambda words: words[0],
)
def test_what_only_looks_imports_nothing_slow(seen, make_run, words: list[str]) -> None:
    done = [{"state": "COMPLETED"}]
    make_run(states={"precompile": done, "train": done})
    assert SLOW & {*seen(*words)["modules"]} == set()


def test_to_render_nothing_is_imported_that_submits(seen) -> None:
    seen("render", "toy", "--cluster", "pc", "--nodes", "2")  # reads the causes of failures once
    modules = {*seen("render", "toy", "--cluster", "pc", "--nodes", "2")["modules"]}
    assert "jinja2" in modules
    assert (
        modules & (SLOW - {"jinja2", "logging", "pickle", "tempfile", "shutil", "email"}) == set()
    )


def templates(events: list[list[str]]) -> Counter[str]:
    return Counter(Path(name.strip("'")).name for _, name in events if ".j2" in name)


def test_no_template_is_compiled_and_no_file_parsed_twice(seen) -> None:
    first = seen("render", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")
    compiled = templates(first["compile"])
    assert {"batch.sbatch.j2", "node.sh.j2", "neuron.j2"} <= {*compiled}
    assert {*compiled.values()} == {1}
    again = seen("render", "gpt2_zero1", "--cluster", "pc", "--nodes", "2")
    assert not templates(again["compile"])
    # The keys that the job declares are read from its source, with the two files that it names.
    parsed = Counter(source for source, name in again["compile"] if name == "'<unknown>'")
    assert set(parsed.values()) == {1} and len(parsed) <= 3


def test_no_file_of_the_job_is_read_twice(seen) -> None:
    opened = Counter(name for name, _ in seen("render", "toy", "--cluster", "pc")["open"])
    ours = {
        name: n for name, n in opened.items() if "/trnslurm/train/" in name and ".pyc" not in name
    }
    assert len(ours) > 20 and set(ours.values()) == {1}
    assert {n for name, n in opened.items() if name.endswith(".j2'")} == {1}


def test_a_submission_starts_no_more_than_it_needs(seen, site, fake_slurm) -> None:
    site.profile(python=sys.executable)
    fake_slurm.answer("sbatch.out", "Submitted batch job 7\n")
    done = seen("submit", "toy", "--cluster", "pc", "--nodes", "2")
    started = sorted(Path(program.strip("'")).name for program, _ in done["subprocess.Popen"])
    # The versions of the job's Python; the commit; and sbatch for each of two phases, first to try.
    assert started == ["bash", "env", "env", "git", "sbatch", "sbatch", "scontrol"]
