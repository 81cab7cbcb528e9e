"""status of local runs, and of run directories that are damaged or half made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.times import utc_time
from trnslurm.node.triage.mend import longer
from trnslurm.records.run import RunDir, process_start
from trnslurm.runs.silence import NO_NUMBERS
from trnslurm.runs.status import run_status
from trnslurm.top.look import view_of

DONE = {"state": "COMPLETED", "exit_code": 0}
RUNNING = {"state": "RUNNING"}
SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def alive() -> Iterator[str]:
    """`pid@start` of a process that runs until the test has ended."""
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        yield f"{process.pid}@{process_start(process.pid)}"
        process.kill()


@pytest.fixture
def dead() -> str:
    """`pid@start` of a process that has ended, and been waited for."""
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        word = f"{process.pid}@{process_start(process.pid)}"
        process.kill()
    return word


def test_alive(make_run, alive: str, path_without_slurm) -> None:
    def state(name: str, **states) -> tuple[str, str]:
        run = make_run(name, scheduler="local", jobs={"local": alive}, states=states)
        status = run_status(run)
        return status.state, status.reason

    assert state("a") == ("PENDING", "precompile: starting")
    assert state("b", precompile=[RUNNING]) == ("PRECOMPILING", "")
    assert state("c", precompile=[DONE]) == ("PENDING", "waiting for the precompile phase")
    assert state("d", precompile=[DONE], train=[RUNNING]) == ("RUNNING", "")
    assert state("e", precompile=[DONE], train=[DONE]) == ("COMPLETED", "")


def test_workers_that_train_alone_are_told_of(make_run, alive: str, path_without_slurm) -> None:
    states = {"precompile": [DONE], "train": [RUNNING]}
    run = make_run("a", scheduler="local", jobs={"local": alive}, states=states)
    told = {"workers": 2, "per_node": 1, "uses": "lightning.pytorch"}
    write_json(run.alone_file("train", 1), told)
    status = run_status(run)
    assert (status.state, status.reason) == (
        "RUNNING",
        "its 2 workers share no process group so far, so each trains alone: Lightning's "
        "Trainer needs num_nodes=2, devices=1, or submit it with --nodes 1, or with --per node if "
        "it starts its own workers",
    )


def test_dead(make_run, dead: str) -> None:
    failed = {"state": "FAILED", "exit_code": 1, "reason": "exit code 1 while running on x"}

    def state(name: str, heartbeat_age_s: float | None = None, **states) -> tuple[str, str]:
        run = make_run(
            name, scheduler="local", jobs={"local": dead}, states=states,
            heartbeat_age_s=heartbeat_age_s,
        )  # fmt: skip
        status = run_status(run)
        return status.state, status.reason

    assert state("a") == (
        "LOST",
        "precompile: it ended before its first heartbeat, without recording its state",
    )
    assert state("b", precompile=[failed]) == ("FAILED", f"precompile: {failed['reason']}")
    assert state("c", precompile=[DONE], train=[failed]) == ("FAILED", failed["reason"])
    assert state("d", precompile=[DONE], train=[DONE]) == ("COMPLETED", "")
    assert state("e", precompile=[DONE], train=[{"state": "CANCELLED"}]) == (
        "CANCELLED",
        "no step is saved",
    )
    word, reason = state("f", 7200, precompile=[DONE], train=[RUNNING])
    assert word == "LOST"
    assert reason.startswith("no heartbeat since 20")


def test_pid_used_again_by_another_process_is_not_ours(make_run, alive: str) -> None:
    pid = alive.partition("@")[0]
    run = make_run(
        scheduler="local", jobs={"local": f"{pid}@1"},
        states={"precompile": [DONE], "train": [RUNNING]}, heartbeat_age_s=600,
    )  # fmt: skip
    assert run_status(run).state == "LOST"


def test_run_of_another_host_is_judged_by_its_heartbeat(make_run, alive: str, monkeypatch) -> None:
    """By the clock of the files, even where that of this host is an hour off."""

    def state(name: str, age_s: float) -> str:
        run = make_run(
            name, scheduler="local", host="elsewhere", jobs={"local": alive},
            states={"precompile": [DONE], "train": [RUNNING]}, heartbeat_age_s=age_s,
        )  # fmt: skip
        return run_status(run).state

    assert state("fresh", 10) == "RUNNING"
    fresh = make_run("x").path.with_name("fresh")
    assert state("stale", 600) == "LOST"
    now = time.time
    for off_s in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: now() + off_s)
        assert run_status(RunDir(fresh)).state == "RUNNING"
        assert run_status(RunDir(fresh.with_name("stale"))).state == "LOST"


def test_cancelled_before_it_started(make_run, dead: str) -> None:
    run = make_run(scheduler="local", jobs={"local": dead})
    run.cancelled_file.write_text("{}")
    assert run_status(run).state == "CANCELLED"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "{}", '{"run": "x"}', "\xff", "{" * 2000]
)
def test_damaged_record_is_told_and_the_others_are_shown(make_run, cli, text: str) -> None:
    good = make_run("20260101-000000-good", states={"precompile": [DONE], "train": [DONE]})
    bad = make_run("20260101-000001-bad")
    bad.record_file.write_bytes(text.encode("latin-1"))
    done = cli("runs")
    assert done.code == 0
    (warning,) = done.err.splitlines()
    assert warning.startswith(f"warning: {bad.record_file}: damaged")
    assert good.name in done.out and "COMPLETED" in done.out
    alone = cli("status", bad.path)
    assert alone.code == 1
    assert str(bad.record_file) in alone.error


@pytest.mark.parametrize("text", ["", "{", "[]", '{"phase": "train"}', '{"odd": 1}', "\xff"])
def test_half_written_state_file_is_an_attempt_all_the_same(make_run, fake_slurm, text) -> None:
    run = make_run(states={"precompile": [DONE]})
    (run.state / "train-1.json").write_bytes(text.encode("latin-1"))
    fake_slurm.queue("1002|RUNNING|None|x|node-1")
    status = run_status(run)
    assert (status.state, status.phases[1].attempt) == ("RUNNING", 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", None),
        ("garbage\n", None),
        ('{"step": 1, "steps": 9, "loss": 2.5}\n{"step": 2', "step 1/9, loss 2.5000"),
        ('{"step": 1, "steps": 9, "loss": NaN}\n', "step 1/9, loss nan"),
        ('{"step": 1, "steps": 9, "loss": null}\n', "step 1/9"),
        ('{"step": 1}\n[]\n3\n', "step 1/?"),
        ('{"step": 1}\n{"step": 2, "loss": 1%s}\n' % ("0" * 400), "step 1/?"),  # no float
    ],
)
def test_metrics_as_they_may_be_found(make_run, cli, text: str, shown: str | None) -> None:
    run = make_run(states={"precompile": [DONE], "train": [DONE]})
    run.metrics_file.write_text(text)
    for command in (("status", run.name), ("runs",)):
        done = cli(*command)
        assert (done.code, done.err) == (0, "")
    lines = [line for line in cli("status", run.name).out.splitlines() if line.startswith("step")]
    assert len(lines) == (0 if shown is None else 1)
    assert all(line.startswith(str(shown)) for line in lines)


@pytest.mark.parametrize("place", ["checkpoints", "work/my out"])
def test_a_cancelled_run_names_what_is_saved_and_how_to_go_on(
    make_run, dead, cli, place: str
) -> None:
    """In checkpoints/, or where the key `checkpoints` has the script save."""
    run = make_run(
        states={"precompile": [DONE], "train": [{"state": "CANCELLED"}]},
        scheduler="local",
        jobs={"local": dead},
    )
    run.script("train").write_text(f'#\nexport TRNSLURM_CHECKPOINTS="$PWD/"\'{place}\'\n: "')
    run.cancelled_file.write_text("{}")
    shown = cli("status", run.name).out
    begins = f"{run.name}: CANCELLED (by trnslurm cancel; no step is saved)\nnext: trnslurm resume"
    assert shown.startswith(f"{begins} {run.name}\n")
    (run.path / place).mkdir(parents=True)
    (run.path / place / "model.pt").touch()
    shown = cli("status", run.name).out
    assert shown.startswith(
        f"{run.name}: CANCELLED (by trnslurm cancel; {place}/ was written at 20"
    )
    assert f"\nnext: trnslurm resume {run.name}\n" in shown
    (run.checkpoints / "step-00000040").mkdir(parents=True)
    shown = cli("status", run.name).out
    assert shown.startswith(f"{run.name}: CANCELLED (by trnslurm cancel; step 40 is saved)\n")
    assert f"\nnext: trnslurm resume {run.name}\n" in shown


def test_a_script_that_ends_before_its_steps_can_be_resumed(make_run, cli) -> None:
    run = make_run(states={"precompile": [DONE], "train": [DONE]})
    run.code.mkdir()
    write_json(run.project_file, {"links": {}, "left_out": []})
    run.metrics_file.write_text('{"attempt": 1, "step": 12, "steps": 100, "loss": 2.5}\n')
    begins = f"{run.name}: COMPLETED (the script ended at step 12 of 100)\n"
    shown = cli("status", run.name).out
    assert shown.startswith(begins) and "next: " not in shown
    # A log need not have the last step.
    run.metrics_file.write_text(
        '{"attempt": 1, "step": 90, "steps": 100, "loss": 2.5, "read": "log"}\n'
    )
    shown = cli("status", run.name).out
    assert shown.startswith(f"{run.name}: COMPLETED\n")
    assert "\nstep 90/100, loss 2.5000 (read from its log)\n" in shown
    for losses, told in (
        ('"eval_loss": 3, "gen/total_loss": 1.5, "disc_loss": 2', ", gen/total_loss 1.5000"),
        ('"eval_loss": 3', ", eval_loss 3.0000"),
    ):
        run.metrics_file.write_text(f'{{"attempt": 1, "step": 90, "steps": 100, {losses}}}\n')
        assert f"\nstep 90/100{told}\n" in cli("status", run.name).out
    assert "log" not in cli("metrics", run.name).out
    run.metrics_file.write_text('{"attempt": 1, "step": 12, "steps": 100, "loss": 2.5}\n')
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    shown = cli("status", run.name).out
    assert shown.startswith(f"{begins}next: trnslurm resume {run.name}\n")


def test_a_script_that_has_saved_is_corrected_in_its_run(make_run, dead, cli) -> None:
    """A new run would begin at step 0, whatever the old one has saved."""
    run = failed(make_run, dead, f"{TRACEBACK}KeyError: 'lr'\n")
    assert f"then {AGAIN}\n" in cli("status", run.name).out
    run.code.mkdir()
    write_json(run.project_file, {"links": {}, "left_out": []})
    (run.path / "work").mkdir()
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    then = f"(in work/ in the run directory), then trnslurm resume {run.name}\n"
    assert then in cli("status", run.name).out


UNRESOLVED = "The IPv6 network addresses of (gpu-1, 26062) cannot be retrieved (gai error: -3"


def test_workers_that_never_met_by_the_time_limit(make_run, dead, cli) -> None:
    """More time would not help; a training that reported a step may need it."""
    reason = "time limit; it saved no new checkpoint"
    run = failed(make_run, dead, UNRESOLVED, state="TIMEOUT", reason=reason, cause="time limit")
    shown = cli("status", run.name).out
    assert f"TIMEOUT ({reason}; " in shown and "cannot be resolved" in shown
    assert "--time" not in shown
    run.metrics_file.write_text('{"attempt": 1, "step": 1, "steps": 9, "loss": 2.5}\n')
    assert "--time MORE" in cli("status", run.name).out


def test_a_script_that_does_not_continue(make_run, dead, cli) -> None:
    reason = "time limit; it started at step 1 again instead of after its checkpoint"
    run = failed(make_run, dead, "", state="TIMEOUT", reason=reason, cause="repeats")
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "model.pt").touch()
    assert (
        "next: make the script load what it finds in {checkpoints} when it starts, then "
        f"{AGAIN}\n"
    ) in cli("status", run.name).out


@pytest.mark.parametrize(
    ("age_s", "words"), [(7, "7 s ago"), (300, "5 min ago"), (3 * 3600 + 60, "3 h ago")]
)
def test_a_running_training_shows_how_old_its_last_step_is(make_run, alive, cli, age_s, words):
    run = make_run(
        states={"precompile": [DONE], "train": [{"state": "RUNNING"}]},
        scheduler="local",
        jobs={"local": alive},
    )
    line = {"step": 1, "steps": 9, "loss": 2.5, "time": time.time() - age_s}
    run.metrics_file.write_text(json.dumps(line) + "\n")
    assert f"step 1/9, loss 2.5000, {words}" in cli("status", run.name).out


def test_a_silent_training_says_so_and_how_to_look(make_run, alive, cli) -> None:
    run = make_run(
        states={"precompile": [DONE], "train": [{"state": "RUNNING"}]},
        scheduler="local",
        jobs={"local": alive},
    )
    log = run.node_log("train", 1, 0)
    log.touch()
    assert "no output" not in cli("status", run.name).out
    os.utime(log, (0, time.time() - 300))
    told = f"no steps and no output for 5 min: run trnslurm stacks {run.name} to see where its"
    assert told in cli("status", run.name).out
    run.project_file.parent.mkdir()
    write_json(run.project_file, {})
    # It loads its model; its first step takes long, and its log still moves; it reports nothing.
    for began_s, wrote_s, told in (
        (10, 9, False), (300, 5, False), (300, 200, True), (700, 5, True),
    ):  # fmt: skip
        began = utc_time(time.time() - began_s)
        os.utime(log, (0, time.time() - wrote_s))
        write_json(run.state_file("train", 1), {"state": "RUNNING", "started": began})
        assert (NO_NUMBERS in cli("status", run.name).out) is told
        waits = f"{run.name} is RUNNING and has no metrics yet: they appear within half a minute"
        assert cli("metrics", run.name).error.startswith(waits) is not told


def failed(make_run, dead, log: str, **state: str) -> RunDir:
    """Return a run on this machine whose training has failed with this log."""
    states = {"precompile": [DONE], "train": [FAILED | state]}
    run: RunDir = make_run(
        states=states,
        scheduler="local",
        jobs={"local": dead},
        command=["trnslurm", "submit", "gpt", "--nodes", "2"],
    )
    began = read_json(run.state_file("train", 1)) | {"checkpoint": 0}
    write_json(run.state_file("train", 1), began)
    run.node_log("train", 1, 0).write_text(log)
    return run


FAILED = {"state": "FAILED", "reason": "exit code 1"}
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 4, in <module>\n'
AGAIN = "trnslurm submit gpt --nodes 2"


@pytest.mark.parametrize(
    ("error", "saved", "said"),
    [
        # An error in the copied code: with something saved, a resume may pass it.
        ("ValueError: bad sample", False, f"correct it there, then {AGAIN}"),
        ("ValueError: bad sample", True, "trnslurm resume {}"),
        # A known cause in what was copied, on the machines, and one that passes.
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            True,
            "set a smaller batch.micro_batch (the plan makes up for it with accumulation), then "
            + AGAIN,
        ),
        (
            "OSError: [Errno 28] No space left on device: '/fsx/a'",
            True,
            "make room (train.keep_last, trnslurm compile gc, /tmp, /dev/shm), then trnslurm "
            "resume {}",
        ),
        (
            "ModuleNotFoundError: No module named 'h5py'",
            True,
            "install it with the job's own Python (see trnslurm env check), then "
            "trnslurm resume {}",
        ),
        ("RuntimeError: NCCL error: remote process exited or there was a network error", True,
         "trnslurm resume {}"),
    ],
)  # fmt: skip
def test_the_first_lines_say_what_to_do(make_run, dead, cli, error, saved, said) -> None:
    """A resume is not offered where it would fail again."""
    run = failed(make_run, dead, f"{TRACEBACK}{error}\n")
    if saved:
        (run.checkpoints / "step-00000010").mkdir(parents=True)
    first, *others = cli("status", run.name).out.splitlines()
    assert first.startswith(f"{run.name}: FAILED (")
    assert f"next: {said.format(run.name)}" in others[:6]


def test_top_says_it_too(make_run, dead) -> None:
    run = failed(make_run, dead, f"{TRACEBACK}ValueError: bad sample\n")
    view = view_of(run, lines=1)
    assert ("next", f"correct it there, then {AGAIN}") in view.facts
    assert view_of(run, lines=1) == view


def test_a_resume_that_would_be_refused_is_not_offered(make_run, dead, cli) -> None:
    """A script with {resume} that reports no checkpoint would begin at step 0."""
    run = failed(make_run, dead, "", state="STOPPED", reason="")
    run.checkpoints.mkdir()
    (run.checkpoints / "model.pt").touch()
    assert f"\nnext: trnslurm resume {run.name}\n" in cli("status", run.name).out
    (run.path / "node.sh").write_text('python train.py --resume "$TRNSLURM_RESUME"\n')
    run.code.mkdir(exist_ok=True)
    write_json(run.project_file, {})
    said = f"next: `trnslurm resume {run.name} --force` if the script finds checkpoints itself; "
    said += f"otherwise pass it to the script, and call trnslurm.saved() in it, then {AGAIN}"
    assert cli("status", run.name).out.splitlines()[1] == said


def test_an_error_that_would_come_again_is_to_be_corrected(make_run, dead, cli) -> None:
    run = failed(make_run, dead, f"{TRACEBACK}KeyError: 'lr'\n", cause="error")
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    look = "correct it there"
    assert f"\nnext: {look}, then {AGAIN}\n" in cli("status", run.name).out


def test_a_file_that_was_not_copied_is_linked_in_the_next_run(make_run, dead, cli) -> None:
    """Options of the script come last on the command line."""
    run = failed(make_run, dead, f"{TRACEBACK}FileNotFoundError: [Errno 2] No such file or "
                 "directory: 'data/a.bin'\n")  # fmt: skip
    run.code.mkdir(exist_ok=True)
    write_json(run.project_file, {"links": {}, "left_out": ["data"]})
    command = ("trnslurm", "submit", "train.py", "--", "--lr", "1")
    run.write_record(replace(run.record(), command=command))
    shown = cli("status", run.name).out
    assert "\nnext: trnslurm submit train.py --set 'links=[data]' -- --lr 1\n" in shown
    assert "cause: data was not copied with the project, because .gitignore lists it" in shown
    run.write_record(replace(run.record(), command=command, group="sweep"))
    shown = cli("status", run.name).out
    assert "\nnext: submit it again with --set 'links=[data]'\n" in shown


def test_attempts_say_a_reason_once(make_run, dead, cli) -> None:
    error = "KeyError: 'lr' at train.py, line 4"
    crash = "crash {} of 3 without a new checkpoint: {}"
    states = [
        {"state": "REQUEUED", "reason": crash.format(1, "OSError: no")},
        {"state": "RESTARTED", "reason": crash.format(2, "OSError: no")},
        {"state": "FAILED", "reason": f"given up after 3 crashes in a row: {error}"},
    ]
    run = make_run(states={"train": states}, phases=("train",), scheduler="local",
                   jobs={"local": dead})  # fmt: skip
    first, second = (crash.format(n, "OSError: no") for n in (1, 2))
    said = f"1 REQUEUED ({first}), 2 RESTARTED ({second.removesuffix(': OSError: no')}), 3 FAILED"
    assert f"\nattempts: 3: {said}\n" in cli("status", run.name).out


def test_a_time_limit_with_nothing_saved(make_run, dead, cli) -> None:
    run = failed(make_run, dead, "", state="TIMEOUT", reason="time limit")
    assert f"\nnext: {AGAIN} --time MORE\n" in cli("status", run.name).out
    short = ["trnslurm", "submit", "t.py", "--time", "1:00", "--time=2:00", "--", "--time=3"]
    assert longer({"command": short})[1] == "trnslurm submit t.py --time MORE -- --time=3"
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    assert f"\nnext: trnslurm resume {run.name}\n" in cli("status", run.name).out


def test_every_command_says_what_the_logs_told_too_late(make_run, cli, dead: str) -> None:
    reason = "given up after 3 crashes in a row without a new checkpoint: exit code 1 while running"
    failed = {"state": "FAILED", "exit_code": 1, "reason": f"{reason} on node-1,node-2"}
    states = {"precompile": [DONE], "train": [failed]}
    run = make_run(states=states, scheduler="local", jobs={"local": dead})
    run.node_log("train", 1, 0).write_text(
        "fine\ntorch.distributed.elastic.SignalException: got signal: 15\n"
    )
    run.node_log("train", 1, 1).write_text("fine\n[rank1]: ValueError: the cause\nmore\n")
    out = cli("status", run.name).out
    why = "FAILED (given up after 3 crashes in a row without a new checkpoint: rank 1 on node-2: "
    why += "ValueError: the cause)"
    assert f"{run.name}: {why}\n" in out
    assert out.count("given up after") == 1, "the tables do not repeat the first line"
    assert out.count("the cause") == 1, "nor does what follows the first line"
    assert why in cli("watch", run.name).out
    tail = f"{reason} on a; not restarted: {'x' * 200}"
    write_json(run.state_file("train", 1), failed | {"reason": tail})
    assert cli("runs").out.endswith(f"  {reason} on a\n")
    write_json(run.state_file("train", 1), failed)
    assert json.loads(cli("status", run.name, "--json").out)["reason"].endswith(
        ": ValueError: the cause"
    )
    write_json(run.state_file("train", 1), failed | {"state": "RUNNING"})
    lost = cli("status", run.name).out.splitlines()[0]
    assert lost.endswith("without recording its state; ValueError: the cause)")


def test_runs_are_named_by_part_by_path_and_as_last(make_run, cli, site) -> None:
    first = make_run("20260101-000000-first", states={"train": [DONE]})
    make_run("20260102-000000-second", states={"train": [DONE]})
    assert cli("status", "last").out.startswith("20260102-000000-second: COMPLETED")
    assert cli("status", "first").out.startswith(f"{first.name}: COMPLETED")
    assert cli("status", first.path).out.startswith(f"{first.name}: COMPLETED")
    several = cli("status", "2026")
    assert several.code == 1 and "matches 2 runs or sweeps (" in several.error
    assert "…" not in several.error
    make_run("20260103-000000-a"), make_run("20260104-000000-b")
    assert "matches 4 runs or sweeps (…, 20260102-000000-second, " in cli("status", "2026").error
    unknown = cli("status", "third")
    assert unknown.error == (f"no run 'third' in {site.run_root}; run `trnslurm runs` to list them")
    assert "not a run directory" in cli("status", site.root).error


def test_runs_lists_the_newest_last(make_run, cli) -> None:
    for number in range(25):
        make_run(f"20260101-0000{number:02d}-x", states={"train": [DONE]})
    lines = cli("runs").out.splitlines()
    assert len(lines) == 21 and lines[-1].startswith("20260101-000024-x")
    assert len(cli("runs", "--all").out.splitlines()) == 26
    assert json.loads(cli("runs", "--json").out)[0]["run"] == "20260101-000005-x"


def test_no_runs_yet(site, cli) -> None:
    done = cli("runs")
    assert (done.code, done.out) == (0, "")
    assert done.err == "No runs yet. To start one: trnslurm submit gpt2_zero1 --nodes 2\n"
    assert cli("status", "last").code == 1


def test_directory_that_is_no_run(site, cli) -> None:
    (site.run_root / "notes").mkdir(parents=True)
    assert cli("runs").out == ""
    assert (
        "not a run directory (no run.json)"
        in cli("status", RunDir(site.run_root / "notes").path).error
    )
