"""What the pages quote of the launcher's pure commands is what these print today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# They need no cluster and write nothing: only the checkout decides what they print.
_PURE = re.compile(r"(recipes|clusters|show|plan|render|compile key)\b")
# A profile, a lock or files that only the page's text describes.
_ELSEWHERE = re.compile(r"--path | -o |--diff |slurm\.account")
# Keys of graphs change with the code.
_KEY = re.compile(r"\b[0-9a-f]{16}\b")


def examples() -> list[tuple[str, list[str]]]:
    """Return each quoted command with the lines below it."""
    found = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            command = re.fullmatch(r" +\$ trnslurm (.*)", line)
            if command and _PURE.match(command[1]) and not _ELSEWHERE.search(command[1]):
                quoted = []
                for below in lines[number + 1 :]:
                    if below.strip() and (not below.startswith("    ") or "$ trnslurm" in below):
                        break
                    quoted.append(_KEY.sub("KEY", " ".join(below.split())))
                found.append((command[1], [text for text in quoted if text not in ("", "...")]))
    return found


@pytest.mark.parametrize(("words", "quoted"), [e for e in examples() if e[1]])
def test_printed_as_quoted(cli, words: str, quoted: list[str]) -> None:
    """The lines are as quoted and in that order; others may be between them."""
    done = cli(*shlex.split(words))
    text = _KEY.sub("KEY", (done.out + done.err).replace(str(ROOT), "/home/ada/trnslurm"))
    printed = iter([" ".join(line.split()) for line in text.splitlines()])
    missing = [line for line in quoted if line not in printed]
    assert not missing, text
