"""The variables of a run: each stands once in Python, and the templates use no others."""

from __future__ import annotations

import re
from pathlib import Path

import trnslurm
from trnslurm.contract.variables import Variable

PACKAGE = Path(trnslurm.__file__).parent
ROOT = PACKAGE.parent
NAME = re.compile(r"TRNSLURM_(?:ROLE(?=_)|[A-Z_]*[A-Z])")
# Read before the package can be imported, or shell that a host without it runs.
TEXT = {
    "contract/variables.py",
    "node/startup/sitecustomize.py",
    "remote/ssh.py",
    "contract/rundir.py",
}
# Of Click, for completion.
OTHERS = {"TRNSLURM_COMPLETE"}


def test_the_templates_and_pages_use_known_names() -> None:
    for directory, pattern in (("templates", "*.j2"), ("docs", "*.md")):
        for file in sorted((ROOT / directory).rglob(pattern)):
            assert {*NAME.findall(file.read_text())} <= {*Variable}, file


def test_python_has_each_name_once() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        found = {*re.findall(rf"""[^_\w]b?["']({NAME.pattern})["']""", file.read_text())}
        assert found == set() or name in TEXT, file


def test_each_is_used() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "templates").rglob("*.j2")]
    text = "\n".join(f.read_text() for f in files if f.name != "variables.py")
    for variable in Variable:
        assert f"Variable.{variable.name}" in text or variable in text, variable
        assert variable.meaning and variable.meaning[-1] != ".", variable
