"""The failures in a node's log: tracebacks by rank, error lines, torchrun's report, times."""

import calendar
import re
import signal
import time
from dataclasses import dataclass, field

from trnslurm.frozen import Frozen

_RANK = re.compile(r"\[rank(\d+)\]: ?")
_BEGINS = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_RAISED = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*[a-z]\w*)(?:: .*)?$")
_FRAME = re.compile(r'  File "(.*)", line (\d+)')
_CLICKS_USAGE = re.compile(r"Usage: (\S+)")
_USAGE, _USAGE_ERROR = re.compile(r"usage: (\S+)"), re.compile(r"(\S+): error: ")
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): ")
_CARETS = re.compile(r"\s*[\^~]+\s*$")
_OF_OTHERS = re.compile(r"[/\\](site|dist)-packages[/\\]|<frozen |/lib/python3\.\d+/")
_OF_TORCHRUN = "torch.distributed.elastic"
_MAX_LINES = 400  # of one traceback, chained ones and those that other writers tore included
_REPORT = re.compile(
    r"^  time      : (?P<time>\S+)\n  host      : (?P<host>.*)\n"
    r"  rank      : (?P<rank>\d+) \(local_rank: \d+\)\n  exitcode  : (?P<code>-?\d+) .*\n"
    r"  error_file: .*\n  traceback : (?P<said>.*)$",
    re.MULTILINE,
)
# What it says at once. The report comes later, or never: where srun ends the other nodes first.
_DIED = re.compile(
    r"^[EW](?P<time>\d{4} \d\d:\d\d:\d\d)(?P<fraction>\.\d+) .*"
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+) \(pid: \d+\)",
    re.MULTILINE,
)
_TIME = re.compile(
    r"(\d{4})-(\d\d|[A-Z][a-z]{2})-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z?)"
)
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


class Exit(Frozen, kw_only=False):
    """One failed worker in torchrun's report."""

    rank: int | None
    code: int
    host: str
    when: float | None
    said: str
    """Of a signal, which one."""


@dataclass
class Traceback:
    """A traceback, with those that it is chained to."""

    rank: int | None
    at: int
    """Its place among the log's lines."""
    lines: list[str] = field(default_factory=list)
    whole: bool = False


class Words(Frozen, kw_only=False):
    """All failures in a log."""

    exits: tuple[Exit, ...]
    tracebacks: tuple[Traceback, ...]
    errors: tuple[tuple[int, str], ...]
    """Lines of our programs, and where they stand."""

    def of_rank(self, rank: int | None) -> tuple[str, ...]:
        """Return the traceback that a rank died of: its last."""
        own = [t for t in self.tracebacks if t.rank == rank is not None]
        return tuple(own[-1].lines) if own else ()

    def without_rank(self) -> tuple[str, ...]:
        """Return the last traceback or error line that names no rank."""
        found = [(t.at, tuple(t.lines)) for t in self.tracebacks if t.rank is None]
        # What ran a program says that it failed, after the program itself has said why.
        found += [(at, (e,)) for at, e in self.errors if not (found and "precompile on" in e)]
        return max(found, default=(0, ()))[1]


def read_words(text: str, first_rank: int | None = None) -> Words:
    """Read a log; the first rank of its node tells which ones the others are."""
    open_by_rank: dict[int | None, Traceback] = {}
    closed: list[Traceback] = []
    errors = []
    programs: set[str] = set()
    clicks = ""
    loose: list[str] = []
    """The lines before one that begins no traceback: of a SyntaxError Python prints no more."""
    for at, whole_line in enumerate(text.split("\n")):
        prefix = _RANK.match(whole_line)
        rank = int(prefix[1]) if prefix else None
        line = whole_line[prefix.end() :] if prefix else whole_line
        if line.startswith(_BEGINS):
            before = open_by_rank.get(rank)
            chained = before and before.lines and before.lines[-1].startswith(_CHAINED)
            if not chained:
                open_by_rank[rank] = Traceback(rank, at)
        elif line.startswith("error: "):
            errors.append((at, line.strip()))
        elif usage := _USAGE.match(line):
            programs.add(usage[1])
        elif (usage := _USAGE_ERROR.match(line)) and usage[1] in programs:  # argparse's
            errors.append((at, line.strip()))
        elif usage := _CLICKS_USAGE.match(line):
            clicks = usage[1]
        elif clicks and line.startswith("Error: "):  # Click's, in argparse's words
            errors.append((at, f"{clicks}: error: {line[7:].strip()}"))
        elif rank in open_by_rank:
            _add(open_by_rank[rank], line, closed)
        elif _ERROR.match(line):  # of a traceback whose beginning is lost
            closed.append(Traceback(rank, at, [*loose, line], whole=True))
        loose = [*loose, line][-4:] if _FRAME.match(line) or (loose and line[:2] == "  ") else []
    mine = [t for t in closed if not any(line.startswith(_OF_TORCHRUN) for line in t.lines)]
    exits = _exits(text) or _deaths(text, first_rank)
    return Words(tuple(exits), tuple(mine), tuple(errors))


def useful_end(lines: tuple[str, ...], most: int) -> tuple[str, ...]:
    """Return the last lines of a traceback: the job's own frames, without carets."""
    frames: list[list[str]] = []
    others = []
    for line in (line.rstrip() for line in lines if line.strip() and not _CARETS.match(line)):
        if line.startswith('  File "'):
            frames.append([line])
        elif line.startswith("    ") and frames:
            frames[-1].append(line)
        else:
            others.append(line)
    raised = others[-1:]
    if not frames:
        return tuple(others[-most:])
    own = [frame for frame in frames if not _OF_OTHERS.search(frame[0])] or frames
    while len(own) > 1 and sum(map(len, own)) + len(raised) > most:
        own = own[1:]
    return tuple([*(line for frame in own for line in frame[:2]), *raised][-most:])


def frames_in(lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return file and line number of each frame of a traceback; the last has raised it."""
    return [(frame[1], frame[2]) for line in lines if (frame := _FRAME.match(line))]


def kinds_in(lines: tuple[str, ...]) -> list[str]:
    """Return the types of a traceback's exceptions, chained ones first."""
    return [raised[1] for line in lines if (raised := _RAISED.match(line))]


def of_others(file: str) -> bool:
    """Check whether a file of a traceback is Python's own, or of an installed package."""
    return _OF_OTHERS.search(file) is not None


def time_in(line: str) -> float | None:
    """Return the first time that a line names; without a zone it is taken for this host's."""
    if not (found := _TIME.search(line)):
        return None
    year, month, day, hour, minute, second, fraction, utc = found.groups()
    number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month) if month.isdigit() else 0
    text = f"{year} {number} {day} {hour} {minute} {second}"
    try:
        parsed = time.strptime(text, "%Y %m %d %H %M %S")
        whole = calendar.timegm(parsed) if utc else time.mktime(parsed)
    except (ValueError, OverflowError):
        return None
    return whole + float(f"0.{fraction or 0}")


def _add(traceback: Traceback, line: str, closed: list[Traceback]) -> None:
    lines = traceback.lines
    if traceback.whole:
        if line.startswith(_CHAINED):
            lines.append(line)
            traceback.whole = False
            closed.remove(traceback)
        return
    if len(lines) >= _MAX_LINES:
        return
    if line.startswith("  "):
        lines.append(line)
    elif _RAISED.match(line):
        lines.append(line)
        traceback.whole = True
        closed.append(traceback)


def _exits(text: str) -> list[Exit]:
    found = []
    for report in _REPORT.finditer(text):
        said = report["said"] if report["said"].startswith("Signal ") else ""
        when = time_in(report["time"])
        found.append(Exit(int(report["rank"]), int(report["code"]), report["host"], when, said))
    return found[::-1]  # torchrun puts the first one last


def _deaths(text: str, first_rank: int | None) -> list[Exit]:
    found = []
    for death in _DIED.finditer(text):
        rank = None if first_rank is None else first_rank + int(death["local_rank"])
        code = int(death["code"])
        number = -code if -code in list(signal.Signals) else 0
        said = f"Signal {number} ({signal.Signals(number).name}) received" if number else ""
        when = _this_year(death["time"])
        exact = when + float(death["fraction"]) if when else None
        found.append(Exit(rank, code, "", exact, said))
    return found


def _this_year(text: str) -> float | None:
    """Return the newest time that month, day and hour may mean."""
    now = time.time()
    for year in (time.localtime(now).tm_year, time.localtime(now).tm_year - 1):
        try:
            when = time.mktime(time.strptime(f"{year} {text}", "%Y %m%d %H:%M:%S"))
        except ValueError:
            continue  # the 29th of February
        if when < now + 86400:
            return when
    return None
