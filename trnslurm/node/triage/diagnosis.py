"""Finds out which worker failed first in an attempt, and why, from the end backwards.

1. What is recorded about the end? A user or Slurm may have ended the attempt. 2. Which process died
first? 3. Which known cause matches that process's last lines, or a line near its death? 4. What
should the user be told about it, and what should the user do? 5. How certain is that? 6. If it is
only a timeout: which ranks were not in the collective?
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trnslurm.contract.attempt import read_attempt
from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import EndCause, State
from trnslurm.node.triage.advice import Advice, advise
from trnslurm.node.triage.again import Raised, comes_again, what_was_raised
from trnslurm.node.triage.around import compared, last_words, places_of, refined, still_ran
from trnslurm.node.triage.budget import budget
from trnslurm.node.triage.case import Case
from trnslurm.node.triage.causes import (
    CAUSE,
    CRASHES,
    EFFECT,
    Cause,
    cause_of,
    causes_of,
    matching,
    named,
    without_harmless,
)
from trnslurm.node.triage.choice import choose, lost_node, only_warns
from trnslurm.node.triage.evidence import OWN_WORD, Evidence, Hit, batch_log, clean, gather
from trnslurm.node.triage.finding import Finding, cut
from trnslurm.node.triage.flight import WAITING, compare_dumps
from trnslurm.node.triage.mend import EITHER, RESUME
from trnslurm.node.triage.words import useful_end

_MAX_LINES = 7
_MAX_QUOTE = 80
_MAX_SAID = 100
_LAST_S = 60.0
"""How long before an end from outside failures count as its consequences."""
_MOST_OTHERS = 2
_MOST_NAMED = 4
_ON_CPU = ("collective-timeout", "gloo-timeout")
"""Timeouts of waits that a worker's stack shows."""
_OF_LATE = (
    "see why it is there: slow work on one rank (saving, loading, evaluation: do it on all ranks, "
    "or raise the timeout), a branch that others do not take, or a hang"
)
_MOST_LAST = 2
_TRAIN_ERROR = "trnslurm.train.errors.TrainError: "
_FROM_OUTSIDE = (State.CANCELLED, State.PREEMPTED, State.STOPPED, State.TIMEOUT)
_EXITED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: Exited with exit code (\d+)")
_CERTAIN = re.compile(r"(?i)\bfatal\b|\babort|core dumped|\bkilled\b|(^|\W)error:|Traceback")
_OF_LAUNCHER = re.compile(r"trnslurm: \d{4}-\S+Z rank \d+ ")


def diagnose(
    run: Path,
    phase: str,
    attempt: int,
    clock: Callable[[], float] = time.thread_time,
    *,
    over: bool = False,
) -> Finding | None:
    """Return an attempt's first failure and its cause, or None if there is none.

    After some seconds of CPU time, return the results so far. `over` means that the job has ended,
    even if the attempt has not recorded an end.
    """
    if server := read_attempt(RunFiles(run), phase, attempt).server:
        phase, _, log = server.partition("-")
        attempt = int(log)
    matching("")  # reads the known causes outside the logs' time budget
    with causes_of(run), budget(clock) as time_for_it:
        found = _diagnose(run, phase, attempt, over=over)
        return replace(found, in_part=time_for_it.ended) if found else None


def _diagnose(run: Path, phase: str, attempt: int, *, over: bool) -> Finding | None:
    evidence = gather(run, phase, attempt, over=over)
    if evidence.state is State.COMPLETED:
        return None
    outside = _ended_from_outside(run, phase, attempt)
    if outside:
        evidence = evidence.before_the_end(_LAST_S)
    suspect, known, beside = choose(evidence)
    if suspect is None:
        failed = evidence.state is State.FAILED and not outside
        return _of_last_lines(run, phase, attempt, evidence) if failed else None
    case = Case(run, phase, attempt, evidence, outside, suspect, known, beside)
    if known and known.name == "task-exited" and not beside:
        if outside:
            return None
        if found := _of_exited_task(case):
            return found
    _tie_to_cause(case)
    if outside and case.weak:
        return None  # workers that are ordered to end print such errors
    again = comes_again(run, phase, attempt, evidence, case.suspect, lambda: _raised_before(case))
    found = _weigh(case, advise(case, again=again), again=again)
    waited = case.known is not None and case.known.name in WAITING
    if not waited:
        return found
    by_dumps = _by_dumps(case, found)
    return _by_places(case, found) if by_dumps is found else by_dumps


def _tie_to_cause(case: Case) -> None:
    """Choose the cause by its surroundings, and the lines of others that show it."""
    of = (case.run, case.phase, case.attempt)
    known, beside = refined(*of, case.suspect, case.known, case.beside)
    known, beside = compared(case.evidence, known, beside)
    if known and known.name in WAITING:
        beside = (*beside, *still_ran(*of, case.evidence))
    if known and known.name == "node-failed":
        case.suspect = lost_node(case.evidence, case.suspect)
    if known is None and (said := cause_of(case.last)) and said.kind == CAUSE:
        known, beside = said, (*case.last, *beside)  # the last output of the process that died
    suspect = case.suspect
    if suspect.telling and suspect.telling not in suspect.lines:
        beside = (suspect.telling.strip(), *beside)
    elif known is None or known.kind == EFFECT:
        beside = (*(line.strip() for line in suspect.more[:3]), *beside)
    says_little = (known is None and case.raised is None) or (known and known.kind == EFFECT)
    if says_little and (hit := _only_cause(case.evidence)):
        known, beside = hit.cause, (hit.line, *beside)
    case.known, case.beside = known, beside


def _only_cause(evidence: Evidence) -> Hit | None:
    """Return the first line with a specific cause, if all such lines mean the same cause."""
    hits = [hit for hit in evidence.hits if hit.cause.rank == 0 and not only_warns(hit)]
    return hits[0] if len({hit.cause.name for hit in hits}) == 1 else None


def _raised_before(case: Case) -> Raised | None:
    """Return the exception that ended the previous attempt."""
    suspect = choose(gather(case.run, case.phase, case.attempt - 1))[0]
    return what_was_raised(suspect) if suspect else None


def _weigh(case: Case, advice: Advice, *, again: bool) -> Finding:
    """Return the finding, how certain it is, and what else may be the cause."""
    known, suspect, general = case.known, case.suspect, advice.general
    earlier = case.earlier or case.last or case.inner
    others = () if known and known.strong else _others(case.evidence, known)
    warned = read_json(RunFiles(case.run).record_file).get("warned")
    said_before = "; ".join(map(str, warned)) if isinstance(warned, list) else ""
    less = len(earlier) + len(case.beside) + len(others) + bool(said_before)
    lines = useful_end(suspect.lines, _MAX_LINES - less)
    brief = _brief(case, advice.cause, "" if again else case.host)
    if known and lines and _OF_LAUNCHER.match(lines[-1].strip()):  # the cause is more informative
        brief = advice.cause
    if case.last:
        last_said = textwrap.shorten(case.last[-1], _MAX_SAID, placeholder="…")
        brief += f"; the last line of the log: {last_said}"
    if advice.of_run is not None and advice.cause not in brief:
        brief = f"{brief}: {advice.cause}"
    return Finding(
        phase=case.phase,
        attempt=case.attempt,
        rank=suspect.rank,
        node=suspect.node,
        host=case.host,
        when=suspect.when,
        lines=(*earlier, *lines, *case.beside),
        name=known.name if known else general.name if general and not general.weak else "",
        kind=EFFECT if known and known.kind == EFFECT else CAUSE,
        cause=advice.cause,
        fix=advice.fix,
        evidence=suspect.place,
        brief=brief,
        again=again,
        mend=advice.mend,
        options=advice.options,
        certain=_is_certain(case, advice),
        others=others,
        warned=clean(said_before),
        there=advice.there,
        modules=advice.modules,
    )


def _is_certain(case: Case, advice: Advice) -> bool:
    """Check whether the process that died printed its cause last, or a record proves it."""
    known = case.known
    if advice.of_run is not None:
        return advice.of_run
    if known is None:
        return not (advice.general or case.suspect.survived)
    own = known is case.suspect.known and case.suspect.said_it
    own = own or any(hit.cause is known and hit.node is None for hit in case.evidence.hits)
    return known.rank == 0 and own and (known.source != "script" or known.proven)


def _others(evidence: Evidence, known: Cause | None) -> tuple[str, ...]:
    """Return up to two other causes that log lines suggest, with those lines."""
    found: dict[str, str] = {}
    ended = (hit for hit in evidence.hits if not only_warns(hit))
    for hit in sorted(ended, key=lambda hit: (hit.cause.rank, hit.at)):
        if hit.cause.kind == CAUSE and hit.cause is not known and hit.cause.name not in found:
            cause, _ = hit.cause.explain([hit.line])
            quoted = textwrap.shorten(hit.line, _MAX_QUOTE, placeholder="…")
            found[hit.cause.name] = f"{cause} ({quoted})"
    return tuple(found.values())[:_MOST_OTHERS]


def _brief(case: Case, cause: str, host: str) -> str:
    """Return the cause in one line: what died, of which exception or known cause, and where."""
    known, suspect, raised = case.known, case.suspect, case.raised
    of_itself = known is not None and known.name in CRASHES and suspect.rank is not None
    if known and known.kind == EFFECT and not of_itself:
        return ""
    more = suspect.more[0].strip() if suspect.more and suspect.lines[-1].endswith(":") else ""
    lines = [line for line in suspect.lines if raised and line.startswith(raised.kind)]
    said = f"{[*suspect.lines, *lines][-1].strip()} {more}".strip()
    if known and not raised and known.source != "trnslurm" and not known.name.startswith("usage"):
        said = cause
    place = raised.place if raised and not said.startswith(_TRAIN_ERROR) else ""
    said = said.removeprefix(_TRAIN_ERROR).removeprefix("error: ")
    if known and raised and known.rank == 0 and known.source != "trnslurm" and cause not in said:
        said = textwrap.shorten(said, _MAX_SAID, placeholder="…")
    else:
        cause = ""
    rank = f"rank {suspect.rank} on " if host and suspect.rank is not None else ""
    where = f"{said} at {place}" if place else said
    return ": ".join(filter(None, [f"{rank}{host}", where, cause]))


def _by_dumps(case: Case, found: Finding) -> Finding:
    """Return a finding with what PyTorch's dumps show, instead of what a timeout may mean."""
    ranks, hosts, suspect = case.evidence.ranks, case.evidence.hosts, case.suspect
    seen = compare_dumps(case.run, case.phase, case.attempt, ranks, hosts)
    if not seen:
        return found
    if found.name == "stuck":  # from all workers' stacks, which show more
        return replace(found, lines=(*found.lines, seen.sentence))
    found = replace(found, cause=seen.sentence, brief=seen.sentence, fix=seen.fix)
    found = replace(found, mend=seen.mend or found.mend, certain=seen.certain)
    if not seen.certain:
        return found
    rank = seen.ranks[0] if len(seen.ranks) == 1 else None
    node = rank * len(hosts) // ranks if rank is not None and rank < ranks else None
    log = RunFiles(Path()).node_log(case.phase, case.attempt, node or 0)
    # A waiting worker's traceback would look like the others'.
    said = suspect.lines[-1].strip()
    if suspect.rank is not None and not said.startswith("["):
        said = f"rank {suspect.rank}: {said}"
    return replace(
        found,
        kind=CAUSE,
        rank=rank,
        node=node,
        host="" if node is None else hosts[node],
        when=None,
        lines=(said,),
        evidence=found.evidence if node is None else str(log),
        others=(),
        held_up=seen.ranks,
    )


def _by_places(case: Case, found: Finding) -> Finding:
    """Return a finding with the ranks that did not wait like the others, if launchers saw any."""
    seen = places_of(case.run, case.phase, case.attempt)
    failed = {suspect.rank for suspect in case.evidence.suspects}  # perhaps on their way out
    late = sorted(seen.elsewhere.keys() - failed)
    # A worker that waits for its GPU seems to be at a line of the script.
    on_cpu = case.known is not None and case.known.name in _ON_CPU
    waited = len(seen.waits) + (len(failed) if on_cpu else 0)
    if late and len(late) <= min(waited, _MOST_NAMED):
        there = "; ".join(f"rank {rank} was at {seen.elsewhere[rank]}" for rank in late)
        cause = f"{there}, while others waited for it in a collective"
        fix = _OF_LATE
    else:
        waits = {rank: place.partition(" ")[0] for rank, place in seen.waits.items()}
        waits |= _timed_out_at(case)
        by_place = {place: rank for rank, place in sorted(waits.items(), reverse=True)}
        if len(by_place) < 2:
            return found
        diverged, first = named("ranks-diverged"), sorted(by_place.items(), key=lambda x: x[1])
        where = ", ".join(f"rank {rank} at {place}" for place, rank in first[:_MOST_NAMED])
        cause, fix = f"{diverged.cause.partition(':')[0]}: {where}", diverged.fix
    found = replace(found, kind=CAUSE, certain=False, mend=EITHER)
    return replace(found, cause=cause, brief=cause, fix=fix)


def _timed_out_at(case: Case) -> dict[int, str]:
    """Return the lines of the script at which ranks waited until their timeout."""
    found: dict[int, str] = {}
    for suspect in case.evidence.suspects:
        name = suspect.known.name if suspect.known else ""
        raised = what_was_raised(suspect)
        timed_out = name in WAITING and name != "collective-aborted" and raised and raised.place
        if timed_out and raised and suspect.rank is not None:
            found[suspect.rank] = raised.place.replace(", line ", ":")
    return found


def _of_last_lines(run: Path, phase: str, attempt: int, evidence: Evidence) -> Finding | None:
    """Return what the logs' last lines mean, or the lines that look like errors.

    Return None if there is no log.
    """
    errors = {place: without_harmless(said) for place, said in evidence.error_like.items()}
    place, lines = next(((p, said) for p, said in errors.items() if said), ("", ()))
    known, last, end = last_words(run, phase, attempt)
    if known and not any(known.weak or _CERTAIN.search(line) for line in lines):
        place, lines = end, last
        cause, fix = known.explain(lines)
    elif lines:
        known = None
        if end == place:
            lines = tuple(dict.fromkeys((*lines, *without_harmless(last[-_MOST_LAST:]))))
        cause = "unknown: these are the lines that look like errors, and the last lines of the log"
        fix = f"read the lines around them in {place}"
    else:
        lines = without_harmless(last)
        if not lines:
            return None
        place = end
        cause = "unknown: no line looks like an error, and these are the last lines"
        fix = f"read {place}, and check sacct -j JOB -o state,exitcode,reason"
    return _of_lines(lines, known, (cause, fix), place, phase, attempt)


def _of_exited_task(case: Case) -> Finding | None:
    """Return a program's last lines if only srun reports its failure, or None if there are none."""
    hosts = case.evidence.hosts
    host, code = _EXITED.findall(case.suspect.lines[-1])[-1]
    node = hosts.index(host) if host in hosts else None
    known, last, place = last_words(case.run, case.phase, case.attempt, node)
    lines = without_harmless(last)
    if not lines:
        return None
    cause, fix = "unknown: these are the last lines of the program", f"read {place}"
    if known:
        cause, fix = known.explain(lines)
    brief = f"{host}: exit code {code}; the last line: {lines[-1].strip()}"
    found = _of_lines(lines, known, (cause, fix), place, case.phase, case.attempt)
    return replace(found, node=node, host=host, brief=brief)


def _of_lines(
    lines: tuple[str, ...],
    known: Cause | None,
    told: tuple[str, str],
    place: str,
    phase: str,
    attempt: int,
) -> Finding:
    """Return a finding that consists only of log lines; `told` is their cause and fix."""
    return Finding(
        phase=phase,
        attempt=attempt,
        rank=None,
        node=None,
        host="",
        when=None,
        lines=lines,
        name=known.name if known else "",
        kind=EFFECT if known and known.weak else CAUSE,  # an end is not a reason
        cause=told[0],
        fix=told[1],
        evidence=place,
        brief="",
        again=False,
        mend=known.mend if known else RESUME,
        certain=known is None,
    )


def _ended_from_outside(run: Path, phase: str, attempt: int) -> bool:
    """Check whether a user or Slurm ended an attempt."""
    ended = read_attempt(RunFiles(run), phase, attempt)
    crashed = ended.cause == EndCause.CRASH or ended.reason.startswith("crash ")
    return (ended.state is State.REQUEUED and not crashed) or ended.state in _FROM_OUTSIDE


def nothing_found(run: Path, phase: str, attempt: int) -> list[str]:
    """Return lines that say that no failure was found, and which logs to read."""
    ended = read_attempt(RunFiles(run), phase, attempt)
    if ended.state is State.COMPLETED or _ended_from_outside(run, phase, attempt):
        how = clean(f"{ended.state} {ended.reason}".strip())
        return [cut(f"{OWN_WORD}{phase} attempt {attempt}: {how}: nothing failed")]
    files = [*RunFiles(run).node_logs(phase, attempt).values()]
    batch = batch_log(run, phase, "")
    names = [str(f.relative_to(run)) for f in [*files, *([batch] if batch else [])]]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = f"read {shown}" if names else "there is no log"
    return [f"{OWN_WORD}{phase} attempt {attempt}: no failure was found; {where}"]
