"""Advice after a failure: the fix, and the command that continues the run."""

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm.contract.rundir import PREPARE

SUBMIT, RESUME, EITHER, PASSES = "submit", "resume", "either", "passes"
_COMMAND = re.compile(r"([;,] |^)(and |then )?(submit again|trnslurm resume)\b.*")
# Not within parentheses, nor within the quotes of a command.
_PARTS = re.compile(r"; (?![^(]*\))(?![^']*'(?:[ ;,]|$))")
_USUAL_FIX, _MAX_FIX = 100, 160


def way_back(
    record: Mapping[str, Any],
    mend: str,
    fix: str,
    options: Sequence[str] = (),
    *,
    saved: bool = False,
    given_up: bool = False,
    command: str = "",
) -> tuple[str, str]:
    """Return the fix in short form, and the command that continues a run after it.

    A resume uses the run's copy of the code and configuration, so it would repeat errors in them.
    `mend` is the cause's. If it is unknown, a run that was given up is submitted again, and so is a
    run that has saved nothing, because it loses nothing. `command` resumes the run.
    """
    repeats = mend == SUBMIT or (not mend and given_up) or (mend in ("", EITHER) and not saved)
    if repeats or PREPARE in record.get("phases", ()):
        return new_submission(record, fix, options)
    what = short(fix) if mend in (RESUME, EITHER) else ""
    return what, command or f"trnslurm resume {record['run']}"


def new_submission(
    record: Mapping[str, Any], fix: str, options: Sequence[str] = ()
) -> tuple[str, str]:
    """Return the fix, and the command that submits a new run, if that is known."""
    command = [str(word) for word in record.get("command") or ()]
    others = any(record.get(key) for key in ("group", "after", "then"))  # starts these too
    if others or command[1:2] != ["submit"]:  # from Python, it is a function call
        added = f" with {shlex.join(options)}" if options else ""
        return ", then ".join(filter(None, [short(fix), f"submit it again{added}"])), ""
    at = command.index("--") if "--" in command else len(command)
    again = shlex.join(["trnslurm", *command[1:at], *options, *command[at:]])
    return "" if options else short(fix), again


def longer(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the fix and command for a run that has saved nothing by its time limit."""
    command = [str(word) for word in record.get("command") or ()]
    at = command.index("--") if "--" in command else len(command)
    ours = [word for word in command[:at] if not word.startswith("--time=")]
    if "--time" in ours:
        del ours[ours.index("--time") : ours.index("--time") + 2]
    again = {**record, "command": [*ours, *command[at:]]}
    return new_submission(again, "", ("--time", "MORE"))


def in_words(fix: str, command: str) -> str:
    """Return fix and command in one line, or "" if nothing must be done."""
    return f"{fix}, then {command}" if fix and command else fix or command


def rest_of(fix: str) -> str:
    """Return the parts of a fix that its short form omits."""
    whole, first = _COMMAND.sub("", fix), short(fix)
    rest = whole[len(first) :].lstrip("; ") if whole.startswith(first) else whole
    return rest[3:] if rest.startswith("or ") else rest


def short(fix: str) -> str:
    """Return the first parts of a fix, without the command that follows it."""
    first, *rest = _PARTS.split(_COMMAND.sub("", fix))
    for part in rest:
        if len(first) + len(part) > _USUAL_FIX:
            break
        first = f"{first}; {part}"
    return textwrap.shorten(first, _MAX_FIX, placeholder=" …")
