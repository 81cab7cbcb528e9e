"""Random schedules of faults in virtual time, and that such schedules find bugs."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.states import EndCause
from trnslurm.node.attempt import events as e
from trnslurm.node.attempt import machine
from trnslurm.node.attempt.machine import ALWAYS, TABLE, Machine, Stage
from trnslurm.node.attempt.roll import Roll

from . import followers
from .plans import check, plan_of
from .traces import TRACES, Seconds, ways
from .world import Plan, name_of

SCHEDULES = 1500
NOT_SIMULATED = {
    "checking > copying: refused: code 0",  # the start by which a job completes
    "judging > copying: judged: COMPLETED",  # the last step, as the time limit is near
    "judging > over: judged: FAILED",  # a script that never gets further
}


@pytest.fixture(scope="module")
def simulated() -> tuple[Counter[tuple[str, str]], Seconds]:
    """What many schedules cover: entries of the table, and ways from stage to stage.

    `make simulate` tries as many as it has time for.
    """
    covered: Counter[tuple[str, str]] = Counter()
    found: Seconds = {}
    for seed in range(SCHEDULES):
        for way, seconds in ways(check(plan_of(seed), covered).stages):
            found.setdefault(way, []).extend([] if seconds is None else [seconds])
    return covered, found


def test_no_schedule_breaks_an_invariant(simulated) -> None:
    covered, _ = simulated
    never = {(stage, name_of(kind)) for stage, kind in TABLE} - covered.keys()
    assert len(never) <= 10, never


@pytest.mark.parametrize("seed", range(10))
def test_jobs_that_follow_start_once_each(seed: int, tmp_path: Path) -> None:
    """A kill of the program, and an answer that Slurm does not give, lose and double no job."""
    assert followers.check(seed, tmp_path).round > 5


@pytest.mark.parametrize("file", sorted(TRACES.glob("*.json")), ids=lambda file: file.stem)
def test_the_simulated_slurm_is_like_a_real_one(simulated, file: Path) -> None:
    """Attempts on a real Slurm, under the faults of the matrix, went no way that is not simulated,
    and took about as long."""
    _, found = simulated
    real = json.loads(file.read_text(encoding="ascii"))["ways"]
    assert len(real) > 15
    assert not {*real} - {*found} - NOT_SIMULATED
    for way, seconds in real.items():
        if len(seconds) > 3 and way in found and not way.startswith(("running", "checking")):
            middle = statistics.median(seconds)
            assert min(found[way]) - 1 <= middle <= 1.5 * max(found[way]) + 1, (way, middle)


def drop(stage: Stage, kind: Any) -> Callable[[Any], None]:
    return lambda patch: patch.delitem(TABLE, (stage, kind))


def never_silent(patch: Any) -> None:
    patch.setattr(Roll, "silent", lambda *_: set())


def asks_nobody(patch: Any) -> None:
    """The nodes are not asked before a restart in the job."""
    patch.setattr(Machine, "_ask", lambda *_: None)


def forgets_the_request(patch: Any) -> None:
    """A time limit is near; a crash starts the next attempt, which nobody asks to save."""

    def save(made: Machine, _: e.Cue) -> None:
        made._decide(e.AskToStop())

    patch.setitem(TABLE, (Stage.RUNNING, e.Cue.SAVE_ASKED), save)


def knows_no_idle_node(patch: Any) -> None:
    """Only the nodes of the attempt are asked, not its spares."""
    real = Machine._ask
    patch.setattr(Machine, "_ask", lambda m, hosts: real(m, {*hosts} & {*m.hosts}))


def waits_for_lost_ones(patch: Any) -> None:
    """Nodes that are lost after the first are waited for."""
    real = ALWAYS[e.Answered]

    def answered(made: Machine, event: e.Answered) -> None:
        ending = made.stage is Stage.ENDING
        real(made, replace(event, silent=frozenset()) if ending else event)

    patch.setitem(ALWAYS, e.Answered, answered)


def believes_srun(patch: Any) -> None:
    """What srun has not waited for is not left over."""
    real = Machine._over
    patch.setattr(Machine, "_over", lambda m, code, **k: real(m, code, **k | {"left_over": False}))


def never_gives_up(patch: Any) -> None:
    patch.setattr(machine, "END_WITHIN_S", float("inf"))


BUGS = {
    "a silent node is never noticed": never_silent,
    "nodes are not asked": asks_nobody,
    "a request to save is forgotten": forgets_the_request,
    "an idle node may be lost": knows_no_idle_node,
    "several nodes are lost together": waits_for_lost_ones,
    "srun is believed": believes_srun,
    "nodes that never end": never_gives_up,
    "TERM after the step": drop(Stage.JUDGING, e.Terminated),
    "a step ends before its attempt begins": drop(Stage.CHECKING, e.StepEnded),
    "TERM while srun pauses": drop(Stage.PAUSING, e.Terminated),
}


@pytest.mark.rest
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    for seed in itertools.count():
        assert seed < 6000, "not found"
        try:
            check(plan_of(seed))
        except AssertionError:
            print(f"{bug}: found after {seed + 1} schedules")
            return


@pytest.mark.parametrize("nodes", [256, 1000])
def test_many_nodes(nodes: int) -> None:
    """One of a thousand, several at once, a program that stands still: nothing is lost but them."""
    for seed, faults in enumerate(
        [
            ((40.0, "off", (7,)),),
            ((40.0, "off", (*range(1, nodes, nodes // 16),)),),
            ((30.0, "stall", ()), (70.0, "off", (3, 5))),
        ]
    ):
        plan = Plan(seed, nodes, spares=nodes // 8, faults=faults, ends_at=100.0)
        world = check(plan)
        assert world.counted["AskNodes"] < 12


@pytest.mark.parametrize("away", [False, True])
def test_more_nodes_are_free(away: bool) -> None:
    """The training saves and its job is requeued; if Slurm does not answer, it goes on as it is."""
    faults: tuple[Any, ...] = ((40.0, "grow", ()),)
    faults += tuple((at, "away", ()) for at in (41.0, 42.0, 43.0, 44.0, 45.0)) if away else ()
    attempts = check(Plan(3, nodes=3, fewest=2, faults=faults, ends_at=200.0)).attempts
    assert attempts[0].cause is EndCause.GROWS
    states = [attempt.state for attempt in attempts]
    assert states == (["RESTARTED", "COMPLETED"] if away else ["REQUEUED"])
