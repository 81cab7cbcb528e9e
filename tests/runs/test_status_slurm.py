"""status on Slurm: every definite word, from state files, squeue and sacct as they are found."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.files import write_json
from trnslurm.contract.states import OF_A_RUN, State
from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status, statuses_of

from ..toy_site import write_attempt

DONE = {"state": "COMPLETED", "exit_code": 0}
RUNNING = {"state": "RUNNING"}
BY_HAND = "by scancel, not by trnslurm cancel"
DIED = "it ended without recording its state, which happens when node-1 fails"
NEVER = "it never started, and Slurm has no record of it"
NOT_BEGUN = (
    "its batch script never started{}, although Slurm calls the job COMPLETED{}: see `scontrol "
    "show node {}` and slurmd's log on {}"
)


def case(
    word: str,
    reason: str = "",
    *,
    train: list[dict[str, Any]] | None = None,
    precompile: list[dict[str, Any]] | None = None,
    queue: tuple[str, ...] = (),
    accounting: tuple[str, ...] = (),
    silent: bool = False,
    heartbeat_age_s: float | None = None,
    **fields: Any,
) -> Any:
    """What is found -> the word and the reason; the precompile phase is done unless said."""
    states = {"precompile": [DONE] if precompile is None else precompile, "train": train or []}
    made = {"states": states, "heartbeat_age_s": heartbeat_age_s, **fields}
    return word, reason, made, queue, accounting, silent


def failed(reason: str) -> dict[str, Any]:
    return {"state": "FAILED", "exit_code": 1, "reason": reason}


CASES = {
    # Pending
    "first phase waits": case(
        "PENDING", "precompile: waiting for free nodes", precompile=[],
        queue=("1001|PENDING|Resources|N/A|", "1002|PENDING|Dependency|N/A|")),
    "train waits for free nodes": case(
        "PENDING", "waiting for free nodes", queue=("1002|PENDING|Resources|N/A|",)),
    "reason with details": case(
        "PENDING", "the nodes it needs are down, drained or reserved",
        queue=("1002|PENDING|ReqNodeNotAvail, UnavailableNodes:node-[1-2]|N/A|",)),
    "reason we have no words for": case(
        "PENDING", "SchedDefer", queue=("1002|PENDING|SchedDefer|N/A|",)),
    "no reason": case("PENDING", "", queue=("1002|PENDING|None|N/A|",)),
    # Held
    "held by its owner": case(
        "HELD", "held by its owner: `scontrol release` frees it",
        queue=("1002|PENDING|JobHeldUser|N/A|",)),
    "held by an admin": case(
        "HELD", "held by an administrator", queue=("1002|PENDING|JobHeldAdmin|N/A|",)),
    "held after a failed launch": case(
        "HELD", "held by Slurm, because its launch failed",
        queue=("1002|PENDING|launch failed requeued held|N/A|",), train=[RUNNING]),
    "requeued and held": case(
        "HELD", "", queue=("1002|REQUEUE_HOLD|None|N/A|",), train=[RUNNING]),
    # On its way
    "nodes boot": case(
        "CONFIGURING", "its nodes are booting", queue=("1002|CONFIGURING|None|x|node-[1-2]",)),
    "nodes boot for the first phase": case(
        "CONFIGURING", "precompile: its nodes are booting", precompile=[],
        queue=("1001|CONFIGURING|None|x|node-1", "1002|PENDING|Dependency|N/A|")),
    "precompiling": case(
        "PRECOMPILING", "", precompile=[RUNNING],
        queue=("1001|RUNNING|None|x|node-1", "1002|PENDING|Dependency|N/A|")),
    "running": case("RUNNING", "", train=[RUNNING], queue=("1002|RUNNING|None|x|node-[1-2]",)),
    "suspended": case(
        "RUNNING", "suspended", train=[RUNNING], queue=("1002|SUSPENDED|None|x|node-1",)),
    "running, no word of its script yet": case(
        "RUNNING", "", queue=("1002|RUNNING|None|x|node-[1-2]",)),
    "completing": case("COMPLETED", "", train=[DONE], queue=("1002|COMPLETING|None|x|node-1",)),
    "completing, script not done": case(
        "RUNNING", "it is ending", train=[RUNNING], queue=("1002|COMPLETING|None|x|node-1",)),
    "completing, its script does not know yet whether it is requeued": case(
        "RUNNING", "it is ending", train=[{"state": "CANCELLED"}],
        queue=("1002|COMPLETING|None|x|node-1",)),
    "completing, cancelled by hand": case(
        "RUNNING", f"it is ending; {BY_HAND}", train=[{"state": "CANCELLED", "reason": BY_HAND}],
        queue=("1002|COMPLETING|None|x|node-1",)),
    # Requeued
    "requeued": case(
        "REQUEUED", "time limit; saved step 40; it will start again within minutes",
        queue=("1002|PENDING|BeginTime|x|",),
        train=[{"state": "REQUEUED", "reason": "time limit; saved step 40"}]),
    "requeued by its script, which has not ended yet": case(
        "REQUEUED", "crash 1 of 3", queue=("1002|COMPLETING|None|x|node-1",),
        train=[{"state": "REQUEUED", "reason": "crash 1 of 3"}]),
    "requeued without a state": case(
        "REQUEUED", f"{DIED}; it will start again within minutes",
        queue=("1002|PENDING|BeginTime|x|",), train=[RUNNING], heartbeat_age_s=900),
    "requeued, though its script took that for a cancel": case(
        "REQUEUED", "it will start again within minutes", queue=("1002|PENDING|BeginTime|x|",),
        train=[{"state": "CANCELLED"}]),
    "second attempt runs": case(
        "RUNNING", "", queue=("1002|RUNNING|None|x|node-1",),
        train=[{"state": "REQUEUED"}, RUNNING]),
    # Ended, Slurm still knows
    "stopped at its time limit, not requeued": case(
        "STOPPED", "time limit; saved step 40", queue=("1002|TIMEOUT|TimeLimit|x|node-1",),
        train=[{"state": "STOPPED", "reason": "time limit; saved step 40"}]),
    "completed": case("COMPLETED", "", train=[DONE], queue=("1002|COMPLETED|None|x|node-1",)),
    "failed, the script says why": case(
        "FAILED", "exit code 1 while running on node-1",
        train=[failed("exit code 1 while running on node-1")],
        queue=("1002|FAILED|NonZeroExitCode|x|node-1",)),
    "failed, the script was killed": case(
        "FAILED", "NonZeroExitCode", train=[RUNNING],
        queue=("1002|FAILED|NonZeroExitCode|x|node-1",)),
    "out of memory": case(
        "FAILED", "out of host memory", train=[RUNNING],
        queue=("1002|OUT_OF_MEMORY|OutOfMemory|x|node-1",)),
    "boot failure": case(
        "FAILED", "its nodes failed to boot", queue=("1002|BOOT_FAIL|BootFailure|x|node-1",)),
    "node failure": case(
        "NODE_FAIL", "a node failed", train=[RUNNING], queue=("1002|NODE_FAIL|NodeDown|x|n",)),
    "time limit": case(
        "TIMEOUT", "time limit", train=[RUNNING], queue=("1002|TIMEOUT|TimeLimit|x|node-1",)),
    "its batch script was killed": case(
        "FAILED", "its batch script was killed", train=[RUNNING],
        queue=("1002|FAILED|JobLaunchFailure|x|node-1",)),
    "slurmd could not start its batch script": case(
        "FAILED", NOT_BEGUN.format("", "", "node-1", "node-1"),
        queue=("1002|COMPLETED|None|x|node-1",)),
    "slurmd could not start its batch script, accounting": case(
        "FAILED", NOT_BEGUN.format("", "", "NODE", "its first node"),
        accounting=("1002|COMPLETED|0:0|",)),
    "slurmd could not start its batch script, Slurm has a reason": case(
        "FAILED", NOT_BEGUN.format("", " (Slurm could not launch it)", "node-1", "node-1"),
        queue=("1002|COMPLETED|JobLaunchFailure|x|node-1",)),
    "slurmd could not start the batch script of the precompile job": case(
        "FAILED", f"precompile: {NOT_BEGUN.format('', '', 'node-1', 'node-1')}", precompile=[],
        queue=("1001|COMPLETED|None|x|node-1", "1002|PENDING|DependencyNeverSatisfied|N/A|")),
    "slurmd could not start its batch script after a requeue": case(
        "FAILED", NOT_BEGUN.format(" again", "", "node-1", "node-1"),
        train=[{"state": "REQUEUED", "reason": "time limit"}],
        queue=("1002|COMPLETED|None|x|node-1",)),
    "deadline": case(
        "TIMEOUT", "its deadline passed", queue=("1002|DEADLINE|DeadLine|x|",)),
    "preempted": case(
        "PREEMPTED", "", train=[RUNNING], queue=("1002|PREEMPTED|None|x|node-1",)),
    "cancelled": case("CANCELLED", BY_HAND, queue=("1002|CANCELLED|None|x|",)),
    "cancelled while it ran": case(
        "CANCELLED", f"{BY_HAND}; no step is saved", train=[{"state": "CANCELLED"}],
        queue=("1002|CANCELLED|None|x|n",)),
    "cancelled while it waited to start again": case(
        "CANCELLED", f"{BY_HAND}; no step is saved", queue=("1002|CANCELLED|None|x|",),
        train=[{"state": "REQUEUED", "reason": "time limit"}]),
    "stopped": case(
        "STOPPED", "asked to", train=[{"state": "STOPPED", "reason": "asked to"}]),
    # The first phase failed
    "precompile failed": case(
        "FAILED", "precompile: exit code 1 while running on node-1",
        precompile=[failed("exit code 1 while running on node-1")],
        queue=("1001|FAILED|NonZeroExitCode|x|n", "1002|CANCELLED|Dependency|x|")),
    "precompile failed, train will never start": case(
        "FAILED", "the precompile job failed, so it will never start",
        queue=("1002|PENDING|DependencyNeverSatisfied|N/A|",)),
    "precompile hit its limit": case(
        "TIMEOUT", "precompile: time limit", precompile=[RUNNING],
        queue=("1001|TIMEOUT|TimeLimit|x|n", "1002|CANCELLED|None|x|")),
    # Forgotten by the controller (MinJobAge), accounting off
    "forgotten, completed": case("COMPLETED", "", train=[DONE]),
    "forgotten, failed": case("FAILED", "exit code 3", train=[failed("exit code 3")]),
    "forgotten, timed out": case(
        "TIMEOUT", "time limit", train=[{"state": "TIMEOUT", "reason": "time limit"}]),
    "forgotten, preempted": case("PREEMPTED", "x", train=[{"state": "PREEMPTED", "reason": "x"}]),
    "forgotten, never started": case("LOST", NEVER),
    "forgotten before its heartbeat": case(
        "LOST",
        "it ended before its first heartbeat, without recording its state",
        train=[RUNNING],
    ),
    "forgotten, and its number given to another run": case(
        "LOST", NEVER, queue=("1002|RUNNING|None|x|node-[1-2]|/runs/20260101-000009-other",)),
    "last phase never submitted": case("LOST", "not submitted", jobs={"precompile": "1001"}),
    "nothing submitted": case("LOST", "precompile: not submitted", precompile=[], jobs={}),
    "refused": case(
        "FAILED", "rejected at submission: sbatch: no", precompile=[], jobs={},
        refused="sbatch: no"),
    # Forgotten, but there is accounting
    "accounting, completed": case(
        "COMPLETED", "", train=[RUNNING], accounting=("1002|COMPLETED|0:0|node-1",)),
    "accounting, failed": case(
        "FAILED", "exit code 9", train=[RUNNING], accounting=("1002|FAILED|9:0|node-1",)),
    "accounting, killed": case(
        "FAILED", "killed by signal 9", train=[RUNNING],
        accounting=("1002|FAILED|0:9|node-1",)),
    "accounting, cancelled": case(
        "CANCELLED", "by scancel (root), not by trnslurm cancel",
        accounting=("1002|CANCELLED by 0|0:0|",)),
    "accounting, node failure": case(
        "NODE_FAIL", "a node failed", train=[RUNNING], accounting=("1002|NODE_FAIL|1:0|n",)),
    "accounting, requeued: the last record counts": case(
        "COMPLETED", "", train=[RUNNING],
        accounting=("1002|NODE_FAIL|1:0|n", "1002|COMPLETED|0:0|n")),
    # The controller is silent
    "silent, waiting as far as is known": case("PENDING", "as last seen; ", silent=True),
    "silent, running": case(
        "RUNNING", "as last seen; ", train=[RUNNING], heartbeat_age_s=5, silent=True),
    "silent, no heartbeat either": case(
        "LOST", "no heartbeat since ", train=[RUNNING], heartbeat_age_s=7200, silent=True),
    "silent, completed": case("COMPLETED", "", train=[DONE], silent=True),
    "silent, requeued": case(
        "REQUEUED", "as last seen; ", train=[{"state": "REQUEUED"}], heartbeat_age_s=5,
        silent=True),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_word(fake_slurm, make_run, what: str) -> None:
    word, reason, made, queue, accounting, silent = CASES[what]
    run = make_run(**made)
    fake_slurm.queue(*queue)
    if accounting:
        fake_slurm.answer("accounting", *accounting)
    if silent:
        fake_slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    status = run_status(run)
    if reason.endswith((" ", "; ")):
        assert (status.state, status.reason[: len(reason)]) == (word, reason)
    else:
        assert (status.state, status.reason) == (word, reason)
    assert status.final == State(word).final


def test_who_cancelled_by_hand_is_asked_of_accounting(fake_slurm, make_run, cli) -> None:
    """And what was saved is the way back, even if the job waited to start again."""
    ended = {"state": "REQUEUED", "reason": "time limit; saved step 40"}
    run = make_run(states={"precompile": [DONE], "train": [ended]})
    (run.checkpoints / "step-00000040").mkdir(parents=True)
    fake_slurm.queue("1002|CANCELLED|None|x|")
    fake_slurm.answer("accounting", "1002|CANCELLED by 4242|0:0|")
    first, second, *_ = cli("status", run.name).out.splitlines()
    said = "by scancel (uid 4242), not by trnslurm cancel; step 40 is saved"
    assert first == f"{run.name}: CANCELLED ({said})"
    assert second == f"next: trnslurm resume {run.name}"


def test_the_table_has_every_word() -> None:
    words = {word for word, *_ in CASES.values()}
    assert words == {*OF_A_RUN}


def test_an_attempt_that_was_killed_runs_no_more(fake_slurm, make_run) -> None:
    """It never wrote how it ended; the newest one of a job that runs is believed."""
    running = {"state": "RUNNING", "job_id": "1002"}
    run = make_run(states={"precompile": [DONE], "train": [running, running]})
    fake_slurm.queue("1002|RUNNING|None|x|node-[1-2]")
    assert [a.state for a in run_status(run).attempts] == ["LOST", "RUNNING"]
    fake_slurm.queue("1002|FAILED|NonZeroExitCode|x|")
    assert [a.state for a in run_status(run).attempts] == ["LOST", "LOST"]


def test_a_run_that_ended_costs_no_question(fake_slurm, make_run) -> None:
    run_status(make_run(states={"precompile": [DONE], "train": [DONE]}))
    assert fake_slurm.calls() == []


def test_a_thousand_runs_cost_one_question(fake_slurm, make_run) -> None:
    runs = [
        make_run(f"20260101-000000-gpt-{n}", jobs={"precompile": f"1{n}", "train": f"2{n}"})
        for n in range(1000)
    ]
    fake_slurm.queue(*(f"1{n}|PENDING|Resources|N/A|" for n in range(1000)))
    statuses, broken = statuses_of(runs)
    assert [s.state for s in statuses] == ["PENDING"] * 1000
    assert broken == []
    assert len(fake_slurm.calls("squeue")) == 1
    assert len(fake_slurm.calls("sacct")) <= 1
    assert len(fake_slurm.calls()) <= 2


def test_runs_of_several_users_are_asked_about_together(fake_slurm, make_run) -> None:
    runs = [make_run("a", user="ann"), make_run("b", user="bob"), make_run("c", user="ann")]
    statuses_of(runs)
    (call,) = fake_slurm.calls("squeue")
    assert "--users=ann,bob" in call.arguments


def test_status_and_its_json_say_the_same(fake_slurm, make_run, cli) -> None:
    run = make_run(states={"precompile": [DONE], "train": [RUNNING]})
    run.metrics_file.write_text('{"step": 4, "steps": 30, "loss": 5.5}\n{"step": 5, "ste')
    fake_slurm.queue("1002|RUNNING|None|x|node-[1-2]")
    text, data = cli("status", run.name), json.loads(cli("status", run.name, "--json").out)
    assert (text.code, text.err) == (0, "")
    assert text.out.splitlines()[0] == f"{run.name}: RUNNING"
    assert "step 4/30, loss 5.5000" in text.out
    assert f"run directory: {run.path}" in text.out
    assert (data["state"], data["metrics"]["step"]) == ("RUNNING", 4)
    assert [(p["phase"], p["state"], p["job_id"]) for p in data["phases"]] == [
        ("precompile", "COMPLETED", "1001"),
        ("train", "RUNNING", "1002"),
    ]


def test_a_requeued_training_says_what_it_leaves_out(fake_slurm, make_run) -> None:
    """Too few nodes may be left; one whose time is over is left out until the next requeue only."""
    run = make_run(states={"precompile": [DONE], "train": [{"state": "REQUEUED", "reason": "x"}]})
    nodes = {"node-1": {"until": time.time() + 60, "why": ""}, "node-2": {"until": 1.0, "why": ""}}
    run.excluded_file.write_text(json.dumps({"nodes": nodes}))
    fake_slurm.queue("1002|PENDING|BadConstraints|N/A|")
    held = "too few nodes satisfy the job's constraints, and Slurm has stopped trying"
    status = run_status(run)
    assert (status.state, status.reason) == ("HELD", f"{held}; excluding node-1")
    assert status.mend == f"trnslurm resume {run.name}"
    run.excluded_file.write_text("[")
    assert run_status(run).reason == held
    fake_slurm.queue("1002|PENDING|Resources|N/A|")
    assert run_status(run).reason == "x; waiting for free nodes"


def test_a_precompile_that_failed_says_what_was_not_compiled(make_run) -> None:
    failed = {"state": "FAILED", "exit_code": 1, "reason": "exit code 1 while running on a,b"}
    run = make_run(states={"precompile": [failed, failed]})
    for node, problem in enumerate((None, "2 of 4 graphs could not be compiled")):
        result = {"host": f"host-{node}", "problem": problem}
        (run.state / f"graphs-2-node{node}.json").write_text(json.dumps(result))
    assert run_status(run).reason == "precompile: host-1: 2 of 4 graphs could not be compiled"
    (run.state / "graphs-2-node1.json").write_text("{")
    assert run_status(run).reason == "precompile: exit code 1 while running on a,b"


def test_runs_of_a_cluster_that_is_gone_can_be_closed_and_removed(make_run, tmp_path, cli) -> None:
    gone = tmp_path / "sandbox/bin"
    run = make_run(states={"precompile": [DONE], "train": [RUNNING]}, bin_dir=str(gone))
    assert run_status(run).words == f"LOST (its cluster is gone: {gone} does not exist)"
    assert cli("cancel", run.name).code == 0
    assert run_status(run).state == "CANCELLED"
    assert cli("rm", "--yes", run.name).code == 0
    assert not run.path.exists()


def test_a_bundle_that_sbatch_started(site, fake_slurm, cli, monkeypatch) -> None:
    """Its files are read; what would change it is refused, with what works instead."""
    monkeypatch.chdir(site.root)
    site.recipe("batch: {global_batch: 64}\nprecompile: never\n")
    assert cli("render", "toy", "-c", "pc", "--nodes", "2", "--time", "60", "-o", "out").code == 0
    said = "./out has not started: run trnslurm submit --rendered ./out"
    assert cli("status", "./out").error == said
    Path("jobs").mkdir(exist_ok=True)
    assert cli("status", "./jobs").error == "./jobs: not a run directory (no run.json)"
    run = RunDir(site.root / "out")
    files = sorted(run.path.rglob("*"))
    write_attempt(run, "train", 1, job_id="77", state="FAILED", cause="crash", exit_code=1,
                  reason="preempted", started="2026-01-01T00:00:00Z")  # fmt: skip
    again = f"cd {run.path} && sbatch train.sbatch"
    for word in ("./out", "out", str(run.path)):
        out = cli("status", word).out
        assert out.startswith(f"out: FAILED (preempted)\nnext: {again}\n")
        assert "toy on 2 nodes of pc\n" in out
        assert "started without trnslurm submit, so its jobs in the queue are unknown" in out
    write_attempt(run, "train", 2, job_id="78", state="RUNNING", host="node-1")
    fake_slurm.queue("78|RUNNING|None|N/A|node-1")
    (run.logs / "train-2-node0.log").write_text("iter 1\n")
    run.metrics_file.write_text('{"attempt": 2, "step": 1, "steps": 2, "loss": 3.5}\n')
    assert cli("status", "./out").out.startswith("out: RUNNING\n")
    assert cli("logs", "./out").out == "iter 1\n"
    assert "3.5000" in cli("metrics", "./out").out
    assert "attempt 2: no failure was found" in cli("triage", "./out").out
    refused = "was started without trnslurm submit: "
    assert cli("cancel", "./out").error.endswith(f"{refused}scancel 78")
    assert cli("resume", "./out").error.endswith(f"{refused}run `{again}` to start it again")
    write_json(run.project_file, {})
    (run.path / "work").mkdir()
    (run.path / "work/last.ckpt").write_text("x")
    write_attempt(run, "train", 2, job_id="78", state="FAILED", cause="crash", exit_code=1)
    fake_slurm.queue()
    told = f"next: `{again}` if the script finds work/last.ckpt itself; otherwise pass it to the "
    assert told in cli("status", "./out").out
    for words in (("keep", "./out"), ("note", "./out", "x"), ("rm", "./out", "-y")):
        assert refused in cli(*words).error
    assert set(files) <= set(run.path.rglob("*"))
    assert not run.record_file.exists()
    for damage in ("", "phases: 3", "x: ["):
        run.config_file.write_text(damage)
        assert f"{run.config_file}:" in cli("status", "./out").error
