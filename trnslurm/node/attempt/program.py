"""Passes events to the machine, and carries out its decisions.

This program owns the attempts' state files and the heartbeat, and receives Slurm's signals. Its
input is the environment (TRNSLURM_*) and the state file that the batch script has created. Work
that may take long, such as a Slurm query, a look at a shared disk or the search for a cause, runs
in a thread. Its result is an event like any other.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from trnslurm.contract.attempt import Attempt, read_attempt
from trnslurm.contract.checkpoints import newest_checkpoint
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.options import AttemptOptions, parse
from trnslurm.contract.states import EndCause, State
from trnslurm.contract.times import utc_time
from trnslurm.contract.variables import Variable
from trnslurm.node import first, processes, relaunch
from trnslurm.node.attempt import events as e
from trnslurm.node.attempt import machine
from trnslurm.node.attempt.judge import Judgement, begins
from trnslurm.node.attempt.machine import Decision, Happening, Machine, Rules, Stage
from trnslurm.node.attempt.servers import Servers
from trnslurm.node.caps import Caps
from trnslurm.node.components import hosts_of_roles
from trnslurm.node.controller import NO_KILL, NoController, controller_of
from trnslurm.node.ending import earlier_attempts, steps_of
from trnslurm.node.events import Messages
from trnslurm.node.follow import Follow
from trnslurm.node.graphs import program as graphs
from trnslurm.node.graphs.compile import read_place
from trnslurm.node.graphs.manifest import CacheError
from trnslurm.node.growth import Growth
from trnslurm.node.hang import HangWatch
from trnslurm.node.job import Job
from trnslurm.node.lookout import period_of
from trnslurm.node.mirror import MirrorProcess, start_fetching, why_not
from trnslurm.node.state import RUN, has_saved_since, note, saved_by_now, start_heartbeat
from trnslurm.node.steps import Successor
from trnslurm.node.triage.causes import matching

_STDOUT = 1
_RELAY_S = 2.0
_FOLLOW_S = 30.0
_SERVERS_S = 60.0
"""How long the role servers have to end, one role after another."""
_WRITE_S, _LAST_WRITE_S = 10.0, 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the batch script's exit code."""
    signals = processes.SignalQueue()  # first: SIGTERM would kill without a record
    options = parse(sys.argv[1:] if argv is None else argv)
    if relaunch.answer(options.nodes, options.command):
        return 0
    try:
        return Program(options, signals, sys.argv[1:] if argv is None else argv).run()
    except KeyError as error:
        processes.say(f"error: {error.args[0]} is not set: a batch script starts this program")
        return 2


class Lane:
    """Runs tasks in order, in the background: writes to a disk that may be slow."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, task: Callable[[], object]) -> None:
        """Run this after all earlier tasks."""
        self._tasks.put(task)

    def flush(self, within_s: float = _WRITE_S) -> None:
        """Wait until all tasks are done, but not forever."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait(within_s)

    def _work(self) -> None:
        while True:
            try:
                self._tasks.get()()
            except Exception:
                processes.say(traceback.format_exc())


class Program:
    """The program of one job's attempts."""

    def __init__(
        self,
        options: AttemptOptions,
        signals: processes.SignalQueue,
        argv: Sequence[str],
    ) -> None:
        """Store the parsed options and the original arguments."""
        self._options, self._signals = options, signals
        self._job = Job(options)
        phase, number = os.environ[Variable.PHASE], int(os.environ[Variable.ATTEMPT])
        self._trains = phase == "train"
        self._results: queue.SimpleQueue[e.Event | e.Cue] = queue.SimpleQueue()
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._woken, False)
        self._files = Lane()
        self._step = self._fetching = 0
        """The pids of srun or its stand-in, and of the process that fetches a checkpoint."""
        self._copies = False
        self._standby: relaunch.Standby | None = None
        state = _own(read_attempt(RUN, phase, number), os.environ)
        self._controller = controller_of(state.job_id, state.restarts, options.retry_s)
        self._open(state)
        server = options.server if self._trains else []
        self._servers = Servers(server, state, own_session=self._controller.own_session)
        caps = self._caps.node_hours if self._trains else 0
        looks = options.standby or self._mirror.wanted or caps or self._growth
        looks = looks or self._follow.wanted
        watch = period_of(60 * options.hang_minutes) if options.hang_minutes else None
        beats = self._job.beats is not None
        rules = Rules(
            trains=self._trains,
            graphs=options.graphs,
            compiles=phase == "precompile",
            beats=beats,
            replaces=bool(options.spares or options.fewer),
            standby=self._trains and options.standby,
            looks_s=watch or (machine.LOOK_S if looks else None),
            retry_s=tuple(self._controller.retry_s),
            signals_workers=self._controller.signals_workers,
            roles=bool(server),
            in_step=self._controller.in_step,
        )
        self._machine = Machine(rules, state, self._job.allocation, time.monotonic())
        self._successor: Successor | None = None
        may_outlive = self._controller.requeues and not self._controller.in_step
        if self._trains and rules.replaces and may_outlive and first.is_missed():
            self._successor = Successor(argv)
        self._lost_first = ""
        """The first node, if this program has taken over from the program there."""

    def _open(self, state: Attempt) -> None:
        """Open the files of one attempt."""
        self._caps = Caps(RUN, read_json(RUN.caps_file))
        self._mirror = MirrorProcess(wanted=self._trains)
        self._follow = Follow(RUN, wanted=self._trains and self._controller.requeues)
        self._messages = Messages(state, self._job.senders)
        self._hang: HangWatch | None = None
        self._growth: Growth | None = None
        if self._trains and self._options.grow_minutes and self._controller.requeues:
            self._growth = Growth(state, self._controller, 60 * self._options.grow_minutes)
        self._judgement = Judgement(state, self._options, self._job, self._controller, self._caps)
        self._before = (0, 0)

    def run(self) -> int:
        """Run all attempts of the job, and return the exit code."""
        return self._run(self._machine.begin)

    def take_over(self, first_node: str, end_orphans: Callable[[Sequence[str]], int]) -> int:
        """Take over from a lost first node; `end_orphans` returns 0 when all processes are gone."""
        self._lost_first, self._end_orphans = first_node, end_orphans
        state = self._machine.state
        cause = read_json(RUN.stop_file(state.phase, state.attempt)).get("cause")
        saves = cause in (EndCause.TIME_LIMIT, EndCause.CANCELLED)
        begun = self._machine.take_over(time.monotonic(), saves=saves)
        self._listen()
        return self._run(lambda now: begun)

    def _run(self, begin: Callable[[float], list[Decision]]) -> int:
        try:
            self._do(begin(time.monotonic()))
            while self._machine.stage is not Stage.OVER:
                for event in self._wait():
                    self._tell(event)
        except OSError as error:
            what = error.filename or self._machine.doing
            processes.say(f"error: {what}: {error.strerror}")
            return self._close(1)
        except Exception:
            processes.say(traceback.format_exc())
            return self._close(1)
        self._files.flush(_LAST_WRITE_S)
        return self._machine.code

    # -- events

    def _wait(self) -> Iterator[Happening]:
        """Wait until something happens, and yield the event."""
        wakes_at = self._machine.wakes_at
        if self._copies:
            wakes_at = min(wakes_at, time.monotonic() + machine.LOOK_S)
        within_s = None if wakes_at == math.inf else max(0.0, wakes_at - time.monotonic())
        beats = self._job.beats
        also = [self._woken, *([beats.fileno()] if beats else []), *self._servers.filenos()]
        arrived, _ = self._signals.wait(within_s, also)
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        if arrived & processes.END_SIGNALS:
            # The guard of a job on this machine says why it ends the job.
            here = isinstance(self._controller, NoController)
            why = str(read_json(RUN.guard_file).get("why", "")) if here else ""
            yield e.Terminated("" if why and RUN.cancelled_file.exists() else why)
        elif signal.SIGUSR1 in arrived:  # the time limit is near, or trnslurm cancel asks
            yield e.Cue.SAVE_ASKED
        yield from beats.read() if beats else ()
        yield from self._servers.read()
        yield from self._ended()
        with suppress(queue.Empty):
            while True:
                yield self._results.get_nowait()
        if time.monotonic() >= self._machine.wakes_at:
            yield e.Cue.TICK

    def _ended(self) -> Iterator[e.Event | e.Cue]:
        """Yield the events for processes that have ended."""
        if self._step and (code := _code_of(self._step)) is not None:
            self._step = 0
            self._answer(partial(self._end_of_step, code), e.StepEnded(code))
        if self._standby and self._standby.has_ended():
            yield e.Cue.AHEAD_ENDED
        if self._successor:
            self._successor.has_ended()
        if self._fetching and (code := _code_of(self._fetching)) is not None:
            self._fetching = 0
            yield self._fetched(code)
        if self._copies and (not self._mirror.runs() or RUN.cancelled_file.exists()):
            self._copies = False
            yield e.Cue.COPIED

    def _end_of_step(self, code: int) -> e.StepEnded:
        if relay := self._job.relay:
            relay.join(_RELAY_S)
            self._job.relay = None
        state = self._machine.state
        logs = RUN.node_logs(state.phase, state.attempt)
        aborted, gave_up = (a > b for a, b in zip(steps_of(state), self._before))
        return e.StepEnded(code, aborted=aborted, began=bool(logs), left_over=gave_up)

    def _fetched(self, code: int) -> e.Event:
        if code:
            return e.Refused(1, f"{self._machine.doing}: {why_not() or 'see the lines above'}")
        return e.HasCheckpoint(*saved_by_now())

    def _tell(self, event: Happening) -> None:
        """Pass an event to the machine, and carry out its decisions."""
        if isinstance(event, e.Launched) and event.state:
            self._job.begin_again(event.launch)
            self._open(event.state)
            if event.runs and self._standby:
                self._step, self._job.relay = self._standby.step, self._standby.relay
                if not self._step:  # it ended when it was ordered to train
                    self._results.put(e.StepEnded(1))
            self._standby = None
        if isinstance(event, e.Served):
            os.environ.update(event.variables)
        made = self._machine
        before = made.stage
        self._do(made.on(event, time.monotonic()))
        if made.stage is not before:
            state = made.state
            line = {"time": round(time.time(), 2), "phase": state.phase, "attempt": state.attempt}
            line |= {"from": before, "to": made.stage, "event": e.brief(event)}
            self._files.put(partial(_append, RUN.stages_file, line))

    def _answer(self, task: Callable[[], e.Event | e.Cue], otherwise: e.Event) -> None:
        """Run a task in the background. Its result is an event."""

        def do() -> None:
            event: e.Event | e.Cue
            try:
                event = task()
            except CacheError as error:
                event = e.Refused(1, str(error))
            except OSError as error:
                what = error.filename or self._machine.doing
                processes.say(f"error: {what}: {error.strerror}")
                event = otherwise
            except Exception:
                processes.say(traceback.format_exc())
                event = otherwise
            self._results.put(event)
            os.write(self._wakes, b"x")

        threading.Thread(target=do, daemon=True).start()

    # -- decisions

    def _do(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._do_one(decision)

    def _do_one(self, decision: Decision) -> None:
        state = self._machine.state
        if isinstance(decision, e.Act):
            self._act(decision)
        elif isinstance(decision, e.Fetch):
            start_heartbeat()
            self._fetching = start_fetching(decision.place)
        elif isinstance(decision, e.Signal):
            if self._step:
                processes.send(self._step, decision.signum)
        elif isinstance(decision, e.EndNodes):
            if self._job.beats:
                self._job.beats.end(state.attempt, decision.nodes)
        elif isinstance(decision, e.EndOrphans):
            ends = partial(self._orphans_end, decision.hosts)
            self._answer(ends, e.StepEnded(1, left_over=True))
        elif isinstance(decision, e.AskToStop):
            file = RUN.stop_file(state.phase, state.attempt)
            self._files.put(partial(_ask_to_stop, file, decision.cause))
        elif isinstance(decision, e.AskNodes):
            hosts = decision.hosts
            self._answer(partial(self._ask_nodes, hosts), e.Answered(hosts, frozenset()))
        elif isinstance(decision, e.LookAtFiles):
            self._mirror.look()
            self._follow.look()
            self._answer(partial(self._look, decision.silent), e.Looked())
        elif isinstance(decision, e.Judge):
            self._answer(partial(self._judge, decision), e.Judged(None, decision.code or 1))
        elif isinstance(decision, e.EndAhead):
            self._end_ahead(wait=decision.wait)
        elif isinstance(decision, e.LaunchNext):
            self._launch(state, decision.hosts, ahead=decision.ahead)
        elif isinstance(decision, e.Requeue):
            self._answer(partial(self._requeue, decision), e.Requeued("an error"))
        elif isinstance(decision, e.Close):
            self._close(decision.code, again=decision.again)
        elif isinstance(decision, e.Say):
            processes.say(decision.text)

    def _act(self, act: e.Act) -> None:
        state, controller = self._machine.state, self._controller
        if act is e.Act.CHECK:
            check = partial(begins, replace(state), self._options, self._caps, controller)
            self._answer(check, e.Refused(1))
        elif act is e.Act.END_FETCH:
            processes.send(self._fetching, signal.SIGKILL)
        elif act is e.Act.KEY:
            self._answer(self._key, e.Refused(1))
        elif act is e.Act.SERVE:
            self._servers.serve()
        elif act is e.Act.HOLD_SERVERS:
            self._servers.hold()
        elif act is e.Act.COMMIT:
            self._answer(self._commit, e.Refused(1))
        elif act is e.Act.BEGIN:
            self._begin(state)
        elif act is e.Act.START:
            self._before = steps_of(state)
            self._step = processes.spawn(self._options.step, own_session=controller.own_session)
        elif act is e.Act.RECORD:
            self._files.put(partial(note, replace(state)))
        elif act is e.Act.ASK_WHAT_ENDS:
            self._answer(lambda: e.Told(controller.what_ends_job()), e.Told(State.RUNNING))
        elif act is e.Act.PREPARE:
            self._standby = relaunch.Standby(self._script(state.hosts), replace(state))
            self._answer(self._standby.prepare, e.Prepared(possible=False))
        elif act is e.Act.START_AHEAD:
            if self._standby:
                self._standby.start()
        elif act is e.Act.COPY:
            self._mirror.finish()
            self._copies = True
            os.write(self._wakes, b"x")

    def _orphans_end(self, hosts: Sequence[str]) -> e.StepEnded:
        there = [host for host in hosts if host not in self._controller.silent(hosts)]
        return e.StepEnded(137, left_over=self._end_orphans(there) != 0)

    def _ask_nodes(self, hosts: frozenset[str]) -> e.Event:
        return e.Answered(hosts, frozenset(self._controller.silent(sorted(hosts))))

    def _key(self) -> e.Event:
        key = graphs.own_key(RUN.path)
        os.environ[Variable.GRAPH_KEY] = key  # read_place looks for it
        return e.Keyed(self._machine.rules.compiles and graphs.is_warm(read_place()))

    def _commit(self) -> e.Cue:
        graphs.commit(read_place())
        return e.Cue.COMMITTED

    def _begin(self, state: Attempt) -> None:
        """Start what runs alongside the step."""
        newest = newest_checkpoint(RUN)
        os.environ[Variable.RESUME] = str(newest.absolute()) if newest else ""
        self._listen()
        if self._machine.rules.replaces and self._controller.holds:
            os.environ[NO_KILL] = "set"
        start_heartbeat()
        if self._trains:  # a restart would wait half a second until the causes are read
            threading.Thread(target=matching, args=("",), daemon=True).start()
        if self._options.hang_minutes:
            self._hang = HangWatch(state, self._options.hang_minutes)
        self._messages.begun(earlier_attempts(state))

    def _listen(self) -> None:
        """Tell the nodes and the successor where to send their heartbeats."""
        if beats := self._job.beats:
            os.environ[Variable.BEATS] = beats.place
        if self._successor:
            made = self._machine
            gone = {made.home, *made.lost}
            others = [host for host in made.allocation if host not in gone]
            log = RUN.batch_log(made.state.phase, made.state.job_id)
            self._successor.begin([made.home, *others], log)

    def _look(self, silent: frozenset[int]) -> e.Event:
        state = self._machine.state
        hangs = False
        if self._hang:
            try:
                hangs = self._hang.look(silent)
            except Exception:
                processes.say(traceback.format_exc())
                self._hang = None
        enough = self._caps.near() if self._trains else EndCause.NONE
        saved = self._options.standby and has_saved_since(state)
        grows = bool(
            self._growth
            and self._growth.wanted(self._job.counts())
            and not self._caps.reached("train", state.attempt + 1)
        )
        return e.Looked(saved, hangs, enough, self._caps.grace_s, grows)

    def _script(self, hosts: str) -> str:
        return self._job.scripts[len(hosts.split(","))]

    def _launch(self, state: Attempt, hosts: Sequence[str], *, ahead: bool) -> None:
        self._job.allocation = self._machine.allocation
        standby, before = self._standby, replace(state)
        if not ahead:
            self._end_ahead(wait=False)

        def launch() -> e.Event:
            if ahead and standby and (begun := standby.go()):
                return e.Launched(_of(begun), runs=True, launch=begun)
            if standby:
                standby.end()
            script = self._job.scripts[len(hosts)]
            told = relaunch.ask(script, before.restarts, hosts)
            if isinstance(told, int):
                return e.Launched(None, told)
            own = _of(told)
            if other := _other_of_job(before, own.attempt):
                RUN.state_file(own.phase, own.attempt).unlink(missing_ok=True)
                _leave_to(other)
            return e.Launched(own, launch=told)

        self._answer(launch, e.Launched(None, 1))

    def _end_ahead(self, *, wait: bool) -> None:
        if self._standby:
            self._standby.end(wait=wait)
            self._standby = None

    def _judge(self, decision: e.Judge) -> e.Event:
        self._stay_if_replaced()
        judged = self._judgement.of(decision)
        self._stay_if_replaced()  # it reads logs, which may take long
        return judged

    def _stay_if_replaced(self) -> None:
        state = self._machine.state
        newest = max(RUN.attempt_numbers(state.phase), default=0)
        if self._successor and (other := _other_of_job(state, newest + 1)):
            _leave_to(other)

    def _requeue(self, decision: e.Requeue) -> e.Event:
        self._files.flush()  # the record says so before Slurm is asked: SIGKILL may follow
        controller = self._controller
        components = self._job.components(self._machine.state.job_id)
        if self._successor and not decision.already and controller.is_reached():
            self._stay_if_replaced()  # a node that had lost its network is back
        every = [host for hosts in components.values() for host in hosts]
        if decision.leaves and (gone := {*decision.lost, *controller.silent(every)}):
            # A requeue would wait for them.
            controller.leave(components, gone)
        if self._lost_first and not decision.already:
            controller.wait_until_left(self._lost_first)
        refused = "" if decision.already else controller.requeue()
        if not refused and decision.bad:
            # The job is pending now, so its next start leaves these nodes out.
            nodes = decision.bad.applied_to(controller.excluded_nodes())
            if nodes is not None and not controller.exclude(nodes):
                processes.say(f"warning: {nodes} will not be left out of the next attempt")
        return e.Requeued(refused)

    def _close(self, code: int, *, again: bool = False) -> int:
        """Write an attempt's final state, print why it ended, and return its exit code."""
        made = self._machine
        state, judged = made.state, self._judgement
        if state.under_way:
            if code:
                why = judged.found.brief if made.launched and judged.found else ""
                state.become(State.FAILED, why or f"exit code {code} while {made.doing}")
            else:
                state.become(State.COMPLETED, state.reason)
        state.exit_code = code
        self._mirror.end()
        self._files.flush()
        note(state)
        if made.launched and (state.state is State.FAILED or state.cause == EndCause.CRASH):
            judged.say_why()
        ended = state.state in (State.FAILED, State.STOPPED, State.TIMEOUT)
        if code and self._options.expedite and ended:
            self._controller.never_requeue()
        reason = f" ({state.reason})" if state.reason else ""
        text = f"{utc_time()} {state.phase} attempt {state.attempt}: {state.state}{reason}"
        processes.say(text, _STDOUT)
        if state.state.final and (missing := self._mirror.missing()):
            processes.say(f"warning: {missing}")
        if not again:
            self._servers.finish(min(_SERVERS_S, made.last_moment - time.monotonic()))
            self._follow.finish(min(_FOLLOW_S, made.last_moment - time.monotonic()))
            self._end_ahead(wait=True)
        within_s = 0 if again else made.last_moment - time.monotonic()
        self._messages.ended(within_s, lambda: judged.found if made.launched else None)
        if code and not again:
            self._stay_if_replaced()
        return code


def _own(state: Attempt, environ: Mapping[str, str]) -> Attempt:
    """Record where an attempt runs."""
    state.host, state.pid = os.uname().nodename, os.getpid()
    apart = sum(map(len, hosts_of_roles(environ)[1:]))
    state.nodes = int(environ.get("SLURM_JOB_NUM_NODES", 0)) + apart
    state.hosts = environ[Variable.HOSTS]
    return state


def _of(launch: relaunch.Launch) -> Attempt:
    environ = launch.environ
    phase, number = environ[Variable.PHASE], int(environ[Variable.ATTEMPT])
    return _own(read_attempt(RUN, phase, number), environ)


def _other_of_job(before: Attempt, number: int) -> Attempt | None:
    """Return the attempt of this job that another program has started after `before`."""
    between = (read_attempt(RUN, before.phase, n) for n in range(before.attempt + 1, number))
    job = before.job_id, before.restarts
    return next((each for each in between if (each.job_id, each.restarts) == job), None)


def _leave_to(other: Attempt) -> NoReturn:
    """Wait for the job's end: this node was lost for a while, and another node has taken over.

    The job would end with this program.
    """
    processes.say(f"attempt {other.attempt} was started on {other.host}, which continues the job")
    while True:
        time.sleep(_WRITE_S)


def _append(file: Path, line: Mapping[str, object]) -> None:
    with suppress(OSError), file.open("a", encoding="ascii") as stream:
        stream.write(f"{json.dumps(line)}\n")


def _code_of(pid: int) -> int | None:
    """Return a child's exit code, or None if it is still running."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return processes.exit_code(status) if ended else None


def _ask_to_stop(file: Path, cause: EndCause | None) -> None:
    """Ask the workers to save and end together. Worker 0 looks for this file."""
    if cause is None:
        cause = EndCause.CANCELLED if RUN.cancelled_file.exists() else EndCause.TIME_LIMIT
    with suppress(OSError):
        write_json(file, {"cause": cause, "time": int(time.time())})
