"""Decides whether an error would end every attempt, so that no more attempts are wasted on it.

Errors in the job's code count, before the first new step. Not all Python exceptions are such
errors: a machine never causes a KeyError, nearly always causes an OSError, and may cause an
IndexError through a directory that is not mounted. A file that all nodes lack is the job's error.
PyTorch, NCCL and Gloo raise RuntimeError for anything. All exceptions:
https://docs.python.org/3/library/exceptions.html#exception-hierarchy
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trnslurm.contract.checkpoints import newest_step
from trnslurm.contract.files import last_line, read_file, read_json
from trnslurm.contract.metrics import is_reported
from trnslurm.contract.rundir import NODE_SCRIPT, RunFiles
from trnslurm.contract.times import seconds_of
from trnslurm.frozen import Frozen
from trnslurm.node.triage.causes import EFFECT, HARMLESS, cause_of
from trnslurm.node.triage.evidence import Evidence, Suspect
from trnslurm.node.triage.project import NO_FILE, not_copied
from trnslurm.node.triage.words import frames_in, kinds_in, of_others

_TRAIN_ERROR = "trnslurm.train.errors.TrainError"
_SYNTAX = {"SyntaxError", "IndentationError", "TabError"}
_IMPORT = {"ImportError", "ModuleNotFoundError"}
_AT_ONCE = _SYNTAX | {
    "AssertionError",
    "AttributeError",
    "KeyError",
    "NameError",
    "NotImplementedError",
    "TypeError",
    "UnboundLocalError",
    "ValueError",
    _TRAIN_ERROR,
}
_TWICE = {
    *_AT_ONCE,
    *_IMPORT,
    "IndexError",
    "LookupError",
    "OverflowError",
    "RecursionError",
    "ZeroDivisionError",
}
_OF_FILES = re.compile(r"/|\bmmap\b|\bempty\b|: ''$")
"""Matches a ValueError about a possibly missing or half-written file, or a named file."""
_MODULE = re.compile(r"(?:No module named|from(?: partially initialized module)?) '(\w+)")
_PYTHON = re.compile(
    r"^(?:export TRNSLURM_PYTHON|TRNSLURM_DEFAULT_PYTHON)=(/[\w./+-]+)$", re.MULTILINE
)
_STARTS = re.compile(r'^TRNSLURM_COMMAND=\(\s*"\$TRNSLURM_PYTHON"', re.MULTILINE)
_CONTAINER = "preparing the container"  # in the batch script of a job with a container
_OF_ARGUMENTS = ("transformers/hf_argparser.py",)
"""Files of packages that raise an exception for an argument on the job's command line."""
# After this time, a script that reports no steps is assumed to have finished some.
_EARLY_S = 600


class Raised(Frozen, kw_only=False):
    """The exception that ended a worker: its type and place."""

    kind: str
    place: str
    """The last line of the job's code in the traceback: "train.py, line 12"."""


def what_was_raised(suspect: Suspect) -> Raised | None:
    """Return the exception in a suspect's last lines, or None if there is none."""
    kind = suspect.kinds[:1] or kinds_in(suspect.lines)[-1:]
    if not kind:
        return None
    frames = frames_in(suspect.lines)
    own = [frame for frame in frames if not of_others(frame[0])] or frames
    place = f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else ""
    return Raised(kind[0], place)


def python_of(run: Path, phase: str) -> str:
    """Return the Python interpreter that a job's script names, or "" if it is the container's."""
    script = _text_of(RunFiles(run).script(phase))
    named = _PYTHON.search(script)
    return named[1] if named and _CONTAINER not in script else ""


def runs_same_python(run: Path, phase: str) -> bool:
    """Check whether the Python that runs the attempt also starts the job's program."""
    started = _STARTS.search(_text_of(run / NODE_SCRIPT)) is not None
    return started and _CONTAINER not in _text_of(RunFiles(run).script(phase))


def _text_of(file: Path) -> str:
    try:
        return read_file(file).decode(errors="replace")
    except OSError:
        return ""


def comes_again(
    run: Path,
    phase: str,
    attempt: int,
    evidence: Evidence,
    chosen: Suspect,
    before: Callable[[], Raised | None],
) -> bool:
    """Check whether the chosen suspect's error would end every further attempt.

    `before` returns the error of the previous attempt. If the type of the exception is not proof
    enough, the same error at the same line is.
    """
    raised = what_was_raised(chosen)
    usage = chosen.known is not None and chosen.known.name.startswith("usage")
    missing = _missing_file(chosen)
    if not (raised or usage or missing):
        return False
    if chosen.known and chosen.known.source != "script" and not missing:
        return False
    if _others_differ(evidence, chosen, raised) or _made_steps(
        run, phase, attempt, evidence, chosen
    ):
        return False
    if missing:
        gone = not_copied(run, chosen.lines) or _all_nodes_lack(run, missing, evidence)
        return bool(gone) or (raised is not None and raised.place != "" and raised == before())
    if raised is None:
        return True
    kinds = set(chosen.kinds or kinds_in(chosen.lines))
    at_once = _AT_ONCE | (_IMPORT if _imports_own(run, chosen) else set())
    if kinds <= at_once and _is_own(chosen, raised):
        return True
    return kinds <= _TWICE and raised.place != "" and raised == before()


def _missing_file(suspect: Suspect) -> str:
    """Return the path of the missing file that ended a worker, or ""."""
    last = suspect.lines[-1]
    match = NO_FILE.search(last) if last.startswith("FileNotFoundError: ") else None
    return match[1] if match else ""


def _all_nodes_lack(run: Path, file: str, evidence: Evidence) -> bool:
    """Check whether a file is missing in a directory that the nodes share, or on each of several
    nodes."""
    if not Path(file).is_absolute():
        directory = run / "work" if RunFiles(run).project_file.exists() else run
        return not (directory / file).exists()
    lacking = {s.node for s in evidence.suspects if _missing_file(s) == file}
    return len(evidence.hosts) > 1 and lacking >= set(range(len(evidence.hosts)))


def _is_own(chosen: Suspect, raised: Raised) -> bool:
    """Check whether the job's code raised an exception about its own input."""
    if raised.kind == _TRAIN_ERROR:
        return "/" not in chosen.lines[-1]
    frames = frames_in(chosen.lines)
    if frames and frames[-1][0].endswith(_OF_ARGUMENTS):
        return True
    if not frames or of_others(frames[-1][0]):
        return False
    may_be_a_file = raised.kind in ("AssertionError", "ValueError")
    return not (may_be_a_file and _OF_FILES.search(chosen.lines[-1]))


def _imports_own(run: Path, chosen: Suspect) -> bool:
    """Check whether the module that cannot be imported belongs to the job."""
    named = _MODULE.search(chosen.lines[-1])
    code = RunFiles(run).code
    return named is not None and any(
        (folder / name).exists()
        for folder in (code, code / "project", *code.glob("jobs/*"))
        for name in (named[1], f"{named[1]}.py", f"{named[1]}.zip")
    )


def _others_differ(evidence: Evidence, chosen: Suspect, raised: Raised | None) -> bool:
    """Check whether anything failed besides the chosen suspect and its consequences."""
    for hit in evidence.hits:
        if hit.cause.strong and hit.cause.source != "script" and hit.cause is not chosen.known:
            return True
    # Several workers' output may be mixed up; the exit codes are not.
    silent = f"ended with exit code {1 if raised else 2},"
    for suspect in evidence.suspects:
        if suspect.known and suspect.known.kind in (EFFECT, HARMLESS):
            continue
        alike = suspect.lines == chosen.lines or silent in suspect.lines[-1]
        if not alike and (raised is None or what_was_raised(suspect) != raised):
            return True
    for lines in evidence.tracebacks:
        known = cause_of(line for line in reversed(lines) if not line.startswith("  "))
        if known and known.kind in (EFFECT, HARMLESS):
            continue
        if raised is None or kinds_in(lines)[-1:] != [raised.kind]:
            return True
    return False


def _made_steps(run: Path, phase: str, attempt: int, evidence: Evidence, chosen: Suspect) -> bool:
    """Check whether the attempt may have finished any new step."""
    if evidence.made_steps:
        return True
    files = RunFiles(run)
    state = read_json(files.state_file(phase, attempt))
    newest, began_at = last_line(files.metrics_file), state.get("checkpoint")
    if newest.get("attempt") == attempt:
        return True
    if isinstance(began_at, int) and newest_step(files) > began_at:
        return True
    if is_reported(newest) or chosen.kinds:  # the script reports its steps
        return False
    # Workers that lost a peer had started working together.
    missed = any(
        s.known and s.known.kind == EFFECT and s.known.name not in ("death-signal", "signal-abort")
        for s in evidence.suspects
    )
    return missed or _seconds(state) > _EARLY_S


def _seconds(state: dict[str, Any]) -> float:
    """Return the duration of an attempt."""

    def seconds(key: str) -> float:
        return seconds_of(str(state.get(key))) or time.time()

    return seconds("ended") - seconds("started")
