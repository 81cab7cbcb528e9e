"""Decides how a training attempt ended, and whether its job starts again.

Crashes are counted per job, so a resubmitted run starts with a count of 0.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trnslurm.contract.attempt import Attempt, read_attempt
from trnslurm.contract.files import open_file, read_json
from trnslurm.contract.roles import Stand
from trnslurm.contract.states import EndCause, State
from trnslurm.frozen import Frozen
from trnslurm.node import alone
from trnslurm.node.controller import is_here
from trnslurm.node.hosts import brief
from trnslurm.node.left_out import bad_nodes, stuck_node, unfit
from trnslurm.node.once import went_on
from trnslurm.node.ports import who_holds
from trnslurm.node.state import RUN, knows_resuming, saved_by_now, saves_whole
from trnslurm.node.triage.finding import Finding

_LOG_BYTES = 64 << 10
_SAME_LOSS = 0.9
_MISSED_S = 60.0
_OF_REQUEST = re.compile(r"(?i)\burl|https?\b|refused|disconnected|timed out|reset by peer")
_NO_WAY_BACK = (
    "not restarted because it would start at step 0: it reported no checkpoint, and its arguments "
    "have no {resume}"
)


class Facts(Frozen):
    """All facts that decide how an attempt ended."""

    attempts: Sequence[Attempt]
    """The attempts of this job, oldest first; the last one has ended."""
    exit_code: int
    newest: int
    """The newest checkpoint's step, or 0 without a checkpoint."""
    changed: float = 0.0
    """When a custom script, whose steps are unknown, last saved anything.

    After a crash this is progress only if the checkpoint is complete.
    """
    whole: bool = False
    """Whether only complete checkpoints of the script count."""
    repeats: int = 0
    """The step at which the attempt began, if the previous attempt had begun there too."""
    max_crashes: int
    requeue: bool
    """Whether the script may requeue its job."""
    stop: str | None = None
    """Why the workers were asked to stop, or None if they were not."""
    answered: bool = False
    """Whether the workers ended because they were asked to; trnslurm.train saves first."""
    saved: int | None = None
    """The step that the workers saved before they ended together, if they did."""
    cancelled: bool = False
    """Whether a user has cancelled the run."""
    trouble: str = ""
    """The problem that a node's preflight or a watchdog found."""
    why: str = ""
    """The cause of the failure in one line, as triage found it."""
    unready: str = ""
    """The role server that was not available to the training, and why."""
    again: bool = False
    """Whether the job has an error that every later attempt would also hit."""
    resumes: bool = True
    """Whether a new attempt continues from what was saved, as far as the run knows."""
    lost: str = ""
    """The nodes that failed, in Slurm's notation, as reported by srun."""
    by: str = ""
    """Who ended or requeued the job, according to the job's log; empty if unknown."""
    fit: bool = False
    """Whether another attempt can start without a requeue."""
    moves: bool = False
    """Whether that attempt would have other nodes."""
    capped: str = ""
    """Why no further attempt may follow: the run has reached a cap."""
    enough: str = ""
    """Why the run needs no more steps, or an empty string if it does."""
    lacks: str = ""
    """Why the run may be incomplete despite exit code 0, such as workers that never joined."""
    newer: int = 0
    """The run's newest attempt if it has replaced this one, or 0."""

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def progress(self) -> bool:
        wrote = self.changed > self.last.changed and not self.repeats
        return self.newest > self.last.checkpoint or wrote


class Ending(Frozen):
    """The end of an attempt, for its state file."""

    state: State
    reason: str
    cause: EndCause
    refused: State
    """The state to record instead of REQUEUED if Slurm refuses to requeue the job."""
    here: bool = False
    """Whether the next attempt starts in the job's allocation instead."""


def how_it_ended(facts: Facts) -> Ending:
    """Return how the attempt ended."""
    ending = _ending(facts)
    # Slurm itself restarts a job that others have requeued. That attempt will end at once.
    if ending.state is not State.REQUEUED or ending.refused is State.REQUEUED or not facts.capped:
        return ending
    return _final(
        ending.refused, f"{ending.reason}; not started again: {facts.capped}", EndCause.CAP
    )


def _ending(facts: Facts) -> Ending:
    if facts.newer:  # a requeued job would replace that attempt in turn
        return _final(State.FAILED, f"attempt {facts.newer} has taken over")
    if facts.exit_code == 0 and not facts.answered and facts.saved is None:
        # The training was finished, even if a stop was requested.
        return _final(State.COMPLETED, facts.lacks)
    by_slurm = None if facts.last.state is State.RUNNING else facts.last.state
    if facts.cancelled:
        return _final(State.CANCELLED, _saved(facts))
    if by_slurm is State.REQUEUED:
        by = f"Slurm because {facts.lost} failed" if facts.lost else facts.by
        why = f"requeued by {by}" if by else "requeued"
        return _again(State.REQUEUED, EndCause.REQUEUED, _and(why, _saved(facts)))
    if by_slurm is State.CANCELLED:
        # On this machine SIGTERM may also come from a shutdown or a closed terminal.
        here = is_here(facts.last.job_id)
        holder, step, _ = facts.last.job_id.partition(".")
        stopped = here and facts.saved is not None
        by = f"by {facts.by}, " if facts.by else ""
        why = facts.last.reason if here else f"{by}not by trnslurm cancel"
        why = (
            f"something other than trnslurm cancel ended its step or job {holder}" if step else why
        )
        return _final(State.STOPPED if stopped else State.CANCELLED, _and(why, _saved(facts)))
    if facts.stop == EndCause.ENOUGH and not by_slurm:
        why = _and(f"ended early: {facts.enough}", _saved(facts))
        return _final(State.COMPLETED, why, EndCause.ENOUGH)
    if facts.stop == EndCause.CAP and not by_slurm:
        return _final(State.STOPPED, _and(facts.capped, _saved(facts)), EndCause.CAP)
    if by_slurm is State.PREEMPTED:
        return _stopped_by(facts, EndCause.PREEMPTED, State.PREEMPTED)
    stopped = facts.saved is not None or (facts.answered and facts.exit_code == 0)
    if stopped and facts.stop == EndCause.GROWS and not by_slurm:
        why = _and("requeued to get more nodes, which are free", _saved(facts))
        return _again(State.STOPPED, EndCause.GROWS, why)
    if by_slurm is State.TIMEOUT or (stopped and facts.stop == EndCause.TIME_LIMIT):
        if facts.progress:
            return _stopped_by(facts, EndCause.TIME_LIMIT, State.TIMEOUT)
        # A requeued attempt would only repeat this one.
        if facts.repeats:
            why = f"it started at step {facts.repeats} again instead of after its checkpoint"
            return _final(State.TIMEOUT, f"time limit; {why}", EndCause.REPEATS)
        return _final(State.TIMEOUT, "time limit; it saved no new checkpoint", EndCause.TIME_LIMIT)
    if stopped:
        return _final(State.STOPPED, _and(facts.stop or "", _saved(facts)))
    return _crash(facts)


def _stopped_by(facts: Facts, cause: EndCause, word: State) -> Ending:
    reason = _and(cause, _saved(facts))
    final = word if facts.saved is None else State.STOPPED
    if not facts.requeue:
        return _final(final, reason, cause)
    return _again(final, cause, reason)


def _crash(facts: Facts) -> Ending:
    running = f"exit code {facts.exit_code} while running on {brief(facts.last.hosts.split(','))}"
    failed = f"{facts.lost} failed" if facts.lost else ""
    what = failed or facts.trouble or facts.why or running
    if facts.unready and facts.unready not in what:
        what = f"{what}; {facts.unready}"
    if facts.again and not (failed or facts.trouble or facts.unready):
        return _final(State.FAILED, what, EndCause.ERROR)
    if not facts.requeue:
        return _final(State.FAILED, what, EndCause.CRASH)
    if not facts.resumes:
        what = textwrap.shorten(what, 320, placeholder="…")
        return _final(State.FAILED, f"{what}; {_NO_WAY_BACK}", EndCause.CRASH)
    changed = facts.changed if facts.whole and not facts.repeats else None
    crashes = crashes_in_a_row(facts.attempts, facts.newest, changed)
    if crashes >= facts.max_crashes:
        return _final(State.FAILED, given_up(crashes, what), EndCause.CRASH)
    if crashes:
        # Files of a custom script may be a checkpoint that the crash left incomplete.
        without = "without a new checkpoint" if not facts.progress else "in a row"
        nth = f"crash {crashes} of {facts.max_crashes} {without}"
        # The queue gives a second crash in a row more time, and other nodes.
        here = facts.fit and (crashes == 1 or facts.moves)
        return _again(State.FAILED, EndCause.CRASH, f"{nth}: {what}", here=here)
    saved = f"step {facts.newest}" if facts.newest else "a checkpoint"
    after = f"crash after {saved} was saved: {what}"
    return _again(State.FAILED, EndCause.CRASH, after, here=facts.fit)


def crashes_in_a_row(attempts: Sequence[Attempt], newest: int, changed: float | None = None) -> int:
    """Count the crashes since an attempt left a newer checkpoint than the one it started with.

    `changed` is the time when the newest checkpoint was complete, if only that shows progress.
    """
    crashes = 0
    left, left_at = newest, changed
    for attempt in reversed(attempts):
        if left > attempt.checkpoint or (left_at is not None and left_at > attempt.changed):
            break
        crashes += attempt.crashed
        left, left_at = attempt.checkpoint, None if left_at is None else attempt.changed
    return crashes


def given_up(crashes: int, what: str) -> str:
    """Return the reason for a run that does not start again."""
    many = f"{crashes} crashes in a row" if crashes > 1 else "a crash"
    return f"given up after {many} without a new checkpoint: {what}"


def _final(state: State, reason: str, cause: EndCause = EndCause.NONE) -> Ending:
    return Ending(state=state, reason=reason, cause=cause, refused=state)


def _again(refused: State, cause: EndCause, reason: str, *, here: bool = False) -> Ending:
    return Ending(state=State.REQUEUED, reason=reason, cause=cause, refused=refused, here=here)


def _saved(facts: Facts) -> str:
    if facts.saved is not None:
        return f"saved step {facts.saved}"
    return f"step {facts.newest} was saved before" if facts.newest else ""


def _and(*words: str) -> str:
    return "; ".join(word for word in words if word)


def earlier_attempts(state: Attempt) -> list[Attempt]:
    """Return the same job's previous attempts, oldest first."""
    numbers = [n for n in RUN.attempt_numbers(state.phase) if n < state.attempt]
    return [
        a for a in (read_attempt(RUN, state.phase, n) for n in numbers) if a.job_id == state.job_id
    ]


def reason_to_give_up(state: Attempt, max_crashes: int) -> str:
    """Return why the run is given up instead of starting this attempt, or ""."""
    earlier = earlier_attempts(state)
    crashes = crashes_in_a_row(earlier, state.checkpoint, state.changed if saves_whole() else None)
    if crashes < max_crashes:
        return ""
    why = earlier[-1].reason or "it ended without recording its state"
    return why if why.startswith("given up ") else given_up(crashes, why)


def lost_nodes(state: Attempt) -> str:
    """Return the nodes that failed during an attempt, from srun's lines in the batch log."""
    # As seen on Slurm 22.05, when a node of the step reboots or is powered off; the second from
    # _launch_tasks in src/api/step_launch.c.
    text = _batch_log(state)
    found = re.findall(r"error: Node failure on ([\w.,\[\]-]+)", text)
    found += re.findall(r"error: Task launch for \S+ failed on node ([\w.-]+):", text)
    return ",".join(dict.fromkeys(found))


def steps_of(state: Attempt) -> tuple[int, int]:
    """Return the number of steps that srun has aborted, and of steps that it has not waited for.

    srun may exit with 0 although tasks were killed, and before they have ended
    (slurm_step_launch_wait_finish in src/api/step_launch.c).
    """
    text = _batch_log(state)
    gave_up = text.count("srun: error: Timed out waiting for job step to complete")
    return text.count("srun: Job step aborted"), gave_up


def who_ended(state: Attempt) -> str:
    """Return who ended or requeued the job, from Slurm's lines in the batch log.

    Slurm does not tell the job which user did it. Seen on Slurm 22.05 and 24.11; the messages are
    in src/slurmd/slurmstepd/req.c.
    """
    told = re.findall(r"\*\*\* JOB \d+ .*CANCELLED AT \S+ (.*)\*\*\*", _batch_log(state))
    last = told[-1].removeprefix("DUE TO ") if told else None
    if last == "":
        return "scancel"
    known = {
        "JOB REQUEUE": "scontrol requeue",
        "PREEMPTION": "a preemption",
        "NODE FAILURE": "Slurm because a node failed",
    }
    return next((who for text, who in known.items() if last and last.startswith(text)), "")


def _batch_log(state: Attempt) -> str:
    """Return the end of the batch log, without the job's earlier attempts."""
    try:
        with open_file(RUN.batch_log(state.phase, state.job_id)) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return text[text.rfind(f" {state.phase} attempt {state.attempt - 1}: ") + 1 :]


def with_holder(found: Finding) -> Finding:
    """Add the process that holds the port, if a job on this node found its port taken."""
    taken = re.search(r"port (\d+) is taken", found.cause)
    if not taken or found.node or not (holder := who_holds(int(taken[1]))):
        return found
    node = found.host or os.uname().nodename
    cause = f"port {taken[1]} of {node} is held by {holder}"
    brief = found.brief.removesuffix(f": {found.cause}")
    return replace(found, cause=cause, brief=f"{brief}: {cause}", certain=True)


def read_facts(
    state: Attempt,
    exit_code: int,
    trouble: str,
    found: Finding | None,
    *,
    max_crashes: int,
    requeue: bool,
    lost: str = "",
    next_hosts: Sequence[str] = (),
    capped: str = "",
    enough: str = "",
) -> Facts:
    """Read all facts about an attempt that has ended: the given ones, and those in its files.

    `lost` are the nodes that failed. `next_hosts` are the nodes on which another attempt could
    start without a requeue.
    """
    stop = RUN.stop_file("train", state.attempt)
    stopped = read_json(RUN.stopped_file("train", state.attempt))
    newest = max(RUN.attempt_numbers("train"), default=0)
    step, changed = saved_by_now()
    return Facts(
        attempts=[*earlier_attempts(state), state],
        exit_code=exit_code,
        newest=step,
        changed=changed,
        whole=saves_whole(),
        repeats=step_repeated(state.attempt) if changed else 0,
        max_crashes=max_crashes,
        requeue=requeue,
        trouble=trouble,
        why=found.line if found else "",
        unready="" if state.server else unready_server(found.line if found else ""),
        again=bool(found and found.again),
        resumes=knows_resuming() or step > 0 or bool(unfit(state.attempt) or lost),
        lost=lost,
        by=who_ended(state),
        fit=bool(next_hosts),
        capped=capped,
        enough=enough,
        moves=bool(next_hosts) and list(next_hosts) != state.hosts.split(","),
        lacks=alone.reason(RUN, state.attempt) or went_on(RUN.node_log("train", state.attempt, 0)),
        newer=newest if newest > state.attempt else 0,
        stop=str(read_json(stop).get("cause", "")) if stop.exists() else None,
        answered=bool(stopped),
        saved=int(stopped["step"]) if stopped.get("saved") else None,
        cancelled=RUN.cancelled_file.exists(),
    )


def unready_server(why: str) -> str:
    """Return which role server is down, or was down a moment ago and may have been missed.

    `why` is the line that says why a worker failed.
    """
    missed = _OF_REQUEST.search(why) is not None
    for role, servers in read_json(RUN.servers_file).items():
        for number, server in enumerate(servers):
            recent = missed and server["starts"] > 1 and time.time() - server["since"] < _MISSED_S
            if server["stand"] != Stand.READY or recent:
                return f"{role} {number} on {server['host']} had ended or did not respond"
    return ""


def step_repeated(attempt: int) -> int:
    """Return the first step that an attempt reported, if the previous one had begun there too.

    A script may count its steps from 1 and still continue. Then its loss is smaller than before.
    Metrics read from a script's output do not show where it began.
    """
    first: dict[int, dict[str, Any]] = {}
    with suppress(OSError, ValueError), open_file(RUN.metrics_file) as file:
        for line in file:
            found = re.match(rb'{"attempt": (\d+), "step": \d', line)
            if found and int(found[1]) not in first and b'"read": ' not in line:
                first[int(found[1])] = json.loads(line)
    now, before = first.get(attempt, {}), first.get(attempt - 1, {})
    if not 0 < now.get("step", 0) <= before.get("step", 0):
        return 0
    loss, was = now.get("loss"), before.get("loss")
    continues = loss is not None and was is not None and loss < _SAME_LOSS * was
    return 0 if continues else int(now["step"])


def next_hosts(
    state: Attempt,
    allocation: Sequence[str],
    lost: Sequence[str],
    counts: Iterable[int],
    slow: Container[str] = (),
) -> list[str]:
    """Return the allocation's nodes for the next attempt, or none if too few are fit.

    `counts` are the node counts that the training may use. A node that held up the others for the
    first time, or a slow node, stays if no spare can replace it.
    """
    hosts = state.hosts.split(",")
    unfit_ones = bad_nodes(state.attempt, hosts).keys() | set(lost)
    stuck = stuck_node(state.attempt, hosts)
    if unfit(state.attempt) and not unfit_ones - {stuck}:
        return []  # a problem of all nodes
    good = [host for host in allocation if host not in unfit_ones]
    earlier = (stuck_node(a.attempt, a.hosts.split(",")) for a in earlier_attempts(state))
    if len(good) < len(hosts) and stuck in unfit_ones - set(lost) and stuck not in earlier:
        good = [host for host in allocation if host in good or host == stuck]
    return choose(good, hosts, counts, slow)


def choose(
    good: Sequence[str], before: Sequence[str], counts: Iterable[int], slow: Container[str] = ()
) -> list[str]:
    """Return as many good nodes as the training may use, preferring those of the last attempt."""
    number = max((count for count in counts if count <= len(good)), default=0)
    first = sorted(good, key=lambda host: (host in slow, host not in before))
    return [host for host in good if host in first[:number]]
