"""The evidence of an attempt's failure: suspects, and log lines with a known cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trnslurm.contract.attempt import Attempt, read_attempt
from trnslurm.contract.files import open_file, read_file, read_json
from trnslurm.contract.rundir import NODE_SCRIPT, RunFiles
from trnslurm.contract.states import State
from trnslurm.contract.times import seconds_of
from trnslurm.frozen import Frozen
from trnslurm.node.triage.budget import is_spent, share
from trnslurm.node.triage.causes import (
    CAUSE,
    NO_DIGITS,
    Cause,
    Context,
    cause_of,
    explained,
    may_match,
    named,
)
from trnslurm.node.triage.going_on import GOES_ON, last_steps
from trnslurm.node.triage.words import Traceback, Words, complains, error_like, read_words, time_in

_TERM, _ABORT = (-15, 143), (-6, 134)
_MOST_RECORDS, _OF_A_NODE = 256, 4
_HEAD_BYTES = 256 << 10
_TAIL_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20
# Of a large log, triage reads the two ends and what surrounds these words: a plain search for
# them reads a gigabyte in seconds.
_ANCHORS = (b"Traceback (most recent call last)", b"\nerror: ")
_BEFORE, _AFTER = 8 << 10, 56 << 10
_MAX_FOUND = 32
# Timeouts, which NCCL prints before it aborts.
_WAITS = (
    *("barrier-timeout", "broadcast-timeout", "collective-timeout", "first-collective"),
    *("gather-timeout", "scalar-timeout", "sum-timeout", "watchdog-stuck"),
)
_LINES_BEFORE = 40
_ENDS_A_JOB = ("time-limit", "oom-kill", "cancelled-for-memory", "node-failed", "preempted")
"""Slurm's messages when it ends a job."""
_LOST = re.compile(r"(?:^|: )([\w.-]+)(?: and \d+ more|, [\w.-]+)* failed\b")
_ONCE = "-m trnslurm.node.launcher --once "  # as node.sh starts a batch script
_OF_TASKS = re.compile(r"(?m)^srun: error: ([\w.-]+): tasks? (\d{1,6}(?:[,-]\d{1,6})*): ")
_MOST_TASKS = 1 << 12
_SRUN_IS_TOLD = "srun: forcing job termination"  # by a signal from a user, or from our program
_STARTS_TASKS = re.compile(r"(\[[^\]]*\] )?slurm(step)?d\b\S*: ")
_LAST_LINES = 3
_LINES_NEAR = 20
"""How many lines before the first sign of a death may explain it."""
_MOST_LINES = 4096  # of one log that are compared with all patterns
WARNING = re.compile(
    r"\b(WARNING|INFO|DEBUG|\w*Warning)\b|(^|\]:\s*)\[[WI]\d*\b|^[WI]\d{4} |: [WI] "
    r"|\b(?i:retrying)\b"
)
# A shell goes on after a command that failed, unless it is told otherwise (set -e).
_OF_SHELL = re.compile(
    r"(?!.*(Segmentation fault|Killed|Aborted|core dumped))"
    r"(?:\S*(?:/|\.sh|\bbash)\S*: (?:line )?\d+: (?=(?P<command>[\w.-]+))|(?:\S*/)?(?P<tool>aws"
    r"|ba?sh|cat|chmod|chown|cp|curl|df|du|find|git|grep|kill|ln|ls|mkdir|mount|mv|rm|rmdir|rsync"
    r"|s(?:acct|control|info|queue)|scp|sed|ssh|tar|touch|tput|umount|wget): "
    r"|(?:Lmod has detected|ModuleCmd_\w+\.c\()(?P<module>))"
)
_OF_WORKERS = re.compile(
    r"torch[./]distributed|\[rank\d+\]|NCCL (INFO|WARN)|^Traceback \(most recent"
)
_OF_RANK = re.compile(r"\[(?:rank|Rank |PG [^\]]*Rank )(\d+)\]")
_CONNECTED = re.compile(r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\b")
_GOES_ON_AFTER = re.compile(r"\W*Trying (to|again)\b")
# Complete sequences first, so that no part of a color or window title is left over.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)
# Control characters, and those that change the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# A pattern with a wildcard takes time that grows with the square of a line's length. Tests compare
# the patterns with lines of this length.
_LONGEST = 1000
_LONG = re.compile(rf"([^\n]{{{_LONGEST}}})[^\n]+")
_PASSED_ON = re.compile(r": Caught \w+ in (DataLoader worker|pin memory|replica)")
_HANDLER_FAILED = re.compile(r"(Type|Attribute|Name|Import|ModuleNotFound|UnboundLocal)Error: ")
_WHILE_HANDLED = "During handling of the above exception, another exception occurred:"
SILENT = "without a traceback"
OWN_WORD = "triage: "
"""The start of this program's own lines, so that it does not read them as evidence."""


class Suspect(Frozen):
    """A worker or node that failed; its last lines of output come last."""

    lines: tuple[str, ...]
    place: str
    """The file with the evidence, relative to the run directory."""
    more: tuple[str, ...] = ()
    """Further lines of the exception's message."""
    rank: int | None = None
    node: int | None = None
    host: str = ""
    when: float | None = None
    coarse: bool = False
    """Whether the time has only whole seconds."""
    known: Cause | None = None
    """The known cause that matches its own lines."""
    telling: str = ""
    """The line that matches the cause, if it is not the exception's first line."""
    said_it: bool = True
    """Whether the process that died wrote the line last, or Slurm or the kernel recorded it.

    Otherwise, it is some line in its node's log.
    """
    survived: bool = False
    """Whether its program probably went on after the exception."""
    kinds: tuple[str, ...] = ()
    """From a record: the types of the exception and of the exceptions that caused it."""

    @property
    def silent(self) -> bool:
        """Whether only a launcher reports its end, so that nothing says why it failed."""
        return self.known is None and SILENT in self.lines[-1]


class Hit(Frozen):
    """A log line with a known cause."""

    cause: Cause
    line: str
    place: str
    at: int
    node: int | None
    """None if the line is in the batch script's log."""
    when: float | None
    rank: int | None = None
    """The rank that the line names."""
    after: str = ""
    """The next line."""
    survived: bool = False
    """Whether it is of an exception after which the program probably went on."""

    @property
    def warns(self) -> bool:
        """Whether it is a warning, after which the program continued."""
        return WARNING.search(self.line) is not None or self.goes_on or self.survived

    @property
    def goes_on(self) -> bool:
        """Whether the line says that the program continues."""
        after = _GOES_ON_AFTER.match(self.after)
        return after is not None or GOES_ON.search(self.line) is not None


@dataclass
class Evidence:
    """All evidence of one attempt."""

    suspects: list[Suspect] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """The hosts by node, if the batch script recorded them."""
    tracebacks: list[tuple[str, ...]] = field(default_factory=list)
    """All tracebacks in the nodes' logs, from any process."""
    error_like: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The last error-like lines in each log."""
    made_steps: bool = False
    """Whether a worker's record shows finished steps."""
    went_on: bool = False
    """Whether a log reports several steps."""
    lengths: dict[str, int] = field(default_factory=dict)
    """The number of lines in each log."""
    state: State = State.STARTING
    ranks: int = 0
    """The number of workers, or 0 if unknown."""

    ended: float | None = None
    """When the attempt ended."""

    def before_the_end(self, seconds: float) -> Evidence:
        """Return what certainly happened well before the end, and what Slurm recorded.

        A run that made no step within its time limit may have hung where its log ends.
        """
        hung = self.state is State.TIMEOUT and not (self.made_steps or self.went_on)

        def early(when: float | None) -> bool:
            return bool(when and self.ended and when < self.ended - seconds)

        return replace(
            self,
            suspects=[suspect for suspect in self.suspects if early(suspect.when)],
            hits=[
                hit
                for hit in self.hits
                if (hit.node is None and hit.cause.name in _ENDS_A_JOB)
                or (
                    hung
                    and hit.node is not None
                    and hit.at >= self.lengths[hit.place] - _LAST_LINES
                )
            ],
            error_like={},
        )


_OF_SRUN = re.compile(r"srun: error: ([\w.-]+): task")


class _Servers(NamedTuple):
    """The servers of a run's roles. What the logs say about them is no cause of a worker's end.

    The reason of the attempt names a server that is down.
    """

    addresses: tuple[str, ...]
    workers: tuple[str, ...]
    """The hosts that have none, but workers."""

    @classmethod
    def of(cls, files: RunFiles, workers: Sequence[str]) -> _Servers:
        told = read_json(files.servers_file).values()
        servers = [each for role in told if isinstance(role, list) for each in role]
        known = (each.get("address") for each in servers if isinstance(each, dict))
        return cls(tuple(each for each in known if isinstance(each, str) and each), tuple(workers))

    def are_in(self, line: str) -> bool:
        """Check whether a line is about one of them."""
        if not self.addresses:
            return False
        if any(address in line for address in self.addresses):
            return True
        told = _OF_SRUN.match(line)
        if told and told[1] not in self.workers:
            return True
        return "refused" in line and "://" not in line


def gather(run: Path, phase: str, attempt: int, *, over: bool = False) -> Evidence:
    """Read the records and all logs of an attempt; `over` means that its job has ended."""
    files = RunFiles(run)
    about = read_attempt(files, phase, attempt)
    hosts = [host for host in about.hosts.split(",") if host]
    ended = seconds_of(about.ended or "")
    found = Evidence(hosts=hosts, state=about.state, ended=ended)
    lost = _LOST.search(about.reason)
    if lost and lost[1] in hosts and about.state in (State.FAILED, State.RESTARTED):
        place = str(files.state_file(phase, attempt).relative_to(run))
        node_failed = Suspect(
            lines=(clean(about.reason),),
            place=place,
            node=hosts.index(lost[1]),
            host=lost[1],
            when=ended,
            known=named("node-failed"),
        )
        found.suspects.append(node_failed)
        return found
    found.suspects += _preflight(run, phase, attempt)
    found.suspects += _stuck(run, phase, attempt)
    per_node = read_json(files.plan_file).get("workers_per_node")
    failed = files.failed_files(phase, attempt)
    if isinstance(per_node, int):
        found.ranks = per_node * len(hosts)
    share(2)
    telling = _first_of_nodes(failed, per_node) if isinstance(per_node, int) else failed
    # The logs need not be searched for these ranks' last lines.
    spoken: set[int | None] = {rank for rank in failed if rank not in telling}
    for file in telling.values():
        record = read_json(file)
        found.made_steps |= bool(record.get("steps_done"))
        if suspect := _recorded(record, str(file.relative_to(run))):
            found.suspects.append(suspect)
            spoken.add(suspect.rank)
    logs = files.node_logs(phase, attempt)
    starts_tasks = _ONCE in _script_of(files)
    before_steps: set[str] = set()  # the lines of the first log with steps
    servers = _Servers.of(files, hosts)
    for read, (node, file) in enumerate(logs.items()):
        # No log, and no part of the work on it, uses up the time of later ones.
        parts = len(logs) - read + 1
        share(2 * parts)
        if is_spent():
            break
        text, place = read_log(file), str(file.relative_to(run))
        share(2 * parts)
        lines = text.split("\n")
        if end := last_steps(lines):  # training continued after the earlier lines
            found.went_on = True
            before_steps = before_steps or {_shape(line) for line in lines[:end]}
            text = "\n".join(lines[end:])
        found.lengths[place] = len(lines) - end
        first_rank = node * per_node if isinstance(per_node, int) else None
        words = read_words(text, first_rank)
        # In a log without steps of its own, the same error is one that all ranks survived.
        survived = set() if end else before_steps
        met = _met(lines[end:], found.ranks)
        got_to = max([met, *(t.at for t in words.of_ranks() if not _is_effect(t))])
        for traceback in words.tracebacks:
            if traceback.rank is None:
                passed_by = traceback.at < got_to or _shape(traceback.lines[-1]) in survived
                traceback.survived = traceback.survived or passed_by
        share(2 * parts)
        hits = list(_hits(text, place, node, words.first_at(text) - _LINES_NEAR))
        hits = [
            hit
            for hit in hits
            if not (
                _did_start(hit, lines[end:])
                or (_went_on(hit, lines[end:]) and _workers_spoke(lines[end + hit.at :]))
                or any(hit.at in c for c in words.caught)
                or servers.are_in(hit.line)
            )
        ]
        passed = [t.at_lines for t in words.tracebacks if t.survived and len(t.lines) > 1]
        hits = [
            replace(
                h,
                survived=h.at < met
                or _shape(h.line) in survived
                or any(h.at in lines for lines in passed),
            )
            for h in hits
        ]
        found.hits += hits
        share(parts)
        host = hosts[node] if node < len(hosts) else ""
        where = Where(node, host, _own_tasks(text) if starts_tasks else None, hosts)
        found.tracebacks += [tuple(traceback.lines) for traceback in words.tracebacks]
        found.error_like[place] = tuple(x for x in error_like(text) if not servers.are_in(x))
        for suspect in _workers(words, place, where, hits):
            if suspect.rank is None or suspect.rank not in spoken:
                found.suspects.append(suspect)
    share(2)
    if batch := batch_log(run, phase, about.job_id):
        part, place = _part_of(read_log(batch), phase, attempt), str(batch.relative_to(run))
        before, told_to_end, _ = part.partition(_SRUN_IS_TOLD)
        if over and not about.ended and told_to_end:
            part = before
            found.suspects.append(_killed_program(files, about, hosts))
        lines = part.split("\n")
        found.hits += [
            hit
            for hit in _hits(part, place, None)
            if not (_went_on(hit, lines) or servers.are_in(hit.line))
        ]
        if not found.suspects:  # it failed before any node wrote a log
            words = read_words(part)
            found.error_like[place] = error_like(part)
            if said := words.last_without_rank(_follows):
                found.suspects.append(_suspect_of(said, place))
    share(1)
    return found


def _shape(line: str) -> str:
    return line.strip().translate(NO_DIGITS)


def _met(lines: list[str], ranks: int) -> int:
    """Return the last line by which all ranks were connected, or 0. Errors before it ended none."""
    for at in range(len(lines) - 1, -1, -1):
        if (peers := _CONNECTED.match(lines[at])) and int(peers[1]) == ranks - 1:
            return at
    return 0


def _killed_program(files: RunFiles, about: Attempt, hosts: list[str]) -> Suspect:
    """Return the attempt's own program if it was killed. Its srun ends with it."""
    return Suspect(
        lines=("the program that runs the attempt ended without a record of why",),
        place=str(files.state_file(about.phase, about.attempt).relative_to(files.path)),
        node=0 if hosts else None,
        host=hosts[0] if hosts else "",
        known=named("program-killed"),
    )


def batch_log(run: Path, phase: str, job_id: str) -> Path | None:
    """Return the log of a job's batch script, or otherwise the newest one of the phase."""
    logs = RunFiles(run).batch_logs(phase)
    own = RunFiles(run).batch_log(phase, job_id)
    return own if own in logs else logs[-1] if logs else None


def _part_of(text: str, phase: str, attempt: int) -> str:
    """Return the attempt's part of the batch log, without this program's output.

    A requeued job appends to the log, and each attempt's last line names the attempt.
    """
    part: list[str] = []
    ours = False
    for line in text.split("\n"):
        ended = re.match(rf"\S+ {phase} attempt (\d+): [A-Z]", line)
        if ended and int(ended[1]) >= attempt:
            break
        if ended:
            part, ours = [], False
            continue
        ours = ours or line.startswith(OWN_WORD)
        if not ours:
            part.append(line)
    return "\n".join(part)


def _suspect(
    lines: tuple[str, ...], place: str, more: tuple[str, ...] = (), **facts: Any
) -> Suspect:
    # From the end, because the last of several chained exceptions ended the process.
    said = [line for line in reversed(lines) if not line.startswith("  ")]
    said += [line for line, after in zip(more, (*more[1:], "")) if not _GOES_ON_AFTER.match(after)]
    # Other processes write between the lines of a message, and a data loader's process only
    # passes on its worker's exception.
    said = [line for line in said if not (_PASSED_ON.search(line) or GOES_ON.search(line))] or said
    context = Context(frames="\n".join(lines))
    # A handler with an error of its own did not mean to pass on the first exception.
    own = said[:1] if _HANDLER_FAILED.match(said[0]) and _WHILE_HANDLED in lines else said
    known, telling = next(iter(explained(own, context) or explained(said, context)), (None, ""))
    telling = "" if telling in lines[-1:] else telling
    return Suspect(lines=lines, place=place, more=more, known=known, telling=telling, **facts)


def _suspect_of(traceback: Traceback, place: str, **facts: Any) -> Suspect:
    return _suspect(tuple(traceback.lines), place, tuple(traceback.more), **facts)


def _first_of_nodes(failed: dict[int, Path], per_node: int) -> dict[int, Path]:
    """Return the records to read: all or, if there are many, the first few of each node.

    Ranks that only lost a peer fail after that peer. All records of one node use one clock. The
    clocks of several nodes may differ by more than the duration of a crash.
    """
    if len(failed) <= _MOST_RECORDS:
        return failed
    written: dict[int, list[tuple[int, int]]] = {}
    for rank, file in failed.items():
        with suppress(OSError):
            when = file.lstat().st_mtime_ns
            written.setdefault(rank // max(per_node, 1), []).append((when, rank))
    first = [rank for node in written.values() for _, rank in sorted(node)[:_OF_A_NODE]]
    return {rank: failed[rank] for rank in first}


def _recorded(record: dict[str, Any], place: str) -> Suspect | None:
    """Return the suspect that wrote a record, or None if the record contains no error."""
    said = clean(str(record.get("traceback") or record.get("error") or ""))
    raised = record.get("raised")
    kinds = tuple(map(str, raised)) if isinstance(raised, list) else ()
    facts = _who(record) | {"kinds": kinds}
    if tracebacks := read_words(said).tracebacks:
        return _suspect_of(tracebacks[-1], place, **facts)
    lines = tuple(line for line in said.split("\n") if line.strip())
    return _suspect(lines, place, **facts) if lines else None


def _stuck(run: Path, phase: str, attempt: int) -> Iterator[Suspect]:
    file = RunFiles(run).stuck_file(phase, attempt)
    if record := read_json(file):
        line = f"watchdog: {clean(str(record.get('line', '')))}"
        place = str(file.relative_to(run))
        known = cause_of([line])
        known = known if known and known.name.startswith("stuck") else named("stuck")
        yield Suspect(lines=(line,), place=place, known=known, **_who(record))


def _preflight(run: Path, phase: str, attempt: int) -> Iterator[Suspect]:
    files = RunFiles(run)
    lone = files.preflight_node_files(phase, attempt)  # from nodes that could not reach node 0
    for file in [files.preflight_file(phase, attempt), *lone]:
        nodes = read_json(file).get("nodes")
        for record in nodes if isinstance(nodes, list) else []:
            problems = record.get("problems") if isinstance(record, dict) else None
            if not isinstance(problems, list) or not problems or record.get("ok"):
                continue
            facts = {**_who(record), "rank": None, "when": file.stat().st_mtime}
            host = facts["host"]
            lines = tuple(f"preflight: {host}: {clean(str(p))}" for p in problems)
            place = str(file.relative_to(run))
            yield Suspect(lines=lines, place=place, known=named("preflight"), **facts)


def _who(record: dict[str, Any]) -> dict[str, Any]:
    def number(key: str, kinds: type | tuple[type, ...]) -> Any:
        value = record.get(key)
        return value if isinstance(value, kinds) and not isinstance(value, bool) else None

    return {
        "rank": number("rank", int),
        "node": number("node", int),
        "host": clean(str(record.get("host") or "")),
        "when": number("time", (int, float)),
    }


class Where(NamedTuple):
    """The node whose log it is and, for a batch script, the hosts of its own srun's tasks."""

    node: int
    host: str
    tasks: dict[int, str] | None
    """The host of each task, or None if the node's log covers only that node's workers."""
    hosts: list[str]

    def of(self, rank: int | None, reported: str = "") -> dict[str, Any]:
        """Return a rank's node and host, as far as they are known."""
        if self.tasks is None or len(self.hosts) == 1:
            return {"node": self.node, "host": self.host or reported}
        host = reported or (self.tasks.get(rank, "") if rank is not None else "")
        return {"node": self.hosts.index(host) if host in self.hosts else None, "host": host}


def _own_tasks(text: str) -> dict[int, str]:
    """Return the hosts on which tasks have ended, as srun reports."""
    found: dict[int, str] = {}
    for match in _OF_TASKS.finditer(text):
        for first, last in (part.partition("-")[::2] for part in match[2].split(",")):
            last_one = min(int(last or first), int(first) + _MOST_TASKS)
            found.update(dict.fromkeys(range(int(first), last_one + 1), match[1]))
    return found


def _script_of(files: RunFiles) -> str:
    try:
        return read_file(files.path / NODE_SCRIPT).decode(errors="replace")
    except OSError:
        return ""


def _workers(words: Words, place: str, where: Where, hits: list[Hit]) -> Iterator[Suspect]:
    """Yield a node's suspects, from torchrun's report and the workers' own output."""
    unsaid = words.last_without_rank(_follows)
    if unsaid and any(t.at > unsaid.at and not _is_effect(t) for t in words.of_ranks()):
        unsaid = None  # a rank got further, so earlier exceptions were caught
    exits = sorted(words.exits, key=lambda e: e.when or 0)
    reported = {e.rank for e in exits}
    for failed in exits:
        facts: dict[str, Any] = {
            "rank": failed.rank,
            **where.of(failed.rank, failed.host),
            "when": failed.when,
            "coarse": failed.coarse,
        }
        aborted = failed.code in _ABORT
        said = words.last_of(failed.rank) if failed.code > 0 or aborted else None
        if said is None and failed.code in (1, 2):
            said, unsaid = unsaid, None
        if said:
            yield _suspect_of(said, place, survived=said.survived, **facts)
        elif (aborted or not failed.said) and (hit := _own_line(hits, failed.rank, aborted)):
            yield Suspect(lines=(hit.line,), place=place, known=hit.cause, **facts)
        else:
            yield _suspect(_exit_words(failed.code, failed.said), place, **facts)
    for rank in {t.rank for t in words.tracebacks if t.rank is not None} - reported:
        if said := words.last_of(rank):
            yield _suspect_of(said, place, rank=rank, survived=said.survived, **where.of(rank))
    if unsaid and not exits:  # with exits, it did not end a worker
        yield _suspect_of(unsaid, place, survived=unsaid.survived, **where.of(None))


def _is_effect(traceback: Traceback) -> bool:
    """Check whether an exception is a consequence of another process's failure."""
    known = _suspect_of(traceback, "").known
    return known is not None and known.kind != CAUSE


def _follows(line: str) -> bool:
    """Check whether a line is a consequence of another process's failure, or harmless."""
    known = cause_of([line])
    return known is not None and known.kind != CAUSE


def _own_line(hits: list[Hit], rank: int | None, aborted: bool) -> Hit | None:
    """Return the line that explains why a worker ended without a traceback.

    NCCL and Gloo abort when a peer is gone, and print that with their own rank or without a rank.
    """
    aborts = ("peer-gone", "collective-aborted", *_WAITS)
    own = [
        hit
        for hit in hits
        if hit.rank in (None, rank)
        and not hit.warns
        and not hit.cause.name.startswith("usage")  # such an exit has its own code
        and (hit.cause.rank <= 1 or (aborted and hit.cause.name in aborts))
    ]
    # A line without a rank may be from another worker, or from an exception that was caught.
    return min(
        own,
        key=lambda hit: (hit.rank is None, hit.cause.rank, hit.cause.name == "barrier-timeout"),
        default=None,
    )


def _exit_words(code: int, said: str) -> tuple[str, ...]:
    if said:
        return (said,)
    if code in _TERM:
        return ("Signal 15 (SIGTERM) received",)
    if code in _ABORT:
        return ("Signal 6 (SIGABRT) received",)
    return (f"it ended with exit code {code}, {SILENT}",)


def _hits(text: str, place: str, node: int | None, begin: int = 0) -> Iterator[Hit]:
    """Yield the first line of each known cause and rank, starting at a line."""
    seen: set[tuple[str, int | None]] = set()
    shapes: set[str] = set()
    lines = text.split("\n")
    for at, (line, small) in enumerate(zip(lines, text.lower().split("\n"))):
        if at < begin or not may_match(small):
            continue
        named = _OF_RANK.search(line)
        rank = int(named[1]) if named else None
        shape = f"{rank} {line.translate(NO_DIGITS)}"
        if shape in shapes or len(shapes) >= _MOST_LINES:
            continue
        shapes.add(shape)
        cause = cause_of([line])
        if cause and (cause.name, rank) not in seen:
            seen.add((cause.name, rank))
            yield Hit(
                cause=cause,
                line=line.strip(),
                place=place,
                at=at,
                node=node,
                when=time_in(line),
                rank=rank,
                after=lines[at + 1] if at + 1 < len(lines) else "",
            )


def _did_start(hit: Hit, lines: list[str]) -> bool:
    """Check whether a program wrote after a complaint from Slurm, so that it did start."""
    if hit.cause.source == "container" or hit.cause.name in _ENDS_A_JOB:
        return False
    if not _STARTS_TASKS.match(hit.line):
        return False
    return any(line.strip() and not _STARTS_TASKS.match(line) for line in lines[hit.at + 1 :])


def _went_on(hit: Hit, lines: list[str]) -> bool:
    """Check whether a command in a shell failed, and what came later complains of other things."""
    shells = _OF_SHELL.match(hit.line)
    if hit.cause.kind != CAUSE or not shells:
        return False
    name = re.escape(shells["command"] or shells["tool"] or "module")
    later = [line.strip() for line in lines[hit.at + 1 :] if _complains(line)]
    others = [line for line in later if not _OF_SHELL.match(line)]
    return bool(others) and not any(re.search(rf"(?<![\w-]){name}(?![\w-])", x) for x in later)


def _workers_spoke(lines: list[str]) -> bool:
    """Check whether a launcher or a worker wrote one of the lines."""
    return any(_OF_WORKERS.search(line) for line in lines)


def _complains(line: str) -> bool:
    """Check whether a line tells of a failure that is not only a consequence of others."""
    known = cause_of([line])
    return complains(line) if known is None else known.kind == CAUSE or known.rank == 3


def context_of(run: Path, phase: str, attempt: int, place: str, line: str) -> Context:
    """Return a line's surroundings: in its log, on the first node, in the batch log."""
    files = RunFiles(run)
    job_id = read_attempt(files, phase, attempt).job_id
    nodes = files.node_logs(phase, attempt)
    logs = [run / place, *([nodes[min(nodes)]] if nodes else []), batch_log(run, phase, job_id)]
    texts = [read_log(file) for file in dict.fromkeys(logs) if file and file.suffix == ".log"]
    before = [_before(text, line) for text in texts]
    return Context(before="\n".join(before), log="\n".join(texts))


def _before(text: str, line: str) -> str:
    """Return the last lines before a line, or the log's last lines, without repeated lines."""
    at = text.find(line) if line else -1
    found: dict[str, str] = {}
    for said in reversed(text[: at if at >= 0 else None].split("\n")):
        if said.strip():
            found.setdefault(said.translate(NO_DIGITS), said)
        if len(found) == _LINES_BEFORE:
            break
    return "\n".join(reversed(found.values()))


def clean(text: str) -> str:
    """Return text without control characters and escapes. Keep lines, but truncate long ones."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub("", _ESCAPES.sub("", text)).replace("\t", "    ")
    long = any(len(line) > _LONGEST for line in text.split("\n"))
    return _LONG.sub(r"\1…", text) if long else text


def read_log(file: Path) -> str:
    """Read a log as text. For a large log, read both ends and the parts that look like errors."""
    try:
        with open_file(file) as stream:
            size = stream.seek(0, 2)
            parts = [_read(stream, begin, end) for begin, end in _windows(stream, size)]
    except OSError:
        return ""  # removed, or not readable: other logs may show the failure
    return clean(b"\n".join(parts).decode(errors="replace"))


def _windows(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    if size <= _HEAD_BYTES + _TAIL_BYTES:
        return [(0, size)]
    middle = range(_HEAD_BYTES, size - _TAIL_BYTES)
    windows = [(0, middle.start)]
    for place in _find(stream, middle):
        begin, end = max(windows[-1][1], place - _BEFORE), min(middle.stop, place + _AFTER)
        if begin < end:
            windows.append((begin, end))
        if len(windows) > _MAX_FOUND:
            break
    return [*windows, (middle.stop, size)]


def _find(stream: BinaryIO, places: range) -> Iterator[int]:
    """Yield the positions of the anchors, in order."""
    overlap = max(map(len, _ANCHORS)) - 1
    for begin in range(places.start, places.stop, _CHUNK_BYTES):
        if is_spent():
            break
        chunk = _read(stream, begin, min(begin + _CHUNK_BYTES + overlap, places.stop))
        found: list[int] = []
        for anchor in _ANCHORS:
            at = chunk.find(anchor)
            while 0 <= at < _CHUNK_BYTES and len(found) < 3 * _MAX_FOUND:
                found.append(begin + at)
                at = chunk.find(anchor, at + _AFTER)
        yield from sorted(found)


def _read(stream: BinaryIO, begin: int, end: int) -> bytes:
    stream.seek(begin)
    return stream.read(end - begin)
