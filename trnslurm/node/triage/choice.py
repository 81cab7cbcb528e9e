"""Chooses which worker or node failed first in an attempt, and which line shows the cause."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from trnslurm.node.triage.again import what_was_raised
from trnslurm.node.triage.causes import CAUSE, CRASHES, EFFECT, HARMLESS, Cause
from trnslurm.node.triage.evidence import Evidence, Hit, Suspect

_OF_TASK = re.compile(r"srun: error: ([\w.-]+): tasks? [\d,-]+: ")
_LOST = re.compile(r"srun: error: Node failure on ([\w.,\[\]-]+)")
_WARN = re.compile(r"\bWARN\b")
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_OF_LIBRARY = re.compile(
    r"\.(cpp|cc):\d+\]|NCCL (INFO|WARN) |torch[./]distributed[./]elastic|\bkubelet\b|-scheduler\b"
    r"|-packages/torch/.*Warning: "
)
_OF_CODE = frozenset({
    "AssertionError", "AttributeError", "IndexError", "KeyError", "NameError", "TypeError",
    "UnboundLocalError", "ValueError", "ZeroDivisionError",
})  # fmt: skip
# Of what a warning about a connection at the start may have become.
_OF_PEERS = re.compile(
    r"(?i)nccl|gloo|\bmpi\b|socket|connect|network|\bc10d|store\b|rendezvous|\bpeers?\b"
    r"|collective|barrier|timed? ?out|broken pipe|\bdistributed\b(?![/\\])"
)
_SAME_S = 2.0  # torchrun reports whole seconds, a moment after a worker's death


def choose(evidence: Evidence) -> tuple[Suspect | None, Cause | None, tuple[str, ...]]:
    """Return the first failure, the cause, and lines of other workers that show the cause.

    A cause precedes a consequence, and a specific cause precedes all others, because the rank whose
    peer died may be the only one with a traceback. Among equals, the earlier time counts.
    """
    suspects = [s for s in evidence.suspects if not (s.known and s.known.kind == HARMLESS)]
    hits = _without_later([h for h in evidence.hits if h.cause.kind != HARMLESS])
    timed = [
        h
        for h in hits
        if h.cause.strong and h.when and of_machines(h.cause) and not _says_warning(h)
    ]
    first = [s for s in suspects if not (s.known and s.known.kind == EFFECT)]
    doubtful = [s for s in first if s.survived]
    doubtful += [s for s in first if s.silent] if doubtful else []
    first = [s for s in first if s not in doubtful] + [*map(_as_suspect, timed)]
    if all(s.silent for s in first):  # a crash tells more than a plain exit at the same time
        first += [s for s in suspects if first and s.known and s.known.name in CRASHES]
    if first:
        return _explain(_first_of(first), hits)
    alone = sorted(hits, key=lambda h: (h.cause.rank, not of_machines(h.cause), _order(h)))
    if suspects or any(h.cause.kind == EFFECT and h.node is not None for h in hits):
        death = _first_death(hits)  # the others are consequences that srun reports last
        alone = [h for h in alone if h is death or not h.cause.name.startswith("task-")]
    causes = [h for h in alone if h.cause.kind == CAUSE]
    beside = bool(suspects) or any(h.cause.kind == EFFECT for h in hits)
    for hit in causes:
        if own := next((s for s in doubtful if _is_of(hit, s)), None):
            return own, own.known or hit.cause, ()
        if _stands_alone(hit, beside_effects=beside) and not (doubtful and hit.cause.weak):
            return _on_its_host(_as_suspect(hit), evidence.hosts), hit.cause, ()
    if doubtful:
        return _explain(_first_of(doubtful), hits)
    if suspects:
        chosen = _first_of(suspects)
        telling = next((h for h in alone if h.cause.kind == EFFECT), None)
        if telling and chosen.known and telling.cause.rank < chosen.known.rank:
            return chosen, telling.cause, (telling.line,)
        return chosen, chosen.known, ()
    effects = [
        h
        for h in alone
        if h.cause.name != "worker-terminated"
        and not only_warns(h)
        and not (h.cause.weak and _says_warning(h))
    ]
    if effects:
        return _as_suspect(effects[0]), effects[0].cause, ()
    # A worker died of something that is harmless elsewhere.
    dead = [replace(s, known=None, telling="") for s in evidence.suspects if s.rank is not None]
    return (_first_of(dead) if dead else None), None, ()


def _is_of(hit: Hit, suspect: Suspect) -> bool:
    """Check whether a line is one of a suspect's own; its log may put a tag before each line."""
    own = (line.strip() for line in suspect.lines)
    return hit.place == suspect.place and any(line and hit.line.endswith(line) for line in own)


def _without_later(hits: list[Hit]) -> list[Hit]:
    """Return the hits without what follows from NCCL's first complaint of a log.

    NCCL warns of each step that fails because of the one before, and may crash in the end. Without
    a plugin for its network it takes another network.
    """
    first: dict[str, int] = {}
    for hit in hits:
        if " NCCL WARN " in hit.line and " NET/" not in hit.line and hit.cause.strong:
            first[hit.place] = min(hit.at, first.get(hit.place, hit.at))

    def follows(hit: Hit) -> bool:
        later = hit.at > first.get(hit.place, hit.at)
        return later and (" NCCL WARN " in hit.line or hit.cause.name.startswith("signal-"))

    return [hit for hit in hits if not follows(hit)]


def _on_its_host(suspect: Suspect, hosts: list[str]) -> Suspect:
    """Return a suspect with the host that srun's line names."""
    if not (found := _OF_TASK.match(suspect.lines[0])):
        return suspect
    node = hosts.index(found[1]) if found[1] in hosts else None
    return replace(suspect, node=node, host=found[1])


def _first_death(hits: list[Hit]) -> Hit | None:
    """Return srun's message that a task was killed, unless that log explains it earlier.

    A crash is not another process's fault. The first node's log contains the message if a batch
    script's own srun printed it.
    """
    in_order = sorted(hits, key=lambda hit: hit.at)
    of_job = [hit for hit in in_order if hit.node is None]
    if of_job and of_job[0].cause.name in ("task-killed", "task-crashed"):
        return of_job[0]
    own = (h for h in in_order if h.cause.name == "task-crashed" and _OF_TASK.match(h.line))
    return next(own, None)


def _first_of(suspects: list[Suspect]) -> Suspect:
    """Return the suspect with the most specific cause; among equals, the first to fail.

    Of workers that failed at the same time, the one that says why is chosen: all may have failed of
    the same exception, which not every one of them prints.
    """
    coarse = any(suspect.coarse for suspect in suspects)
    silent_at = min((s.when for s in suspects if s.silent and s.when), default=math.inf)
    one_says_why = any(
        not s.silent and (s.when is None or s.when <= silent_at + _SAME_S) for s in suspects
    )

    def order(suspect: Suspect) -> tuple[bool, bool, float, bool, int, int]:
        specific = suspect.known is not None and suspect.known.rank == 0
        when = math.inf if suspect.when is None else suspect.when
        # A time in whole seconds is not before a fraction of the same second.
        when = math.floor(when) if coarse and suspect.when is not None else when
        node = -1 if suspect.node is None else suspect.node
        says_nothing = suspect.silent and one_says_why
        return not specific, says_nothing, when, suspect.coarse, node, suspect.rank or 0

    return min(suspects, key=order)


def _explain(chosen: Suspect, hits: list[Hit]) -> tuple[Suspect, Cause | None, tuple[str, ...]]:
    """Return a failure's cause from its own lines, machines' lines near it, or its log's."""
    own = chosen.known
    if own and own.strong:
        specific = [hit for hit in hits if own.wide and _may_explain(hit, chosen)]
        specific = specific or [hit for hit in hits if own.wide and _nccl_says_why(hit, chosen)]
        if not specific:
            return chosen, own, ()
        best = min(specific, key=_order)
        return chosen, best.cause, (best.line,)
    raised = what_was_raised(chosen)
    # The program's own code raises such an exception, so earlier log lines are unrelated.
    of_code = raised is not None and raised.kind in _OF_CODE
    near = [
        hit
        for hit in hits
        if hit.cause.kind == CAUSE
        and of_machines(hit.cause)
        and not (of_code and _says_warning(hit))
        and hit.node in (chosen.node, None)
        and not (hit.when and chosen.when and hit.when > chosen.when + _SAME_S)
    ]
    strong = [hit for hit in near if hit.cause.strong]
    weak = [hit for hit in near if not (hit.cause.strong or _says_warning(hit))]
    found = strong or ([] if own or raised else weak)
    others = not own and not of_code
    if not found and others:
        found = [hit for hit in hits if _may_explain(hit, chosen)]
    if not found and others:
        found = [hit for hit in hits if _may_follow(chosen, hit)]
    if not found:
        return chosen, own, ()
    best = min(found, key=lambda hit: (hit.node is None, _order(hit)))
    return chosen, best.cause, () if best.line in chosen.lines else (best.line,)


def _order(hit: Hit) -> int:
    """Return a line's sort key: in a node's log the last line, nearest to the death, is first.

    In the batch log the first of several complaints is the cause of the others.
    """
    return hit.at if hit.node is None else -hit.at


def of_machines(cause: Cause) -> bool:
    """Check whether a machine printed the line, not a program that may have continued."""
    return cause.source in ("neuron", "slurm", "node")


def _says_warning(hit: Hit) -> bool:
    """Check whether a line calls itself a warning, also in NCCL's format."""
    return hit.warns or _WARN.search(hit.line) is not None


def only_warns(hit: Hit) -> bool:
    """Check whether a line only warns, so that the program continued.

    Warnings of PyTorch, NCCL, XLA and Kubernetes often say why a later operation failed.
    """
    of_script = hit.warns and _OF_LIBRARY.search(hit.line) is None
    return not of_machines(hit.cause) and (hit.goes_on or of_script)


def _may_explain(hit: Hit, suspect: Suspect) -> bool:
    """Check whether a specific line in a failed worker's log may say why an error came later.

    Native code prints such lines. A different Python exception was caught.
    """
    return (
        hit.cause.rank == 0
        and _EXCEPTION.search(hit.line) is None
        and hit.place == suspect.place
        and hit.line not in suspect.lines
        and not only_warns(hit)
    )


def _nccl_says_why(hit: Hit, suspect: Suspect) -> bool:
    """Check whether a line of NCCL tells why a call of NCCL failed, which names only its kind.

    docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (NCCL_DEBUG)
    """
    of_call = "NCCL" in suspect.lines[-1] and hit.place == suspect.place
    return of_call and hit.cause.strong and " NCCL WARN " in hit.line and not hit.goes_on


def _may_follow(suspect: Suspect, hit: Hit) -> bool:
    """Check whether an unknown error may be a consequence of what a line in its log reports.

    A program continues after a warning, so a warning explains only errors in communication.
    """
    effect = hit.cause.kind == EFFECT and not hit.cause.wide
    if not (effect and hit.place == suspect.place) or hit.line in suspect.lines:
        return False
    said = "\n".join((*suspect.lines[-3:], *suspect.more))
    return not (_says_warning(hit) and what_was_raised(suspect)) or bool(_OF_PEERS.search(said))


def _stands_alone(hit: Hit, *, beside_effects: bool) -> bool:
    """Check whether a line explains the failure if workers report only lost peers."""
    if of_machines(hit.cause):
        return hit.cause.strong or not _says_warning(hit)
    if only_warns(hit):
        return False
    if beside_effects and hit.cause.source == "trnslurm":
        return True
    if beside_effects and hit.cause.wide and (hit.warns or hit.cause.source == "script"):
        return False  # a program prints such lines and continues
    return hit.cause.strong


def lost_node(evidence: Evidence, suspect: Suspect) -> Suspect:
    """Return the node that failed, not the node that reported it, because srun ends the others."""
    lost = next((match for hit in evidence.hits if (match := _LOST.search(hit.line))), None)
    if not lost and suspect.rank is None and suspect.host:
        return suspect
    if not lost:
        return replace(suspect, rank=None, node=None, host="")
    node = evidence.hosts.index(lost[1]) if lost[1] in evidence.hosts else None
    return replace(suspect, lines=(lost[0],), rank=None, node=node, host=lost[1])


def _as_suspect(hit: Hit) -> Suspect:
    return Suspect(
        lines=(hit.line,),
        place=hit.place,
        node=hit.node,
        when=hit.when,
        known=hit.cause,
        said_it=hit.node is None,
    )
