"""The states, their sets, and what may follow which."""

from __future__ import annotations

import pytest

from trnslurm.contract.attempt import Attempt, attempt_of, read_attempt
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import NEXT, OF_A_RUN, EndCause, State


def test_every_state_is_of_an_attempt_or_a_run() -> None:
    of_an_attempt = {*NEXT, *(state for after in NEXT.values() for state in after)}
    assert {*OF_A_RUN} | of_an_attempt == {*State}
    assert len({*OF_A_RUN}) == len(OF_A_RUN)
    for state in State:
        assert state.final >= (state.written or state.failed or state.stopped_short), state
        assert state.waiting + state.alive + state.final <= 1, state


def test_nothing_follows_an_end_that_slurm_has_no_part_in() -> None:
    ends = {state for after in NEXT.values() for state in after} - {*NEXT}
    assert ends == {State.COMPLETED, State.STOPPED}
    attempt = Attempt(phase="train", attempt=1)
    attempt.become(State.COMPLETED)
    with pytest.raises(AssertionError, match="COMPLETED becomes RUNNING"):
        attempt.become(State.RUNNING)


def test_a_record_is_read_as_it_was_written(tmp_path) -> None:
    run = RunFiles(tmp_path)
    run.state.mkdir()
    assert read_attempt(run, "train", 2).state is State.STARTING
    attempt = Attempt(phase="train", attempt=2, job_id="7", checkpoint=40, changed=1.5)
    attempt.become(State.FAILED, "one\ntwo", EndCause.CRASH)
    attempt.exit_code = 3
    attempt.write(run)
    assert read_attempt(run, "train", 2) == attempt
    assert (attempt.reason, attempt.crashed) == ("one two", True)


@pytest.mark.parametrize("state", ["BUSY", "", None, 7, ["RUNNING"]])
def test_a_damaged_record_keeps_what_is_sound(state) -> None:
    told = {"state": state, "job_id": 7, "restarts": True, "checkpoint": 40, "attempt": 9}
    assert attempt_of("train", 1, told) == Attempt(phase="train", attempt=1, checkpoint=40)
