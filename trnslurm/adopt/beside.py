"""Compares a user's batch script with trnslurm's: the sbatch options of both."""

from __future__ import annotations

from pathlib import Path

from trnslurm.config.batch_script import directives_of
from trnslurm.contract.files import read_file


def beside(file: Path, written: str, name: str) -> list[str]:
    """Return the options, with `-` for only the user's, and `+` and a reason for only ours."""
    text = read_file(file).decode(errors="replace")
    theirs = {d.name: d for d in directives_of(file, text)}
    ours = {d.name: d for d in directives_of(Path(name), written)}
    reasons = written.splitlines()
    lines = []
    for option in dict.fromkeys((*theirs, *ours)):
        left, right = theirs.get(option), ours.get(option)
        if left and right and left.word == right.word:
            lines.append(f"  {left.word}")
            continue
        if left:
            lines.append(f"- {left.word:<40}  {file.name}:{left.line}")
        if right:
            reason = reasons[right.line - 1].partition("# ")[2]
            lines.append(f"+ {right.word:<40}  {reason}".rstrip())
    return lines
