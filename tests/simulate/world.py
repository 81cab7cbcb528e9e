"""A job's nodes, its Slurm, its network and its clock in one process, driven by a seed.

The machine of an attempt is the real one, and so is what judges an attempt. All else is a model,
in virtual time: what it does is written beside each part, with where that was seen.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.states import EndCause, State
from trnslurm.node.attempt import events as e
from trnslurm.node.attempt.machine import Decision, Happening, Machine, Rules, Stage, kind_of
from trnslurm.node.beats import PERIOD_S, Beat
from trnslurm.node.ending import Facts, choose, how_it_ended

KILL_WAIT_S = 30.0
SLURMD_TIMEOUT_S = 180.0
MOST_S = 3600.0
"""A job that has not come to rest by then never does."""
MAX_CRASHES = 3
SRUN_WAITS_S = 60.0
"""After which srun gives up on a controller that does not answer."""
_BUFFER = 256
"""How many heartbeats a socket holds (net.core.rmem_max, 212,992 bytes, on most machines)."""


_SIGNALS = (e.Terminated, e.Cue.SAVE_ASKED)


def name_of(what: Any) -> str:
    """The name of an event, of a decision, or of a kind of them."""
    if isinstance(what, enum.Enum):
        return what.value
    return what.__name__ if isinstance(what, type) else type(what).__name__


class BrokenError(AssertionError):
    """An invariant does not hold."""


@dataclass
class Node:
    """A node, and which attempts have processes on it."""

    name: str
    state: str = "on"
    """on, frozen (all its processes are stopped; its kernel answers), off."""
    runs: set[int] = field(default_factory=set)
    since: float = 0.0


@dataclass
class Step:
    """srun, and the tasks of one attempt."""

    attempt: int
    nodes: list[int]
    ahead: bool = False
    began: bool = False
    trains_at: float = float("inf")
    stopped: bool = False
    """Whether srun itself is stopped."""
    aborted: bool = False
    """Whether srun has ended tasks because others failed: "Job step aborted"."""
    over: bool = False
    code: int | None = None
    """Of the task that failed first."""
    asked_at: float = float("inf")
    """When the workers were asked to save and to end."""
    left: set[int] = field(default_factory=set)
    """The nodes whose tasks run."""
    refused: list[str] = field(default_factory=list)
    """The nodes on which srun could start nothing."""


@dataclass(frozen=True)
class Plan:
    """A job, and what befalls it."""

    seed: int
    nodes: int
    spares: int = 0
    fewest: int = 0
    """The least number of nodes; 0: no range."""
    standby: bool = False
    hang_s: float = 60.0
    faults: tuple[tuple[float, str, tuple[int, ...]], ...] = ()
    """When, what, and which nodes."""
    second: tuple[str, str] | None = None
    """A stage, and a fault that comes when the machine enters it for the first time."""
    slow_disk: bool = False
    loses: float = 0.0
    """The share of datagrams that get lost."""
    ends_at: float = 600.0
    """When the training is complete."""
    graphs: bool = False
    compiles: bool = False
    """A phase that compiles graphs, instead of a training."""
    elsewhere: bool = False
    """Whether its first checkpoint is in S3."""
    refused: str = ""
    """The stage that fails: checking, fetching, keying or verifying."""
    roles: bool = False
    """Whether servers run beside the training."""
    no_index: bool = False
    """Whether a job cannot give up nodes: "DB index is being set", without accounting (22.05)."""

    @property
    def counts(self) -> list[int]:
        return [*range(self.fewest, self.nodes + 1)] if self.fewest else [self.nodes]


class World:
    """Runs one plan."""

    def __init__(self, plan: Plan, covered: Counter[tuple[str, str]] | None = None) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.nodes = [Node(f"n{i}") for i in range(plan.nodes + plan.spares)]
        self.by_name = {node.name: i for i, node in enumerate(self.nodes)}
        self.allocation = [node.name for node in self.nodes]
        self.controller_away = 0.0
        """Until when."""
        self.ended_by = State.RUNNING
        self.step: Step | None = None
        self.ahead: Step | None = None
        self.saved = 0
        self.done_s = 0.0
        self.counted: Counter[str] = Counter()
        self.covered = covered if covered is not None else Counter()
        self.attempts: list[Attempt] = []
        self.busy_until = 0.0
        self._waiting: list[Happening] = []
        self.result: int | None = None
        self.stages: list[tuple[float, str, str, str]] = []
        """When, from which stage, to which, and by what event."""
        self.trail: list[str] = []
        self.faults_at: list[float] = []
        self.trained_at, self.faults_since = 0.0, 0
        self.last_trained: Step | None = None
        self.gaps: list[tuple[float, int]] = []
        """For how long nothing was trained until an attempt did, and how many faults that had."""
        self.stop_asked: dict[int, EndCause] = {}
        """What the workers of an attempt were last asked to stop for."""
        self.more_free = False
        """Whether Slurm has more nodes for the job."""
        self.save_asked = False
        self.term_at = 0.0
        self.told_to_stop: set[int] = set()
        """The attempts whose workers were asked to save and to end, or are about to be."""
        self.unready = 0
        self.served: object = None
        """The machine whose servers are ready."""
        """How often servers fail before they are ready."""
        hears = bool(plan.spares or plan.fewest or plan.standby or plan.roles)
        self.rules = Rules(
            trains=not plan.compiles, graphs=plan.graphs or plan.compiles, compiles=plan.compiles,
            beats=hears, replaces=bool(plan.spares or plan.fewest),
            standby=plan.standby, roles=plan.roles, looks_s=10.0, retry_s=(10.0, 30.0),
        )  # fmt: skip
        self.home, self.successor = 0, None
        """The node of the program, and the one on which its successor waits."""
        self.dead = False
        """Whether the program is gone with its node."""
        first = self._attempt(1, self.allocation[: plan.nodes])
        self.machine = Machine(self.rules, first, self.allocation)

    def run(self) -> World:
        """Run to the end, and check what must hold then."""
        for at, what, which in self.plan.faults:
            self.after(at, lambda what=what, which=which: self.fault(what, which))
        self.perform(self.machine.begin(0.0))
        self._wake()
        while self._heap and self.result is None:
            self.now, _, act = heapq.heappop(self._heap)
            if self.now > MOST_S:
                raise BrokenError(
                    f"it does not come to rest: {self.machine.stage}, {self.trail[-12:]}"
                )
            act()
        if self.result is None:
            raise BrokenError(f"nothing happens any more: {self.machine.stage}, {self.trail[-12:]}")
        self.check_end()
        return self

    # -- the clock

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._number), act))

    def between(self, least: float, most: float) -> float:
        return self.random.uniform(least, most)

    def _wake(self) -> None:
        """Tick when the machine wants it, as far as its program has time."""
        at = self.machine.wakes_at
        if at < MOST_S:
            self.after(max(0.0, at - self.now), lambda: self._tick(at))

    def _tick(self, at: float) -> None:
        if self.machine.wakes_at == at:
            self.tell(e.Cue.TICK)

    def tell(self, event: Happening) -> None:
        """Tell the machine, once its program is not busy."""
        if self.result is not None or self.dead:
            return
        if self.now < self.busy_until or self._waiting:
            if (
                not isinstance(event, Beat)
                or sum(isinstance(each, Beat) for each in self._waiting) < _BUFFER
            ):
                self._waiting.append(event)
            return
        self._tell(event)

    def block(self, seconds: float) -> None:
        """Let this program be busy: what comes meanwhile waits, and beats may find no room."""
        self.busy_until = max(self.busy_until, self.now + seconds)
        self.after(seconds, self._free)

    def _free(self) -> None:
        """Go on, signals first, as program.py does."""
        self._waiting.sort(key=lambda event: kind_of(event) not in _SIGNALS)
        while self._waiting and self.now >= self.busy_until:
            self._tell(self._waiting.pop(0))

    def _tell(self, event: Happening) -> None:
        if self.result is not None or self.dead:
            return
        made = self.machine
        if event is e.Cue.TICK and self.now < made.wakes_at:
            return
        stage = made.stage
        if event is not e.Cue.TICK and not isinstance(event, Beat):
            self.trail.append(f"{self.now:.1f} {stage} {name_of(event)}")
        self.covered[stage, name_of(event)] += 1
        before = made.wakes_at
        self.counted["events"] += 1
        if event is e.Cue.SAVE_ASKED:
            self.save_asked = True
        self.perform(made.on(event, self.now))
        if made.stage is not stage:
            self.stages.append((self.now, stage, made.stage, e.brief(event)))
            self.entered(made.stage)
        if made.wakes_at != before or event is e.Cue.TICK:
            self._wake()

    def entered(self, stage: Stage) -> None:
        if self.plan.second and self.plan.second[0] == stage and "second" not in self.counted:
            self.counted["second"] += 1
            delay = self.between(0.0, 0.5)
            which = (self.random.randrange(len(self.nodes)),)
            self.after(delay, lambda: self.fault(self.plan.second[1], which))

    # -- what the machine decides

    def perform(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self.counted[name_of(decision)] += 1
            self.perform_one(decision)

    def disk_s(self) -> float:
        """A shared file system answers in milliseconds, or in seconds."""
        return self.between(0.5, 8.0) if self.plan.slow_disk else self.between(0.001, 0.05)

    def perform_one(self, decision: Decision) -> None:
        made = self.machine
        match decision:
            case e.Act.CHECK:
                place = "s3://x" if self.plan.elsewhere and not self.saved else ""
                self.try_("checking", lambda: e.MayBegin(KILL_WAIT_S, place, self.saved))
            case e.Fetch():
                self.after(self.between(1.0, 20.0), self.fetched)
            case e.Act.END_FETCH:
                self.saved = self.saved or 1
            case e.Act.KEY:
                self.try_("keying", lambda: e.Keyed(warm=False))
            case e.Act.SERVE:
                self.unready -= 1
                failed = e.ServerFailed("a server ended 5 times", "rollout-1")
                fails = self.unready >= 0
                # Servers load models; those that run already are ready at once.
                load_s = self.between(0.0, 60.0)
                ready = self.served is self.machine and not fails
                self.served = None if fails else self.machine
                self.answer(0.0 if ready else load_s, lambda: failed if fails else e.Served())
            case e.Act.COMMIT:
                self.try_("verifying", lambda: e.Cue.COMMITTED)
            case e.Act.BEGIN:
                self.wait_next()
            case e.EndOrphans(hosts):
                self.end_orphans(self.numbers([*hosts]))
            case e.Act.START:
                asked = not self.rules.trains or made.state.attempt in self.told_to_stop
                if self.save_asked and not asked:
                    raise BrokenError("the workers of a later attempt are not asked to save")
                self.start(Step(made.state.attempt, self.numbers(made.state.hosts.split(","))))
            case e.Signal(signum):
                self.signal(signum)
            case e.EndNodes(nodes):
                for node in nodes:
                    self.end_node(node)
            case e.AskToStop(cause):
                attempt = made.state.attempt
                self.told_to_stop.add(attempt)
                self.after(self.disk_s(), lambda: self.ask_workers(attempt, cause))
            case e.Act.ASK_WHAT_ENDS:
                self.ask(0.05, lambda: e.Told(self.ended_by), e.Told(State.RUNNING))
            case e.AskNodes(hosts):
                off = any(self.nodes[self.by_name[h]].state == "off" for h in hosts)
                wait_s = 3.0 if off else self.between(0.01, 0.2)
                self.answer(wait_s, lambda: e.Answered(hosts, self.silent(hosts)))
            case e.LookAtFiles(silent):
                self.answer(self.disk_s(), lambda: self.look(silent))
            case e.Judge():
                self.answer(self.between(0.2, 5.0) + self.disk_s(), lambda: self.judge(decision))
            case e.Act.PREPARE:
                self.answer(self.between(0.5, 3.0), lambda: e.Prepared(possible=True))
            case e.Act.START_AHEAD:
                nodes = self.numbers(made.state.hosts.split(","))
                self.ahead = Step(made.state.attempt + 1, nodes, ahead=True)
                self.start(self.ahead)
            case e.EndAhead():
                if self.ahead:
                    self.kill_tasks(self.ahead, within_s=0.0)
                    self.ahead = None
            case e.LaunchNext(hosts, ahead):
                self.launch(hosts, ahead=ahead)
            case e.Requeue():
                self.requeue(decision)
            case e.Act.COPY:
                self.answer(self.between(0.0, 2.0), lambda: e.Cue.COPIED)
            case e.Close(code):
                self.close(code)
            case e.EndProgram(code):
                self.result = code

    def try_(self, stage: str, event: Callable[[], e.Event | e.Cue]) -> None:
        """Answer that a part of the beginning or the end is done, or has failed."""
        fails = self.plan.refused == stage
        wait_s = self.between(0.05, 0.3) + self.disk_s()
        self.answer(wait_s, (lambda: e.Refused(1, "an error", doing=stage)) if fails else event)

    def fetched(self) -> None:
        self.saved = 1
        fails = self.plan.refused == "fetching"
        self.answer(0.0, lambda: e.Refused(1, "an error") if fails else e.HasCheckpoint(self.saved))

    def answer(self, wait_s: float, event: Callable[[], e.Event | e.Cue]) -> None:
        """Answer this program, unless another one has taken over meanwhile."""
        asks = self.machine

        def answered() -> None:
            if self.machine is asks and not self.dead:
                self.tell(event())

        self.after(wait_s, answered)

    def ask(self, wait_s: float, event: Callable[[], e.Event | e.Cue], otherwise: e.Event) -> None:
        """Ask the controller; without an answer, scontrol is ended after a while."""
        patience_s = self.machine.patience_s
        if (away_s := self.controller_away - self.now) > patience_s:
            self.answer(patience_s, lambda: otherwise)
        else:
            self.answer(max(0.0, away_s) + wait_s, event)

    def numbers(self, hosts: list[str]) -> list[int]:
        return [self.by_name[host] for host in hosts]

    def _attempt(self, number: int, hosts: list[str]) -> Attempt:
        state = Attempt(
            phase="precompile" if self.plan.compiles else "train",
            attempt=number,
            job_id="1",
            hosts=",".join(hosts),
        )
        self.attempts.append(state)
        return state

    def silent(self, hosts: frozenset[str]) -> frozenset[str]:
        """A frozen node's kernel still accepts connections."""
        return frozenset(h for h in hosts if self.nodes[self.by_name[h]].state == "off")

    def look(self, silent: frozenset[int]) -> e.Looked:
        step, attempt = self.step, self.machine.state
        hangs = False
        if step and not step.over and self.hangs_since(step) + self.plan.hang_s + 150 < self.now:
            hangs = True
        grows, self.more_free = self.more_free, False
        return e.Looked(saved=self.saved > attempt.checkpoint, hangs=hangs, grows=grows)

    def hangs_since(self, step: Step) -> float:
        """Since when no step of the training was done, for a node of it stands still."""
        at = [self.nodes[n].since for n in step.nodes if self.nodes[n].state != "on"]
        return max(min(at), step.trains_at) if at else float("inf")

    def judge(self, asked: e.Judge) -> e.Judged:
        made, plan = self.machine, self.plan
        hosts = made.state.hosts.split(",")
        then: list[str] = []
        if asked.stays and (not asked.server or asked.server.here):
            lost = {*asked.lost, *(self.step.refused if self.step else ())}
            good = [host for host in made.allocation if host not in lost]
            then = choose(good, hosts, plan.counts)
        stop = made.state.attempt in self.stop_asked
        if not (asked.code or stop):
            return e.Judged(None, 0)
        answered = stop and asked.code == 0
        ending = how_it_ended(
            Facts(
                attempts=self.attempts, exit_code=asked.code, newest=self.saved,
                max_crashes=MAX_CRASHES, requeue=True, lost=",".join(asked.lost),
                stop=self.stop_asked.get(made.state.attempt), answered=answered,
                saved=self.saved if answered else None, fit=bool(then),
                moves=bool(then) and then != hosts,
            )
        )  # fmt: skip
        return e.Judged(ending, asked.code, tuple(then), None, asked.lost)

    def launch(self, hosts: tuple[str, ...], *, ahead: bool) -> None:
        number = self.machine.state.attempt + 1
        used, self.ahead = self.ahead, None
        if ahead and used:
            bad = [n for n in used.nodes if self.nodes[n].state != "on"]
            if any(self.now - self.nodes[n].since > 15.0 for n in bad):
                raise BrokenError(f"what waits on n{bad} is used, and will never train")
        if used and not ahead:
            self.kill_tasks(used, within_s=0.0)

        def launched() -> e.Event:
            if ahead and used:
                used.ahead = False
                self.step = used
                used.trains_at = self.now + self.between(0.2, 2.0)
                self.after(used.trains_at - self.now, lambda: self.train(used))
            return e.Launched(self._attempt(number, [*hosts]), runs=bool(ahead and used))

        self.answer(0.1 if ahead else self.between(0.5, 3.0), launched)

    def requeue(self, decision: e.Requeue) -> None:
        def done() -> e.Event:
            return e.Requeued()

        refused = e.Requeued("no answer")
        waits_s = self.leaving_s(decision.lost) if decision.leaves else 0.0
        if decision.already:
            self.answer(0.1, e.Requeued)
        elif self.controller_away - self.now > 40 + 3 * 10:  # tried again after 10 and 30 s
            self.answer(70.0, lambda: refused)
        else:
            self.answer(max(0.0, self.controller_away - self.now, waits_s) + 0.2, done)

    def leaving_s(self, lost: tuple[str, ...]) -> float:
        """How long until Slurm itself has taken lost nodes out of a job that cannot be changed."""
        off = [self.nodes[n] for n in self.numbers([*lost]) if self.nodes[n].state == "off"]
        if not self.plan.no_index or not off:
            return 0.0
        return max(0.0, max(node.since for node in off) + SLURMD_TIMEOUT_S - self.now)

    def close(self, code: int) -> None:
        """The record is written, and what is blocked meanwhile is this program."""
        state = self.machine.state
        if state.under_way:
            state.become(State.FAILED if code else State.COMPLETED, f"exit code {code}")
        state.exit_code = code
        self.block(self.between(0.0, 1.0))

    # -- the step

    def start(self, step: Step) -> None:
        """Start srun: tasks begin within seconds, and fail to on a node that is off."""
        if not step.ahead:
            self.step = step
            if self.ended_by is not State.RUNNING and self.now > self.term_at + 1.0:
                raise BrokenError(f"a step starts, though the job is {self.ended_by}")
        for n in step.nodes:
            others = {a for a in self.nodes[n].runs if not (self.ahead and a == self.ahead.attempt)}
            if not step.ahead and others - {step.attempt}:
                raise BrokenError(f"attempts {others} still run on n{n} as {step.attempt} starts")
        away_s = max(0.0, self.controller_away - self.now)
        if away_s > SRUN_WAITS_S:  # "Unable to create step for job 1: Requested nodes are busy"
            step.code = 1
            self.after(SRUN_WAITS_S, lambda: self.end_srun(step))
        else:
            self.after(away_s + self.between(0.1, 1.0), lambda: self.begin_tasks(step))

    def begin_tasks(self, step: Step) -> None:
        if step.over:
            return
        step.began = True
        off = [n for n in step.nodes if self.nodes[n].state != "on"]
        for n in step.nodes:
            if self.nodes[n].state == "on":
                self.nodes[n].runs.add(step.attempt)
                step.left.add(n)
                self.after(self.between(0.5, 3.0), lambda n=n: self.beat(step, n))
        if off:  # "Task launch for StepId=1.1 failed on node n1", after MessageTimeout
            step.code = 1
            step.refused = [self.nodes[n].name for n in off]
            self.after(self.between(10.0, 30.0), lambda: self.kill_on_bad_exit(step))
        elif not step.ahead:
            step.trains_at = self.now + self.between(3.0, 20.0)
            self.after(step.trains_at - self.now, lambda: self.train(step))

    def beat(self, step: Step, n: int) -> None:
        """Every two seconds a node sends a heartbeat, as long as its task runs."""
        node = self.nodes[n]
        if step.over and step.attempt not in node.runs:
            return
        if n in step.left and node.state == "on":
            self.send(Beat(step.nodes.index(n), step.attempt))
        elif n not in step.left:
            return
        self.after(PERIOD_S * self.between(0.95, 1.1), lambda: self.beat(step, n))

    def send(self, beat: Beat) -> None:
        if self.rules.beats and self.random.random() >= self.plan.loses:
            self.after(self.between(0.0001, 0.02), lambda: self.tell(beat))

    def train(self, step: Step) -> None:
        """A checkpoint every 20 s, as long as all nodes work; then the end."""
        if step.over or step.ahead or step.code is not None:
            return
        if any(self.nodes[n].state != "on" for n in step.nodes):
            return
        if step is not self.last_trained:
            self.gaps.append((self.now - self.trained_at, self.faults_since))
            self.last_trained = step
        self.trained_at, self.faults_since = self.now, 0
        if self.now >= step.asked_at:
            self.saved += 1
            self.exit_all(step, 0)
            return
        if self.done_s >= self.plan.ends_at or (self.plan.compiles and self.done_s >= 60.0):
            self.exit_all(step, 0)
            return
        self.done_s += 20.0
        self.saved += 1
        self.after(20.0, lambda: self.train(step))

    def ask_workers(self, attempt: int, cause: EndCause | None) -> None:
        self.stop_asked[attempt] = cause or EndCause.TIME_LIMIT
        if self.step and self.step.attempt == attempt:
            step = self.step
            step.asked_at = min(step.asked_at, self.now)
            self.after(self.between(0.5, 3.0), lambda: self.train(step))

    def exit_all(self, step: Step, code: int) -> None:
        step.code = code
        for n in [*step.left]:
            self.end_task(step, n)
        self.end_srun(step)

    def end_task(self, step: Step, n: int) -> None:
        step.left.discard(n)
        if self.nodes[n].state != "frozen":
            self.nodes[n].runs.discard(step.attempt)

    def fail_task(self, step: Step, n: int, code: int) -> None:
        """A task ends with an error; srun ends the others, and first.py says so."""
        if step.over or n not in step.left or self.nodes[n].state != "on":
            return
        self.end_task(step, n)
        if step.attempt == self.machine.state.attempt and self.rules.replaces:
            self.say_ended(step, n)
        if step.code is None:
            step.code = code
            self.after(self.between(0.1, 1.0), lambda: self.kill_on_bad_exit(step))

    def say_ended(self, step: Step, n: int) -> None:
        """As first.py does, until it is answered."""
        if self.nodes[n].state != "on" or self.result is not None:
            return
        if self.random.random() < self.plan.loses or self.now < self.busy_until:
            self.after(PERIOD_S, lambda: self.say_ended(step, n))
        else:
            beat = Beat(step.nodes.index(n), step.attempt, ended=True)
            self.after(0.01, lambda: self.tell(beat))

    def kill_on_bad_exit(self, step: Step) -> None:
        if step.stopped or step.over:
            return
        step.aborted |= bool(step.left) and self.random.random() < 0.8  # it does not always say so
        for n in [*step.left]:
            if self.nodes[n].state == "on":
                wait_s = self.between(0.2, 3.0)
                self.after(wait_s, lambda n=n: self.fail_task(step, n, 143))
        self.after(3.1, lambda: self.end_srun(step))
        # "Job step aborted: Waiting up to 32 seconds for job step to finish"
        self.after(KILL_WAIT_S + 2, lambda: self.end_srun(step, anyway=True))

    def end_srun(self, step: Step, *, anyway: bool = False, code: int | None = None) -> None:
        """srun ends once all tasks have, or it waits no longer."""
        if step.over or (step.stopped and code is None):
            return
        if step.left and not anyway:
            return
        gave_up, step.over = bool(step.left), True
        for n in step.nodes:
            if self.nodes[n].state == "on":
                self.nodes[n].runs.discard(step.attempt)
        step.left.clear()
        if step.ahead:
            self.tell(e.Cue.AHEAD_ENDED)
            self.ahead = None if self.ahead is step else self.ahead
            return
        status = code if code is not None else step.code or 0
        ended = e.StepEnded(status, aborted=step.aborted, began=step.began, left_over=gave_up)
        self.answer(self.disk_s(), lambda: ended)

    def signal(self, signum: int) -> None:
        step = self.step
        if not step or step.over:
            return
        if signum == signal.SIGSTOP:
            step.stopped = True
        elif signum == signal.SIGKILL:
            # A helper of srun has Slurm kill the step: within seconds, on nodes that answer.
            for n in [*step.left]:
                if self.nodes[n].state == "on":
                    wait_s = self.between(0.1, 5.0)
                    self.after(wait_s, lambda n=n: self.nodes[n].runs.discard(step.attempt))
            step.over = True
            step.left.clear()
            ended = e.StepEnded(137, aborted=step.aborted, began=step.began)
            self.answer(0.01, lambda: ended)
        elif signum == signal.SIGTERM:
            step.code = 143
            self.kill_on_bad_exit(step)

    def end_node(self, number: int) -> None:
        """A node is told to kill its processes."""
        step = self.step
        if not step or number >= len(step.nodes) or self.random.random() < self.plan.loses:
            return
        n = step.nodes[number]
        if self.nodes[n].state != "on":
            return

        def killed() -> None:
            if self.nodes[n].state != "on":
                return
            self.nodes[n].runs.discard(step.attempt)
            step.left.discard(n)
            for _ in range(3):
                self.send(Beat(number, step.attempt, ended=True))

        self.after(self.between(0.05, 0.5), killed)

    def kill_tasks(self, step: Step, within_s: float) -> None:
        step.over = True
        for n in step.nodes:
            self.after(within_s, lambda n=n: self.nodes[n].runs.discard(step.attempt))

    # -- faults

    def fault(self, what: str, which: tuple[int, ...]) -> None:
        if self.result is not None:
            return
        self.trail.append(f"{self.now:.1f} FAULT {what} {which}")
        self.faults_at.append(self.now)
        self.faults_since += 1
        getattr(self, f"_{what}")(which)

    def _server(self, which: tuple[int, ...]) -> None:
        """A server does not come back: another port, a spare, or no node is left for it."""
        self.unready = which[0] % 3
        self.tell(e.ServerFailed("a server is lost", "rollout-2", here=which[0] % 4 > 0))

    def _crash(self, which: tuple[int, ...]) -> None:
        """A worker ends with an error."""
        if self.step:
            for n in which:
                if n in self.step.nodes:
                    self.fail_task(self.step, n, 9)

    def _off(self, which: tuple[int, ...]) -> None:
        """Nodes lose their power; the workers of others notice soon, or never."""
        for n in which:
            if self.nodes[n].state != "off":
                node = self.nodes[n]
                node.state, node.since = "off", self.now
                node.runs.clear()
        if self.home in which and not self.dead:
            self.lose_program()
        step = self.step
        if step and not step.over and {*which} & {*step.nodes}:
            notices = self.random.random()
            if notices < 0.7:
                for n in step.nodes:
                    if self.nodes[n].state == "on":
                        wait_s = self.between(0.2, 5.0) if notices < 0.5 else self.between(5, 60)
                        self.after(wait_s, lambda n=n: self.fail_task(step, n, 1))
            # Slurm ends the step itself once it gives the node up.
            self.after(SLURMD_TIMEOUT_S, lambda: self.given_up(step))

    def lose_program(self) -> None:
        """The first node is off: its program and srun are gone, its tasks elsewhere are not."""
        self.dead = True
        self._waiting.clear()
        # What it had noted between two attempts is gone with it.
        self.save_asked &= not self.machine._save_pending
        for step in filter(None, (self.step, self.ahead)):
            step.over = True
        self.ahead = None
        # Silence of 6 s, sought every 2 s; a connection that is waited for; one step on the others.
        self.after(self.between(8.0, 14.0), self.succeed)

    def succeed(self) -> None:
        """The second node's program takes over, as attempt/successor.py does."""
        if self.result is not None:
            return
        waits = self.successor
        record = self.attempts[-1]
        goes_on = record.under_way or record.state is State.RESTARTED
        if self.ended_by is not State.RUNNING or not goes_on:
            self.result = 143  # Slurm ends it, or nothing is left to do
        elif waits is None or self.nodes[waits].state != "on":
            self.counted["requeued for the first node"] += 1
            record.become(State.REQUEUED)
            self.machine.state = record
            self.result = 143
        elif self.controller_away > self.now:  # no step can ask the others
            self.after(self.controller_away - self.now + 6.0, self.succeed)
        else:
            self.dead, self.home, self.busy_until = False, waits, self.now
            self.attempts[-1] = replace(record)
            self.machine = Machine(self.rules, self.attempts[-1], self.then, self.now)
            saves = self.stop_asked.get(record.attempt) is EndCause.TIME_LIMIT
            self.perform(self.machine.take_over(self.now, saves=saves))
            self.wait_next()
            self._wake()

    def wait_next(self) -> None:
        """A program waits on the second node, to take over as well."""
        made = self.machine
        others = [n for n in self.numbers(made.allocation) if self.nodes[n].name not in made.lost]
        others = [n for n in others if n != self.home]
        self.successor = others[0] if others and self.rules.replaces else None
        self.then = [self.nodes[n].name for n in [self.home, *others]]

    def end_orphans(self, nodes: list[int]) -> None:
        """Kill all tasks of the attempts on the nodes that answer."""
        there = [n for n in nodes if self.nodes[n].state != "off"]
        frozen = any(self.nodes[n].state == "frozen" for n in there)
        wait_s = 15.0 if frozen else self.between(0.2, 3.0)

        def ended() -> e.Event:
            for n in there:
                if self.nodes[n].state == "on":
                    self.nodes[n].runs.clear()
            return e.StepEnded(137, left_over=frozen)

        self.answer(wait_s, ended)

    def given_up(self, step: Step) -> None:
        if not step.over and not step.stopped:
            step.code = 1
            self.kill_on_bad_exit(step)

    def _freeze(self, which: tuple[int, ...]) -> None:
        for n in which:
            if n != self.home and self.nodes[n].state == "on":
                self.nodes[n].state, self.nodes[n].since = "frozen", self.now

    def _away(self, _: tuple[int, ...]) -> None:
        """The controller does not answer for 20 or 120 s."""
        until = self.now + self.random.choice([20.0, 120.0])
        self.controller_away = max(self.controller_away, until)

    def _stall(self, _: tuple[int, ...]) -> None:
        """This program stands still, as when a disk or the machine does."""
        self.block(self.between(3.0, 30.0))

    def _grow(self, _: tuple[int, ...]) -> None:
        """More nodes become free."""
        self.more_free = True

    def _cancel(self, _: tuple[int, ...]) -> None:
        self._end_job(State.CANCELLED)

    def _preempt(self, _: tuple[int, ...]) -> None:
        self._end_job(State.PREEMPTED)

    def _requeue(self, _: tuple[int, ...]) -> None:
        self._end_job(State.REQUEUED)

    def _end_job(self, state: State) -> None:
        """TERM to every process of the job, this program included."""
        if self.ended_by is State.RUNNING:
            self.term_at = self.now
            self.after(KILL_WAIT_S, self.killed)
        self.ended_by = state
        self.tell(e.Terminated())
        if self.step and not self.step.over:
            step = self.step
            if step.code is None:
                step.code = 143
            for n in [*step.left]:
                wait_s = self.between(0.2, 10.0)
                self.after(wait_s, lambda n=n: self.fail_task(step, n, 143))
            self.after(10.1, lambda: self.end_srun(step))

    def killed(self) -> None:
        """KILL comes to every process of the job."""
        if self.dead:
            self.result = 143
        elif self.now < self.busy_until:
            self.result = 137  # it stood still all the time
        elif self.result is None and self.machine.state.state.under_way:
            raise BrokenError("KILL comes before the record says how the attempt ended")

    def _limit(self, _: tuple[int, ...]) -> None:
        """The time limit is near: Slurm signals once."""
        self.tell(e.Cue.SAVE_ASKED)
        self.after(180.0, lambda: self._end_job(State.TIMEOUT))

    # -- what must hold

    def check_end(self) -> None:
        made = self.machine
        wrong = [h for h in made.lost if self.nodes[self.by_name[h]].state != "off"]
        if wrong:
            raise BrokenError(f"{wrong} are healthy, and were taken for lost")
        state = made.state
        if self.dead or self.result == 137:  # nobody is there to record an end by Slurm
            return
        if not (state.state.final or state.state is State.REQUEUED):
            raise BrokenError(f"the record says {state.state}")
        early = self.done_s < self.plan.ends_at and not self.plan.compiles
        if state.state is State.COMPLETED and early:
            raise BrokenError("COMPLETED, and the training is not")
