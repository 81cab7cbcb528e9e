"""Finds the failures in a node's log: tracebacks by rank, error lines, reports, times."""

from __future__ import annotations

import calendar
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trnslurm.frozen import Frozen
from trnslurm.node.triage.causes import NO_DIGITS, words_of
from trnslurm.node.triage.going_on import says_it_goes_on, was_caught

# torch's prefix, or mpirun's: [job,rank]<stderr>:
_RANK = re.compile(r"\[rank(\d+)\]: ?|\[\d+,(\d+)\]<std(?:err|out)>: ?")
_BEGINS = "Traceback (most recent call last):"
# What srun --label, pdsh, Ray and log collectors put before each line: the number of a task, a
# host, a process, a time.
_TAGGED = re.compile(
    r"(?![╭│ ]*[╭│])(?P<tag>.{0,90}?[^\s\d].{0,90}?"
    r"(?<!Error: )(?<!Exception: )(?<!Original ))"
    r"(?=(?:\[rank\d+\]: ?)?" + re.escape(_BEGINS) + ")"
)
_MOST_TAGS = 64
_REPORTED_RANK = re.compile(
    r"  rank      : (\d+) \(local_rank|trnslurm: \S+Z rank (\d+) .* failed: .*; it recorded:$"
)
_IN_REPORT = f"  traceback : {_BEGINS}"
# The last is from a loader's worker, inside the message of the exception in the main process.
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    "Original Traceback (most recent call last)",
)
_DIRECT = "The above exception was the direct cause"
_OF_SPAWNED = "-- Process "  # torch/multiprocessing/spawn.py
_RAISED = re.compile(
    r"((?:[A-Za-z_]\w*\.)*[A-Z](?=\w*[a-z])\w+)(?:: .*|(?<=Error):|(?<=Exception):)?$"
)
_OF_SHARER = re.compile(r'  File ".*/multiprocessing/resource_sharer\.py"')
_FRAME = re.compile(r'  File "(.*)", line (\d+)')
# The first frame of an exception that ends a process or a thread. Where a program caught an
# exception and printed it, the first frame is the one with the handler.
# https://docs.python.org/3/library/traceback.html#traceback.print_exception
_PROCESS_BEGINS = re.compile(
    r'  File "(?:(?![^"]*(?:__init__\.py"|[/\\](?:site|dist)-packages[/\\]))[^"]*", line \d+, in'
    r' <module>|[^"]*(?:runpy|threading|multiprocessing|concurrent[/\\]futures|ray)\b)'
)
_CLICKS_USAGE = re.compile(r"Usage: (\S+)")
_USAGE, _USAGE_ERROR = re.compile(r"usage: (\S+)"), re.compile(r"(\S+): error: ")
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): ")
# Rich draws tracebacks in boxes, and breaks long paths.
_BOX_FRAME = re.compile(r"│ +(?P<path>\S*?):(?P<line>\d+) in (?P<name>\S.*?) *│")
_BOX_PATH, _BOX_CODE = re.compile(r"│ (/\S+) +│"), re.compile(r"│ ❱ *\d+ │ ?(.*?) *│")
CARETS = re.compile(r"\s*[\^~]+\s*$")
_OF_OTHERS = re.compile(r"[/\\](site|dist)-packages[/\\]|<frozen |/lib/python3\.\d+/")
_IN_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\]([A-Za-z]\w*)[/\\]")
_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing"
_OF_LAUNCHERS = re.compile(
    r"accelerate[/\\]commands[/\\]|deepspeed[/\\]launcher[/\\]|distributed[/\\]launch\.py"
)
_MAX_LINES = 400  # in one traceback, including chained and interrupted ones
_MAX_MESSAGE = 12  # lines of an exception's message after the first
_MOST_ERROR_LIKE = 3
_LAST, _END = 6, 8 << 10
_JUST_BEFORE = 6
_WARNED = re.compile(r"^.* NCCL WARN (?P<said>.+)$", re.MULTILINE)
_MOST_WARNINGS = 2
_OF_START = re.compile(
    r"preflight: |\S+Z \w+: node \d+ of |no progress: |trnslurm: the launcher got signal"
    r"|\[Gloo\] Rank \d+ is connected to |\[?[IW]\d{4} \d\d:\d\d:"
)
"""Matches lines that trnslurm's programs and PyTorch's libraries print in every run."""
_NEAR = 300  # lines between the first failure of a node and the last
_SOON_S = 60.0
_BESIDE = 100  # lines before an exception that may tell its time
_IN_THREAD = re.compile(r"Exception in thread |Thread \S+:$|Task exception was never retrieved")
"""Matches what precedes an exception that ends no process (threading.excepthook, asyncio)."""
_DIGITS = re.compile(r"\d+")
_BEGINNINGS = ("Traceback", "Error", "Exception", "error: ", "sage: ", '  File "')
"""Words without which a line before a traceback says nothing."""
_IGNORED = re.compile(r"Exception ignored (in|while|on)\b|Error in atexit\.|--- Logging error ---")
# Lines of other writers, which end an exception's message.
_OTHERS_LINE = re.compile(
    r"\[rank\d+\]|[IWEF]\d{4} \d\d:|\[?[IWE]? ?\d{4}-(\d\d|[A-Z][a-z]{2})-\d\d|srun: "
    r"|\S+:\d+:\d+ \[\d+\] NCCL"
    r"|slurm|trnslurm: |={8}|-{8}|\*{8}|(INFO|WARNING|ERROR|DEBUG)\b|triage: |Exception ignored"
    r"|\S+: line \d+: +\d+ |munmap_chunk\(|free\(\): |double free|corrupted (size|double|unsorted)"
)
_ERROR_LIKE = re.compile(
    r"(?i)error\b|\bfatal\b|\bfail(ed|ure)\b|\babort|\bassert|\bcannot\b|\bcould not\b|\bcan't\b"
    r"|\bdenied\b|\bkilled\b|\bnot found\b|\bno such\b|\bunable to\b|\bpanic|\bcore dumped\b"
)
_MAYBE_ERROR = re.compile(
    r"(?i)exception|\bnot in\b|\b(invalid|unsupported|missing|illegal|refused|bad|lost)\b|mismatch"
    r"|timed out|time ?out|\bnot (a|allowed|supported|valid|available|set)\b|\bno (more|longer)\b"
    r"|\bWARN\b|\bexit(ed|s)? (with|status|code)|\bexceed|\bmust be\b"
)
# Lines of launchers, hints, and code.
_NO_NEWS = re.compile(
    r"torch[./]distributed[./](elastic(?!.*SignalException)|run|launch)|={8}|-{8}|closing signal"
    r"|^trnslurm: (\S+Z )?(rank \d+|the launcher) |\.py FAILED$|Root Cause \(first observed"
    r"|HYDRA_FULL_ERROR=|^frame #\d+: |terminate called .* 'c10::|^Exception raised from \w+ at /"
    r"|Some NCCL operations have failed or timed out|To avoid data inconsistency, we are taking"
    r"|CUDA_LAUNCH_BLOCKING=|TORCH_USE_CUDA_DSA|CUDA kernel errors might be"
    r"|^\s*(raise|return|assert|except|if|elif|with|for|def|class|import|from|try:|File) ?\b"
    r"[^:]*[\w(]"
)
_REPORT = re.compile(
    r"^  time      : (?P<time>\S+)\n  host      : (?P<host>.*)\n"
    r"  rank      : (?P<rank>\d+) \(local_rank: \d+\)\n  exitcode  : (?P<code>-?\d+) .*\n"
    r"  error_file: .*\n  traceback : (?P<said>.*)$",
    re.MULTILINE,
)
# What launchers print at once. torchrun's report comes later, or never if srun ends the other
# nodes first. torch 1 and 2 differ in the text before "failed"; DeepSpeed has its own line.
_DIED = re.compile(
    r"^(?:[EW](?P<time>\d{4} \d\d:\d\d:\d\d)(?P<fraction>\.\d+) )?.*?(?:"
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+) \(pid: \d+\)"
    r"|--local[-_]rank=(?P<deepspeeds>\d+)\b.* exits with return code = (?P<returned>-?\d+))",
    re.MULTILINE,
)
# What trnslurm's own launcher prints at once. The worker's record follows, indented by two spaces.
_FAILED = re.compile(
    r"^trnslurm: (?P<time>\S+Z) rank (?P<rank>\d+) \(local rank \d+, (?P<host>.*)\) failed: "
    r"(?:exit code (?P<code>\d+) of|(?P<said>Signal (?P<signal>\d+) .*))",
    re.MULTILINE,
)
_TIME = re.compile(
    r"(\d{4})-(\d\d|[A-Z][a-z]{2})-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z?)"
)
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


class Exit(Frozen, kw_only=False):
    """A failed worker in a launcher's report."""

    rank: int | None
    code: int
    host: str
    when: float | None
    said: str
    """The signal that ended it, in the launcher's words, or ""."""
    coarse: bool
    """Whether the time has only whole seconds."""


@dataclass
class Traceback:
    """A traceback with those to which it is chained."""

    rank: int | None
    at: int
    """Its position among the log's lines."""
    lines: list[str] = field(default_factory=list)
    """Frames and exception types; the last line is the first line of the last message."""
    more: list[str] = field(default_factory=list)
    """The other lines of the last message."""
    whole: bool = False
    gap: bool = False
    """Whether a blank line followed the message, which ends it in mixed output."""
    ignored: bool = False
    """Whether Python printed it without ending the process."""
    inside: bool = False
    """Whether it is part of another exception's message."""
    end: int = 0
    """The position of a following line by another writer or a logger, or 0 if there was none."""

    survived: bool = False
    """Whether the program probably went on after it."""

    @property
    def at_lines(self) -> range:
        """The positions of its lines in the log, with those of other writers between them."""
        return range(self.at, self.end or self.at + len(self.lines) + len(self.more) + 1)

    @property
    def printed(self) -> bool:
        """Whether its first frame is not where a process begins, so that a handler printed it."""
        before = ["", *(line for line in self.lines if not CARETS.match(line))]
        first = [
            line
            for line, previous in zip(before[1:], before)
            if _FRAME.match(line) and (not previous or previous.startswith(_CHAINED))
        ]
        return not self.inside and not any(map(_PROCESS_BEGINS.match, first))


class Words(Frozen, kw_only=False):
    """All failures in a log."""

    exits: tuple[Exit, ...]
    tracebacks: tuple[Traceback, ...]
    errors: tuple[tuple[int, str], ...]
    """Lines in which a program says that it failed, and their positions."""
    caught: tuple[range, ...] = ()
    """Lines of exceptions that a program logged before it continued."""

    def first_at(self, text: str) -> int:
        """Return the line of the first sign that a process died, or the log's end without one."""
        report = _before_report(text).count("\n")
        return min([report, *(t.at for t in self.tracebacks), *(at for at, _ in self.errors)])

    def of_ranks(self) -> list[Traceback]:
        """Return the tracebacks that name a rank."""
        return [traceback for traceback in self.tracebacks if traceback.rank is not None]

    def last_of(self, rank: int | None) -> Traceback | None:
        """Return the traceback that ended a rank, which is its last one."""
        found = [t for t in self.tracebacks if t.rank == rank is not None]
        own = [t for t in found if not _of_reader(t)] or found
        own = [t for t in own if not t.survived] or own
        return own[-1] if own else None

    def last_without_rank(self, follows: Callable[[str], bool] | None = None) -> Traceback | None:
        """Return the last traceback or error line that names no rank.

        `follows` says whether a line is a consequence of another process's failure. If so, the last
        line near it that is not a consequence is preferred.
        """
        found = [t for t in self.tracebacks if t.rank is None]
        # A launcher says that a program failed after the program itself has said why.
        found += [
            Traceback(None, at, [error])
            for at, error in self.errors
            if not (found and "precompile on" in error)
        ]
        own = [t for t in found if not (_of_launcher(t) or _of_reader(t))] or found
        own = [t for t in own if not t.survived] or own
        last = max(own, key=lambda t: t.at, default=None)
        if last and follows and follows(last.lines[-1]):
            near = [t for t in own if t.at > last.at - _NEAR and not follows(t.lines[-1])]
            return max(near, key=lambda t: t.at, default=last)
        return last


def _of_launcher(traceback: Traceback) -> bool:
    """Check whether a launcher only says that its program failed."""
    ended = traceback.lines[-1].startswith("subprocess.CalledProcessError: ")
    return ended and any(_OF_LAUNCHERS.search(line) for line in traceback.lines)


def _of_reader(traceback: Traceback) -> bool:
    """Check whether it fetches data from a process that is gone (a data loader worker)."""
    return any(_OF_SHARER.match(line) for line in traceback.lines)


def read_words(text: str, first_rank: int | None = None) -> Words:
    """Read a log. The first rank of its node shows which ranks the others are."""
    reader = _Reader()
    lines = text.split("\n")
    for at, line in enumerate(lines):
        reader.read(at, line)
    caught = [
        t
        for t in reader.closed
        if t.end and was_caught(lines[t.at - 1], lines[t.end], printed=t.printed)
    ]
    last = _last_usual(lines[: _before_report(text).count("\n")]) if reader.closed else (0, 0.0)
    for traceback in reader.closed:
        traceback.survived = traceback.printed or _went_on(traceback, lines, *last)
    tracebacks = [
        t
        for t in reader.closed
        if not (t.ignored or t in caught or any(x.startswith(_OF_TORCHRUN) for x in t.lines))
    ]
    exits = _failed(text) or _exits(text) or _deaths(text, first_rank)
    ranges = [range(t.at, t.end) for t in caught]
    return Words(tuple(exits), tuple(tracebacks), tuple(reader.errors), tuple(ranges))


def _last_usual(lines: list[str]) -> tuple[int, float]:
    """Return the position and time of the last line with a time that tells of no failure."""
    for at in range(len(lines) - 1, -1, -1):
        if (when := time_in(lines[at])) and not complains(lines[at]):
            return at, when
    return 0, 0.0


def _went_on(traceback: Traceback, lines: list[str], last_at: int, last: float) -> bool:
    """Check whether the program says that it goes on, or writes usual lines a minute later.

    A launcher ends the other workers of its node soon after a worker has died.
    """
    previous = lines[traceback.at - 1].rstrip() if traceback.at else ""
    after = min(traceback.end or traceback.at_lines.stop, len(lines) - 1)
    remarks = [*traceback.more, lines[after]]
    remarks += [previous] if previous.endswith(":") else []
    if _IN_THREAD.match(previous) or any(map(says_it_goes_on, remarks)):
        return True
    before = map(time_in, reversed(lines[max(0, traceback.at - _BESIDE) : traceback.at + 1]))
    begun = next(filter(None, before), None) if last_at >= after else None
    return begun is not None and last > begun + _SOON_S


def error_like(text: str) -> tuple[str, ...]:
    """Return error-like lines without a rank that precede a launcher's report.

    They are the first such line and the last ones. Lines that differ only in numbers count once. If
    there are few, lines with weaker words follow.
    """
    lines = [(line, line.lower()) for line in _before_report(text).split("\n")]
    said: list[str] = []
    for pattern in (_ERROR_LIKE, _MAYBE_ERROR):
        needed = words_of(pattern.pattern)
        found: dict[str, str] = {}
        for line, small in lines:
            if not any(word in small for word in needed):
                continue
            if pattern.search(line) and not (_RANK.match(line) or _NO_NEWS.search(line)):
                shape = _DIGITS.sub("", line.strip())
                found[shape] = found.pop(shape, line.strip())
        said = [*said, *(line for line in found.values() if line not in said)]
        if len(said) >= _MOST_ERROR_LIKE:
            break
    return tuple(dict.fromkeys((*said[:1], *said[-_MOST_ERROR_LIKE:])))


def complains(line: str) -> bool:
    """Check whether a line has words of an error."""
    return _ERROR_LIKE.search(line) is not None and not _NO_NEWS.search(line)


def last_lines(text: str) -> tuple[str, ...]:
    """Return a log's last meaningful lines."""
    lines = [line.strip() for line in text[-_END:].split("\n") if re.search(r"\w", line)]
    return tuple(lines[-_LAST:])


def said_last(text: str, rank: int | None = None) -> tuple[str, ...]:
    """Return the last two lines of a log before a launcher's report, without other ranks' lines."""
    said: list[str] = []
    for line in reversed(_before_report(text).split("\n")):
        own = _RANK.match(line)
        others = own is not None and rank is not None and int(own[1] or own[2]) != rank
        line = line.strip()
        if not others and re.search(r"\w", line) and not _OF_START.match(line):
            said.append(line)
        if len(said) == 2:
            break
    return tuple(said[::-1])


def _before_report(text: str) -> str:
    reports = (_FAILED, _DIED, _REPORT)
    ends = [match.start() for pattern in reports if (match := pattern.search(text))]
    return text[: min(ends, default=len(text))]


class _Reader:
    """Reads a log line by line."""

    def __init__(self) -> None:
        self.closed: list[Traceback] = []
        self.errors: list[tuple[int, str]] = []
        self._open: dict[int | None, Traceback] = {}
        self._ignored: set[int | None] = set()
        """The ranks whose next traceback Python prints without ending the process."""
        self._programs: set[str] = set()
        self._tags: list[str] = []
        self._any_tag: re.Pattern[str] | None = None
        self._clicks = ""
        self._reported: int | None = None
        """The rank whose traceback a launcher's report shows, indented by two spaces."""
        self._in_report = False
        self._path = ""
        """The path of a frame whose line number is on the next line."""
        self._before = ""
        """The last line that is not blank."""
        self._loose: list[str] = []
        """The lines before a line that starts no traceback; a SyntaxError has only these."""

    def read(self, at: int, whole_line: str) -> None:
        if reported := _REPORTED_RANK.match(whole_line):
            self._reported = int(reported[1] or reported[2])
            self._in_report = reported[2] is not None
            return
        if whole_line.startswith(_IN_REPORT):
            self._in_report, whole_line = True, f"  {_BEGINS}"
        inside = self._open or self._loose or self._clicks
        if not (inside or any(word in whole_line for word in _BEGINNINGS)):
            return
        line = self._untagged(whole_line)
        prefix = _RANK.match(line)
        rank = int(prefix[1] or prefix[2]) if prefix else None
        if self._in_report and line.startswith("  "):
            rank, line = self._reported, line[2:]
        elif self._in_report:
            self._in_report = False
        line = self._unboxed(line[prefix.end() :] if prefix else line)
        current = self._open.get(rank)
        if line.startswith(_BEGINS):
            if not (current and current.lines and current.lines[-1].startswith(_CHAINED)):
                embedded = line.strip() != _BEGINS or self._before.startswith(_OF_SPAWNED)
                embedded = embedded or bool(current and current.whole and not current.gap)
                self._open[rank] = Traceback(
                    rank, at, ignored=rank in self._ignored, inside=embedded
                )
                self._ignored.discard(rank)
        elif _IGNORED.match(line):
            self._ignored.add(rank)
        elif error := self._program_error(line):
            self.errors.append((at, error))
        elif current:
            self._add(current, at, line)
        elif _ERROR.match(line):  # from a traceback whose start is lost
            self._open[rank] = Traceback(rank, at, [*self._loose, line], whole=True)
            self.closed.append(self._open[rank])
        framed = _FRAME.match(line) or (self._loose and line[:2] == "  ")
        self._loose = [*self._loose, line][-4:] if framed else []
        self._before = line.strip() or self._before

    def _untagged(self, line: str) -> str:
        if _BEGINS in line and len(self._tags) < _MOST_TAGS and not _RANK.match(line):
            tagged = _TAGGED.match(line)
            shape = re.sub(r"\d+", r"\\d+", re.escape(tagged["tag"])) if tagged else ""
            if shape and shape not in self._tags:
                self._tags.append(shape)
                self._any_tag = re.compile("|".join(self._tags))
        found = self._any_tag.match(line) if self._any_tag else None
        return line[found.end() :] if found else line

    def _unboxed(self, line: str) -> str:
        if not line.startswith(("│", "╭", "╰")):
            return line
        if line[0] == "╭":
            return _BEGINS if _BEGINS[:-1] in line else ""
        if frame := _BOX_FRAME.match(line):
            path, self._path = frame["path"] or self._path, ""
            return f'  File "{path}", line {frame["line"]}, in {frame["name"]}'
        if path := _BOX_PATH.match(line):
            self._path += path[1]
        elif code := _BOX_CODE.match(line):
            return f"    {code[1].replace('│', ' ').strip()}"
        return ""

    def _program_error(self, line: str) -> str:
        """Return a program's own message about its failure, in argparse's format."""
        if line.startswith("error: "):
            return line.strip()
        if usage := _USAGE.match(line):
            self._programs.add(usage[1])
        elif (usage := _USAGE_ERROR.match(line)) and usage[1] in self._programs:
            return line.strip()
        elif usage := _CLICKS_USAGE.match(line):
            self._clicks = usage[1]
        elif self._clicks and line.startswith("Error: "):
            return f"{self._clicks}: error: {line[7:].strip()}"
        return ""

    def _add(self, traceback: Traceback, at: int, line: str) -> None:
        lines = traceback.lines
        if traceback.whole and line.startswith(_CHAINED):
            lines.append(line)
            traceback.more.clear()
            traceback.whole, traceback.gap = False, False
            self.closed.remove(traceback)
        elif traceback.whole:
            mixed = traceback.rank is None and (traceback.gap or _OTHERS_LINE.match(line))
            if not line.strip():
                traceback.gap = True
            elif mixed or len(traceback.more) >= _MAX_MESSAGE:
                traceback.end = at
                del self._open[traceback.rank]
            else:
                traceback.more.append(line)
        elif len(lines) < _MAX_LINES:
            if line.startswith("  "):
                lines.append(line)
            elif _RAISED.match(line):
                lines.append(line)
                traceback.whole = True
                self.closed.append(traceback)


def useful_end(lines: tuple[str, ...], most: int) -> tuple[str, ...]:
    """Return a traceback's last lines: the job's own frames and the last one, without carets."""
    frames: list[list[str]] = []
    others = []
    for line in (line.rstrip() for line in lines if line.strip() and not CARETS.match(line)):
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
    own += frames[-1:] if frames[-1] not in own else []  # the call that raised it
    while len(own) > 1 and sum(map(len, own)) + len(raised) > most:
        own = own[1:]
    return tuple([*(line for frame in own for line in frame[:2]), *raised][-most:])


def frames_in(lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the file and line number of each frame of a traceback; the last frame raised it."""
    return [(frame[1], frame[2]) for line in lines if (frame := _FRAME.match(line))]


def raised_from(lines: tuple[str, ...]) -> tuple[str, str]:
    """Return the type and the line of the exception that a script raised another one from.

    Both are "" without one. A wrapper's own message often says only that something failed.
    """
    at = next((n for n, line in enumerate(lines) if line.startswith(_DIRECT)), 0)
    raised = [(found[1], line) for line in lines[:at] if (found := _RAISED.match(line))]
    return raised[-1] if raised else ("", "")


def said_before(log: str, lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the error-like lines just before a traceback: native code and tools print there."""
    begin = log.rfind(_BEGINS, 0, max(log.find(lines[-1]), 0)) if lines else -1
    before = log[max(0, begin - _END) : max(begin, 0)].split("\n")[:-1]
    near = [line.strip() for line in before[-_JUST_BEFORE:] if not line.startswith("  ")]
    said = [x for x in near if complains(x) and not (_RAISED.match(x) or _RANK.match(x))]
    return tuple(dict.fromkeys(said))[-2:]


def warnings_of_nccl(log: str) -> tuple[str, ...]:
    """Return NCCL's first warnings: each of the others may follow from the one before."""
    found: dict[str, str] = {}
    for match in _WARNED.finditer(log):
        found.setdefault(match["said"].translate(NO_DIGITS), match[0].strip())
        if len(found) == _MOST_WARNINGS:
            break
    return tuple(found.values())


def kinds_in(lines: tuple[str, ...]) -> list[str]:
    """Return the exception types in a traceback, chained ones first."""
    return [raised[1] for line in lines if (raised := _RAISED.match(line))]


def packages_in(lines: tuple[str, ...]) -> list[str]:
    """Return the installed packages whose code a traceback went through, in order."""
    found = (_IN_PACKAGE.search(file) for file, _ in frames_in(lines))
    return list(dict.fromkeys(match[1] for match in found if match))


def of_others(file: str) -> bool:
    """Check whether a file in a traceback belongs to Python or an installed package."""
    return _OF_OTHERS.search(file) is not None


def time_in(line: str) -> float | None:
    """Return the first time in a line. Without a time zone, it is in this host's zone."""
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


def _failed(text: str) -> list[Exit]:
    return [
        Exit(
            int(failed["rank"]),
            int(failed["code"] or -int(failed["signal"])),
            failed["host"],
            time_in(failed["time"]),
            failed["said"] or "",
            coarse=False,
        )
        for failed in _FAILED.finditer(text)
    ]


def _exits(text: str) -> list[Exit]:
    found = []
    for report in _REPORT.finditer(text):
        said = report["said"] if report["said"].startswith("Signal ") else ""
        when = time_in(report["time"])
        rank, code = int(report["rank"]), int(report["code"])
        found.append(Exit(rank, code, report["host"], when, said, coarse=True))
    return found[::-1]  # torchrun lists the first failure last


def _deaths(text: str, first_rank: int | None) -> list[Exit]:
    found = []
    for death in _DIED.finditer(text):
        local_rank = int(death["local_rank"] or death["deepspeeds"])
        rank = None if first_rank is None else first_rank + local_rank
        code = int(death["code"] or death["returned"])
        number = -code if -code in list(signal.Signals) else 0
        said = f"Signal {number} ({signal.Signals(number).name}) received" if number else ""
        when = _this_year(death["time"]) if death["time"] else None
        exact = when + float(death["fraction"]) if when else None
        found.append(Exit(rank, code, "", exact, said, coarse=False))
    return found


def _this_year(text: str) -> float | None:
    """Return the latest past time with this month, day and hour."""
    now = time.time()
    for year in (time.localtime(now).tm_year, time.localtime(now).tm_year - 1):
        try:
            when = time.mktime(time.strptime(f"{year} {text}", "%Y %m%d %H:%M:%S"))
        except ValueError:
            continue  # the 29th of February
        if when < now + 86400:
            return when
    return None
