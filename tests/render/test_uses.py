"""Which files of a project shape what a script does."""

from __future__ import annotations

from trnslurm.render.uses import used_by

FILES = {
    "prepare.py": b"import tokens\n",
    "train.py": b"from lib.model import Net\nimport tokens as t\nopen('vocab.txt')\n",
    "eval.py": b"from lib import model\n",
    "smoke.sh": b"python -m lib.check\n",
    "tokens.py": b"",
    "lib/__init__.py": b"",
    "lib/model.py": b"from . import layers\n",
    "lib/layers.py": b"from ..tokens import x\n",
    "lib/check.py": b"",
    "vocab.txt": b"a b c",
    "README.md": b"see eval.py",
}
BESIDE = {"prepare.py", "train.py", "eval.py", "smoke.sh"}


def test_a_script_uses_what_it_imports_and_all_that_is_no_module() -> None:
    lib = {"lib/__init__.py", "lib/model.py", "lib/layers.py"}
    assert used_by(FILES, "train.py", BESIDE) == {"train.py", "tokens.py", "vocab.txt", *lib}
    assert used_by(FILES, "eval.py", BESIDE) == {"eval.py", "tokens.py", "vocab.txt", *lib}
    assert used_by(FILES, "prepare.py", BESIDE) == {"prepare.py", "tokens.py", "vocab.txt"}


def test_a_program_that_is_not_python_uses_all_but_what_others_start() -> None:
    used = used_by(FILES, "smoke.sh", BESIDE)
    assert used == {*FILES} - BESIDE - {"README.md"} | {"smoke.sh"}


def test_what_a_used_file_names_is_used() -> None:
    files = FILES | {"train.py": b"import tokens\nsource = 'see README.md and smoke.sh'\n"}
    used = used_by(files, "train.py", BESIDE)
    assert {"README.md", "smoke.sh"} <= used and "eval.py" in used  # README.md names eval.py
    files = FILES | {"smoke.sh": b"python -m eval --x\n"}
    assert "eval.py" in used_by(files, "smoke.sh", BESIDE)


def test_a_script_that_may_hide_what_it_starts_uses_all_modules() -> None:
    for source in (
        b"import importlib\n",
        b"import os\nos.system('x')\n",
        b"__import__(name)\n",
        b"from subprocess import run\n",
        b"this is no Python\n",
    ):
        used = used_by(FILES | {"prepare.py": source}, "prepare.py", BESIDE)
        assert {"lib/check.py", "lib/model.py", "tokens.py"} <= used
    assert "lib/check.py" not in used_by(
        FILES | {"prepare.py": b"import tokens\nmodel.eval()\n"}, "prepare.py", BESIDE
    )


def test_a_module_of_the_project_is_found_in_src_and_beside_the_script() -> None:
    files = {
        "tools/run.py": b"import helper\nimport pkg.deep\nuse('other.py')\n",
        "tools/helper.py": b"",
        "tools/other.py": b"",
        "tools/unused.py": b"",
        "src/pkg/__init__.py": b"",
        "src/pkg/deep.py": b"",
    }
    assert used_by(files, "tools/run.py") == {*files} - {"tools/unused.py"}
