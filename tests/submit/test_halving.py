"""submit --halving: the arrays of the rungs, what is refused, cancel and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trnslurm.contract.halving import read_halving, read_place
from trnslurm.contract.states import State
from trnslurm.node import rung
from trnslurm.records.run import RunDir
from trnslurm.runs.halving import Rungs
from trnslurm.runs.status import run_status, statuses_of

from ..toy_site import Site, write_attempt
from .test_arrays import runs_of, submitted

RECIPE = """\
steps: 36000
batch: {global_batch: 64}
train: {lr: 0.5, stop_at: 0, save_every: 10}
slurm: {time_min: 60}
reference: [{instance_type: trn1.32xlarge, nodes: 1, samples_per_s: 64}]
"""
NEVER = ("--precompile", "never")
SWEEP = ("submit", "toy", "--cluster", "pc", "--nodes", "2", *NEVER)
FOUR = ("--sweep", "train.lr=1,2", "--sweep", "seed=1,2")
HALVING = (*SWEEP, *FOUR, "--halving", "2")
PENDING = "JobId=1 JobState=PENDING"


@pytest.fixture(autouse=True)
def cluster(site: Site, fake_slurm) -> None:
    """A cluster that takes arrays."""
    site.recipe(RECIPE)
    fake_slurm.answer("show-config", "MaxArraySize            = 1001")


@pytest.fixture
def runs(site: Site, cluster, fake_slurm, cli) -> list[RunDir]:
    """Four runs, in three rungs; all jobs wait."""
    done = cli(*HALVING)
    assert done.code == 0, done.err
    fake_slurm.answer("show-job", PENDING)
    return runs_of(site)


def sweep_of(runs: list[RunDir]) -> Path:
    return runs[0].path.with_name(runs[0].record().group)


def end(run: RunDir, step: int, loss: float, attempt: int = 1) -> None:
    """Leave what a run leaves that has trained up to a step."""
    job = run.record().jobs["train"]
    state = "COMPLETED" if step in (9000, 18000, 36000) else "FAILED"
    write_attempt(run, "train", attempt, state=state, job_id=job)
    (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    with run.metrics_file.open("a") as file:
        line = {"attempt": attempt, "step": step, "steps": 36000, "loss": loss}
        file.write(json.dumps(line) + "\n")


def states(runs: list[RunDir]) -> list[str]:
    return [f"{status.state} ({status.reason})" for status in statuses_of(runs)[0]]


def test_all_rungs_are_in_the_queue(site, fake_slurm, cli) -> None:
    done = cli(*HALVING, "--at-most", "3")
    runs = runs_of(site)
    group = runs[0].record().group
    assert submitted(fake_slurm) == [
        ("1-4%3", "", f"{group}/array-1"),
        ("1-2%3", "afterany:1001", f"{group}/rung-2"),
        ("1-1%3", "afterany:1002", f"{group}/rung-3"),
    ]
    assert done.err.partition("\n\n")[2].partition("Graphs")[2].partition("\n")[2] == (
        "rung  runs  to step   steps  node-hours\n"
        "   1     4    9,000  36,000        10.0\n"
        "   2     2   18,000  18,000         5.0\n"
        "   3     1   36,000  18,000         5.0\n"
        "\n"
        "72,000 steps instead of 144,000: 50 %, 20.0 node-hours instead of 40.0\n"
        "In all: about 20.0 node-hours, $430; at most 14.0 node-hours within the time limits\n"
        "Queued, each after the previous one: rung 2 job 1002, rung 3 job 1003\n"
    )
    assert [read_place(run).stop_at for run in runs] == [9000] * 4
    halving = read_halving(sweep_of(runs))
    assert [r.job for r in halving.rungs] == ["", "1002", "1003"]
    assert halving.runs == tuple(run.name for run in runs)
    # The schedule is that of all steps.
    plan = json.loads(runs[0].plan_file.read_text())
    assert (plan["steps"], plan["train"]["stop_at"]) == (36000, 0)


def test_a_cap_for_the_full_sweep_is_too_much(site, cli) -> None:
    """It would take 40 node-hours, and the rungs take half."""
    cap = "--set", "slurm.max_node_hours=20", "--dry-run"
    assert "warning" not in cli(*HALVING, *cap).err
    assert "20 node-hours, but about 40.0 are expected" in cli(*SWEEP, *FOUR, *cap).err


def test_the_first_rung_is_named(site, fake_slurm, cli) -> None:
    assert cli(*SWEEP, *FOUR, "--halving", "2:100", "--highest", "f1").code == 0
    halving = read_halving(sweep_of(runs_of(site)))
    assert [(r.runs, r.stop_at) for r in halving.rungs] == [(4, 100), (2, 200), (1, 36000)]
    assert (halving.metric, halving.highest) == ("f1", True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--halving", "1"], "--halving 1: expected a factor of at least 2"),
        (["--halving", "3:0"], "--halving 3:0: expected a factor of at least 2"),
        (
            ["--halving", "2:36000"],
            "--halving 2:36000: the runs have only 36,000 steps: choose a smaller number",
        ),
        (["--halving", "2", "--set", "steps=3"], "3 steps are too few for 3 rungs"),
        (["--halving", "2", "--lowest", "a", "--highest", "b"], "pass only one of them"),
        (["--halving", "2", "--set", "train.stop_at=9"], "remove train.stop_at"),
        (["--halving", "2", "--set", "train.save_every=0"], "train.save_every is 0"),
        (["--halving", "2", "--set", "slurm.max_attempts=2"], "slurm.max_attempts is 2"),
        (["--halving", "2", "--sweep", "steps=50,90"], "these have 50 to 90 steps"),
        (["--halving", "2", "--sweep", "slurm.time_min=60,90"], "have different #SBATCH options"),
        (["--lowest", "a"], "--lowest and --highest require --halving"),
    ],
)
def test_refused_before_anything_is_queued(site, fake_slurm, cli, words, said) -> None:
    done = cli(*SWEEP, *FOUR, *words)
    assert done.code in (1, 2) and said in done.err.splitlines()[-1]
    assert fake_slurm.calls("sbatch") == [] and runs_of(site) == []


def test_refused_elsewhere(site, fake_slurm, cli) -> None:
    site.profile("here", scheduler="local", instance_type="local", device="cpu", slurm={})
    for words, said in (
        (["toy", "--nodes", "1", "--halving", "2"], "error: --halving requires --sweep"),
        (["toy", "--cluster", "here", *FOUR, "--halving", "2"], "rungs require Slurm's job arrays"),
    ):  # fmt: skip
        done = cli("submit", *words)
        assert done.code in (1, 2) and said in done.err.splitlines()[-1]
    fake_slurm.answer("show-config", "MaxArraySize = 2")
    done = cli(*HALVING)
    assert done.code == 1 and "an array of 2 tasks" in done.err.splitlines()[-1]
    assert fake_slurm.calls("sbatch") == []


LOOP = """\
import trnslurm
for step in range(9):
    trnslurm.report(step=step, loss=1)
    if trnslurm.should_stop():
        break
"""
OWN = ("--cluster", "pc", "--time", "9", "--set", "device=cpu", "--set", "devices=[cpu]",
       "--sweep", "seed=1,2", "--halving", "2")  # fmt: skip
KNOWN = ("--set", "steps=90")


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (
            LOOP,
            ["--", "{resume}"],
            "own decides its number of steps itself: pass --set steps=N, and add {steps} to",
        ),
        ("print(1)\n", [*KNOWN, "--", "{resume}"], "own never checks whether to stop"),
        (LOOP, KNOWN, "own does not load a checkpoint, so a rung would start at step 0: add"),
        (LOOP, [*KNOWN, "--", "{steps}", "{resume}"], ""),
        (LOOP, [*KNOWN, "--set", "checkpoints=out"], ""),
    ],
)
def test_custom_scripts(site, fake_slurm, cli, text: str, words: list[str], said: str) -> None:
    done = cli("submit", site.write("own/own.py", text), *OWN, *words)
    if said:
        assert done.code == 1 and said in done.err.splitlines()[-1]
        assert fake_slurm.calls("sbatch") == []
    else:
        assert done.code == 0, done.err
        assert [read_place(run).stop_at for run in runs_of(site)] == [45, 45]


def test_a_rung_that_slurm_refuses_leaves_nothing(site, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch-3", "sbatch: error: Invalid qos specification")
    assert cli(*HALVING).code == 1
    assert [c.arguments for c in fake_slurm.calls("scancel")] == [["1002"], ["1001_[1,2,3,4]"]]
    assert {run_status(run).state for run in runs_of(site)} == {"FAILED"}


def test_the_words_of_a_run(runs, fake_slurm, cli) -> None:
    for run, loss in zip(runs, (4.0, 1.0, 2.0), strict=False):
        end(run, 9000, loss)
    end(runs[3], 8000, 0.0)
    fake_slurm.queue("1001_4 1001|FAILED|NonZeroExitCode|N/A|n")
    waits = "REQUEUED (rung 1 of 3 is done: will be ranked when the others have ended)"
    assert states(runs)[:3] == [waits] * 3 and states(runs)[3].startswith("FAILED")
    place = sweep_of(runs) / "rung-2"
    assert rung.take(place, 1, "1002_1") == runs[1].name
    fake_slurm.queue("1001_4 1001|FAILED|NonZeroExitCode|N/A|n", "1002_1 1009|RUNNING|None|N/A|n")
    assert states(runs)[:3] == [
        "COMPLETED (stopped after rung 1 of 3: rank 3 of 4)",
        "RUNNING ()",
        "REQUEUED (rank 2 of 4 in rung 1 of 3: continues)",
    ]
    end(runs[1], 18000, 9.0, attempt=2)
    shown = cli("status", runs[0].record().group, "--json")
    told = json.loads(shown.out)
    assert told["best"] == runs[1].name  # it has come further
    assert [(r["rung"], r["rank"]) for r in told["runs"]] == [(1, 3), (2, None), (1, 2), (1, None)]
    assert told["halving"]["rungs"][1] == {"runs": 2, "stop_at": 18000, "job": "1002"}
    table = cli("status", runs[0].record().group).out
    assert "  1/3      3  COMPLETED   9000/36000" in table


def test_a_run_that_moves_while_it_is_looked_at(runs) -> None:
    """The last rung's mark beside the record of the rung before is no completed run."""
    for number, run in enumerate(runs):
        end(run, 9000, float(number))
    rung.take(sweep_of(runs) / "rung-2", 1, "1002_1")
    end(runs[0], 18000, 1.0, attempt=2)
    before = runs[0].record()
    rung.take(sweep_of(runs) / "rung-3", 1, "1003_1")
    told = Rungs().tell(runs[0], before, State.COMPLETED)
    assert told and (told.state, told.reason) == (State.REQUEUED, "continues in its next rung")
    assert Rungs().tell(runs[0], runs[0].record(), State.COMPLETED) is None


def test_cancelled_and_resumed(runs, fake_slurm, cli) -> None:
    group = runs[0].record().group
    end(runs[0], 9000, 1.0)
    write_attempt(runs[1], "train", 1, state="RUNNING", job_id="1001_2")
    fake_slurm.queue("1001_2 1001|RUNNING|None|N/A|n", "1001_3 1001|PENDING|None|N/A|n")
    fake_slurm.forget_calls()
    assert cli("cancel", group, "--now").code == 0
    first = fake_slurm.calls("scancel")[0]
    assert first.arguments == ["1003", "1002"]  # before a rung could start
    fake_slurm.answer("show-job", "JobId=1 JobState=CANCELLED")
    fake_slurm.queue()
    write_attempt(runs[1], "train", 1, state="CANCELLED", job_id="1001_2")
    assert states(runs)[0] == "CANCELLED (by trnslurm cancel, after rung 1 of 3)"
    assert f"next: trnslurm resume {group}" in cli("status", group).out
    fake_slurm.forget_calls()
    done = cli("resume", group)
    assert done.code == 0, done.err
    assert [job[:2] for job in submitted(fake_slurm)] == [
        ("", ""), ("", ""), ("", ""),
        ("1-2", "afterany:1004:1005:1006"), ("1-1", "afterany:1007"),
    ]  # fmt: skip
    assert [read_place(run).stop_at for run in runs] == [9000] * 4
    fake_slurm.answer("show-job", PENDING)
    assert states(runs)[0].startswith("REQUEUED (rung 1 of 3 is done")


def test_cancelled_in_the_second_rung_and_resumed(runs, fake_slurm, cli) -> None:
    group, place = runs[0].record().group, sweep_of(runs) / "rung-2"
    for number, run in enumerate(runs):
        end(run, 9000, float(number))
    rung.take(place, 1, "1002_1")
    write_attempt(runs[0], "train", 2, state="CANCELLED", job_id="1002_1")
    runs[0].cancelled_file.touch()
    runs[1].cancelled_file.touch()
    fake_slurm.answer("show-job", "JobId=1 JobState=CANCELLED")
    fake_slurm.queue()
    assert states(runs)[1] == "CANCELLED (by trnslurm cancel, after rung 1 of 3)"
    fake_slurm.forget_calls()
    assert cli("resume", group).code == 0
    # The run goes on by itself, the task that had not started as part of its array.
    assert [job[1] for job in submitted(fake_slurm)] == ["", "", "afterany:1005:1004"]
    array = fake_slurm.calls("sbatch")[1]
    assert "--array=2" in array.arguments and array.cwd == place
    assert rung.take(place, 2, "1005_2") == runs[1].name


def test_only_rungs_are_left_to_resume(runs, fake_slurm, cli) -> None:
    for number, run in enumerate(runs):
        end(run, 9000, float(number))
    fake_slurm.answer("show-job", "JobId=1 JobState=CANCELLED")
    fake_slurm.queue()
    fake_slurm.forget_calls()
    done = cli("resume", runs[0].record().group)
    said = "Queued, each after the previous one: rung 2 job 1004, rung 3 job 1005\n"
    assert (done.code, done.out, done.err) == (0, "", said)
    assert [job[1] for job in submitted(fake_slurm)] == ["", "afterany:1004"]
    assert cli("resume", runs[0].record().group, "--json").out == "[]\n"


def test_a_failed_run_is_resumed_while_the_next_rung_waits(runs, fake_slurm, cli) -> None:
    for run in runs[:3]:
        end(run, 9000, 1.0)
    end(runs[3], 8000, 0.0)
    fake_slurm.queue("1001_4 1001|FAILED|NonZeroExitCode|N/A|n")
    fake_slurm.forget_calls()
    assert cli("resume", runs[0].record().group).code == 0
    # The next rung must not start before the run is in the queue again.
    assert [c.arguments for c in fake_slurm.calls("scancel")] == [["1003", "1002"]]
    assert submitted(fake_slurm) == [
        ("", "", runs[3].name),
        ("1-2", "afterany:1001:1004", f"{sweep_of(runs).name}/rung-2"),
        ("1-1", "afterany:1005", f"{sweep_of(runs).name}/rung-3"),
    ]
    assert read_place(runs[3]).stop_at == 9000


def test_a_run_is_cancelled_between_rungs(runs, fake_slurm, cli) -> None:
    for number, run in enumerate(runs):
        end(run, 9000, float(number))
    place, name = sweep_of(runs) / "rung-2", runs[1].name
    assert cli("cancel", name).code == 0
    assert states(runs)[1] == "CANCELLED (by trnslurm cancel, after rung 1 of 3)"
    assert fake_slurm.calls("scancel")[0].arguments == ["1001_[2]"]  # not the rungs
    assert rung.take(place, 1, "1002_1") == runs[0].name
    assert rung.take(place, 2, "1002_2") == runs[2].name
    assert run_status(runs[1]).words == "CANCELLED (by trnslurm cancel, after rung 1 of 3)"
    assert run_status(runs[1]).mend == ""


def test_a_run_that_has_stopped_goes_on_alone(runs, fake_slurm, cli) -> None:
    for number, run in enumerate(runs):
        end(run, 9000, float(number))
    assert rung.take(sweep_of(runs) / "rung-2", 1, "1002_1")
    done = cli("resume", runs[1].name)  # it is to go on with the others
    assert done.code == 1 and "is REQUEUED (rank 2 of 4" in done.err
    fake_slurm.queue()
    assert cli("resume", runs[3].name).code == 0
    assert read_place(runs[3]) is None and run_status(runs[3]).state != "COMPLETED"


def test_removed_together(runs, fake_slurm, cli) -> None:
    sweep = sweep_of(runs)
    assert cli("cancel", sweep.name, "--now").code == 0
    fake_slurm.answer("show-job", "JobId=1 JobState=CANCELLED")
    fake_slurm.queue()
    assert cli("rm", "--yes", runs[0].name).code == 0
    assert (sweep / "rung-2").is_dir()
    assert cli("rm", "--yes", *(run.name for run in runs[1:])).code == 0
    assert not sweep.exists()
