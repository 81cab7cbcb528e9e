"""Find out who failed first and why, and report it in a few lines."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from trnslurm.contract.attempt import read_attempt
from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import EndCause, State
from trnslurm.frozen import Frozen
from trnslurm.node.triage.again import (
    Raised,
    comes_again,
    python_of,
    what_was_raised,
)
from trnslurm.node.triage.around import (
    compared,
    crashed_at,
    ends_of,
    general_cause,
    last_words,
    owner_of,
    refined,
)
from trnslurm.node.triage.budget import budget
from trnslurm.node.triage.causes import (
    CAUSE,
    EFFECT,
    HARMLESS,
    Cause,
    cause_of,
    causes_of,
    matching,
)
from trnslurm.node.triage.choice import choose, lost_node
from trnslurm.node.triage.evidence import (
    OWN_WORD,
    Evidence,
    Suspect,
    batch_log,
    clean,
    gather,
    read_log,
)
from trnslurm.node.triage.hub import missing_here
from trnslurm.node.triage.machine import NO_GPU, Machine
from trnslurm.node.triage.mend import EITHER, PASSES, RESUME, SUBMIT
from trnslurm.node.triage.project import (
    left_out_of,
    missing_of_project,
    named_by_script,
    needs_gpu,
)
from trnslurm.node.triage.versions import Versions
from trnslurm.node.triage.words import said_last, useful_end

_MAX_LINES = 7
_MAX_COLUMNS = 200
_MAX_QUOTE = 80
_MAX_SAID = 100
_LAST_S = 60.0
"""Before an end from outside, within which failures are its consequences."""
_SILENT = "without a traceback"
_IN_PART = "the logs were read in part, as they take too long"
_MOST_OTHERS = 2
_TRAIN_ERROR = "trnslurm.train.errors.TrainError: "
_FROM_OUTSIDE = (State.CANCELLED, State.PREEMPTED, State.STOPPED, State.TIMEOUT)
_EXITED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: Exited with exit code (\d+)")
_CERTAIN = re.compile(r"(?i)\bfatal\b|\babort|core dumped|\bkilled\b|(^|\W)error:|Traceback")
_NO_FILES = (
    *("data-empty", "download-unreachable"),
    *("general-empty", "general-empty-sequence", "general-file", "general-missing"),
)
"""Causes that may come of files that are not there."""
_NOTHING_FOUND = re.compile(
    r"(?i)\b(no|0|zero)\b.{0,30}\b(files?|shards?|images?|samples?|data|inputs?|records?|match\w*)\b"
    r"|\bempty\b|\b(n.t|not) (found|find|exist)"
)
_TO_WRITE = ("directory-to-write", "save-directory")
_CRASHES = ("signal-abort", "signal-bus", "signal-fpe", "signal-segv")


class Finding(Frozen):
    """Who failed first in an attempt, and why."""

    phase: str
    attempt: int
    rank: int | None
    node: int | None
    host: str
    when: float | None
    """Unix seconds; whole ones if from torchrun's report."""
    lines: tuple[str, ...]
    name: str
    """The entry in known/*.toml; empty: no entry matches."""
    kind: str
    """cause; or effect, if only consequences were found."""
    cause: str
    fix: str
    evidence: str
    """The file with the evidence, in the run directory."""
    brief: str
    """The cause in one line; empty if only consequences were found."""
    again: bool
    """Whether every further attempt would end the same way."""
    mend: str = ""
    """How the run continues after the fix, see Cause.mend; empty: not known."""
    options: tuple[str, ...] = ()
    """What a new submission needs in addition to the old one."""
    certain: bool = True
    """Whether the line has this cause only; else it is the most likely one."""
    others: tuple[str, ...] = ()
    """Other causes that the logs suggest, where the evidence of the named cause is weak."""
    warned: str = ""
    """What the submission warned of."""
    there: str = ""
    """What was on the node, where that decides between causes."""
    modules: tuple[str, ...] = ()
    """The modules whose packages' versions may explain the failure."""
    in_part: bool = False
    """Whether the diagnosis ran out of time and left parts of the logs out."""

    def report(self) -> list[str]:
        """Return at most 12 lines for the user."""
        time_text = time.strftime("%F %T", time.localtime(self.when)) if self.when else ""
        at = f" at {time_text}" if time_text else ""
        if self.kind == EFFECT:
            what = f"only consequences were found; the first: {self._who()}{at}"
        else:
            what = f"{self._who()} failed first{at}" if self._who() else "from the job's log"
        return [
            _cut(f"{OWN_WORD}{self.phase} attempt {self.attempt}: {what}"),
            *(_cut(f"  {line}") for line in self.lines),
            _cut(f"{'cause' if self.certain else 'likely'}: {self.cause}"),
            _cut(f"fix: {self.fix}"),
            *(_cut(f"or: {other}") for other in self.others),
            *([_cut(self.there)] if self.there else []),
            *([_cut(f"submit warned: {self.warned}")] if self.warned else []),
            *([f"note: {_IN_PART}; the cause may be in the rest"] if self.in_part else []),
            f"see: {self.evidence}",
        ]

    @property
    def line(self) -> str:
        """What is known in one line: the cause; else the first consequence, or the last error."""
        more = f" ({_IN_PART})" if self.in_part else ""
        if self.brief:
            return self.brief + more
        if self.kind == EFFECT:
            return f"only consequences were found; the first: {self._who()}: {self.cause}{more}"
        return f"no known cause; the last line like an error: {self.lines[-1].strip()}{more}"

    def _who(self) -> str:
        node = "" if self.node is None else f"node {self.node}"
        rank = "" if self.rank is None else f"rank {self.rank}"
        place = f"{node} ({self.host})" if node and self.host else node or self.host
        return f"{rank} on {place}" if rank and place else rank or place


def find_cause(
    run: Path, phase: str, attempt: int, clock: Callable[[], float] = time.thread_time
) -> Finding | None:
    """Return who failed first in an attempt, and why; None if no failure is found.

    After some seconds of CPU time it returns what it has by then.
    """
    matching("")  # reads the known causes, for which the logs' time is not meant
    with causes_of(run), budget(clock) as time_for_it:
        found = _find_cause(run, phase, attempt)
        return replace(found, in_part=time_for_it.ended) if found else None


def _find_cause(run: Path, phase: str, attempt: int) -> Finding | None:
    evidence = gather(run, phase, attempt)
    if evidence.state is State.COMPLETED:
        return None
    outside = _ended_from_outside(run, phase, attempt)
    if outside:
        evidence = evidence.before_the_end(_LAST_S)
    suspect, known, beside = choose(evidence)
    if suspect is None:
        return _unexplained(evidence, run, phase, attempt)
    if known and known.name == "task-exited" and not beside:
        exited = _exited(evidence, run, phase, attempt, suspect.lines[-1])
        if exited or outside:
            return exited
    known, beside = refined(run, phase, attempt, suspect, known, beside)
    known, beside = compared(evidence, known, beside)
    if known and known.name == "node-failed":
        suspect = lost_node(evidence, suspect)
    vague = known is not None and (known.kind == EFFECT or known.weak)
    if vague and outside:
        return None  # workers that are told to end leave such errors

    def before() -> Raised | None:
        earlier = choose(gather(run, phase, attempt - 1))[0]
        return what_was_raised(earlier) if earlier else None

    again = comes_again(run, phase, attempt, evidence, suspect, before)
    if suspect.telling and suspect.telling not in suspect.lines:
        beside = (suspect.telling.strip(), *beside)
    elif known is None or known.kind == EFFECT:
        beside = (*(line.strip() for line in suspect.more[:3]), *beside)
    silent = known.kind == EFFECT or known.weak if known else _SILENT in suspect.lines[-1]
    earlier = evidence.error_like.get(suspect.place, ()) if silent else ()
    earlier = _without_harmless(x for x in earlier if x not in (*suspect.lines, *beside))
    last = () if known or earlier or not silent else said_last(read_log(run / suspect.place))
    earlier = earlier or last
    others = () if known and known.strong else _others(evidence, known)
    warned = read_json(RunFiles(run).record_file).get("warned")
    said_before = "; ".join(map(str, warned)) if isinstance(warned, list) else ""
    less = len(earlier) + len(beside) + len(others) + bool(said_before)
    lines = useful_end(suspect.lines, _MAX_LINES - less)
    host = suspect.host
    if not host and suspect.node is not None and suspect.node < len(evidence.hosts):
        host = evidence.hosts[suspect.node]
    said = (*beside, suspect.telling, *ends_of(suspect), *suspect.more, *suspect.lines)
    owner = owner_of(suspect)
    cause, fix = known.explain(said, **owner) if known else _unknown(suspect)
    if last:
        cause = "unknown: the worker ended without a traceback; the log's last words are above"
        fix = (
            f"look where the script says that, or ends itself (sys.exit); {suspect.place} has more"
        )
    words = (*said, *(line for lines in evidence.tracebacks for line in lines))
    mend = known.mend if known else RESUME
    raised = what_was_raised(suspect)
    general: Cause | None = None
    if raised and not known:
        cause = f"unknown: {raised.kind} ended the worker"
        fix = f"read what comes before it in {suspect.place}"
        if raised.place:
            cause = f"the script raised {raised.kind} ({raised.place})"
            fix = f"correct it there, and submit again; {suspect.place} has more"
        mend = ""
        if general := general_cause(suspect):
            cause, fix = general.explain(ends_of(suspect), **owner)
            mend = general.mend
    if known and known.name in _CRASHES and (at := crashed_at(read_log(run / suspect.place))):
        cause, fix = f"{cause}, at {at}", fix.partition("; ")[2]
    options: tuple[str, ...] = ()
    missing = missing_of_project(run, said)
    if missing:
        cause, fix, mend = missing.cause, missing.fix, SUBMIT
        options = ("--set", f"links=[{missing.link}]") if missing.link else ()
        if known and known.name in _TO_WRITE:
            fix = f"make it in the script (os.makedirs), or {fix}"
    elif known and (unasked := needs_gpu(run, known.name)):
        (cause, fix), mend = unasked, SUBMIT
    elif _found_nothing(known or general, suspect) and (gone := left_out_of(run)):
        if named := named_by_script(run, suspect.lines):
            cause, fix, mend = named.cause, named.fix, SUBMIT
            options = ("--set", f"links=[{named.link}]")
        else:
            few = ", ".join(gone[:3])
            fix = f"see whether the script looks for {few}, not copied (.gitignore); {fix}"
    elif lacking := missing_here(run, known, words):
        (cause, fix), mend = lacking, RESUME
    versions = Versions(RunFiles(run).packages_file(phase, attempt), suspect)
    machine = Machine(run, phase, attempt, suspect.node or 0)
    concerned = not missing and versions.explain(f"{cause} {fix}")
    told = [machine.told(f"{cause} {fix}"), versions.told() if concerned else ""]
    decided = versions.decided() if concerned else None
    decided = decided or (machine.no_gpu() if known and known.name in NO_GPU else None)
    if decided:
        (cause, fix, mend), told = decided, []
    if python := python_of(run, phase):
        fix = fix.replace("that Python", python)
    if again and mend in ("", EITHER, PASSES):
        mend = SUBMIT
    if again and not known and not options:
        cause += ", which would end every attempt"
    in_short = _brief(suspect, known, cause, "" if again else host)
    if last:
        last_said = textwrap.shorten(last[-1], _MAX_SAID, placeholder="…")
        in_short += f"; the log's last words: {last_said}"
    own = known is not None and known is suspect.known and suspect.said_it
    own = own or any(hit.cause is known and hit.node is None for hit in evidence.hits)
    sure = known is not None and (known.source != "script" or known.proven)
    certain = not general if known is None else known.rank == 0 and own and sure
    if missing or options:
        in_short, certain = f"{in_short}: {cause}", missing is not None
    if decided:
        in_short, certain = in_short if cause in in_short else f"{in_short}: {cause}", True
    return Finding(
        phase=phase,
        attempt=attempt,
        rank=suspect.rank,
        node=suspect.node,
        host=host,
        when=suspect.when,
        lines=(*earlier, *lines, *beside),
        name=known.name if known else general.name if general and not general.weak else "",
        kind=EFFECT if known and known.kind == EFFECT else CAUSE,
        cause=cause,
        fix=fix,
        evidence=suspect.place,
        brief=in_short,
        again=again,
        mend=mend,
        options=options,
        certain=certain,
        others=others,
        warned=clean(said_before),
        there="; ".join(filter(None, told)),
        modules=versions.modules if concerned else (),
    )


def _unexplained(evidence: Evidence, run: Path, phase: str, attempt: int) -> Finding | None:
    """Return what the logs' last words mean, or the lines that look like errors.

    None if there is no log, or nothing failed.
    """
    if evidence.state is not State.FAILED or _ended_from_outside(run, phase, attempt):
        return None
    errors = {place: _without_harmless(said) for place, said in evidence.error_like.items()}
    place, lines = next(((p, said) for p, said in errors.items() if said), ("", ()))
    known, last, end = last_words(run, phase, attempt)
    if known and not any(known.weak or _CERTAIN.search(line) for line in lines):
        place, lines = end, last
        cause, fix = known.explain(lines)
    elif lines:
        known = None
        cause = "unknown: these are the lines that look like errors"
        fix = f"read what is around them in {place}"
    else:
        lines = _without_harmless(last)
        if not lines:
            return None
        place = end
        cause = "unknown: no line looks like an error, and these are the last ones"
        fix = f"read {place}, and look at sacct -j JOB -o state,exitcode,reason"
    return _of_lines(lines, known, (cause, fix), place, phase, attempt)


def _of_lines(
    lines: tuple[str, ...],
    known: Cause | None,
    told: tuple[str, str],
    place: str,
    phase: str,
    attempt: int,
) -> Finding:
    """Return a finding that has only lines of a log; `told` are their cause and fix."""
    return Finding(
        phase=phase,
        attempt=attempt,
        rank=None,
        node=None,
        host="",
        when=None,
        lines=lines,
        name=known.name if known else "",
        kind=CAUSE,
        cause=told[0],
        fix=told[1],
        evidence=place,
        brief="",
        again=False,
        mend=known.mend if known else RESUME,
        certain=known is None,
    )


def _exited(evidence: Evidence, run: Path, phase: str, attempt: int, said: str) -> Finding | None:
    """Return a program's last lines, if only srun tells that it failed; None if there are none."""
    host, code = _EXITED.findall(said)[-1]
    node = evidence.hosts.index(host) if host in evidence.hosts else None
    known, last, place = last_words(run, phase, attempt, node)
    lines = _without_harmless(last)
    if not lines or _ended_from_outside(run, phase, attempt):
        return None
    cause, fix = "unknown: these are the last lines of the program", f"read {place}"
    if known:
        cause, fix = known.explain(lines)
    brief = f"exit code {code} on {host}; the last line: {lines[-1].strip()}"
    found = _of_lines(lines, known, (cause, fix), place, phase, attempt)
    return replace(found, node=node, host=host, brief=brief)


def _without_harmless(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(x for x in lines if not ((cause := cause_of([x])) and cause.kind == HARMLESS))


def _others(evidence: Evidence, known: Cause | None) -> tuple[str, ...]:
    """Return up to two other causes that lines of the logs suggest, with those lines."""
    found: dict[str, str] = {}
    for hit in sorted(evidence.hits, key=lambda hit: (hit.cause.rank, hit.at)):
        if hit.cause.kind == CAUSE and hit.cause is not known and hit.cause.name not in found:
            cause, _ = hit.cause.explain([hit.line])
            found[hit.cause.name] = f"{cause} ({hit.line[:_MAX_QUOTE]})"
    return tuple(found.values())[:_MOST_OTHERS]


def _brief(suspect: Suspect, known: Cause | None, cause: str, host: str) -> str:
    """Return the cause in one line: the exception or the known cause, with place and rank."""
    if known and known.kind == EFFECT:
        return ""
    raised = what_was_raised(suspect)
    more = suspect.more[0].strip() if suspect.more and suspect.lines[-1].endswith(":") else ""
    lines = [line for line in suspect.lines if raised and line.startswith(raised.kind)]
    said = f"{[*suspect.lines, *lines][-1].strip()} {more}".strip()
    if known and not raised and known.source != "trnslurm" and not known.name.startswith("usage"):
        said = cause
    place = raised.place if raised and not said.startswith(_TRAIN_ERROR) else ""
    who = f"rank {suspect.rank} on {host}" if host and suspect.rank is not None else host
    inside = ", ".join(filter(None, [place, who]))
    said = said.removeprefix(_TRAIN_ERROR).removeprefix("error: ")
    certain = known and raised and known.rank == 0 and known.source != "trnslurm"
    if certain and cause not in said:
        said, cause = textwrap.shorten(said, _MAX_SAID, placeholder="…"), f": {cause}"
    else:
        cause = ""
    return f"{said} ({inside}){cause}" if inside else f"{said}{cause}"


def _ended_from_outside(run: Path, phase: str, attempt: int) -> bool:
    """Check whether a person or Slurm ended an attempt."""
    ended = read_attempt(RunFiles(run), phase, attempt)
    crashed = ended.cause == EndCause.CRASH or ended.reason.startswith("crash ")
    return (ended.state is State.REQUEUED and not crashed) or ended.state in _FROM_OUTSIDE


def nothing_found(run: Path, phase: str, attempt: int) -> list[str]:
    """Return the lines that say so, and which logs to read."""
    ended = read_attempt(RunFiles(run), phase, attempt)
    if ended.state is State.COMPLETED or _ended_from_outside(run, phase, attempt):
        how = clean(f"{ended.state} {ended.reason}".strip())
        return [_cut(f"{OWN_WORD}{phase} attempt {attempt}: {how}: nothing failed")]
    files = [*RunFiles(run).node_logs(phase, attempt).values()]
    batch = batch_log(run, phase, "")
    names = [str(f.relative_to(run)) for f in [*files, *([batch] if batch else [])]]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = f"read {shown}" if names else "there is no log"
    return [f"{OWN_WORD}{phase} attempt {attempt}: no failure was found; {where}"]


def _found_nothing(known: Cause | None, suspect: Suspect) -> bool:
    """Check whether a failure may come of files that are not there."""
    if known:
        return known.name in _NO_FILES
    return _NOTHING_FOUND.search(suspect.lines[-1]) is not None


def _unknown(suspect: Suspect) -> tuple[str, str]:
    if _SILENT in suspect.lines[-1]:
        return (
            "unknown: the worker's own error is not in this log",
            f"read the last lines of {suspect.place}; torchrun --tee 3 brings workers' output "
            "there, and @record on main() its traceback",
        )
    return (
        f"{suspect.lines[-1].split(':')[0].strip()} is not a known cause",
        f"read the error; {suspect.place} has more",
    )


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_COLUMNS else f"{line[: _MAX_COLUMNS - 1]}…"
