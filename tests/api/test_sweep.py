"""submit --sweep: runs that differ in some values, with one name, and what they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trnslurm
from trnslurm.errors import TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.render.bundle import read_bundle
from trnslurm.runs.status import run_status
from trnslurm.submission import submit

from ..toy_site import write_attempt

RECIPE = """\
batch: {global_batch: 64}
model: {layers: 2}
train: {lr: 0.5, note: ""}
graphs: {free: [lr, note]}
slurm: {time_min: 60}
"""
SWEEP = ("submit", "toy", "--cluster", "pc", "--nodes", "2")
# In the place of the launcher on this machine; the second of three fails.
SCRIPT = """
import sys
import trnslurm
number = int(sys.argv[1])
if number == 2:
    raise KeyError(f"run {number}")
trnslurm.report(step=1, steps=1, loss=10 - number, score=number)
while "--hold" in sys.argv and number == 1 and not trnslurm.should_stop():
    pass
"""


@pytest.fixture
def toy(site, fake_slurm):
    site.recipe(RECIPE)


@pytest.fixture
def script(site, tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    file = tmp_path / "project/train.py"
    file.write_text(SCRIPT)
    return file


def dependencies(fake_slurm) -> list[str]:
    """What each job waits for, in the order of submission."""
    words = [call.arguments[:-1] for call in fake_slurm.calls("sbatch")]
    assert all(w[1:] == ["--kill-on-invalid-dep=yes"] for w in words if w)
    return [w[0].removeprefix("--dependency=") if w else "" for w in words]


def test_render_writes_what_submit_would(site, toy, fake_slurm, cli, tmp_path) -> None:
    out, words = tmp_path / "out", (*SWEEP[1:], "--sweep", "train.lr=0.1,0.2")
    done = cli("render", *words, "-o", out)
    assert done.out.splitlines() == [f"{out}/1  train.lr=0.1", f"{out}/2  train.lr=0.2"]
    assert cli("submit", *words).code == 0
    runs = sorted(file.parent for file in site.run_root.glob("*/run.json"))
    for number, run in enumerate(runs, 1):
        assert read_bundle(run) == read_bundle(out / str(number))
    # render refuses to replace an existing bundle or file.
    assert cli("render", *words, "-o", out).error == (
        f"{out}/1 already exists: pass --force to replace it"
    )
    assert cli("render", *words, "-o", out, "--force").code == 0
    (out / "notes").mkdir()
    done = cli("render", *words, "-o", out, "--force")
    assert done.error == f"{out}/notes exists and is not a bundle: choose another name"
    assert cli("render", *words).code == 2
    assert "contradict" in cli("render", *words, "--set", "train.lr=1", "-o", out).error


def test_what_has_the_same_graphs_is_compiled_once(site, toy, fake_slurm, cli) -> None:
    done = cli(*SWEEP, "--sweep", "train.lr=0.1,0.2", "--sweep", "model.layers=2,3")
    assert done.code == 0, done
    # 1: layers 2, 2: layers 3, and the same again.
    assert dependencies(fake_slurm) == [
        "", "afterok:1001", "", "afterok:1003", "afterok:1001", "afterok:1003",
    ]  # fmt: skip
    runs = site.runs()
    plans = [json.loads(run.plan_file.read_text()) for run in runs]
    assert [(p["train"]["lr"], p["model"]["layers"]) for p in plans] == [
        (0.1, 2), (0.1, 3), (0.2, 2), (0.2, 3),
    ]  # fmt: skip
    (group,) = {run.record().group for run in runs}
    assert [run.name for run in runs] == [f"{group}-{number}" for number in (1, 2, 3, 4)]
    assert runs[2].record().values == {"train.lr": "0.2", "model.layers": "2"}
    fake_slurm.queue("1005|PENDING|Dependency|N/A|", "1001|RUNNING|None|N/A|n")
    assert run_status(runs[2]).reason == "waiting for job 1001, which compiles its graphs"
    assert done.out.splitlines()[-1] == f"See: trnslurm status {group}"


def test_the_graphs_of_a_run_that_waits_are_in_use(site, graphs, fake_slurm, cli) -> None:
    """By its record, so that `compile gc` keeps them."""
    site.recipe(RECIPE)
    assert cli(*SWEEP, "--sweep", "train.lr=1,2").code == 0
    first, second = (run.record().precompile for run in site.runs())
    assert first["key"] and second["key"] == first["key"]
    assert (second["waits_for"], second["versions"]) == ("1001", first["versions"])


def test_a_long_start_is_told(site, toy, fake_slurm, cli, monkeypatch) -> None:
    monkeypatch.setattr(submit, "_TELL_S", 0.0)
    said = cli(*SWEEP, "--sweep", "train.lr=0.1,0.2").err
    assert "Created 1 of 2 runs\nCreated 2 of 2 runs\n" in said


def test_so_many_at_a_time(site, toy, fake_slurm, cli) -> None:
    done = cli(*SWEEP, "--sweep", "train.lr=1,2,3,4,5", "--at-most", "2", "--json")
    assert len(fake_slurm.calls("test-only")) <= 2  # not once per run
    assert dependencies(fake_slurm) == [
        "", "afterok:1001", "afterok:1001", "afterok:1001,afterany:1002",
        "afterok:1001,afterany:1003", "afterok:1001,afterany:1004",
    ]  # fmt: skip
    first, *_, last = json.loads(done.out)
    assert first["sweep"] == last["sweep"] and last["values"] == {"train.lr": "5"}
    runs = site.runs()
    assert [run.record().behind for run in runs] == ["", "", *(r.name for r in runs[:3])]
    alone = cli(*SWEEP, "--sweep", "train.lr=1,2", "--at-most=1", "--precompile=never")
    fake_slurm.queue("1005|PENDING|Dependency|N/A|", "1001|RUNNING|None|N/A|n")
    compiling = "waiting for job 1001, which compiles its graphs"
    assert run_status(runs[3]).reason == compiling
    fake_slurm.queue("1005|PENDING|Dependency|N/A|", "1001|COMPLETED|None|N/A|n")
    assert run_status(runs[3]).reason == f"waiting for the end of {runs[1].name}"
    assert alone.code == 0 and dependencies(fake_slurm)[-2:] == ["", "afterany:1007"]
    third = site.runs()[-1]
    fake_slurm.queue("1008|PENDING|Dependency|N/A|", "1007|RUNNING|None|N/A|n")
    assert run_status(third).reason == f"waiting for the end of {third.record().behind}"


def test_what_it_takes_is_said_first(site, fake_slurm, cli) -> None:
    site.recipe()  # 10 node-hours each
    sweep = ("--sweep", "seed=1,2,3", "--precompile", "never", "--at-most", "2")
    done = cli(*SWEEP, *sweep, "--dry-run")
    assert done.out == (
        "3 runs of toy on 2 x trn1.32xlarge, 32 workers per node, 2 at a time:\n\n"
        "run  seed  hours  node-hours  cost\n"
        "  1  1       5.0        10.0  $215\n"
        "  2  2       5.0        10.0  $215\n"
        "  3  3       5.0        10.0  $215\n\n"
        "Graphs: no precompile (--precompile never); they are compiled during training\n"
        "In all: about 30.0 node-hours, $645; at most 39.0 node-hours within the time limits\n"
    )
    site.profile(ask_above_node_hours=29)
    asked = cli(*SWEEP, *sweep)
    assert (asked.code, asked.out) == (1, "")
    assert "30.0 node-hours exceeds the 29 above which pc asks" in asked.err.splitlines()[-1]
    assert site.runs() == [] and fake_slurm.calls("sbatch") == []
    assert cli(*SWEEP, *sweep, "--yes").code == 0


def test_values_from_a_file(site, toy, fake_slurm, cli, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("train.note: ['a, b', \"it's $x\"]\nslurm.sbatch: [[--comment=x], []]\n")
    assert cli(*SWEEP, "--sweep-file", file, "--sweep", "seed=7").code == 0
    found = [
        (json.loads(run.plan_file.read_text())["train"]["note"], "--comment=x" in script)
        for run in site.runs()
        for script in [run.script("train").read_text()]
    ]
    assert found == [("a, b", True), ("a, b", False), ("it's $x", True), ("it's $x", False)]
    file.write_text("- {seed: 1, train.lr: 0.1}\n- {seed: 2}\n")
    out = cli(*SWEEP, "--sweep-file", file, "--dry-run").out
    assert [line.split()[:3] for line in out.splitlines()[2:5]] == [
        ["run", "seed", "train.lr"], ["1", "1", "0.1"], ["2", "2", "-"],
    ]  # fmt: skip


REFUSED = {
    "--sweep seed": "--sweep seed: expected KEY=VALUE,VALUE",
    "--sweep seed=1,,2": "--sweep seed=1,,2: expected KEY=VALUE,VALUE",
    "--sweep sed=1": "unknown key sed (did you mean \"seed\"?)",
    "--sweep seed=1,x": "seed must be a whole number, found 'x'",
    "--sweep seed=1,1": "the sweep contains seed=1 twice",
    "--sweep seed=1 --sweep seed=2": "the sweep sets seed in two places",
    "--sweep seed=1,2 --set seed=3": "--sweep seed and --set seed=… contradict each other",
    "--sweep seed=1,2 --chain": "--chain does not work with --sweep",
    "--sweep seed=1,2 --compile-for 1": "--compile-for does not work with --sweep",
    "--at-most 2": "--at-most requires --sweep",
    "--sweep seed=1,2 --at-most 0": "0 is not in the range x>=1",
    "--sweep run_root=/tmp/a,/tmp/b": "all runs of a sweep must have the same run_root",
    f"--sweep seed={','.join(map(str, range(1001)))}": "has 1,001 runs, but at most 1,000",
    "--sweep-file /no/file": "--sweep-file /no/file: No such file or directory",
    "--sweep-file {a: 1": "not valid YAML",
    "--sweep-file [1, 2]": "expected either `KEY: [VALUE, VALUE]` for each key",
    "--sweep-file {seed: 1}": "expected either `KEY: [VALUE, VALUE]` for each key",
    "--sweep-file {}": "expected either `KEY: [VALUE, VALUE]` for each key",
    "--sweep-file {1: [2]}": "1 is not a configuration key",
    "--sweep-file {a=b: [2]}": "'a=b' is not a configuration key",
    "--sweep seed=1 --name " + "x" * 63: "job name",
}  # fmt: skip


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_a_sweep(site, toy, fake_slurm, cli, tmp_path, options: str) -> None:
    words = options.split()
    if words[0] == "--sweep-file" and words[1][0] in "{[":
        file = tmp_path / "values"
        file.write_text(options.partition(" ")[2])
        words = ["--sweep-file", str(file)]
    done = cli(*SWEEP, *words)
    assert done.code in (1, 2)
    assert REFUSED[options] in done.err.splitlines()[-1]
    assert fake_slurm.calls("sbatch") == [] and site.runs() == []


def test_all_or_nothing(site, toy, fake_slurm, cli) -> None:
    fake_slurm.refuse("sbatch-4", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    done = cli(*SWEEP, "--sweep", "seed=1,2,3,4")
    assert done.code == 1 and "QOSMaxSubmitJobPerUserLimit" in done.err.splitlines()[-1]
    runs = site.runs()
    assert len(runs) == 3  # the one that was refused, and those before it
    cancelled = [job for call in fake_slurm.calls("scancel") for job in call.arguments]
    assert {*cancelled} == {"1001", "1002", "1003"}
    assert {run_status(run).state for run in runs} == {"FAILED"}
    assert all("rejected at submission: sbatch" in run_status(run).reason for run in runs)


@pytest.fixture
def swept(make_run):
    """Eleven runs of a sweep that have ended, of which some went wrong, and a run beside them."""
    said: dict[int, dict[str, Any]] = {
        1: {"loss": 3.0, "eval_loss": 3.5, "f1": 0.1}, 2: {"loss": 1.0, "eval_loss": 2.0},
        3: {"loss": float("nan")}, 10: {"loss": 0.5, "eval_loss": 2.5, "f1": 0.9},
    }  # fmt: skip
    runs = []
    for number in range(1, 12):
        state = {3: "FAILED", 4: "STOPPED"}.get(number, "COMPLETED")
        run = make_run(
            f"20260101-000000-gpt-{number}", group="20260101-000000-gpt",
            values={"seed": str(number)}, phases=("train",), jobs={"train": str(100 + number)},
            states={"train": [{"state": state, "reason": "saved" if state == "STOPPED" else ""}]},
        )  # fmt: skip
        numbers = said.get(number, {"loss": 9.0})
        lines = [numbers, {"loss": numbers["loss"]}]  # held out is what was said before the last
        text = [
            json.dumps({"attempt": 1, "step": s, "steps": 2} | n) for s, n in enumerate(lines, 1)
        ]
        run.metrics_file.write_text("\n".join(text) + "\n")
        runs.append(run)
    make_run("20260101-000001-other")
    return runs


def test_how_its_runs_stand(swept, fake_slurm, cli) -> None:
    out = cli("status", "20260101-000000-gpt").out
    lines = out.splitlines()
    assert lines[0] == "20260101-000000-gpt: 11 runs: 9 COMPLETED, 1 FAILED, 1 STOPPED"
    assert lines[2].split() == ["run", "seed", "state", "step", "eval_loss", "reason"]
    rows = [line.split() for line in lines[3:14]]
    assert [row[1] for row in rows] == [str(number) for number in range(1, 12)]
    assert [row[4] for row in rows[:4]] == ["3.5000", "2.0000", "-", "-"]
    assert lines[15] == "best: 20260101-000000-gpt-2, eval_loss 2.0000 with seed=2"
    assert lines[16] == "next: trnslurm resume 20260101-000000-gpt"

    # An error that would come again is no reason to resume.
    log = 'Traceback (most recent call last):\n  File "train.py", line 4, in f\nKeyError: 3\n'
    swept[2].node_log("train", 1, 0).write_text(log)
    lines = cli("status", "20260101-000000-gpt").out.splitlines()
    assert lines[16] == "next: trnslurm resume 20260101-000000-gpt-4"
    fix = "correct it there, then submit it again"
    assert lines[17] == f"20260101-000000-gpt-3: {fix}"

    def best(*options: str) -> str:
        return json.loads(cli("status", "gpt", "--json", *options).out)["best"][-2:]

    assert [best("--lowest", "loss"), best("--highest", "f1"), best("--highest", "loss")] == [
        "10", "10", "-4",
    ]  # fmt: skip
    assert (
        "none of the runs report acc, only eval_loss, f1, loss"
        in cli("status", "gpt", "--lowest", "acc").error
    )
    both = cli("status", "gpt", "--lowest", "loss", "--highest", "f1")
    assert "pass only one" in both.error
    assert "compare the runs of a sweep" in cli("status", "gpt-2", "--lowest", "loss").err
    alone = cli("status", "gpt-2").out
    assert "in the sweep 20260101-000000-gpt, with seed=2\n" in alone


def test_one_name_for_all(swept, fake_slurm, cli, stable) -> None:
    listed = cli("runs", "gpt").out.splitlines()
    assert listed[0].split()[:3] == ["run", "seed", "state"] and len(listed) == 12
    assert len(json.loads(cli("runs", "gpt", "--json").out)) == 11
    assert "20260101-000001-other" in cli("runs").out
    rows = [line.split() for line in cli("metrics", "gpt").out.splitlines()]
    assert rows[0] == ["run", "step", "attempt", "loss", "eval_loss"]
    assert rows[2] == ["20260101-000000-gpt-2", "2", "1", "1.0000", "2.0000"]
    assert len(json.loads(cli("metrics", "gpt", "--json").out)["20260101-000000-gpt-1"]) == 2
    said = json.loads(cli("status", "gpt", "--json").out)
    stable.json("status (of a sweep)", said, free=["states", "runs"])
    done = cli("cancel", "gpt")
    assert [line.split()[0] for line in done.out.splitlines()] == [
        f"20260101-000000-gpt-{number}" for number in range(1, 12)
    ]
    # Commands of one run say so.
    said = "gpt is a sweep of 11 runs: name one of them, such as 20260101-000000-gpt-1"
    assert said in cli("logs", "gpt").error


def test_cancelled_with_a_few_commands(site, toy, fake_slurm, cli) -> None:
    assert cli(*SWEEP, "--sweep", "seed=1,2,3,4", "--precompile", "never").code == 0
    runs = site.runs()
    write_attempt(runs[0], "train", 1, state="COMPLETED")
    fake_slurm.queue("1001|COMPLETED|None|N/A|n", "1002|RUNNING|None|N/A|n",
                     "1003|PENDING|Priority|N/A|", "1004|PENDING|Priority|N/A|")  # fmt: skip
    fake_slurm.forget_calls()
    done = cli("cancel", runs[0].record().group, "--now")
    assert [line.split()[0] for line in done.out.splitlines()] == [runs[0].name] + ["Cancelled"] * 3
    assert [call.command for call in fake_slurm.calls()] == [
        "squeue",
        "squeue",
        "squeue",
        "scancel",
    ]
    # Last run first, so that none starts in between.
    assert fake_slurm.calls("scancel")[0].arguments == ["1004", "1003", "1002"]


def test_a_name_that_means_two_is_refused(swept, make_run, fake_slurm, cli) -> None:
    make_run("20260202-000000-gpt")
    assert "gpt matches 2 runs or sweeps" in cli("cancel", "gpt").error
    assert cli("status", "20260101-000000-gpt").code == 0
    assert cli("status", "gpt-11").out.startswith("20260101-000000-gpt-11: COMPLETED")
    assert "no run 'nothing' in" in cli("status", "nothing").error


def test_resume_is_for_what_stopped_short(site, toy, fake_slurm, cli) -> None:
    submit = (*SWEEP, "--sweep", "seed=1,2,3", "--at-most", "1", "--precompile", "never")
    assert cli(*submit).code == 0
    one, two, three = site.runs()
    write_attempt(one, "train", 1, state="COMPLETED")
    fake_slurm.queue("1001|COMPLETED|None|N/A|n", "1002|TIMEOUT|None|N/A|n",
                     "1003|NODE_FAIL|None|N/A|n")  # fmt: skip
    done = cli("resume", one.record().group)
    assert done.code == 0, done
    assert [line.split()[1] for line in done.out.splitlines()] == [two.name, three.name,
                                                                   "trnslurm"]  # fmt: skip
    # In their turns again: the third is behind the second.
    assert dependencies(fake_slurm)[3:] == ["", "afterany:1004"]
    assert one.record().jobs == {"train": "1001"}


def test_here_they_follow_one_another_and_one_that_fails_stops_none(site, script) -> None:
    options: dict[str, Any] = {"cluster": "local", "launcher": "python", "arguments": ["{n}"]}
    runs = trnslurm.sweep(script, {"places.n": [1, 2, 3]}, **options)
    assert [run.values for run in runs] == [{"places.n": str(n)} for n in (1, 2, 3)]
    ended = runs.wait(timeout=180, raises=False)
    assert ended is runs and "COMPLETED" in repr(runs) and "PENDING" not in repr(runs)
    assert [status.state for status in ended.statuses] == ["COMPLETED", "FAILED", "COMPLETED"]
    began = [RunDir(run.directory).attempts("train")[0].started for run in runs]
    ends = [RunDir(run.directory).attempts("train")[0].ended or "" for run in runs]
    assert began == sorted(began) and all(e <= b for e, b in zip(ends, began[1:], strict=False))
    assert (ended.best(), ended.best(lowest="score")) == (runs[2], runs[0])
    with pytest.raises(TrnslurmError, match="-2 is FAILED"):
        ended.wait()
    with pytest.raises(TrnslurmError, match="timeout='1': expected a number of seconds"):
        ended.wait(timeout="1")
    (group,) = {RunDir(run.directory).record().group for run in runs}
    assert [*trnslurm.runs(group)] == [*runs]
    assert "places.n" in repr(runs) and ">places.n<" in runs._repr_html_()


def test_one_of_them_is_cancelled_here(site, script) -> None:
    options: dict[str, Any] = {"cluster": "local", "launcher": "python"}
    runs = trnslurm.sweep(
        script, [{"places.n": n} for n in (1, 3, 4)], arguments=["{n}", "--hold"], **options
    )
    first, second, third = runs
    while not first.metrics():
        assert not first.status().final, repr(first)
    assert second.status().reason == f"waiting for the end of {first.name}"
    assert second.cancel().wait(timeout=180, raises=False).state == "CANCELLED"
    first.cancel()
    assert third.wait(timeout=600).state == "COMPLETED"
    assert [run.state for run in runs] == ["CANCELLED", "CANCELLED", "COMPLETED"]
    assert not second.metrics()


@pytest.mark.parametrize(
    "values", [{}, [], {"seed": 1}, {"seed": "12"}, {"seed": []}, [{}], [1], 3, {"seed": {1: 2}}]
)
def test_wrong_values_are_errors_of_one_line(site, values: Any) -> None:
    site.recipe(RECIPE)
    with pytest.raises(TrnslurmError, match=r"values[:=]") as error:
        trnslurm.sweep("toy", values, cluster="pc")
    assert "\n" not in str(error.value) and site.runs() == []
