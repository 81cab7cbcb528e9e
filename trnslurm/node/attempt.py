"""Runs one attempt of a phase: the last line of a batch script becomes this program.

    exec python -m trnslurm.node.attempt --max-crashes=3 --requeue -- srun … bash node.sh train

The program owns the attempt's state file and the heartbeat. It receives Slurm's signals, asks the
workers to save, waits for them, and decides with ending.py whether the job is requeued; events.py
sends messages to people. Its input is the environment (TRNSLURM_*) and the state file that the
script has begun.
"""

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property

from trnslurm.contract.attempt import read_attempt
from trnslurm.contract.checkpoints import newest_checkpoint
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.options import parse
from trnslurm.contract.states import EndCause, State
from trnslurm.contract.times import utc_time
from trnslurm.contract.variables import Variable
from trnslurm.node import left_out, processes, relaunch
from trnslurm.node.beats import PERIOD_S
from trnslurm.node.caps import Caps
from trnslurm.node.controller import NO_KILL, controller_of
from trnslurm.node.ending import (
    Ending,
    aborted_steps,
    earlier_attempts,
    how_it_ended,
    lost_nodes,
    next_hosts,
    read_facts,
    reason_to_give_up,
    with_holder,
)
from trnslurm.node.events import Messages
from trnslurm.node.graphs import program as graphs
from trnslurm.node.graphs.compile import read_place
from trnslurm.node.graphs.manifest import CacheError
from trnslurm.node.hang import HangWatch
from trnslurm.node.hosts import brief
from trnslurm.node.job import Job
from trnslurm.node.mirror import MirrorProcess, begins_elsewhere, start_fetching, why_not
from trnslurm.node.packages import packages
from trnslurm.node.state import RUN, note, saved_by_now, start_heartbeat
from trnslurm.node.triage.again import runs_same_python
from trnslurm.node.triage.budget import budget
from trnslurm.node.triage.causes import matching
from trnslurm.node.triage.finding import Finding, find_cause, nothing_found

TERMINATED = 128 + signal.SIGTERM
# This program ends within this share of the time between TERM and KILL.
_LAST_SHARE = 0.9
_STDOUT = 1
_LOOK_S = 10.0
_RELAY_S = 2.0
_BY_SLURM = {
    State.REQUEUED: (State.REQUEUED, "requeued"),
    State.TIMEOUT: (State.TIMEOUT, "time limit"),
    State.PREEMPTED: (State.PREEMPTED, "preempted"),
    State.CANCELLED: (State.CANCELLED, ""),
    State.RUNNING: (State.CANCELLED, ""),
    State.LOST: (State.FAILED, "Slurm had forgotten the job, and ended it"),
}
"""What an attempt becomes, and why, by what the controller says."""


class RefusedError(Exception):
    """The attempt ends before anything was started: exit code and message, or no message."""


class Terminated(BaseException):
    """TERM arrived during work in this process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code of the batch script."""
    signals = processes.SignalQueue()  # first: before this TERM would kill without a record
    options = parse(sys.argv[1:] if argv is None else argv)
    if relaunch.answer(options.nodes, options.command):
        return 0
    try:
        job = Job(options, signals)
        attempt = AttemptProgram(job)
        code = run(attempt)
        while job.next_hosts:
            launch, step = attempt.next_launch()
            if isinstance(launch, int):
                return launch
            job.begin_again(launch)
            attempt = AttemptProgram(job, step)
            code = run(attempt)
    except KeyError as error:
        processes.say(f"error: {error.args[0]} is not set: a batch script starts this program")
        return 2
    return code


def run(attempt: "AttemptProgram") -> int:
    """Run an attempt to its end, whatever happens; return the exit code."""
    code = 1
    try:
        code = attempt.run()
    except RefusedError as refused:
        code, message = refused.args
        if message:
            processes.say(f"error: {message}")
    except Terminated:
        code = attempt.end_by_term()
    except OSError as error:
        processes.say(f"error: {error.filename or attempt.doing}: {error.strerror}")
    except Exception:
        processes.say(traceback.format_exc())
    return attempt.finish(code)


class AttemptProgram:
    """One attempt of a phase."""

    def __init__(self, job: Job, step: int = 0) -> None:
        """Take the job, and the pid of a step that was started ahead."""
        phase, number = os.environ[Variable.PHASE], int(os.environ[Variable.ATTEMPT])
        self.state = read_attempt(RUN, phase, number)
        self.state.host, self.state.pid = os.uname().nodename, os.getpid()
        self.state.nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 0))
        self.trains = phase == "train"
        self.doing = "starting"
        """The current activity, for the reason of a failure."""
        state, retry_s = self.state, job.options.retry_s
        self.controller = controller_of(state.job_id, state.restarts, retry_s)
        self._job, self._options, self._signals = job, job.options, job.signals
        self._stop_file = RUN.stop_file(phase, number)
        self._launched = False
        """Whether the nodes have run, so that their logs may explain a failure."""
        self._step = step
        """The pid of srun, or of its stand-in."""
        self._standby: relaunch.Standby | None = None
        self._lost: list[str] = []
        """The nodes that were found lost."""
        self._aborted = False
        """Whether srun has aborted the step: it may still return 0."""
        self._left_over = False
        """Whether srun was killed, and processes of the step may be left."""
        self._deadline: float | None = None
        """When the step must have ended, after Slurm began to end the job."""
        self._ended_by_term = False
        self._last_moment = math.inf
        """When this program must have ended, because KILL follows."""
        self._hang: HangWatch | None = None
        self._caps = Caps(RUN, read_json(RUN.caps_file))
        self._mirror = MirrorProcess(wanted=self.trains)
        self._capped_by = ""
        """The cap for which the workers were asked to save and to end."""
        self._capped_at = math.inf
        """When the step must have ended, because the run has used what it may."""
        self._events = Messages(self.state, job.senders)

    def next_launch(self) -> tuple[relaunch.Launch | int, int]:
        """Return how the next attempt is launched, or the exit code if that cannot be told; and
        the pid of its step, if it was started ahead.
        """
        hosts = self._job.next_hosts
        if standby := self._standby:
            same = hosts == self.state.hosts.split(",")
            if same and (step := standby.go()):
                assert standby.launch
                self._job.relay = standby.relay
                return standby.launch, step
            standby.end(wait=same)  # a lost node of the step does not answer
        return relaunch.ask(self._job.scripts[len(hosts)], self.state.restarts, hosts), 0

    def run(self) -> int:
        """Run all of it; return the exit code."""
        self._begin()
        if self._options.graphs and self._graphs_are_warm():
            return 0
        self._mark_running()
        code = self._run_step()
        if self._ended_by_term and not self.trains:
            return TERMINATED
        self._launched = True
        if self.trains and not self._ended_by_term:
            code = self._end_by_slurm(code)
        if self._aborted and not self._ended_by_term:
            code = code or 1
        if code == 0 and self._options.graphs and self.state.phase == "precompile":
            with self._graph_work("verifying the graphs"):
                graphs.commit(read_place())
        alone = RUN.alone_file("train", self.state.attempt).exists()
        if self.trains and (code or alone or self._stop_file.exists()):
            code = self._conclude(code)
        if self.trains and code == 0:
            self._wait_for_mirror()
        return code

    def _end_by_slurm(self, code: int) -> int:
        """Ask whether Slurm ended the step without TERM to this process; return the exit code.

        srun returns 0 when Slurm gives up one of its nodes, even if workers failed. At a preemption
        with a GraceTime, Slurm sends TERM to the step only, or with send_user_signal the signal
        that precedes a time limit (_job_check_grace_internal in src/interfaces/preempt.c).
        """
        ended_by = self.controller.what_ends_job()
        if code == 0 and ended_by in (State.REQUEUED, State.CANCELLED):
            self._record(ended_by, ended_by.lower())
            return TERMINATED
        if ended_by is State.PREEMPTED:
            self._record(ended_by, "preempted")
        return code

    def _begin(self) -> None:
        """Refuse a cancelled run, a wrong node count, and a run that crashed too often."""
        state = self.state
        if self.trains:
            state.checkpoint, state.changed = saved_by_now()
        if RUN.cancelled_file.exists():  # nothing brings a cancelled run back
            state.become(State.CANCELLED, "cancelled before it started")
            message = "this run was cancelled; remove state/cancelled.json to run it anyway"
            raise RefusedError(1, message)
        if key := self._caps.reached(state.phase, state.attempt):
            state.become(State.STOPPED, self._caps.words(key), EndCause.CAP)
            raise RefusedError(1, state.reason)
        state.write(RUN)
        planned, nodes = self._options.nodes, state.nodes
        spares, fewer = self._options.spares, self._options.fewer
        if fewer:
            nodes = len(os.environ[Variable.HOSTS].split(","))
        expected = planned + (0 if fewer else spares)
        if planned and nodes != expected:  # the plan's arithmetic is for one node count
            self.doing = "checking the allocation"
            wanted = f"{planned} nodes and {spares} spare" if spares else f"{planned} nodes"
            message = f"this script is for {wanted}, the allocation has {nodes}"
            raise RefusedError(2, f"{message}: render it again with --nodes {nodes - spares}")
        self.controller.learn_config()
        if self._job.beats and self.controller.holds:
            os.environ[NO_KILL] = "set"
        # A crash counts even if the attempt could not record it, as when its node died.
        counts = self.trains and self.controller.requeues
        if counts and (given_up := reason_to_give_up(state, self._options.max_crashes)):
            state.become(State.FAILED, given_up)
            raise RefusedError(1, given_up)

    def _mark_running(self) -> None:
        """Record that the step runs, and start the heartbeat, which dies with this process."""
        self._take_signals(0)
        if self.trains and (place := begins_elsewhere()):
            self._fetch(place)
        if self._ended_by_term:
            raise RefusedError(TERMINATED, "")
        self.state.hosts = os.environ[Variable.HOSTS]
        newest = newest_checkpoint(RUN)
        os.environ[Variable.RESUME] = str(newest.absolute()) if newest else ""
        self.doing = f"running on {brief(self.state.hosts.split(','))}"
        self.state.become(State.RUNNING, self.state.reason)
        self.state.write(RUN)
        start_heartbeat()
        if self.trains:  # a restart would wait half a second until the causes are read
            threading.Thread(target=matching, args=("",), daemon=True).start()
        if self.trains and self._options.standby:
            script = self._job.scripts[len(self.state.hosts.split(","))]
            self._standby = relaunch.Standby(script, self.state)
        if beats := self._job.beats:
            beats.begin(self.state.attempt)
            os.environ[Variable.BEATS] = beats.place
        if self._options.hang_minutes:
            self._hang = HangWatch(self.state, self._options.hang_minutes)
        self._events.begun(earlier_attempts(self.state))

    def _fetch(self, place: str) -> None:
        """Fetch the checkpoint with which the run begins."""
        self.doing = f"fetching the newest checkpoint of {place}"
        start_heartbeat()
        fetching, pid, status = start_fetching(place), 0, 0
        while not pid:
            self._take_signals(_LOOK_S)
            if self._ended_by_term:
                processes.send(fetching, signal.SIGKILL)
            pid, status = os.waitpid(fetching, 0 if self._ended_by_term else os.WNOHANG)
        if status and not self._ended_by_term:
            raise RefusedError(1, f"{self.doing}: {why_not() or 'see the lines above'}")
        self.state.checkpoint, self.state.changed = saved_by_now()

    def _wait_for_mirror(self) -> None:
        """Wait until S3 has the last checkpoint, unless Slurm or the user ends the job before."""
        self.doing = "copying the last checkpoint to S3"
        self._mirror.finish()
        while self._mirror.runs() and not RUN.cancelled_file.exists():
            arrived, _ = self._signals.wait(_LOOK_S)
            if arrived & processes.END_SIGNALS:  # the training itself is complete
                break

    def _record(self, state: State, reason: str) -> None:
        self.state.become(state, reason)
        note(self.state)

    def finish(self, code: int) -> int:
        """Write the final state of this attempt; return its exit code."""
        state = self.state
        if state.under_way:
            why = self._found.brief if code and self._launched and self._found else ""
            if code:
                state.become(State.FAILED, why or f"exit code {code} while {self.doing}")
            else:
                state.become(State.COMPLETED, state.reason)
        state.exit_code = code
        self._mirror.end()
        note(state)
        if self._launched and (state.state is State.FAILED or state.cause == EndCause.CRASH):
            self._say_why()
        ended = state.state in (State.FAILED, State.STOPPED, State.TIMEOUT)
        if code and self._options.expedite and ended:
            self.controller.never_requeue()
        reason = f" ({state.reason})" if state.reason else ""
        text = f"{utc_time()} {state.phase} attempt {state.attempt}: {state.state}{reason}"
        processes.say(text, _STDOUT)
        if state.state.final and (missing := self._mirror.missing()):
            processes.say(f"warning: {missing}")
        if self._standby and not self._job.next_hosts:
            self._standby.end()
        within_s = 0 if self._job.next_hosts else self._last_moment - time.monotonic()
        self._events.ended(within_s, lambda: self._found if self._launched else None)
        return code

    def _run_step(self) -> int:
        """Run the command, again if srun has given up on a busy controller; return its code."""
        code = 0
        for pause_s in (*self.controller.retry_s, None):
            aborted = aborted_steps(self.state)
            self._step = self._step or processes.spawn(
                self._options.command, own_session=self.controller.own_session
            )
            code = self._wait_for_step()
            self._step = 0
            if self._job.relay:
                self._job.relay.join(_RELAY_S)
                self._job.relay = None
            self._aborted = aborted_steps(self.state) > aborted
            # Once anything was started a node's log is there, and the exit code is the job's own.
            logs = RUN.node_logs(self.state.phase, self.state.attempt)
            if pause_s is None or code == 0 or self._asked_to_end() or logs:
                break
            until = time.monotonic() + pause_s
            while not self._asked_to_end() and (left_s := until - time.monotonic()) > 0:
                self._take_signals(left_s)
            if self._asked_to_end():
                break
        return code

    def _asked_to_end(self) -> bool:
        return self._ended_by_term or (self.trains and self._stop_file.exists())

    def _wait_for_step(self) -> int:
        """Wait for the step to end, and act on signals; return its exit code."""
        look_at = time.monotonic()
        while True:
            pid, status = os.waitpid(self._step, os.WNOHANG)
            if pid:
                return processes.exit_code(status)
            left_s = None if self._deadline is None else self._deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                processes.send(self._step, signal.SIGKILL)
                _, status = os.waitpid(self._step, 0)
                return processes.exit_code(status)
            if self._deadline is not None:
                self._take_signals(left_s)
                continue
            period_s = self._period_s()
            self._take_signals(period_s and max(0.0, look_at - time.monotonic()))
            if self._ended_by_term or time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + (period_s or 0.0)
            self._mirror.look()
            if self._standby:
                self._standby.look()
            hangs = self._hang and self._hangs(self._hang)
            if hangs or self._nodes_are_lost() or self._is_past_cap():
                self._end_step()

    def _end_step(self) -> None:
        """End the step at once."""
        if self.controller.in_step:
            # What a killed srun leaves on the nodes would stay in the user's job.
            processes.send(self._step, signal.SIGTERM)  # srun then kills its tasks
            self._deadline = time.monotonic() + self.controller.patience_s
            return
        # When srun dies, a helper of it has Slurm kill the step (src/srun/libsrun/srun_job.c,
        # _shepherd_spawn): the nodes' programs might not live long enough to answer.
        processes.send(self._step, signal.SIGSTOP)
        self._end_nodes()
        processes.send(self._step, signal.SIGKILL)

    def _is_past_cap(self) -> bool:
        """Ask the workers to save near the cap; check whether they have had the time for it."""
        if not self._capped_by and (key := self._caps.near()):
            self._capped_by = key
            self._ask_to_stop(EndCause.CAP)
            self._capped_at = time.monotonic() + self._caps.grace_s
        return time.monotonic() >= self._capped_at

    def _nodes_are_lost(self) -> bool:
        """Check whether nodes have stopped to give signs of life, and do not answer either."""
        if not self._job.beats or self._lost:
            return False
        hosts = self.state.hosts.split(",")
        silent = [hosts[node] for node in self._job.beats.silent() if node < len(hosts)]
        self._lost = [host for host in silent if not self.controller.answers(host)]
        return bool(self._lost)

    def _end_nodes(self) -> None:
        """End the processes on the nodes that answer."""
        hosts, beats = self.state.hosts.split(","), self._job.beats
        lost = [hosts.index(host) for host in self._lost]
        self._left_over = not (beats and beats.end_others(lost))

    def _period_s(self) -> float | None:
        """Return how often to look after the step, beside its end; None: never."""
        if self._job.beats:
            return PERIOD_S
        if self._hang:
            return self._hang.period_s
        looks = self._standby or self._mirror.wanted or (self.trains and self._caps.node_hours)
        return _LOOK_S if looks else None

    def _hangs(self, watch: HangWatch) -> bool:
        """Check whether the step hangs, and its nodes do not end it; an error is only logged."""
        try:
            return watch.look()
        except Exception:
            processes.say(traceback.format_exc())
            self._hang = None
            return False

    def _take_signals(self, within_s: float | None) -> None:
        """Wait for signals, and act on them; after the first TERM they have no effect."""
        beats = self._job.beats
        arrived, _ = self._signals.wait(within_s, [beats.fileno()] if beats else ())
        if beats:
            beats.read()
        if self._ended_by_term:
            return
        if arrived & processes.END_SIGNALS:
            self.end_by_term()
        elif signal.SIGUSR1 in arrived and self.trains:
            # The time limit is near, or trnslurm cancel asks.
            cancelled = RUN.cancelled_file.exists()
            self._ask_to_stop(EndCause.CANCELLED if cancelled else EndCause.TIME_LIMIT)

    def _ask_to_stop(self, cause: EndCause) -> None:
        """Ask the workers to save and to end together: worker 0 looks for this file."""
        with suppress(OSError):
            write_json(self._stop_file, {"cause": cause, "time": int(time.time())})

    def end_by_term(self) -> int:
        """Record what ends the attempt: scancel, the time limit, preemption or a requeue."""
        self._ended_by_term = True
        self._expect_kill()
        if self.trains:
            self._ask_to_stop(EndCause.TERMINATED)
        # The guard of a job on this machine says why it ends it.
        why = str(read_json(RUN.guard_file).get("why", ""))
        why = "" if RUN.cancelled_file.exists() else why
        self._record(State.CANCELLED, why)  # at once: KILL may come before the controller answers
        deadline = time.monotonic() + self.controller.patience_s
        state, reason = _BY_SLURM[self.controller.what_ends_job()]
        self._record(state, reason or why)
        # A second TERM makes torchrun leave its workers.
        if self.trains and self.controller.signals_workers:
            self._deadline = deadline
        elif self._step:
            processes.send(self._step, signal.SIGTERM)
        return TERMINATED

    def _expect_kill(self) -> None:
        """Set when this program must have ended, after TERM or just before it."""
        within_s = _LAST_SHARE * self.controller.kill_wait_s
        self._last_moment = min(self._last_moment, time.monotonic() + within_s)

    def _conclude(self, code: int) -> int:
        """Decide how a training ended and whether it starts again; return the exit code."""
        try:
            hosts = self.state.hosts.split(",")
            # Not once Slurm is ending the job, which leaves no time to read logs.
            found = self._found if code and self.state.state is State.RUNNING else None
            lost = self._lost or self.controller.host_names(lost_nodes(self.state))
            counts = self._job.counts()
            slow: dict[str, str] = {}
            if self._options.leave_out_slow:
                slow = left_out.slow_nodes(self.state.attempt, hosts)
            hosts_then = next_hosts(self.state, self._job.allocation, lost, counts, slow)
            if self._left_over or not self._options.script:
                hosts_then = []
            ending = how_it_ended(
                read_facts(
                    self.state,
                    code,
                    left_out.trouble(self.state.attempt, hosts),
                    found,
                    max_crashes=self._options.max_crashes,
                    requeue=self._options.requeue,
                    lost=brief(lost),
                    next_hosts=hosts_then,
                    capped=self._caps.words(
                        self._capped_by or self._caps.reached("train", self.state.attempt + 1)
                    ),
                )
            )
            bad = slow | left_out.bad_nodes(self.state.attempt, hosts)
            if ending.here:
                bad = {host: why for host, why in bad.items() if host not in hosts_then}
            bad_nodes = left_out.update(
                bad,
                hosts,
                hours=self._options.exclude_hours,
                now=time.time(),
                most=self._can_do_without() if bad else sys.maxsize,
            )
        except Exception:  # then the exit code and Slurm's state decide
            processes.say(traceback.format_exc())
            self.doing = "deciding how it ended" if code == 0 else self.doing
            return code or 1
        self.state.become(ending.state, ending.reason, ending.cause)
        if ending.state is State.REQUEUED:
            self._start_again(ending, bad_nodes, hosts_then, lost)
        failed = ending.cause in (EndCause.CRASH, EndCause.ERROR)
        if self.state.state is not State.COMPLETED and not failed:
            return TERMINATED  # even after exit code 0: runs that wait for its success must wait
        return code

    def _can_do_without(self) -> int:
        """Return how many nodes of its partition the job can do without."""
        options, counts = self._options, self._job.scripts
        # With graphs, the job asks for all nodes of its range.
        starts_on_fewer = options.fewer and not options.graphs
        needed = min(counts) if starts_on_fewer else max(counts) + options.spares
        return self.controller.can_do_without(needed)

    def _start_again(
        self, ending: Ending, bad_nodes: left_out.Change, hosts: list[str], lost: list[str]
    ) -> None:
        """Start again here, or have Slurm start the job, unless it is being cancelled."""
        state = self.state
        ended_by = self.controller.what_ends_job()
        if ended_by is State.CANCELLED:  # Slurm would start it again anyway
            state.become(State.CANCELLED, "cancelled as it ended")
            return
        if ended_by is State.RUNNING and ending.here:
            state.become(State.RESTARTED, state.reason)
            gone = {*self.state.hosts.split(",")} - {*hosts}
            self._job.allocation = [host for host in self._job.allocation if host not in gone]
            self._job.next_hosts = hosts
            return
        if ended_by is State.RUNNING:
            self._leave_lost(lost)
        self._ended_by_term = True  # scontrol requeue sends TERM to this process as well
        why_not = "Slurm has forgotten the job" if ended_by is State.LOST else ""
        if not why_not:
            note(state)  # before Slurm is asked: KILL may follow
            self._expect_kill()
            why_not = "" if ended_by is State.REQUEUED else self.controller.requeue()
        if why_not:
            why = f"{state.reason}; it could not be requeued: {why_not}"
            state.become(ending.refused, why)
            return
        # The job is pending now, so its next start leaves these nodes out.
        nodes = bad_nodes.applied_to(self.controller.excluded_nodes())
        if nodes is not None and not self.controller.exclude(nodes):
            processes.say(f"warning: {nodes} will not be left out of the next attempt")

    def _leave_lost(self, lost: list[str]) -> None:
        """Give up the nodes that are lost, for which a requeue would wait."""
        lost = [*lost, *self.controller.silent(self._job.allocation)]
        if lost:
            self.controller.leave([h for h in self._job.allocation if h not in lost])

    @cached_property
    def _found(self) -> Finding | None:
        """The cause of a failure according to the logs; errors of this search are only logged."""
        try:
            phase, attempt = self.state.phase, self.state.attempt
            with budget():  # for both
                found = find_cause(RUN.path, phase, attempt)
                modules = found.modules if found and not found.in_part else ()
                if modules and runs_same_python(RUN.path, phase):
                    write_json(RUN.packages_file(phase, attempt), packages(modules))
                    found = find_cause(RUN.path, phase, attempt)
            return with_holder(found) if found else None
        except Exception:
            processes.say(traceback.format_exc())
            return None

    def _say_why(self) -> None:
        """Print the cause of a failure; errors here are only logged."""
        try:
            state, found = self.state, self._found
            lines = found.report() if found else nothing_found(RUN.path, state.phase, state.attempt)
            processes.say("\n".join(lines), _STDOUT)
        except Exception:
            processes.say(traceback.format_exc())

    def _graphs_are_warm(self) -> bool:
        """Find the key of the job's graphs; return whether there is nothing to precompile."""
        with self._graph_work("reading the key of the graphs"):
            os.environ[Variable.GRAPH_KEY] = graphs.own_key(RUN.path)
            return self.state.phase == "precompile" and graphs.is_warm(read_place())

    @contextmanager
    def _graph_work(self, doing: str) -> Iterator[None]:
        """Let TERM interrupt work on graphs in this process, which may take minutes."""

        def interrupt(_signum: int, _frame: object) -> None:
            raise Terminated

        self.doing = doing
        with processes.handling(processes.heard_end_signals(), interrupt):
            # After the handler is set: a signal between the two would otherwise be missed.
            arrived, _ = self._signals.wait(0)
            if arrived & processes.END_SIGNALS:
                raise Terminated
            try:
                yield
            except CacheError as error:
                raise RefusedError(1, str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
