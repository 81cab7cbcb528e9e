"""The result of an attempt's diagnosis, and its report in a few lines."""

from __future__ import annotations

import re
import time

from trnslurm.frozen import Frozen
from trnslurm.node.triage.causes import EFFECT
from trnslurm.node.triage.evidence import OWN_WORD
from trnslurm.node.triage.mend import rest_of, short

_MAX_COLUMNS = 200
_MAX_LAST = 400
_MOST_RANKS = 16
UNKNOWN = "unknown: "
_NO_MORE = (UNKNOWN, "the script raised ")
"""How a cause starts that says no more than the exception."""
_WATCHDOG = "watchdog: "
_SAID = ("kernel-killed", "killed-by-hand")
"""Causes that repeat the launcher's line about a killed worker."""
_KILLED = re.compile(r" *trnslurm: rank \d+ was killed \(KILL\)")
_IN_PART = "only a part of the logs was read, because they are too long"


class Finding(Frozen):
    """Which worker or node failed first in an attempt, and why."""

    phase: str
    attempt: int
    rank: int | None
    node: int | None
    host: str
    when: float | None
    """Unix seconds, without fractions if they are from torchrun's report."""
    lines: tuple[str, ...]
    name: str
    """The name of the entry in known/*.toml, or "" if none matches."""
    kind: str
    """cause, or effect if only consequences were found."""
    cause: str
    fix: str
    evidence: str
    """The file with the evidence, relative to the run directory."""
    brief: str
    """The cause in one line, or "" if only consequences were found."""
    again: bool
    """Whether every further attempt would end the same way."""
    mend: str = ""
    """How the run continues after the fix (see Cause.mend), or "" if unknown."""
    options: tuple[str, ...] = ()
    """The options that a new submission needs in addition to the previous ones."""
    certain: bool = True
    """Whether the line has only this cause. Otherwise, this is the most likely cause."""
    others: tuple[str, ...] = ()
    """Other causes that the logs suggest, if the evidence for the named cause is weak."""
    warned: str = ""
    """The warning that the submission printed."""
    there: str = ""
    """The facts about the node that decide between causes."""
    modules: tuple[str, ...] = ()
    """The modules whose packages' versions may explain the failure."""
    in_part: bool = False
    """Whether the diagnosis ran out of time and left parts of the logs out."""
    held_up: tuple[int, ...] = ()
    """The ranks that others waited for in a collective, as PyTorch's flight recorder shows."""

    def report(self, told: str = "", to_do: str = "") -> list[str]:
        """Return at most 12 lines for the user, without lines that were printed before.

        `to_do` replaces a fix whose first parts it contains. Otherwise, it follows the fix.
        """
        known = self.brief and self.brief in told
        lines = [x for x in self.lines if x.strip().removeprefix(_WATCHDOG) not in told]
        lines = [x for x in lines if not (_KILLED.match(x) and self.name in _SAID)]
        # `told` says who failed, with the cause or with all lines.
        known = known or (self.kind == EFFECT and self._consequences() in told)
        header = [] if told and (known or not lines or not self._who()) else [self._header()]
        said = self.cause in told or (known and self.cause.startswith(_NO_MORE))
        word = "cause" if self.certain else "seen" if self.kind == EFFECT else "likely"
        unknown = self.cause.startswith(UNKNOWN)
        cause = [] if said else [cut(self.cause if unknown else f"{word}: {self.cause}")]
        fix, others = [cut(f"fix: {self.fix}")], self.others
        if to_do and short(self.fix) in to_do:
            fix, others = [], (rest_of(self.fix), *others)
        fix += [f"next: {to_do}"] if to_do else []
        return [
            *map(cut, header),
            *(cut(f"  {line}") for line in lines[:-1]),
            *(_without_middle(f"  {line}") for line in lines[-1:]),  # may end with what to do
            *cause,
            *fix,
            *(cut(f"or: {other}") for other in others if other),
            *([cut(self.there)] if self.there else []),
            *([cut(f"submit warned: {self.warned}")] if self.warned else []),
            *([f"note: {_IN_PART}; the cause may be in the rest"] if self.in_part else []),
            f"see: {self.evidence}",
        ]

    def _header(self) -> str:
        time_text = time.strftime("%F %T", time.localtime(self.when)) if self.when else ""
        at = f" at {time_text}" if time_text else ""
        if self.kind == EFFECT and not self.brief:
            what = f"{self._consequences()}{at}"
        elif self.held_up:
            ranks = ", ".join(map(str, self.held_up[:_MOST_RANKS]))
            what = f"{self._who() or f'ranks {ranks}'} held up the others"
        else:
            what = f"{self._who()} failed first{at}" if self._who() else "from the job's log"
        return f"{OWN_WORD}{self.phase} attempt {self.attempt}: {what}"

    @property
    def line(self) -> str:
        """The finding in one line: the cause, the first consequence, or the last error."""
        more = f" ({_IN_PART})" if self.in_part else ""
        if self.brief:
            return self.brief + more
        if self.kind == EFFECT:
            return f"{self._consequences()}: {self.cause}{more}"
        last = self.lines[-1].strip()
        return f"no known cause; the last line that looks like an error: {last}{more}"

    def _consequences(self) -> str:
        first = f"; the first: {self._who()}" if self._who() else ""
        return f"only consequences were found{first}"

    def _who(self) -> str:
        node = "" if self.node is None else f"node {self.node}"
        rank = "" if self.rank is None else f"rank {self.rank}"
        place = f"{node} ({self.host})" if node and self.host else node or self.host
        return f"{rank} on {place}" if rank and place else rank or place


def _without_middle(line: str) -> str:
    """Return a long message without its middle, because its end may say why."""
    if len(line) <= _MAX_LAST:
        return line
    return f"{line[: _MAX_LAST // 2]} … {line[3 - _MAX_LAST // 2 :]}"


def cut(line: str, most: int = _MAX_COLUMNS) -> str:
    """Truncate a line, by default to a terminal's width."""
    return line if len(line) <= most else f"{line[: most - 1]}…"
