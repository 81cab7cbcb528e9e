"""The attempts of a job as a state machine: events in, decisions out.

It does no I/O, never waits, and gets the time from its caller. TABLE, at the end, says what each
event does in each stage. Events that are not in it change nothing.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Union

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.meant import Meant, Name
from trnslurm.contract.states import EndCause, State
from trnslurm.frozen import Frozen
from trnslurm.node.attempt import events as e
from trnslurm.node.attempt.roll import Roll
from trnslurm.node.beats import PERIOD_S, Beat
from trnslurm.node.hosts import brief

TERMINATED = 128 + signal.SIGTERM
LOOK_S = 10.0
"""How often the run's files are read."""
AHEAD_AFTER_S = 60.0
"""How long an attempt runs before standby workers for the next attempt are started."""
# The program ends within this share of the time between SIGTERM and SIGKILL.
_LAST_SHARE = 0.9
# The step gets this share of the time between SIGTERM and SIGKILL. The rest is for the end of the
# program itself: these seconds, if there is enough time.
_PATIENCE_SHARE, _LEAST_SHARE = 0.75, 0.3
_OWN_END_S = 3.0
TELL_AGAIN_S = 0.5
END_WITHIN_S = 15.0
"""How long the nodes have to kill their processes, since the last node did so or was lost."""
_ASK_AGAIN_S, _MOST_PAUSE_S = 10.0, 60.0
_BY_SLURM = {
    State.REQUEUED: (State.REQUEUED, "requeued"),
    State.TIMEOUT: (State.TIMEOUT, "time limit"),
    State.PREEMPTED: (State.PREEMPTED, "preempted"),
    State.CANCELLED: (State.CANCELLED, ""),
    State.RUNNING: (State.CANCELLED, ""),
    State.LOST: (State.FAILED, "Slurm lost its record of the job and ended it"),
}
"""The state and reason that an attempt gets, by what the controller says."""


Happening = Union[e.Event, e.Cue, Beat]
Decision = Union[e.Decision, e.Act]
Kind = Union[type[e.Event], type[Beat], e.Cue]


def kind_of(event: Happening) -> Kind:
    """Return the kind by which TABLE looks up an event."""
    return event if isinstance(event, e.Cue) else type(event)


class Stage(Meant):
    """The stage that an attempt is in, and what its program does in this stage."""

    CHECKING = "checking", "checks whether the attempt may begin"
    FETCHING = "fetching", "fetches the checkpoint to resume from, if only S3 has it"
    KEYING = "keying", "computes the key of the graphs that the job needs"
    SERVING = "serving", "waits until the servers of the job's roles are ready"
    RUNNING = "running", "runs the job step: srun starts node.sh on each node"
    PAUSING = "pausing", "waits before it starts srun again, because the controller was busy"
    ENDING = "ending", "ends the job step because of Slurm, a lost node, a hang or a limit"
    ASKING = "asking", "asks Slurm whether it is ending the job, and which nodes respond"
    VERIFYING = "verifying", "checks that all graphs are compiled"
    JUDGING = "judging", "decides how the attempt ended, and where the next one can run"
    CONFIRMING = "confirming", "asks Slurm why it sent TERM"
    LAUNCHING = "launching", "prepares the next attempt in this job"
    REQUEUING = "requeuing", "asks Slurm to requeue the job"
    COPYING = "copying", "waits until the last checkpoint is in S3"
    LEAVING = "leaving", "waits until Slurm reports what ended the job, and records that"
    OVER = "over", "has ended"


class Ahead(Name):
    """The state of the standby workers for the next attempt."""

    NONE = "none"
    PREPARING = "preparing"
    WAITING = "waiting"
    OVER = "over"


class Rules(Frozen):
    """The rules that hold for all attempts of a job."""

    trains: bool
    graphs: bool = False
    compiles: bool = False
    """Whether the phase compiles the graphs."""
    beats: bool = False
    """Whether the nodes send heartbeats."""
    replaces: bool = False
    """Whether the job can continue without a node."""
    standby: bool = False
    looks_s: float | None = None
    """How often the run's files are read, or None for never."""
    retry_s: tuple[float, ...] = ()
    signals_workers: bool = True
    """Whether the workers get the SIGTERM that ends the job, and SIGKILL some time later."""
    roles: bool = False
    """Whether servers run alongside training."""
    in_step: bool = False
    """Whether the run is a job step in a job that a user holds."""


class Machine:
    """The attempts of one job, one after the other."""

    def __init__(
        self, rules: Rules, state: Attempt, allocation: Sequence[str], now: float = 0.0
    ) -> None:
        self.rules, self.state, self.now = rules, state, now
        self.allocation = [*allocation]
        """The job's nodes, without the lost and bad ones."""
        self.home = self.allocation[0]
        """The node on which this program runs."""
        self.roll = Roll()
        self.stage = Stage.CHECKING
        self.code = 0
        self._out: list[Decision] = []
        self._answers: set[str] = set()
        """The nodes that have responded at least once."""
        self.kill_wait_s = 30.0
        """The time between SIGTERM and SIGKILL."""
        self._term_pending = self._save_pending = False
        """The signals that arrived between two attempts."""
        self._reset()

    def _reset(self) -> None:
        """Forget the previous attempt."""
        self.doing = "starting"
        self.lost: set[str] = set()
        self.left_over = False
        """Whether processes of the step may still be on the nodes."""
        self.launched = False
        """Whether the nodes have started, so that their logs may explain a failure."""
        self.term = self.saves = False
        """Whether Slurm is ending the job, and whether the workers were asked to save."""
        self.last_moment = math.inf
        """When this program must have ended, because SIGKILL follows."""
        self.ahead = Ahead.NONE
        self._told: State | None = None
        self._srun_gave_up = False
        self._ended_early: e.StepEnded | None = None
        """How the standby step ended, if it ended before the attempt had started."""
        self._step_runs = self._looking = self._tells = self._aborted = False
        self._capped = self._grows = False
        self._tries = 0
        self._unanswered = 0
        self._left = -1
        """How many nodes must still kill their processes."""
        self._deadline = self._again_at = self._capped_at = self._give_up_at = math.inf
        self._watch_at = self._look_at = self._tell_at = self._ahead_at = math.inf
        self._why = ""
        self._ask_at: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        self._asking: set[str] = set()
        self._code = 0
        self._judged_as = e.Judged(None, 0)
        self._server: e.ServerFailed | None = None
        """The server that caused the step to end."""

    # -- from outside

    def begin(self, now: float) -> list[Decision]:
        """Start the first attempt, and return what must be done."""
        self.now = now
        self._check()
        return self._taken()

    def take_over(self, now: float, *, saves: bool) -> list[Decision]:
        """Take over on the second node, because the first node and its program are lost.

        `saves` says whether that program has asked the workers to save.
        """
        self.now, self.stage = now, Stage.ENDING
        self.doing = f"taking over from {self.home}"
        self.state.become(State.RUNNING)  # if it had ended, the next one never started
        self.lost.add(self.home)
        self._answers.add(self.home)  # or its silence would mean nothing
        self.home = self.allocation[1]
        self._step_runs, self.saves = True, saves
        self._decide(e.EndOrphans(tuple(self.allocation[1:])))
        return self._taken()

    def on(self, event: Happening, now: float) -> list[Decision]:
        """Process an event, and return what must be done."""
        self.now = now
        kind = kind_of(event)
        if self.stage is Stage.OVER:
            return []
        if act := TABLE.get((self.stage, kind)) or ALWAYS.get(kind):
            act(self, event)
        return self._taken()

    @property
    def hosts(self) -> list[str]:
        return self.state.hosts.split(",") if self.state.hosts else []

    @property
    def patience_s(self) -> float:
        """How long after SIGTERM to wait for the step to end."""
        most = min(_PATIENCE_SHARE * self.kill_wait_s, self.kill_wait_s - _OWN_END_S)
        return max(most, _LEAST_SHARE * self.kill_wait_s)

    @property
    def wakes_at(self) -> float:
        """When the machine wants a TICK, or infinity for never."""
        if self.stage is Stage.PAUSING:
            return self._again_at
        if self.stage is Stage.RUNNING:
            return min(self._watch_at, self._look_at, self._capped_at)
        if self.stage is Stage.ENDING:
            return min(self._deadline, self._watch_at, self._tell_at, self._give_up_at)
        return math.inf

    # -- the beginning

    def _check(self) -> None:
        self.stage = Stage.CHECKING
        self._decide(e.Act.CHECK)
        if self._save_pending:
            self._save_pending = False
            self._save(e.Cue.SAVE_ASKED)
        if self._term_pending:
            self._term_pending = False
            self._terminate(e.Terminated())

    def _may_begin(self, event: e.MayBegin) -> None:
        self.kill_wait_s = event.kill_wait_s
        self.state.checkpoint, self.state.changed = event.checkpoint, event.changed
        if event.elsewhere:
            self.stage = Stage.FETCHING
            self.doing = f"fetching the newest checkpoint of {event.elsewhere}"
            self._decide(e.Fetch(event.elsewhere))
        else:
            self._find_key()

    def _fetched(self, event: e.HasCheckpoint) -> None:
        self.state.checkpoint, self.state.changed = event.checkpoint, event.changed
        self._find_key()

    def _find_key(self) -> None:
        if self.rules.graphs:
            self.stage, self.doing = Stage.KEYING, "reading the key of the graphs"
            self._decide(e.Act.KEY)
        else:
            self._serve()

    def _keyed(self, event: e.Keyed) -> None:
        if event.warm:
            self._close(0)
        else:
            self._serve()

    def _serve(self) -> None:
        if self.rules.roles:
            self.stage, self.doing = Stage.SERVING, "waiting for the servers of its roles"
            self._decide(e.Act.SERVE)
        else:
            self._run()

    def _served(self, _: e.Served) -> None:
        self._run()

    def _server_failed(self, event: e.ServerFailed) -> None:
        """End the training, which cannot continue as it is."""
        if self._server:
            return
        self._server, self.state.server = event, event.log
        if self._step_runs:
            self._end_step()
        else:
            self._over(1)

    def _refused(self, event: e.Refused) -> None:
        if event.message:
            self._decide(e.Say(f"error: {event.message}"))
        if event.state:
            self.state.become(event.state, event.reason, event.cause)
        self.doing = event.doing or self.doing
        self._leave(event.code)

    # -- the step

    def _run(self) -> None:
        rules = self.rules
        self.stage, self.doing = Stage.RUNNING, f"running on {brief(self.hosts)}"
        self.state.become(State.RUNNING, self.state.reason)
        self._decide(e.Act.RECORD, e.Act.BEGIN)
        if rules.beats:
            self.roll.begin(self.state.attempt, len(self.hosts), self.now)
            self._watch_at = self.now + PERIOD_S
        if rules.standby:
            self._ahead_at = self.now + AHEAD_AFTER_S
        if rules.looks_s is not None:
            self._look_at = self.now
        if rules.trains:
            self._ask({*self.allocation} - {self.home} - self._answers)
        if self._ended_early:
            self._step_ended(self._ended_early)
        elif not self._step_runs:
            self._start()

    def _start(self, _: e.Cue | None = None) -> None:
        self.stage = Stage.RUNNING
        self._step_runs = True
        self._decide(e.Act.START)

    def _tick(self, _: e.Cue) -> None:
        """Check the step as often as it needs."""
        if self.now >= self._capped_at:
            self._end_step()
            return
        if self.now >= self._watch_at:
            self._watch_at = self.now + PERIOD_S
            self.roll.awake(self.now)
            if self.rules.replaces:
                self._ask_silent(self.roll.silent(self.now))
        if self.now >= self._look_at:
            assert self.rules.looks_s
            self._look_at = self.now + self.rules.looks_s
            if not self._looking:
                self._looking = True
                self._decide(e.LookAtFiles(frozenset(self.roll.silent(self.now))))

    def _ask_silent(self, nodes: Set[int]) -> None:
        """Ask about the nodes that send no heartbeat, all in one query."""
        silent = self._named(nodes) - self.lost - self._asking
        self._ask(host for host in silent if self._ask_at.get(host, 0.0) <= self.now)

    def _ask(self, hosts: Iterable[str]) -> None:
        if asked := frozenset(hosts):
            self._asking |= asked
            for host in asked:  # a node that responds without heartbeats is asked less often
                pause_s = self._pause_s.get(host, _ASK_AGAIN_S)
                self._ask_at[host] = self.now + pause_s
                self._pause_s[host] = min(2 * pause_s, _MOST_PAUSE_S)
            self._decide(e.AskNodes(asked))

    def _answered(self, event: e.Answered) -> None:
        """Note which nodes respond. A node that neither responds nor sends heartbeats is lost."""
        self._asking -= event.asked
        self._answers |= event.asked - event.silent
        # If no node has ever responded, the network may block all queries.
        gone = event.silent & {*self.allocation} if self._answers else set()
        if self.stage is Stage.RUNNING:
            gone &= self._named(self.roll.silent(self.now)) if self.rules.replaces else set()
        elif self.stage is Stage.ENDING:
            gone -= self._named(self.roll.present(self.now) | self.roll.ended)
        self.lost |= gone
        if self.stage is Stage.RUNNING and gone:
            self._end_step()
        elif self.stage is Stage.ENDING and gone and self._tells:
            self._end_nodes()
        elif self.stage is Stage.ASKING:
            self._go_on()

    def _looked(self, event: e.Looked) -> None:
        self._looking = False
        if self.stage is not Stage.RUNNING:
            return
        if event.enough and not self._capped:
            self._capped, self._capped_at = True, self.now + event.grace_s
            self._decide(e.AskToStop(event.enough))
        if event.grows and not (self._grows or self._capped or self.saves):
            self._grows = True
            self._decide(e.AskToStop(EndCause.GROWS))
        if event.hangs:
            self._end_step()
        elif event.saved and self.ahead is Ahead.NONE and self.now >= self._ahead_at:
            self.ahead, self._ahead_at = Ahead.PREPARING, math.inf
            self._decide(e.Act.PREPARE)

    def _beat(self, event: Beat) -> None:
        self.roll.hear(event.node, event.attempt, self.now, ended=event.ended)
        if event.ended and self._tells:
            self._end_nodes()

    # -- its end

    def _end_step(self) -> None:
        """End the step at once: nodes are lost, it hangs, or a cap is reached."""
        self.stage = Stage.ENDING
        self._ask_at, self._pause_s = {}, {}  # nodes that have responded are asked again at once
        if self.rules.in_step:
            # What a killed srun leaves on the nodes would stay in the user's job.
            self._decide(e.Signal(signal.SIGTERM))  # srun then kills its tasks
            self._deadline = self.now + self.patience_s
            return
        # When srun dies, a helper of it has Slurm kill the step (src/srun/libsrun/srun_job.c,
        # _shepherd_spawn): the nodes' programs might not live long enough to answer.
        self._decide(e.Signal(signal.SIGSTOP))
        if self.rules.beats:
            self._tells, self._watch_at = True, self.now
            self._end_nodes()
        else:
            self._give_up()

    def _end_nodes(self) -> None:
        """Order the nodes to end their processes, and kill srun when all have done so."""
        left = self._still_there()
        if len(left) != self._left:
            self._left, self._give_up_at = len(left), self.now + END_WITHIN_S
        if not left:
            self._kill()
            return
        self._tell_at = self.now + TELL_AGAIN_S
        self._decide(e.EndNodes(left))

    def _still_there(self) -> frozenset[int]:
        """Return the nodes that must still kill their processes."""
        there = {number for number, host in enumerate(self.hosts) if host not in self.lost}
        return frozenset(there - self.roll.ended)

    def _give_up(self) -> None:
        self.left_over = True
        self._kill()

    def _kill(self) -> None:
        self._tells = False
        self._tell_at = self._give_up_at = self._deadline = self._watch_at = math.inf
        self._decide(e.Signal(signal.SIGKILL))

    def _tick_of_end(self, _: e.Cue) -> None:
        if (late_s := self.now - self.wakes_at) > PERIOD_S:  # this program was frozen
            self._give_up_at += late_s
        if self.now >= self._deadline:
            self._kill()
        elif self.now >= self._give_up_at:
            self._give_up()
        else:
            if self.now >= self._watch_at:
                self._watch_at = self.now + PERIOD_S
                self.roll.awake(self.now)
                self._ask_silent(self._still_there() - self.roll.present(self.now))
            if self._tells and self.now >= self._tell_at:
                self._end_nodes()

    def _step_ended(self, event: e.StepEnded) -> None:
        self._step_runs = False
        code = event.code
        may_retry = self._tries < len(self.rules.retry_s) and self.stage is Stage.RUNNING
        # After any start there is a node log, and the exit code is the job's own.
        if code and not event.began and may_retry and not self._asked_to_end:
            self.stage = Stage.PAUSING
            self._again_at = self.now + self.rules.retry_s[self._tries]
            self._tries, self._code = self._tries + 1, code
            return
        self._over(code, aborted=event.aborted, left_over=event.left_over)

    def _ended_too_early(self, event: e.StepEnded) -> None:
        self._step_runs, self._ended_early = False, event

    def _over(self, code: int, *, aborted: bool = False, left_over: bool = False) -> None:
        """Continue after the last step of the attempt."""
        if self.term and not self.rules.trains:
            self._leave(TERMINATED)
            return
        self.launched = True
        self._code, self._aborted, self._tells = code, aborted, False
        self._srun_gave_up = left_over
        self.stage = Stage.ASKING
        if self.rules.trains and not self.term:
            self._ask_what_ends()
            if code:
                self._ask({*self.allocation} - {self.home} - self.lost)
        self._go_on()

    @property
    def _asked_to_end(self) -> bool:
        return self.term or (self.rules.trains and self.saves)

    def _go_on(self) -> None:
        """Decide about the attempt when all replies have arrived."""
        if self._unanswered or self._asking:
            return
        if self.term:
            self._judge()
            return
        ended_by, code = self._told, self._code
        if self.rules.trains:
            # srun returns 0 when Slurm gives up one of its nodes, even if workers failed.
            if code == 0 and ended_by in (State.REQUEUED, State.CANCELLED):
                self._become(ended_by, ended_by.lower())
                code = TERMINATED
            # At a preemption with a GraceTime, Slurm sends TERM to the step only, or with
            # send_user_signal the signal that precedes a time limit (_job_check_grace_internal in
            # src/interfaces/preempt.c).
            elif ended_by is State.PREEMPTED:
                self._become(ended_by, "preempted")
        if self._aborted:
            code = code or 1
        self._code = code
        if self._srun_gave_up:  # lost nodes are a reason, and have no processes
            ended = self._named(self.roll.ended) | self.lost
            self.left_over |= not (self.lost and ended.issuperset(self.hosts))
        if code == 0 and self.rules.graphs and self.rules.compiles:
            self.stage, self.doing = Stage.VERIFYING, "verifying the graphs"
            self._decide(e.Act.COMMIT)
        else:
            self._judge()

    def _judge(self) -> None:
        if not self.rules.trains:
            self._leave(self._code)
            return
        self.stage = Stage.JUDGING
        near = self.saves and not self.term
        self._decide(
            e.Judge(
                self._code,
                tuple(host for host in self.allocation if host in self.lost),
                stays=not self.left_over and not near,
                capped=self._capped,
                server=self._server,
            )
        )

    def _committed(self, _: e.Cue) -> None:
        self._leave(0)

    def _judged(self, event: e.Judged) -> None:
        ending = event.ending
        if ending is None:
            self.doing = self.doing if self._code else "deciding how it ended"
            self._leave(event.code)
            return
        self._judged_as = event
        self._code = event.code
        self.state.become(ending.state, ending.reason, ending.cause)
        if ending.state is State.REQUEUED:
            self._confirm()
        else:
            self._leave(0 if ending.state is State.COMPLETED else self._exit_code)

    def _confirm(self) -> None:
        """Start again unless the job is being ended. If a signal has arrived, ask Slurm first."""
        if self._term_pending:
            self.stage = Stage.CONFIRMING
            self._ask_what_ends()
        else:
            self._start_again()

    def _start_again(self) -> None:
        judged, state = self._judged_as, self.state
        assert judged.ending
        if self._told is State.CANCELLED:  # Slurm would start it again anyway
            state.become(State.CANCELLED, "cancelled as it ended")
            self._leave(self._exit_code)
        elif self._told is State.RUNNING and judged.ending.here and not self._save_pending:
            state.become(State.RESTARTED, state.reason)
            self._launch([*judged.hosts])
        elif self._told is State.LOST:
            self._cannot_requeue("Slurm no longer has a record of the job")
        else:
            self.stage = Stage.REQUEUING
            leaves = self._told is State.RUNNING
            already = self._told is State.REQUEUED
            if not already:
                self._expect_kill()
            self._decide(
                e.Act.RECORD,  # before Slurm is asked: SIGKILL may follow
                e.Requeue(tuple(judged.lost), judged.bad, already=already, leaves=leaves),
            )

    def _requeued(self, event: e.Requeued) -> None:
        if event.why_not:
            self._cannot_requeue(event.why_not)
        else:
            self._leave(self._exit_code)

    @property
    def _exit_code(self) -> int:
        """Nonzero even after exit code 0, because runs that wait for success must keep waiting."""
        failed = self.state.cause in (EndCause.CRASH, EndCause.ERROR)
        return self._code if failed else TERMINATED

    def _cannot_requeue(self, why_not: str) -> None:
        ending, hosts = self._judged_as.ending, self._judged_as.hosts
        assert ending
        still_runs = self._told is State.RUNNING and not self._term_pending
        if ending.cause is EndCause.GROWS and hosts and still_runs:
            why = f"it could not be requeued for more nodes: {why_not}"
            self.state.become(State.RESTARTED, why)
            self._launch([*hosts])
            return
        why = f"{self.state.reason}; it could not be requeued: {why_not}"
        self.state.become(ending.refused, why)
        self._leave(self._exit_code)

    # -- the next attempt, in this job

    def _launch(self, hosts: list[str]) -> None:
        self.stage = Stage.LAUNCHING
        gone = {*self.hosts} - {*hosts} | self.lost
        self.allocation = [host for host in self.allocation if host not in gone]
        ready = self.ahead is Ahead.WAITING and hosts == self.hosts
        # Each of its nodes must send heartbeats as well: a frozen node does not.
        ahead = ready and self.roll.all_ahead(len(hosts), self.now)
        if self.ahead is Ahead.WAITING and not ahead:
            self._decide(e.EndAhead(wait=ready))  # a lost node of the step does not respond
        self.ahead = Ahead.OVER
        self._decide(e.Close(self._code, again=True), e.LaunchNext(tuple(hosts), ahead))

    def _launched(self, event: e.Launched) -> None:
        if event.state is None:
            self._exit(event.code)
            return
        runs = event.runs
        self.state = event.state
        self._reset()
        self._step_runs = runs
        self._check()

    def _prepared(self, event: e.Prepared) -> None:
        self.ahead = Ahead.WAITING if event.possible else Ahead.OVER
        if not event.possible:
            return
        if self.stage in (Stage.RUNNING, Stage.PAUSING):
            self._decide(e.Act.START_AHEAD)
        else:
            self.ahead = Ahead.OVER

    def _ahead_ended(self, _: e.Cue) -> None:
        self.ahead = Ahead.OVER

    # -- signals

    def _terminate(self, event: e.Terminated) -> None:
        """Record what ends the attempt: scancel, the time limit, preemption, or a requeue."""
        if self.term:
            return
        self.term, self._why = True, event.why
        self._expect_kill()
        if self.rules.roles:
            self._decide(e.Act.HOLD_SERVERS)
        if self.rules.trains:
            self._decide(e.AskToStop(EndCause.TERMINATED))
        self._become(State.CANCELLED, event.why)  # at once: SIGKILL may come before the reply
        self._ask_what_ends()
        if self._step_runs:
            self.stage = Stage.ENDING
            self._end_by_term()
        elif self.stage is Stage.PAUSING:
            self._over(self._code)
        else:
            if self.stage is Stage.FETCHING:
                self._decide(e.Act.END_FETCH)
            self._leave(TERMINATED)

    def _end_by_term(self) -> None:
        if self.rules.trains and self.rules.signals_workers:
            # torchrun abandons its workers at a second SIGTERM.
            self._deadline = min(self._deadline, self.now + self.patience_s)
        else:
            self._decide(e.Signal(signal.SIGTERM))

    def _told_of_job(self, event: e.Told) -> None:
        self._unanswered -= 1
        self._told = event.state
        if self.stage is Stage.CONFIRMING:
            if event.state is State.RUNNING:  # or no answer, but a signal came
                self._told = State.CANCELLED
            self._term_pending = False
            self._start_again()
            return
        if self.term:
            state, reason = _BY_SLURM[event.state]
            self._become(state, reason or self._why)
        if self.stage is Stage.ASKING:
            self._go_on()
        elif self.stage is Stage.LEAVING:
            self._close(self._code)

    def _note_term(self, _: e.Terminated) -> None:
        """Note a signal that arrives after the step has ended. Its meaning is queried later."""
        self._term_pending = True

    def _save(self, _: e.Cue) -> None:
        if self.rules.trains and not self.term:
            self.saves = True
            self._decide(e.AskToStop())
            if self.stage is Stage.PAUSING:
                self._over(self._code)

    def _note_save(self, _: e.Cue) -> None:
        self._save_pending = self.rules.trains

    # -- the last things

    def _leave(self, code: int) -> None:
        """End the attempt. After a completed training, wait until S3 has the last checkpoint."""
        self._code = code
        if self._unanswered:
            self.stage = Stage.LEAVING
        elif self.rules.trains and code == 0 and not self.term:
            self.stage, self.doing = Stage.COPYING, "copying the last checkpoint to S3"
            self._decide(e.Act.COPY)
        else:
            self._close(code)

    def _copied(self, _: e.Event | e.Cue) -> None:
        self._close(self._code)

    def _close(self, code: int) -> None:
        if self.ahead is Ahead.WAITING:
            self._decide(e.EndAhead())
        self.ahead = Ahead.OVER
        self._decide(e.Close(code))
        self._exit(code)

    def _exit(self, code: int) -> None:
        self.stage, self.code = Stage.OVER, code
        self._decide(e.EndProgram(code))

    # -- help

    def _become(self, state: State, reason: str) -> None:
        self.state.become(state, reason)
        self._decide(e.Act.RECORD)

    def _ask_what_ends(self) -> None:
        self._unanswered += 1
        self._decide(e.Act.ASK_WHAT_ENDS)

    def _expect_kill(self) -> None:
        self.last_moment = min(self.last_moment, self.now + _LAST_SHARE * self.kill_wait_s)

    def _named(self, nodes: Iterable[int]) -> set[str]:
        hosts = self.hosts
        return {hosts[node] for node in nodes if node < len(hosts)}

    def _decide(self, *decisions: Decision) -> None:
        self._out += decisions

    def _taken(self) -> list[Decision]:
        out, self._out = self._out, []
        return out


_Act = Callable[[Machine, Any], None]
_NO_STEP = (
    *(Stage.CHECKING, Stage.FETCHING, Stage.KEYING, Stage.SERVING, Stage.PAUSING),
    Stage.VERIFYING,
)
_WITH_STEP = (Stage.RUNNING, Stage.ENDING)
_AFTER = (Stage.ASKING, Stage.JUDGING, Stage.CONFIRMING, Stage.LAUNCHING)
TABLE: Mapping[tuple[Stage, Kind], _Act] = {
    (Stage.CHECKING, e.MayBegin): Machine._may_begin,
    (Stage.CHECKING, e.Refused): Machine._refused,
    (Stage.CHECKING, e.StepEnded): Machine._ended_too_early,
    (Stage.KEYING, e.StepEnded): Machine._ended_too_early,
    (Stage.FETCHING, e.HasCheckpoint): Machine._fetched,
    (Stage.FETCHING, e.Refused): Machine._refused,
    (Stage.KEYING, e.Keyed): Machine._keyed,
    (Stage.KEYING, e.Refused): Machine._refused,
    (Stage.SERVING, e.Served): Machine._served,
    **{
        (stage, e.ServerFailed): Machine._server_failed
        for stage in (Stage.SERVING, Stage.RUNNING, Stage.PAUSING)
    },
    (Stage.RUNNING, e.Cue.TICK): Machine._tick,
    (Stage.RUNNING, e.StepEnded): Machine._step_ended,
    (Stage.PAUSING, e.Cue.TICK): Machine._start,
    (Stage.ENDING, e.Cue.TICK): Machine._tick_of_end,
    (Stage.ENDING, e.StepEnded): Machine._step_ended,
    (Stage.VERIFYING, e.Cue.COMMITTED): Machine._committed,
    (Stage.VERIFYING, e.Refused): Machine._refused,
    (Stage.JUDGING, e.Judged): Machine._judged,
    (Stage.REQUEUING, e.Requeued): Machine._requeued,
    (Stage.LAUNCHING, e.Launched): Machine._launched,
    (Stage.COPYING, e.Cue.COPIED): Machine._copied,
    (Stage.COPYING, e.Terminated): Machine._copied,  # the training itself is complete
    **{(stage, e.Terminated): Machine._terminate for stage in (*_NO_STEP, *_WITH_STEP)},
    # A requeue sends SIGTERM as well.
    **{(stage, e.Terminated): Machine._note_term for stage in (*_AFTER, Stage.REQUEUING)},
    **{(stage, e.Cue.SAVE_ASKED): Machine._save for stage in (*_NO_STEP, *_WITH_STEP)},
    **{(stage, e.Cue.SAVE_ASKED): Machine._note_save for stage in (*_AFTER, Stage.REQUEUING)},
}
"""What each event does in each stage."""
ALWAYS: Mapping[Kind, _Act] = {
    Beat: Machine._beat,
    e.Looked: Machine._looked,
    e.Answered: Machine._answered,
    e.Told: Machine._told_of_job,
    e.Prepared: Machine._prepared,
    e.Cue.AHEAD_ENDED: Machine._ahead_ended,
}
"""What an event does in every stage."""
