"""The man page and the completion scripts: made of today's commands, and found once installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from trnslurm.cli import _COMMANDS

from .processes import run_process

ROOT = Path(__file__).parents[1]


def test_they_are_of_these_commands() -> None:
    spec = importlib.util.spec_from_file_location("share", ROOT / "docs/make/share.py")
    assert spec and spec.loader
    spec.loader.exec_module(make := importlib.util.module_from_spec(spec))
    made = make.files()
    assert {str(f.relative_to(make.SHARE)) for f in make.SHARE.rglob("*") if f.is_file()} == {*made}
    other = [p for p, text in made.items() if (make.SHARE / p).read_text("utf-8") != text]
    assert not other, f"share/ is of other commands: make goldens ({', '.join(other)})"


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff")
def test_the_page_is_sound() -> None:
    page = ROOT / "share/man/man1/trnslurm.1"
    done = run_process(["groff", "-Kutf8", "-man", "-Tutf8", "-ww", "-P-cbou", str(page)])
    assert (done.code, done.err) == (0, "")
    assert all(f"trnslurm {name} " in done.out for name in _COMMANDS)
    assert "      trnslurm cluster detect --write" in done.out  # its lines stay lines


def test_bash_completes_with_the_installed_script(tmp_path: Path) -> None:
    program = tmp_path / "trnslurm"
    program.write_text("#!/bin/sh\nprintf 'plain,%s\\n' submit \"$_TRNSLURM_COMPLETE\"\n")
    program.chmod(0o755)
    script = (
        f"compopt() {{ :; }}; . '{ROOT}/share/bash-completion/completions/trnslurm'\n"
        "COMP_WORDS=(trnslurm su) COMP_CWORD=1\n"
        '_trnslurm_completion trnslurm; echo "${COMPREPLY[@]}"; complete -p trnslurm'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_process(["bash", "-euc", script], env={"PATH": path})
    assert done.ok.splitlines() == [
        "submit bash_complete", "complete -o nosort -F _trnslurm_completion trnslurm",
    ]  # fmt: skip
