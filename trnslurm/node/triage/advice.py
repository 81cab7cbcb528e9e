"""Chooses the cause to name for a failure, and the advice about it."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace

from trnslurm.contract.rundir import RunFiles
from trnslurm.node.triage.again import python_of
from trnslurm.node.triage.around import crashed_at, ends_of, general_cause
from trnslurm.node.triage.case import Case
from trnslurm.node.triage.causes import CRASHES, EFFECT, Cause
from trnslurm.node.triage.evidence import Suspect
from trnslurm.node.triage.finding import UNKNOWN
from trnslurm.node.triage.hub import missing_here
from trnslurm.node.triage.machine import NO_GPU, Machine
from trnslurm.node.triage.mend import EITHER, PASSES, RESUME, SUBMIT
from trnslurm.node.triage.project import (
    left_out_of,
    missing_of_project,
    named_by_script,
    needs_gpu,
)
from trnslurm.node.triage.script import batch_size, told_by_script
from trnslurm.node.triage.versions import Versions
from trnslurm.node.triage.words import packages_in, raised_from

_NO_FILES = (
    *("data-empty", "download-unreachable"),
    *("general-empty", "general-empty-sequence", "general-file", "general-missing"),
)
"""Causes that may result from missing files."""
_NOTHING_FOUND = re.compile(
    r"(?i)\b(no|0|zero)\b.{0,30}\b(files?|shards?|images?|samples?|data|inputs?|records?|match\w*)\b"
    r"|\bempty\b|\b(n.t|not) (found|find|exist)"
)
_TO_WRITE = ("directory-to-write", "save-directory")
_OF_RECIPES = re.compile(
    r",? ?\btrain\.keep_last\b[,;]? ?|(: | \()the plan makes up for it with accumulation\)?"
)
_OF_SCRIPT = ("KeyError", "NameError", "UnboundLocalError")
"""Errors that a machine never causes, so that a resume of the same script would fail again."""
_ADVICE = re.compile(
    r"[.!?;:,] +(?P<advice>(?:Please|You (?:can|should|must|may|need to)|To (?:fix|avoid|resolve)"
    r"|Make sure|Ensure|Check|Consider|Did you mean|Try|Use|Set|Pass|Specify|Install|Upgrade"
    r"|Increase|Reduce|Decrease|Add|Remove|Disable|Enable|Turn (?:on|off)|Run|Call|Either)\b"
    r".{10,}?)(?:[.!?](?= |$)|$)"
)
"""Matches a sentence that begins with what to do."""
_REQUIRED = re.compile(
    r"\b(?:requires?|required|needs?|must|have)(?: users| you)? to (?P<advice>(?:upgrade|update"
    r"|downgrade|install|set|use|pass|rename|remove|enable|disable)\b.{10,}?)(?:[.!?](?= |$)|$)"
)
"""Matches what a message says is required."""
_FOR_AUTHORS = re.compile(
    r"(?i)\b(report|file an?|open an?|raise an?|issue|bug|github|developers?|maintainers?|subclass"
    r"|override|implement|inherit)\b"
)
"""Matches advice for those who write the package, not for those who use it."""
_MAX_ADVICE = 160
_OF_INTERFACES = {"TypeError", "AttributeError", "ImportError", "ModuleNotFoundError", "NameError"}
"""Exceptions that may mean that the versions of two packages do not fit."""
_LAST_ERROR = "Last error:"
_MICRO_BATCH = "batch.micro_batch"
_EXIT_CODE = re.compile(r"\bexit code (\d+)")
_TORCHRUN = re.compile(r"torch[./]distributed[./](run|launch|elastic)\b")


@dataclass(frozen=True)
class Advice:
    """The cause, the fix, and how the run then continues."""

    cause: str
    fix: str
    mend: str
    options: tuple[str, ...] = ()
    """The options that a new submission needs in addition to the previous ones."""
    general: Cause | None = None
    """What the exception's class and words mean, if no known cause fits."""
    of_run: bool | None = None
    """Whether the run's own files prove the cause; None if they say nothing about it."""
    there: str = ""
    """The facts about the node that may decide between causes."""
    modules: tuple[str, ...] = ()
    """The modules whose packages' versions may explain the failure."""


def advise(case: Case, *, again: bool) -> Advice:
    """Return the advice; `again` means that every further attempt would end the same way."""
    advice = _of_project(case, _of_lines(case))
    advice = _of_node(case, advice)
    python = python_of(case.run, case.phase) or "python"
    advice = replace(advice, fix=advice.fix.replace("that Python", python))
    if RunFiles(case.run).project_file.exists():  # custom scripts have no such settings
        fix = _OF_RECIPES.sub("", advice.fix).replace(" ()", "")
        if _MICRO_BATCH in fix:
            own = batch_size(case.run) or "batch size of the script"
            fix = fix.replace(_MICRO_BATCH, own)
        advice = replace(advice, fix=fix)
    if again and advice.mend in ("", EITHER, PASSES):
        advice = replace(advice, mend=SUBMIT)
    if again and not case.known and advice.of_run is None:
        advice = replace(advice, cause=f"{advice.cause}, which would end every attempt")
    return advice


def _of_lines(case: Case) -> Advice:
    """Return the advice from log lines only: a known cause, the last words, or the exception."""
    known, suspect = case.known, case.suspect
    if known:
        cause, fix = known.explain(case.said, **case.owner)
        if known.name in CRASHES and (at := crashed_at(case.log)):
            cause, fix = f"{cause}, at {at}", fix.partition("; ")[2]
        last = _last_of_nccl(suspect) if known.kind == EFFECT else ""
        if last and not known.matches(last):
            cause = f"{cause} (NCCL: {last})"
        return Advice(cause, fix, known.mend)
    if case.raised:
        if general := general_cause(suspect):
            cause, fix = general.explain(ends_of(suspect), **case.owner)
            return Advice(cause, fix, general.mend, general=general)
        if case.raised.place:
            kind, at, told = case.raised.kind, case.raised.place, _told_by_message(suspect)
            package = case.owner["package"]
            by, do = "the script raised", "correct it there, and submit again"
            if package:  # the script passed the wrong thing, or the installation is at fault
                by = f"{UNKNOWN}{package} raised"
                do = f"read the message, and the frames that lead from {at} into {package}"
                do += _of_versions(suspect, package) if kind in _OF_INTERFACES else ""
            origin = raised_from(suspect.lines)[0].rpartition(".")[2]
            kind += f" from {origin}" if origin else ""
            return Advice(
                f"{by} {kind} ({at})",
                f'the message says: "{told}"' if told else do,
                SUBMIT if kind in _OF_SCRIPT and not package else "",
            )
        cause = f"unknown: {case.raised.kind} ended the worker"
        return Advice(cause, f"read what comes before it in {suspect.place}", "")
    if case.last:
        return Advice(
            "unknown: the worker ended without a traceback; the last lines of its log are above",
            "find where the script exits after that (sys.exit, os._exit)",
            EITHER,
        )
    if suspect.silent:
        by_torchrun = _TORCHRUN.search(case.log)
        tee = "torchrun --tee 3 adds the workers' output, and " if by_torchrun else ""
        if case.earlier:
            return Advice(
                "unknown: the worker ended without a traceback; the lines above look like errors",
                f"read the lines around them in {suspect.place}",
                EITHER,
            )
        if (code := _EXIT_CODE.search(suspect.lines[-1])) and code[1] != "1":
            return Advice(
                f"unknown: the worker exited with code {code[1]}; an exception would exit with 1",
                f"find where the program exits with {code[1]} (sys.exit, os._exit)",
                EITHER,
            )
        return Advice(
            "unknown: the worker's own error is not in this log",
            f"read the last lines of {suspect.place}; {tee}@record on main() adds its traceback",
            EITHER,
        )
    return Advice(
        f"{suspect.lines[-1].split(':')[0].strip()} is not a known cause",
        f"read the error in {suspect.place}",
        EITHER,
    )


def _last_of_nccl(suspect: Suspect) -> str:
    """Return what NCCL calls its last error, in the message of PyTorch's exception."""
    said = [line.strip() for line in suspect.more]
    at = said.index(_LAST_ERROR) + 1 if _LAST_ERROR in said else len(said)
    return textwrap.shorten("".join(said[at : at + 1]), _MAX_ADVICE, placeholder="…")


def _of_versions(suspect: Suspect, package: str) -> str:
    """Return what to check if the script's own call is right: whether the packages fit."""
    called = packages_in(suspect.lines)
    others = [name for name in called if name not in (package, "torch")][:1] or called[:1]
    names = " and ".join(dict.fromkeys((*others, package)))
    return f"; if that is right, try another version of {names}"


def _told_by_message(suspect: Suspect) -> str:
    """Return the sentence in an exception's message that says what to do, or ""."""
    said = " ".join((suspect.lines[-1], *(line.strip() for line in suspect.more)))
    found = _ADVICE.search(said) or _REQUIRED.search(said)
    if found and _FOR_AUTHORS.search(found["advice"]):
        return ""
    return textwrap.shorten(found["advice"], _MAX_ADVICE, placeholder="…") if found else ""


def _of_project(case: Case, advice: Advice) -> Advice:
    """Return the advice with what the run's project copy and its plan show about the cause."""
    run, known = case.run, case.known
    if missing := missing_of_project(run, case.said):
        fix = missing.fix
        if known and known.name in _TO_WRITE:
            fix = f"create it in the script (os.makedirs), or {fix}"
        options = ("--set", f"links=[{missing.link}]") if missing.link else ()
        advice = replace(advice, cause=missing.cause, fix=fix, mend=SUBMIT)
        return replace(advice, options=options, of_run=True)
    if told := told_by_script(run, case.suspect):
        advice = replace(advice, cause=told.cause, fix=told.fix, mend=SUBMIT)
        return replace(advice, of_run=told.proven)
    if known and (unasked := needs_gpu(run, known.name)):
        return replace(advice, cause=unasked[0], fix=unasked[1], mend=SUBMIT, of_run=True)
    if _found_nothing(case, advice) and (gone := left_out_of(run)):
        if named := named_by_script(run, case.suspect.lines):
            options = ("--set", f"links=[{named.link}]")
            advice = replace(advice, cause=named.cause, fix=named.fix, mend=SUBMIT)
            return replace(advice, options=options, of_run=False)
        names = ", ".join(gone[:3])
        looked = f"check whether the script needs {names}, which .gitignore excluded from the copy"
        return replace(advice, fix=f"{looked}; {advice.fix}")
    words = (*case.said, *(line for lines in case.evidence.tracebacks for line in lines))
    if lacking := missing_here(run, known, words):
        return replace(advice, cause=lacking[0], fix=lacking[1], mend=RESUME)
    return advice


def _of_node(case: Case, advice: Advice) -> Advice:
    """Return the advice with facts about the node: its devices, and the versions of packages."""
    files, known, suspect = RunFiles(case.run), case.known, case.suspect
    versions = Versions(files.packages_file(case.phase, case.attempt), suspect)
    machine = Machine(case.run, case.phase, case.attempt, suspect.node or 0)
    text = f"{advice.cause} {advice.fix}"
    concerned = not advice.of_run and versions.explain(text)
    modules = versions.modules if concerned else ()
    decided = versions.decided() if concerned else None
    asks = known and known.name in NO_GPU and not advice.of_run  # not if the run computes on CPUs
    decided = decided or (machine.no_gpu() if asks else None)
    if decided:
        cause, fix, mend = decided
        return replace(advice, cause=cause, fix=fix, mend=mend, of_run=True, modules=modules)
    told = [machine.told(text), versions.told() if concerned else ""]
    return replace(advice, there="; ".join(filter(None, told)), modules=modules)


def _found_nothing(case: Case, advice: Advice) -> bool:
    """Check whether a failure may result from missing files."""
    if known := case.known or advice.general:
        return known.name in _NO_FILES
    return _NOTHING_FOUND.search(case.suspect.lines[-1]) is not None
