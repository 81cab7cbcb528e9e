"""Find out who failed first and why, and report it in a few lines."""

import math
import time
from pathlib import Path

from trnslurm.frozen import Frozen
from trnslurm.node.triage.again import Raised, comes_again, what_was_raised
from trnslurm.node.triage.causes import CAUSE, EFFECT, HARMLESS, Cause
from trnslurm.node.triage.evidence import (
    OWN_WORD,
    Evidence,
    Hit,
    Suspect,
    batch_log,
    clean,
    gather,
)
from trnslurm.node.triage.words import useful_end
from trnslurm.rundir import RunFiles, read_json

_MAX_LINES = 7
_MAX_COLUMNS = 200
_TRAIN_ERROR = "trnslurm.train.errors.TrainError: "
_FROM_OUTSIDE = ("CANCELLED", "PREEMPTED", "STOPPED", "TIMEOUT")
_SAME_S = 2.0  # torchrun reports whole seconds, a moment after a worker's death


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
    """The entry in causes.toml; empty: no entry matches."""
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
            _cut(f"cause: {self.cause}"),
            _cut(f"fix: {self.fix}"),
            f"see: {self.evidence}",
        ]

    def _who(self) -> str:
        node = "" if self.node is None else f"node {self.node}"
        rank = "" if self.rank is None else f"rank {self.rank}"
        place = f"{node} ({self.host})" if node and self.host else node or self.host
        return f"{rank} on {place}" if rank and place else rank or place


def find_cause(run: Path, phase: str, attempt: int) -> Finding | None:
    """Return who failed first in an attempt, and why; None if no failure is found."""
    evidence = gather(run, phase, attempt)
    if evidence.state == "COMPLETED":
        return None
    suspect, known, beside = _choose(evidence)
    if suspect is None:
        return None
    vague = known is not None and (known.kind == EFFECT or known.weak)
    if vague and _ended_from_outside(run, phase, attempt):
        return None  # workers that are told to end leave such errors

    def before() -> Raised | None:
        earlier = _choose(gather(run, phase, attempt - 1))[0]
        return what_was_raised(earlier) if earlier else None

    again = comes_again(run, phase, attempt, evidence, suspect, before)
    lines = useful_end(suspect.lines, _MAX_LINES - len(beside))
    host = suspect.host
    if not host and suspect.node is not None and suspect.node < len(evidence.hosts):
        host = evidence.hosts[suspect.node]
    cause, fix = (known.cause, known.fix) if known else _unknown(suspect)
    if again and not known:
        cause = "an error in the job's code, which would end every attempt"
        fix = "correct the error, and submit the run again"
    return Finding(
        phase=phase,
        attempt=attempt,
        rank=suspect.rank,
        node=suspect.node,
        host=host,
        when=suspect.when,
        lines=(*lines, *beside),
        name=known.name if known else "",
        kind=known.kind if known else CAUSE,
        cause=cause,
        fix=fix,
        evidence=suspect.place,
        brief=_brief(suspect, known, "" if again else host),
        again=again,
    )


def _brief(suspect: Suspect, known: Cause | None, host: str) -> str:
    """Return the cause in one line: the exception or the known cause, with place and rank."""
    if known and known.kind == EFFECT:
        return ""
    raised = what_was_raised(suspect)
    lines = [line for line in suspect.lines if raised and line.startswith(raised.kind)]
    said = [*suspect.lines, *lines][-1].strip()
    if known and not raised and known.source != "trnslurm" and known.name != "usage":
        said = known.cause
    place = raised.place if raised and not said.startswith(_TRAIN_ERROR) else ""
    who = f"rank {suspect.rank} on {host}" if host and suspect.rank is not None else host
    inside = ", ".join(filter(None, [place, who]))
    said = said.removeprefix(_TRAIN_ERROR).removeprefix("error: ")
    return f"{said} ({inside})" if inside else said


def _ended_from_outside(run: Path, phase: str, attempt: int) -> bool:
    """Check whether a person or Slurm ended an attempt."""
    state = read_json(RunFiles(run).state_file(phase, attempt))
    requeued = state.get("state") == "REQUEUED" and state.get("cause") != "crash"
    return requeued or state.get("state") in _FROM_OUTSIDE


def nothing_found(run: Path, phase: str, attempt: int) -> list[str]:
    """Return the lines that say so, and which logs to read."""
    if _ended_from_outside(run, phase, attempt):
        state = read_json(RunFiles(run).state_file(phase, attempt))
        ended = clean(f"{state['state']} {state.get('reason', '')}".strip())
        return [_cut(f"{OWN_WORD}{phase} attempt {attempt}: {ended}: nothing failed")]
    files = [*RunFiles(run).node_logs(phase, attempt).values()]
    batch = batch_log(run, phase, "")
    names = [str(f.relative_to(run)) for f in [*files, *([batch] if batch else [])]]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = f"read {shown}" if names else "there is no log"
    return [f"{OWN_WORD}{phase} attempt {attempt}: no failure was found; {where}"]


def _choose(evidence: Evidence) -> tuple[Suspect | None, Cause | None, tuple[str, ...]]:
    """Return who failed first, the cause, and lines of others that show the cause.

    Strong causes come before weak ones, and both before consequences: the rank whose peer died
    may be the only one with a traceback.
    """
    suspects = [s for s in evidence.suspects if not (s.known and s.known.kind == HARMLESS)]
    hits = [h for h in evidence.hits if h.cause.kind != HARMLESS]
    timed = [h for h in hits if h.cause.strong and h.when and _of_machines(h)]
    first = [s for s in suspects if not (s.known and s.known.kind == EFFECT)]
    first += map(_as_suspect, timed)
    if first:
        chosen = min(first, key=_order)
        return _explain(chosen, hits)
    alone = sorted(hits, key=lambda h: (not h.cause.strong, not _of_machines(h), h.at))
    for hit in alone:
        if hit.cause.kind == CAUSE and _stands_alone(hit, beside_effects=bool(suspects)):
            return _as_suspect(hit), hit.cause, ()
    if suspects:
        chosen = min(suspects, key=_order)
        return chosen, chosen.known, ()
    effects = [h for h in alone if h.cause.name != "worker-terminated"]
    return (_as_suspect(effects[0]), effects[0].cause, ()) if effects else (None, None, ())


def _order(suspect: Suspect) -> tuple[float, int, int]:
    when = math.inf if suspect.when is None else suspect.when
    return when, -1 if suspect.node is None else suspect.node, suspect.rank or 0


def _explain(chosen: Suspect, hits: list[Hit]) -> tuple[Suspect, Cause | None, tuple[str, ...]]:
    """Return the cause of a failure: from its own lines, else from the machines' lines near it."""
    own = chosen.known
    if own and own.strong:
        return chosen, own, ()
    near = [
        hit
        for hit in hits
        if hit.cause.kind == CAUSE
        and _of_machines(hit)
        and hit.node in (chosen.node, None)
        and not (hit.when and chosen.when and hit.when > chosen.when + _SAME_S)
    ]
    strong = [hit for hit in near if hit.cause.strong]
    weak = [hit for hit in near if not hit.cause.strong]
    found = strong or ([] if own else weak)
    if not found:
        return chosen, own, ()
    best = min(found, key=lambda hit: (hit.node is None, hit.at))
    return chosen, best.cause, () if best.line in chosen.lines else (best.line,)


def _of_machines(hit: Hit) -> bool:
    """Check whether a machine printed the line, not a program that may have continued."""
    return hit.cause.source in ("neuron", "slurm") or hit.cause.name.startswith("shell-")


def _stands_alone(hit: Hit, *, beside_effects: bool) -> bool:
    """Check whether a line explains the failure if workers report only lost peers."""
    if _of_machines(hit):
        return True
    return hit.cause.source == "trnslurm" if beside_effects else hit.cause.strong


def _as_suspect(hit: Hit) -> Suspect:
    return Suspect(
        lines=(hit.line,), place=hit.place, node=hit.node, when=hit.when, known=hit.cause
    )


def _unknown(suspect: Suspect) -> tuple[str, str]:
    if "exit code" in suspect.lines[-1]:
        return "unknown", f"read the last lines of {suspect.place}"
    return (
        f"{suspect.lines[-1].split(':')[0].strip()} is not a known cause",
        f"read the error; {suspect.place} has more",
    )


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_COLUMNS else f"{line[: _MAX_COLUMNS - 1]}…"
