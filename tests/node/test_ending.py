"""How an attempt of a training is judged, and which nodes the next one leaves out."""

import json
import os
import time
from pathlib import Path

import pytest

from trnslurm.contract.attempt import Attempt, read_attempt
from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import State
from trnslurm.node import left_out, state
from trnslurm.node.ending import (
    Facts,
    crashes_in_a_row,
    how_it_ended,
    lost_nodes,
    next_hosts,
    read_facts,
    reason_to_give_up,
    step_repeated,
    steps_of,
    unready_server,
    who_ended,
)
from trnslurm.node.state import RUN

GAVE_UP = "given up after {} without a new checkpoint: exit code 1 while running on a,b"


def attempt(state="RUNNING", **fields):
    known = {"phase": "train", "attempt": 0, "job_id": "7", "hosts": "a,b"}
    return Attempt(state=State(state), **known | fields)


def facts(**fields):
    known = {"attempts": [attempt()], "exit_code": 1, "newest": 0, "max_crashes": 3}
    return Facts(**{**known, "requeue": True, **fields})


def told(**fields):
    """The ending in a line: state, state if requeue is refused, cause, reason."""
    ending = how_it_ended(facts(**fields))
    return "|".join((ending.state, ending.refused, ending.cause, ending.reason))


TERM = {word: [attempt(state=word)] for word in ("CANCELLED", "TIMEOUT", "PREEMPTED", "REQUEUED")}
SAVED = {"saved": 40, "newest": 40}
EARLY = {"stop": "time limit", "exit_code": 0, **SAVED}
LOCAL = {"attempts": [attempt(state="CANCELLED", job_id="local-9")], "requeue": False}


@pytest.mark.parametrize(
    ("known", "ending"),
    [
        # It ended by itself, whatever was asked of it.
        ({"exit_code": 0}, "COMPLETED|COMPLETED||"),
        ({"exit_code": 0, "stop": "time limit"}, "COMPLETED|COMPLETED||"),
        ({"exit_code": 0, "cancelled": True, "stop": "cancelled"}, "COMPLETED|COMPLETED||"),
        ({"exit_code": 0, "attempts": TERM["TIMEOUT"]}, "COMPLETED|COMPLETED||"),
        # A newer attempt runs: this one does not begin again, and had better not have ended well.
        ({"newer": 3}, "FAILED|FAILED||attempt 3 has taken over"),
        ({"newer": 3, "exit_code": 0}, "FAILED|FAILED||attempt 3 has taken over"),
        # The early signal.
        (EARLY, "REQUEUED|STOPPED|time limit|time limit; saved step 40"),
        ({**EARLY, "requeue": False}, "STOPPED|STOPPED|time limit|time limit; saved step 40"),
        ({**EARLY, "cancelled": True}, "CANCELLED|CANCELLED||saved step 40"),
        (
            {**EARLY, "attempts": [attempt(checkpoint=40)]},
            "TIMEOUT|TIMEOUT|time limit|time limit; it saved no new checkpoint",
        ),
        # A custom script that writes checkpoints, but begins at its first step again.
        (
            {"attempts": TERM["TIMEOUT"], "changed": 9.0, "repeats": 1},
            "TIMEOUT|TIMEOUT|repeats|time limit; it started at step 1 again instead of after its "
            "checkpoint",
        ),
        ({"attempts": TERM["TIMEOUT"], "changed": 9.0}, "REQUEUED|TIMEOUT|time limit|time limit"),
        ({"stop": "cancelled", **SAVED, "cancelled": True}, "CANCELLED|CANCELLED||saved step 40"),
        # Asked for in another way, by a file that somebody wrote.
        ({"stop": "", **SAVED}, "STOPPED|STOPPED||saved step 40"),
        ({"stop": "terminated", **SAVED}, "STOPPED|STOPPED||terminated; saved step 40"),
        # A custom script that was asked to stop, and ended without reporting a save.
        (
            {"stop": "time limit", "answered": True, "exit_code": 0},
            "TIMEOUT|TIMEOUT|time limit|time limit; it saved no new checkpoint",
        ),
        (
            {"stop": "time limit", "answered": True, "exit_code": 0, "newest": 30},
            "REQUEUED|TIMEOUT|time limit|time limit; step 30 was saved before",
        ),
        (
            {"stop": "time limit", "answered": True, "exit_code": 0, "changed": 7.0},
            "REQUEUED|TIMEOUT|time limit|time limit",
        ),
        ({"stop": "", "answered": True, "exit_code": 0}, "STOPPED|STOPPED||"),
        # TERM.
        ({"attempts": TERM["CANCELLED"]}, "CANCELLED|CANCELLED||not by trnslurm cancel"),
        (
            {"attempts": TERM["CANCELLED"], **SAVED},
            "CANCELLED|CANCELLED||not by trnslurm cancel; saved step 40",
        ),
        ({"attempts": TERM["REQUEUED"]}, "REQUEUED|REQUEUED|requeued|requeued"),
        (
            {"attempts": TERM["REQUEUED"], "by": "scontrol requeue"},
            "REQUEUED|REQUEUED|requeued|requeued by scontrol requeue",
        ),
        (
            {"attempts": TERM["REQUEUED"], "lost": "node-2", "by": "Slurm because a node failed"},
            "REQUEUED|REQUEUED|requeued|requeued by Slurm because node-2 failed",
        ),
        (
            {"attempts": TERM["CANCELLED"], "by": "scancel"},
            "CANCELLED|CANCELLED||by scancel, not by trnslurm cancel",
        ),
        (
            {"attempts": TERM["REQUEUED"], "requeue": False, **SAVED},
            "REQUEUED|REQUEUED|requeued|requeued; saved step 40",
        ),
        ({"attempts": TERM["REQUEUED"], "cancelled": True}, "CANCELLED|CANCELLED||"),
        (
            {"attempts": TERM["TIMEOUT"]},
            "TIMEOUT|TIMEOUT|time limit|time limit; it saved no new checkpoint",
        ),
        (
            {"attempts": TERM["TIMEOUT"], "newest": 30},
            "REQUEUED|TIMEOUT|time limit|time limit; step 30 was saved before",
        ),
        (
            {"attempts": TERM["TIMEOUT"], **SAVED},
            "REQUEUED|STOPPED|time limit|time limit; saved step 40",
        ),
        ({"attempts": TERM["PREEMPTED"]}, "REQUEUED|PREEMPTED|preempted|preempted"),
        (
            {"attempts": TERM["PREEMPTED"], "requeue": False},
            "PREEMPTED|PREEMPTED|preempted|preempted",
        ),
        (
            {"attempts": TERM["PREEMPTED"], **SAVED},
            "REQUEUED|STOPPED|preempted|preempted; saved step 40",
        ),
        # TERM on this machine.
        (LOCAL, "CANCELLED|CANCELLED||"),
        ({**LOCAL, **SAVED}, "STOPPED|STOPPED||saved step 40"),
        ({**LOCAL, **SAVED, "cancelled": True}, "CANCELLED|CANCELLED||saved step 40"),
    ],
)
def test_ends_that_were_asked_for(known, ending):
    assert told(**known) == ending


CRASHED = attempt(state="REQUEUED", cause="crash")
NO_CRASHES = [
    attempt(state="REQUEUED", cause=cause) for cause in ("time limit", "preempted", "requeued")
]


@pytest.mark.parametrize(
    ("known", "ending"),
    [
        (
            {},
            "REQUEUED|FAILED|crash|crash 1 of 3 without a new checkpoint: "
            "exit code 1 while running on a,b",
        ),
        ({"requeue": False}, "FAILED|FAILED|crash|exit code 1 while running on a,b"),
        ({"max_crashes": 1}, f"FAILED|FAILED|crash|{GAVE_UP.format('a crash')}"),
        # The cause is said, and what every attempt would meet is not tried again.
        (
            {"why": "b: OSError: x at train.py, line 3"},
            "REQUEUED|FAILED|crash|crash 1 of 3 without a new checkpoint: "
            "b: OSError: x at train.py, line 3",
        ),
        (
            {"why": "KeyError: 'lr' at train.py, line 3", "again": True},
            "FAILED|FAILED|error|KeyError: 'lr' at train.py, line 3",
        ),
        (
            {"why": "KeyError: 'lr' at train.py, line 3", "again": True, "trouble": "b: stuck"},
            "REQUEUED|FAILED|crash|crash 1 of 3 without a new checkpoint: b: stuck",
        ),
        # A script that may begin again over its own checkpoint.
        (
            {"resumes": False},
            "FAILED|FAILED|crash|exit code 1 while running on a,b; not restarted because it "
            "would start at step 0: it reported no checkpoint, and its arguments have no {resume}",
        ),
        # A whole checkpoint whose step is unknown is progress.
        (
            {"changed": 1.0, "whole": True, "newest": 0, "attempts": [CRASHED, attempt()]},
            "REQUEUED|FAILED|crash|crash after a checkpoint was saved: exit code 1 while running "
            "on a,b",
        ),
        # Its files have changed: whether they are a whole checkpoint is unknown.
        (
            {"changed": 1.0, "attempts": [CRASHED, attempt()]},
            "REQUEUED|FAILED|crash|crash 2 of 3 in a row: exit code 1 while running on a,b",
        ),
        # While it was asked to stop, and nobody ended it: it failed to save.
        (
            {"stop": "time limit", "max_crashes": 1},
            f"FAILED|FAILED|crash|{GAVE_UP.format('a crash')}",
        ),
        (
            {"newest": 30},
            "REQUEUED|FAILED|crash|crash after step 30 was saved: exit code 1 while running on a,b",
        ),
        (
            {"attempts": [CRASHED, attempt()], "trouble": "b: stuck"},
            "REQUEUED|FAILED|crash|crash 2 of 3 without a new checkpoint: b: stuck",
        ),
        (
            {"attempts": [CRASHED, *NO_CRASHES, CRASHED, attempt()]},
            f"FAILED|FAILED|crash|{GAVE_UP.format('3 crashes in a row')}",
        ),
    ],
)
def test_crashes(known, ending):
    assert told(**known) == ending


@pytest.mark.parametrize(
    ("attempts", "newest", "count"),
    [
        ([], 0, 0),
        ([CRASHED, CRASHED], 0, 2),
        ([CRASHED, *NO_CRASHES], 0, 1),
        ([attempt(state=word) for word in ("STARTING", "RUNNING", "FAILED")], 0, 3),  # no word
        ([attempt(state=w) for w in ("COMPLETED", "STOPPED", "CANCELLED", "TIMEOUT")], 0, 0),
        ([CRASHED, CRASHED], 10, 0),  # the last one left a checkpoint
        ([CRASHED, attempt(checkpoint=10), attempt(checkpoint=10)], 10, 2),  # the first did
        ([CRASHED, attempt(checkpoint=10), attempt(state="TIMEOUT", checkpoint=10)], 10, 1),
        # Damaged ones were set aside: that is no progress.
        ([attempt(checkpoint=30), attempt(checkpoint=20)], 20, 2),
    ],
)
def test_crashes_since_a_new_checkpoint(attempts, newest, count):
    assert crashes_in_a_row(attempts, newest) == count


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('said "no"\n\tto C:\\x', 'said "no" to C:\\x'),
        ("\x1b[31mred\x00 \x7f é", "[31mred  é"),
        ("x" * 500, f"{'x' * 399}…"),
        ("", ""),
    ],
)
def test_reasons_are_one_short_line(run, text, line):
    Attempt(phase="train", attempt=1, reason=text).write(RUN)
    assert read_attempt(RUN, "train", 1).reason == line


def test_nodes_to_leave_out():
    def applied(before, after, *excluded):
        return left_out.Change(frozenset(before), frozenset(after)).applied_to(excluded)

    assert applied("", "") is None
    assert applied("", "", "users") is None
    assert applied("", "b", "users") == "b,users"
    assert applied("b", "b", "b", "users") is None
    assert applied("b", "c", "b", "users") == "c,users"
    assert applied("b", "", "b") == ""
    assert applied("b", "b") == "b"  # a new job of the same run


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)

    def write(name, **data):
        (tmp_path / "state" / f"{name}.json").write_text(json.dumps(data))

    return write


@pytest.mark.parametrize(
    ("first", "then", "repeats"),
    [
        ((1, 4.2), (1, 4.1), 1),  # from the start, by another seed
        ((1, 4.2), (1, 2.0), 0),  # it counts from 1, and has learned something
        ((1, 4.2), (41, 2.0), 0),
        ((1, None), (1, None), 1),  # it reports no loss
        ((0, 4.2), (0, 4.2), 0),
        ((31, 2.0), (41, 2.0), 0),
    ],
)
def test_an_attempt_that_begins_where_the_one_before_had(run, first, then, repeats) -> None:
    """The lines of the newest attempt follow those of the one before."""
    lines = [
        {"attempt": attempt, "step": step + more, "steps": 900}
        | ({} if loss is None else {"loss": loss})
        for attempt, (step, loss) in ((3, first), (4, then))
        for more in (0, 1)
    ]
    Path("metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert step_repeated(4) == repeats
    assert step_repeated(3) == 0
    read = [line | {"read": "log"} for line in lines]
    Path("metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in read))
    assert step_repeated(4) == 0


def preflight(*bad, host="ip-10-0-0-{}"):
    nodes = [
        {"node": n, "host": host.format(n), "ok": n not in bad, "problems": []} for n in (0, 1)
    ]
    for n in bad:
        nodes[n]["problems"] = ["15 of 16 devices", "and more"]
    return {"nodes": nodes, "bad": [host.format(n) for n in bad]}


def update(number, *hosts, hours=1, now=0.0, excluded=()):
    bad = left_out.bad_nodes(number, hosts)
    change = left_out.update(bad, hosts, hours=hours, now=now)
    return change.applied_to(excluded), left_out.trouble(number, hosts)


def test_enough_nodes_are_left(run):
    """The longest left out are taken again; the job could never start otherwise."""
    for now, host in enumerate("abc"):
        left_out.update({host: "stuck"}, ["x", host], hours=24, now=float(now), most=2)
    assert [*left_out.read_excluded()] == ["b", "c"]
    change = left_out.update({"d": "stuck"}, ["x", "d"], hours=24, now=3.0, most=0)
    assert change.applied_to(["b", "c", "users"]) == "users"


def test_a_node_that_has_booted_since_is_taken_again(run):
    """HyperPod replaces an instance under the same name."""
    for now, host in enumerate("abc"):
        left_out.update({host: "stuck"}, ["x", host], hours=24, now=float(now))
    left_out.update({}, ["x", "y"], hours=24, now=9.0, booted={"a": -5.0, "b": 1.0, "c": 7.0})
    assert [*left_out.read_excluded()] == ["a"]


def test_a_bad_node_is_left_out_until_its_time_is_over(run):
    run("preflight-train-1", **preflight(1))
    why = "preflight failed; 15 of 16 devices"
    found = update(1, "a", "b", hours=2, now=1000.0, excluded=["users"])
    assert found == ("b,users", f"b: {why}")
    assert left_out.read_excluded() == {"b": {"until": 8200.0, "why": why}}
    line = "worker 3 (node 0, c) is stuck"
    run("stuck-train-2", node=0, host="c", line=line)
    found = update(2, "c", "d", hours=2, now=8000.0, excluded=["b", "users"])
    assert found == ("b,c,users", line), "the node is named once"
    found = update(3, "d", "e", hours=2, now=8300.0, excluded=["b", "c", "users"])
    assert found == ("c,users", "")
    assert left_out.read_excluded().keys() == {"c"}


@pytest.mark.parametrize(
    ("bad", "hosts", "hours", "excluded"),
    [
        ([0], ["a"], 1, "a"),  # a job of one node
        ([0, 1], ["a", "b"], 1, None),  # what is wrong with all is not theirs
        ([1], ["a", "b"], 0, None),
        ([1], ["a"], 1, None),  # no node of this job
    ],
)
def test_when_a_node_is_left_out(run, bad, hosts, hours, excluded):
    run("preflight-train-1", **preflight(*bad))
    assert update(1, *hosts, hours=hours)[0] == excluded
    assert "preflight failed" in update(1, *hosts, hours=hours)[1]


def test_what_all_nodes_lack_is_said_and_leaves_none_out(run):
    run("preflight-train-1", nodes=[{"node": 0, "host": "a", "problems": ["no room"]}], bad=[])
    assert update(1, "a") == (None, "a: preflight failed; no room")


def test_nodes_that_did_not_reach_the_first_one(run):
    run("preflight-train-1-node1", nodes=[preflight(1)["nodes"][1]], bad=["ip-10-0-0-1"])
    assert left_out.bad_nodes(1, ["a", "b"]).keys() == {"b"}


def test_a_slow_node_is_one_that_computes_longer(run):
    slow = {"what": "compute", "node": 1, "host": "ip-10-0-0-1", "text": "worker 1 computes longer"}
    network = {"host": "all nodes", "text": "workers wait longer"}
    run("pace-train-1", notices=[slow, {**slow, "what": "data", "node": 0}, network])
    assert left_out.slow_nodes(1, ["a", "b"]) == {"b": "worker 1 computes longer"}
    assert left_out.slow_nodes(2, ["a", "b"]) == {}


def state_file(run, number, **fields):
    known = {"phase": "train", "attempt": number, "state": "RUNNING", "job_id": "7"}
    run(f"train-{number}", **{**known, "hosts": "a,b", "checkpoint": 0, **fields})


def ended(number, exit_code=9, **known):
    known |= {"max_crashes": 2, "requeue": True}
    ending = how_it_ended(
        read_facts(read_attempt(RUN, "train", number), exit_code, "", None, **known)
    )
    return ending.state, ending.reason


def test_the_files_of_a_run(run, tmp_path):
    """One job after another; crashes of an earlier job are its own."""
    for number in (1, 2):
        state_file(run, number, job_id="6", state="FAILED", cause="crash", reason="r")
    state_file(run, 3)
    assert reason_to_give_up(read_attempt(RUN, "train", 3), 2) == ""
    (tmp_path / "checkpoints/step-00000020.tmp-3").mkdir()
    why = "exit code 9 while running on a,b"
    assert ended(3) == ("REQUEUED", f"crash 1 of 2 without a new checkpoint: {why}")
    (tmp_path / "checkpoints/step-00000020").mkdir()
    assert ended(3) == ("REQUEUED", f"crash after step 20 was saved: {why}")
    run("stop-train-3", cause="time limit")
    run("stopped-train-3", step=20, saved=True)
    assert ended(3, 0) == ("REQUEUED", "time limit; saved step 20")
    run("cancelled")
    assert ended(3) == ("CANCELLED", "saved step 20")


@pytest.mark.parametrize(
    ("variables", "files", "state"),
    [
        ({}, (), "REQUEUED"),
        ({"TRNSLURM_CHECKPOINTS": "out"}, (), "FAILED"),
        ({"TRNSLURM_CHECKPOINTS": "out", "TRNSLURM_RESUMES": "told"}, (), "REQUEUED"),
        ({"TRNSLURM_CHECKPOINTS": "out", "TRNSLURM_RESUMES": "looks"}, (), "REQUEUED"),
        # Its option was added, but nothing is found: it may save elsewhere.
        ({"TRNSLURM_CHECKPOINTS": "out", "TRNSLURM_RESUMES": "added"}, (), "FAILED"),
        ({"TRNSLURM_CHECKPOINTS": "out"}, ("saved",), "REQUEUED"),
        # The preflight ended the attempt: the script has not begun.
        ({"TRNSLURM_CHECKPOINTS": "out"}, ("preflight-train-1",), "REQUEUED"),
    ],
)
def test_which_scripts_start_again_after_a_crash(run, monkeypatch, variables, files, state):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    state_file(run, 1)
    contents = {"saved": {"step": 3, "path": ""}, "preflight-train-1": preflight(1)}
    for name in files:
        run(name, **contents[name])
    assert ended(1)[0] == state


def test_a_node_that_failed_is_named(run, tmp_path):
    state_file(run, 2, state="REQUEUED")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/train-7.log").write_text(
        "srun: error: Node failure on a\n2026-01-01T00:00:00Z train attempt 1: REQUEUED ()\n"
        "srun: error: Node failure on trn-[1-2]\nsrun: error: Node failure on trn-[1-2]\n"
        "srun: error: Task launch for StepId=7.1 failed on node trn-3: Communication failure\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: Timed out waiting for job step to complete\n"
    )
    attempt = read_attempt(RUN, "train", 2)
    assert lost_nodes(attempt) == "trn-[1-2],trn-3" and steps_of(attempt) == (1, 1)
    reason = "requeued by Slurm because trn-1,trn-2 failed"
    assert ended(2, lost="trn-1,trn-2") == ("REQUEUED", reason)


@pytest.mark.parametrize(
    ("words", "who"),
    [
        ("***", "scancel"),
        ("DUE TO JOB REQUEUE ***", "scontrol requeue"),
        ("DUE TO PREEMPTION ***", "a preemption"),
        ("DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", "Slurm because a node failed"),
        ("DUE TO TIME LIMIT ***", ""),
        (None, ""),
    ],
)
def test_who_ended_the_job(run, tmp_path, words, who):
    """As Slurm writes it into the job's log; an earlier attempt had another end."""
    state_file(run, 2, state="CANCELLED")
    at = "slurmstepd-a: error: *** JOB 7 ON a CANCELLED AT 2026-11-26T13:33:28"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/train-7.log").write_text(
        f"{at} DUE TO JOB REQUEUE ***\n2026-01-01T00:00:00Z train attempt 1: REQUEUED ()\n"
        f"slurmstepd-a: error: *** STEP 7.0 ON a CANCELLED AT 2026-11-26T13:33:28 ***\n"
        + (f"{at} {words}\n" if words else "")
    )
    assert who_ended(read_attempt(RUN, "train", 2)) == who
    by = f"by {who}, " if who else ""
    assert ended(2) == ("CANCELLED", f"{by}not by trnslurm cancel")


def test_the_nodes_of_the_next_attempt(run, tmp_path):
    """Those that are fit, with spares for the others; none if they are too few."""

    def chosen(number, allocation="a,b", lost=(), counts=(2,), slow=()):
        known = read_attempt(RUN, "train", number)
        return ",".join(next_hosts(known, allocation.split(","), lost, counts, slow))

    state_file(run, 1)
    assert chosen(1) == chosen(1, "a,b,c") == "a,b"
    assert chosen(1, lost=["a"]) == ""
    assert chosen(1, lost=["a"], counts=(1, 2)) == "b" and chosen(1, counts=(1, 2)) == "a,b"
    assert chosen(1, "a,b,c,d", ["a"], (1, 2, 4)) == "b,c"
    assert chosen(1, "a,b,c,d", ["a"]) == chosen(1, "b,c,d", ["a"]) == "b,c"
    assert chosen(1, "a,b,c", slow=["a"]) == "b,c" and chosen(1, slow=["a"]) == "a,b"
    run("preflight-train-1", **preflight(1))
    assert chosen(1) == "" and chosen(1, "a,b,c") == "a,c"
    run("preflight-train-1", nodes=[{"node": 0, "host": "a", "problems": ["no room"]}], bad=[])
    assert chosen(1, "a,b,c") == ""  # what all nodes lack
    (tmp_path / "state/preflight-train-1.json").unlink()
    run("stuck-train-1", node=1, host="x", line="worker 3 is stuck")
    assert chosen(1) == "a,b" and chosen(1, "a,b,c") == "a,c"
    assert chosen(1, lost=["b"]) == ""
    state_file(run, 2)
    run("stuck-train-2", node=0, host="y", line="worker 1 is stuck")
    assert chosen(2) == "a,b"
    run("stuck-train-2", node=1, host="x", line="worker 3 is stuck")  # the same node again
    assert chosen(2) == "" and chosen(2, "a,b,c") == "a,c"


def test_when_the_next_attempt_starts_in_the_allocation(run, tmp_path):
    """Not after a second crash that left nothing new, unless another node takes part."""

    def here(number, *hosts):
        facts = read_facts(
            read_attempt(RUN, "train", number),
            9,
            "",
            None,
            max_crashes=9,
            requeue=True,
            next_hosts=hosts,
        )
        return how_it_ended(facts).here

    state_file(run, 1)
    assert here(1, "a", "b") and not here(1)
    state_file(run, 1, state="RESTARTED", cause="crash")
    state_file(run, 2)
    assert not here(2, "a", "b") and here(2, "a", "c")
    (tmp_path / "checkpoints/step-00000020").mkdir()
    assert here(2, "a", "b")


def test_a_job_that_dies_without_a_word_again_and_again(run):
    state_file(run, 1)
    state_file(run, 2)
    assert reason_to_give_up(read_attempt(RUN, "train", 2), 2) == ""
    os.truncate("state/train-2.json", 0)  # before it had written a word: of which job?
    state_file(run, 3)
    assert reason_to_give_up(read_attempt(RUN, "train", 3), 2) == ""
    state_file(run, 4)
    assert reason_to_give_up(read_attempt(RUN, "train", 4), 2) == (
        "given up after 2 crashes in a row without a new checkpoint: "
        "it ended without recording its state"
    )


@pytest.mark.parametrize(
    ("stand", "starts", "ago_s", "why", "named"),
    [
        ("pausing", 1, 1.0, "Killed", True),
        ("ready", 2, 5.0, "URLError: <urlopen error [Errno 111] Connection refused>", True),
        ("ready", 2, 5.0, "Killed", False),
        ("ready", 2, 500.0, "requests.exceptions.ConnectionError: refused", False),
        ("ready", 1, 5.0, "requests.exceptions.ConnectionError: refused", False),
    ],
)
def test_a_server_is_named_if_a_worker_may_have_missed_it(
    run, stand, starts, ago_s, why, named
) -> None:
    server = {"stand": stand, "starts": starts, "since": time.time() - ago_s, "host": "c"}
    write_json(RUN.servers_file, {"reward": [server]})
    assert unready_server(why) == ("reward 0 on c had ended or did not respond" if named else "")


def test_damaged_files_are_no_files(run, tmp_path):
    state_file(run, 1, restarts="many", checkpoint=None, hosts=3)
    for name in ("stopped-train-1", "preflight-train-1", "excluded", "stuck-train-1"):
        (tmp_path / f"state/{name}.json").write_text("[1")
    assert ended(1)[0] == "REQUEUED"
    assert update(1, "a") == (None, "")


def test_what_a_script_that_is_told_where_to_begin_has_saved(tmp_path, monkeypatch) -> None:
    """Something new in its directory is progress only if it looks there itself."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/last.pt").touch()
    monkeypatch.setattr(state, "RUN", RunFiles(tmp_path))
    monkeypatch.setenv("TRNSLURM_CHECKPOINTS", str(tmp_path / "out"))
    assert state.saved_by_now()[1] > 0
    monkeypatch.setenv("TRNSLURM_RESUMES", "told")
    assert state.saved_by_now() == (0, 0.0)
