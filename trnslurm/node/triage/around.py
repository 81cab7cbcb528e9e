"""Finds what an error means, from its traceback, the lines before it, and other ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trnslurm.contract.rundir import RunFiles
from trnslurm.node.triage.causes import (
    EFFECT,
    Cause,
    Context,
    cause_of,
    explained,
    general_meaning,
    last_meaning,
    matching,
    named,
)
from trnslurm.node.triage.evidence import Evidence, Suspect, context_of, read_log
from trnslurm.node.triage.words import CARETS, frames_in, last_lines, said_last

_AT = re.compile(
    r"^trnslurm: \S+Z rank (?P<rank>\d+) \(.*?\) (?P<does>is|waits) at (?P<place>.+)$", re.MULTILINE
)
"""Matches the launcher's line about a worker that still ran when another failed."""
_WAIT = re.compile(
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)(?:, (?P<size>NumelIn=\d+))?"
)
_GROUP = re.compile(r"\[PG (?:ID |GUID )?(\w+)")
_CAUGHT = re.compile(r"Caught \w+ in (DataLoader worker|pin memory|replica)")
_INNER = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception)\b")
_MOST_MISSING = 8
_OF_PYTHON = re.compile(r"<frozen |/lib/python3\.\d+/(?!(site|dist)-packages)")
# https://docs.python.org/3/library/faulthandler.html: the thread that crashed is the current one,
# and other threads may come before it.
_CRASH = re.compile(
    r"Fatal Python error: .*\n\n?(?:Thread .*\n(?:  .*\n)+\n)*"
    r"(?:Current t|T)hread .*\n((?:  File .*\n)+)"
)
_CRASH_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](\w+)")


def ends_of(suspect: Suspect) -> list[str]:
    """Return the last exception's line with the rest of its message, and the lines before it.

    For an exception in a data loader worker, the worker's own line is in the message and comes
    first.
    """
    ends = [line for line in reversed(suspect.lines) if not line.startswith("  ")]
    inner = [line for line in reversed(suspect.more) if _INNER.match(line)]
    joined = [" ".join((*ends[:1], *suspect.more[:3]))]
    return [*inner, *ends] if _CAUGHT.search(joined[0]) else [*joined, *ends[1:]]


def general_cause(suspect: Suspect) -> Cause | None:
    """Return what a suspect's exception means, from its class, words and frames."""
    traceback = "\n".join(suspect.lines)
    inner = sum(line in suspect.more for line in ends_of(suspect))
    found = (general_meaning(line, traceback) for line in ends_of(suspect)[: inner + 1])
    return next((cause for cause in found if cause), None)


def owner_of(suspect: Suspect) -> dict[str, str]:
    """Return whose code raised the decisive exception, and at which line.

    `own` is the innermost line outside of packages. If a package raised it, `package` is its name,
    and `newer` the command that upgrades it.
    """
    lines = suspect.lines
    if suspect.telling in lines:  # from several chained exceptions
        lines = lines[: lines.index(suspect.telling)]
    frames = frames_in(lines)
    if not frames:
        log = suspect.place
        return {
            "owner": "the program",
            "file": log,
            "own": log,
            "code": "",
            "newer": "",
            "package": "",
        }
    file, line = next((f for f in reversed(frames) if not _OF_PYTHON.search(f[0])), frames[-1])
    code = [said.strip() for said in lines if said.startswith("    ") and not CARETS.match(said)]
    package = _PACKAGE.search(file)
    of_script = (f for f in reversed(frames) if not _OF_PYTHON.search(f[0]))
    own = next((f for f in of_script if not _PACKAGE.search(f[0])), (file, line))
    place = f"{Path(own[0]).name}, line {own[1]}"  # where the user can look, not within a package
    return {
        "owner": package[1] if package else Path(file).name,
        "package": package[1] if package else "",
        "newer": f"pip install -U {package[1]}, or " if package else "",
        "file": place,
        "own": place,
        "code": code[-1] if code else "",
    }


def crashed_at(log: str) -> str:
    """Return the line at which a process crashed, from the stack by Python's faulthandler."""
    if not (stack := _CRASH.search(log)):
        return ""
    frames = [(file, line) for file, line in _CRASH_FRAME.findall(stack[1])]
    own = (f for f in frames if not _OF_PYTHON.search(f[0]) and not _PACKAGE.search(f[0]))
    file, line = next(own, frames[0])
    return f"{Path(file).name}, line {line}"


def refined(
    run: Path,
    phase: str,
    attempt: int,
    suspect: Suspect,
    known: Cause | None,
    beside: tuple[str, ...],
) -> tuple[Cause | None, tuple[str, ...]]:
    """Return a better-fitting cause that also requires other log lines, if there is one."""
    if known and known.name == "time-limit":
        hung, lines, _ = last_words(run, phase, attempt)
        if hung:
            return hung, (*beside, *lines)
    ends = [line for line in reversed(suspect.lines) if not line.startswith("  ")]
    said = [line for line in (*beside, suspect.telling, *ends, *suspect.more) if line]
    asking = (line for line in said if any(c.before or c.log for c in matching(line)))
    if not (first := next(asking, "")):
        return known, beside
    context = replace(
        context_of(run, phase, attempt, suspect.place, first), frames="\n".join(suspect.lines)
    )
    better, line = next(iter(explained(said, context)), (None, ""))
    if not better or not (better.before or better.log):
        return known, beside
    if known and (known.rank < better.rank or known.conditions > better.conditions):
        return known, beside
    shown = [*beside, *suspect.lines]
    more = [each for each in (line, _line_before(better, context)) if each and each not in shown]
    return better, (*more, *beside)


def _line_before(cause: Cause, context: Context) -> str:
    """Return the last line that a cause requires before its own line."""
    if not cause.before or not (match := cause.before.search(context.before)):
        return ""
    text = context.before
    end = match.end() - (len(match[0]) - len(match[0].rstrip()))
    return text[text.rfind("\n", 0, end) + 1 :].partition("\n")[0].strip()


def compared(
    evidence: Evidence, known: Cause | None, beside: tuple[str, ...]
) -> tuple[Cause | None, tuple[str, ...]]:
    """Return the cause that ranks diverged, if their timeouts name different collectives."""
    if known is None or known.kind != EFFECT:
        return known, beside
    waits: dict[tuple[str, str], dict[str, tuple[int, str]]] = {}
    for hit in evidence.hits:
        if (wait := _WAIT.search(hit.line)) and hit.rank is not None:
            group = _GROUP.search(hit.line)
            work = f"{wait['op']}, {wait['size']}" if wait["size"] else wait["op"]
            key = (group[1] if group else "", wait["number"])
            waits.setdefault(key, {}).setdefault(work, (hit.rank, hit.line))
    for works in waits.values():
        if len({work.split(",")[0] for work in works}) > 1 or _sizes_differ(works):
            lines = [line for _, line in works.values()][:2]
            return named("ranks-diverged"), (*lines, *(b for b in beside if b not in lines))
    waiting = {hit.rank for hit in evidence.hits if _WAIT.search(hit.line)} - {None}
    missing = sorted({*range(evidence.ranks)} - waiting)
    if 0 < len(missing) <= len(waiting) // 4:
        ranks = ", ".join(map(str, missing[:_MOST_MISSING]))
        beside = (*beside, f"all ranks wait in a collective except {ranks}")
    return known, beside


def still_ran(run: Path, phase: str, attempt: int, evidence: Evidence) -> Iterator[str]:
    """Yield the last words of the only node without a failed worker, while other nodes waited."""
    failed = {suspect.node for suspect in evidence.suspects}
    logs = RunFiles(run).node_logs(phase, attempt)
    running = [node for node in logs if node not in failed]
    if failed - {None} and len(running) == 1:
        said = said_last(read_log(logs[running[0]]))
        if said and not cause_of(said[-1:]):
            yield f"node {running[0]} was still running; its log ends with: {said[-1]}"


class Places(NamedTuple):
    """Where workers were when another one failed, as launchers report: file:line (function)."""

    elsewhere: dict[int, str]
    """The ranks that did not wait in a collective."""
    waits: dict[int, str]


def places_of(run: Path, phase: str, attempt: int) -> Places:
    """Return where the other workers were when the first one failed."""
    found = Places({}, {})
    for log in RunFiles(run).node_logs(phase, attempt).values():
        for match in _AT.finditer(read_log(log)):
            at = found.waits if match["does"] == "waits" else found.elsewhere
            at[int(match["rank"])] = match["place"]
    return found


def _sizes_differ(works: Iterable[str]) -> bool:
    """Check whether ranks wait with different sizes in a collective that requires equal sizes."""
    sizes = {work for work in works if work.startswith(("ALLREDUCE,", "BROADCAST,", "_ALLGATHER"))}
    return len(sizes) > 1


def last_words(
    run: Path, phase: str, attempt: int, node: int | None = None
) -> tuple[Cause | None, tuple[str, ...], str]:
    """Return what the end of a node's log means (default: node 0), its lines and its file."""
    nodes = RunFiles(run).node_logs(phase, attempt)
    for file in [nodes[n] for n in sorted(nodes) if node in (None, n)][:1]:
        lines = last_lines(read_log(file))
        known, line = last_meaning(lines)
        return known, (line,) if known else lines, str(file.relative_to(run))
    return None, (), ""
