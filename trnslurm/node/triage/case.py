"""A failed attempt: the object that the steps of the diagnosis pass on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trnslurm.contract.rundir import RunFiles
from trnslurm.node.triage.again import Raised, what_was_raised
from trnslurm.node.triage.around import ends_of, owner_of
from trnslurm.node.triage.causes import EFFECT, Cause, without_harmless
from trnslurm.node.triage.evidence import Evidence, Suspect, read_log
from trnslurm.node.triage.words import raised_from, said_before, said_last, warnings_of_nccl

_MOST_EARLIER = 4


@dataclass
class Case:
    """An attempt's evidence, its first failure, and the known cause of that failure."""

    run: Path
    phase: str
    attempt: int
    evidence: Evidence
    outside: bool
    """Whether a user or Slurm ended the attempt."""
    suspect: Suspect
    known: Cause | None
    beside: tuple[str, ...] = ()
    """Lines from other workers that show the cause."""

    @property
    def weak(self) -> bool:
        """Whether the cause is only a consequence, or one of several possible causes."""
        return self.known is not None and (self.known.kind == EFFECT or self.known.weak)

    @cached_property
    def raised(self) -> Raised | None:
        """The exception that ended the worker."""
        return what_was_raised(self.suspect)

    @cached_property
    def log(self) -> str:
        """The log with the evidence."""
        return read_log(self.run / self.suspect.place)

    @cached_property
    def owner(self) -> dict[str, str]:
        """Whose code raised the exception, and where."""
        return owner_of(self.suspect)

    @property
    def host(self) -> str:
        """The host on which it failed, or "" if that is unknown."""
        node, hosts = self.suspect.node, self.evidence.hosts
        return self.suspect.host or (hosts[node] if node is not None and node < len(hosts) else "")

    @property
    def said(self) -> tuple[str, ...]:
        """The lines that may show the cause, those of other workers first."""
        suspect = self.suspect
        ends = ends_of(suspect)
        return (*self.beside, suspect.telling, *ends, *suspect.more, *suspect.lines)

    @property
    def silent(self) -> bool:
        """Whether the suspect's own lines do not say why it ended."""
        return self.weak if self.known else self.suspect.silent

    @cached_property
    def earlier(self) -> tuple[str, ...]:
        """Error-like lines that precede a silent end."""
        shown = {*self.suspect.lines, *self.beside}
        if not (self.known and self.known.kind == EFFECT):  # another process may have said why
            shown |= self._survived
        lines = self.evidence.error_like.get(self.suspect.place, ()) if self.silent else ()
        warned = warnings_of_nccl(self.log) if self.silent and self.known else ()
        lines = tuple(dict.fromkeys((*warned, *lines)))[:_MOST_EARLIER]
        return without_harmless(line for line in lines if line not in shown)

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """What an unknown exception was raised from, and what was printed just before it."""
        if self.known or not self.raised:
            return ()
        suspect, log = self.suspect, self.log
        if not suspect.place.endswith(".log"):  # its own record of the exception
            files = RunFiles(self.run).node_logs(self.phase, self.attempt)
            log = read_log(files[suspect.node]) if suspect.node in files else ""
        said = without_harmless(said_before(log, suspect.lines))
        return tuple(filter(None, (*said, raised_from(suspect.lines)[1])))

    @property
    def last(self) -> tuple[str, ...]:
        """The log's last words, if nothing else says why a worker ended."""
        if self.known or self.earlier or not self.silent:
            return ()
        said = said_last(self.log, self.suspect.rank)
        return tuple(line for line in said if line not in self._survived)

    @property
    def _survived(self) -> set[str]:
        """The lines of errors after which the program went on."""
        return {hit.line for hit in self.evidence.hits if hit.survived}
