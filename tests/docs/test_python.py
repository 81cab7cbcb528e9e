"""The Python examples in the pages, run as they stand, and the notebook, run by nbconvert."""

from __future__ import annotations

import doctest
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ..processes import run_process

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    if ">>> " in page.read_text(encoding="utf-8")
]
# The user's script; and in the place of the launcher what starts its one worker, without PyTorch.
TRAIN = """
import sys
import trnslurm
lr = float(sys.argv[sys.argv.index("--lr") + 1])
for step in range(1, 5):
    trnslurm.report(step=step, steps=4, loss=1 / step)
print("trained")
"""
PYTHON = """#!/bin/bash
if [ "$2" = trnslurm.node.launcher ]; then
  while [ "${1##*/}" != train.py ]; do shift; done
  export RANK=$SLURM_NODEID WORLD_SIZE=$SLURM_JOB_NUM_NODES LOCAL_RANK=0
fi
exec '%s' "$@"
"""


@pytest.fixture
def project(site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the script, where the user stands."""
    python = tmp_path / "python"
    python.write_text(PYTHON % sys.executable)
    python.chmod(0o755)
    site.profile("local", scheduler="local", instance_type="local", device="cpu",
                 workers_per_node=1, python=str(python), slurm={})  # fmt: skip
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr("trnslurm.submission.choice.slurm_hint", lambda: (None, False))
    return tmp_path / "project"


def test_there_are_examples() -> None:
    assert {page.name for page in PAGES} >= {"README.md", "python.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_examples_print_what_the_page_says(page: Path, project: Path) -> None:
    text = page.read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert tried and not failed, "".join(said)


def test_the_notebook_runs(project: Path, tmp_path: Path) -> None:
    notebook = shutil.copy(ROOT / "docs/python.ipynb", project)  # whose directory is the kernel's
    done = run_process(
        [
            sys.executable,
            "-m",
            "nbconvert",
            "--to",
            "notebook",
            "--execute",
            notebook,
            "--output-dir",
            tmp_path,
            "--output",
            "done.ipynb",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PREFER_ENV_PATH": "1"},
    )
    assert done.code == 0, done.err
    cells = json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = [
        "".join(output.get("data", {}).get("text/html", ""))
        for cell in cells
        for output in cell.get("outputs", [])
    ]
    plan, run, runs = shown
    assert "gpt2_zero1 (xl)" in plan and plan.count("<table>") == 2
    assert "COMPLETED" in run and "<td" in run and "4/4" in runs
