"""Reads what the machine needs to decide, before an attempt starts and after it has ended."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable
from functools import cached_property

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import write_json
from trnslurm.contract.options import AttemptOptions
from trnslurm.contract.states import EndCause, State
from trnslurm.node import left_out, processes
from trnslurm.node.attempt import events as e
from trnslurm.node.caps import Caps
from trnslurm.node.controller import Controller
from trnslurm.node.ending import (
    earlier_attempts,
    how_it_ended,
    lost_nodes,
    next_hosts,
    read_facts,
    reason_to_give_up,
    with_holder,
)
from trnslurm.node.hosts import brief
from trnslurm.node.job import Job
from trnslurm.node.mirror import begins_elsewhere
from trnslurm.node.once import went_on
from trnslurm.node.packages import packages
from trnslurm.node.state import RUN, saved_by_now
from trnslurm.node.triage.again import runs_same_python
from trnslurm.node.triage.budget import budget
from trnslurm.node.triage.diagnosis import diagnose, nothing_found
from trnslurm.node.triage.finding import Finding

_STDOUT = 1


def begins(
    state: Attempt, options: AttemptOptions, caps: Caps, controller: Controller
) -> e.MayBegin | e.Refused:
    """Refuse a cancelled run, a wrong node count, or a run that crashed too often."""
    trains = state.phase == "train"
    if trains:
        state.checkpoint, state.changed = saved_by_now()
    if RUN.cancelled_file.exists():  # nothing brings a cancelled run back
        message = "this run was cancelled; remove state/cancelled.json to run it anyway"
        return e.Refused(1, message, State.CANCELLED, "cancelled before it started")
    if trains and (enough := caps.enough()):
        return e.Refused(0, "", State.COMPLETED, f"ended early: {enough}", EndCause.ENOUGH)
    if key := caps.reached(state.phase, state.attempt):
        why = caps.words(key)
        return e.Refused(1, why, State.STOPPED, why, EndCause.CAP)
    state.write(RUN)
    done = (each.state is State.COMPLETED for each in earlier_attempts(state))
    if trains and state.restarts and any(done):
        # attempt/successor.py has requeued the job, so that it can complete.
        return e.Refused(0, "", State.COMPLETED, "the previous attempt completed the training")
    planned, nodes, spares = options.nodes, state.nodes, options.spares
    if options.fewer:
        nodes = len(state.hosts.split(","))
    expected = planned + (0 if options.fewer else spares) + options.served
    if planned and nodes != expected:  # the plan's arithmetic is for one node count
        wanted = f"{planned} nodes and {spares} spare" if spares else f"{planned} nodes"
        wanted += f" and {options.served} for roles" if options.served else ""
        message = f"this script is for {wanted}, but the allocation has {nodes}"
        message = f"{message}: render it again with --nodes {nodes - spares - options.served}"
        return e.Refused(2, message, doing="checking the allocation")
    controller.learn_config()
    # A crash counts even if the attempt could not record it, for example because its node died.
    counts = trains and controller.requeues
    if counts and (given_up := reason_to_give_up(state, options.max_crashes)):
        return e.Refused(1, given_up, State.FAILED, given_up)
    elsewhere = begins_elsewhere() if trains else ""
    return e.MayBegin(controller.kill_wait_s, elsewhere, state.checkpoint, state.changed)


class Judgement:
    """How an attempt has ended, judged from everything that it left."""

    def __init__(
        self,
        state: Attempt,
        options: AttemptOptions,
        job: Job,
        controller: Controller,
        caps: Caps,
    ) -> None:
        self._state, self._options, self._job = state, options, job
        self._controller, self._caps = controller, caps

    def of(self, asked: e.Judge) -> e.Judged:
        """Find out how training ended, and on which nodes it could continue."""
        state, options, code = self._state, self._options, asked.code
        allocation = self._job.allocation
        stop = RUN.stop_file("train", state.attempt)
        lacks = RUN.alone_file("train", state.attempt).exists()
        lacks = lacks or bool(went_on(RUN.node_log("train", state.attempt, 0)))
        if not (code or lacks or stop.exists()):
            return e.Judged(None, code)
        hosts = state.hosts.split(",")
        # When Slurm is ending the job, there is no time to read logs.
        found = self.found if code and state.state is State.RUNNING else None
        reported = self._controller.host_names(lost_nodes(state))
        gone = [*asked.lost, *(asked.server.lost if asked.server else ())]
        lost = [*gone, *(host for host in reported if host not in gone)]
        slow: dict[str, str] = {}
        if options.leave_out_slow:
            slow = left_out.slow_nodes(state.attempt, hosts)
        hosts_then: list[str] = []
        here = not asked.server or asked.server.here
        if asked.stays and here and options.script:
            avoided = {*slow}
            if len(allocation) > len(hosts):  # a spare may take their place
                avoided.update(self._controller.drained(hosts))
            hosts_then = next_hosts(state, allocation, lost, self._job.counts(), avoided)
        reached = self._caps.reached("train", state.attempt + 1)
        ending = how_it_ended(
            read_facts(
                state,
                code,
                asked.server.why if asked.server else left_out.trouble(state.attempt, hosts),
                found,
                max_crashes=options.max_crashes,
                requeue=options.requeue,
                lost=brief([host for host in lost if host in hosts]),
                next_hosts=hosts_then,
                capped=self._caps.words(self._caps.key if asked.capped else reached),
                enough=self._caps.enough(),
            )
        )
        bad = slow | left_out.bad_nodes(state.attempt, hosts)
        if ending.here:
            bad = {host: why for host, why in bad.items() if host not in hosts_then}
        change = left_out.update(
            bad,
            hosts,
            hours=options.exclude_hours,
            now=time.time(),
            most=self._can_do_without(bad) if bad else sys.maxsize,
            booted=self._controller.booted(left_out.read_excluded()),
        )
        return e.Judged(ending, code, tuple(hosts_then), change, tuple(lost))

    def _can_do_without(self, bad: Iterable[str]) -> int:
        """Return how many of the bad nodes and of those already left out the job can do without."""
        options, counts = self._options, self._job.scripts
        # With graphs, the job requests all nodes of its range.
        starts_on_fewer = options.fewer and not options.graphs
        needed = min(counts) if starts_on_fewer else max(counts) + options.spares
        needed += len(self._job.served[0])  # the other nodes are in other partitions
        return self._controller.can_do_without(needed, {*bad, *left_out.read_excluded()})

    @cached_property
    def found(self) -> Finding | None:
        """The cause of a failure according to the logs. Errors of this search are only logged."""
        try:
            phase, attempt = self._state.phase, self._state.attempt
            with budget():  # for both
                found = diagnose(RUN.path, phase, attempt)
                modules = found.modules if found and not found.in_part else ()
                if modules and runs_same_python(RUN.path, phase):
                    write_json(RUN.packages_file(phase, attempt), packages(modules))
                    found = diagnose(RUN.path, phase, attempt)
            return with_holder(found) if found else None
        except Exception:
            processes.say(traceback.format_exc())
            return None

    def say_why(self) -> None:
        """Print the cause of a failure. Errors of this search are only logged."""
        try:
            state, found = self._state, self.found
            lines = found.report() if found else nothing_found(RUN.path, state.phase, state.attempt)
            processes.say("\n".join(lines), _STDOUT)
        except Exception:
            processes.say(traceback.format_exc())
