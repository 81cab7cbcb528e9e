"""submit pipeline.yaml: a run for each stage that is not done, each after those that it needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import trnslurm
from trnslurm.contract.files import write_json
from trnslurm.records.run import RunDir

from ..processes import run_process

STAGES = """\
stages:
  prepare: ./prepare.py --time 5 -- {out}
  train: ./train.py --nodes 2 --time 10 -- --data {prepare.out} --resume {resume}
  evaluate: ./eval.py --time 5 -- {train.checkpoint} {train.step}
  export: ./export.sh --time 5 -- {train.checkpoint} {out}
  smoke:
    submit: ./smoke.sh --time 5 -- {export.out} {evaluate.accuracy}
    if: evaluate.accuracy >= 0.6
"""
FILES = {
    "prepare.py": "import sys\n",
    "train.py": "import model\n",
    "eval.py": "import model\n",
    "export.sh": "#!/bin/bash\ncp $1 $2\n",
    "smoke.sh": "#!/bin/bash\nls $1\n",
    "model.py": "size = 3\n",
    "README.md": "a project\n",
}
RECIPE = """\
batch: {global_batch: 64}
train: {init_from: "", save_every: 5}
slurm: {time_min: 60}
steps: 10
precompile: never
"""
SUBMIT = ("submit", "nightly.yaml", "--cluster", "pc")
NAMES = ("prepare", "train", "evaluate", "export", "smoke")


@pytest.fixture
def project(site, tmp_path, monkeypatch) -> Path:
    site.profile(device="cpu")
    project = tmp_path / "project"
    project.mkdir()
    for name, text in FILES.items():
        (project / name).write_text(text)
        (project / name).chmod(0o755)
    (project / "nightly.yaml").write_text(STAGES)
    monkeypatch.chdir(project)
    return project


def runs_of(site) -> dict[str, RunDir]:
    """The newest run of each stage."""
    return {run.record().name.removeprefix("nightly-"): run for run in site.runs()}


def complete(run: RunDir, **numbers: float) -> None:
    """Let a run be as a job leaves it that has completed."""
    state = {"phase": "train", "attempt": 1, "state": "COMPLETED", "exit_code": 0}
    write_json(run.state / "train-1.json", state)
    run.out.mkdir(exist_ok=True)
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 5, **numbers}) + "\n")
    if run.record().name.endswith("train"):
        saved = run.checkpoints / "step-5.pt"
        saved.parent.mkdir(exist_ok=True)
        saved.write_text("weights")
        write_json(run.saved_file, {"step": 5, "path": str(saved), "attempt": 1, "time": 1.0})


def test_each_stage_is_a_run_after_those_that_it_needs(site, project, fake_slurm, cli) -> None:
    done = cli(*SUBMIT)
    assert done.code == 0, done
    runs = runs_of(site)
    assert [*runs] == [*sorted(NAMES)]
    calls = {
        c.cwd: [w for w in c.arguments if "dependency" in w] for c in fake_slurm.calls("sbatch")
    }
    waits = {name: calls[run.path] for name, run in runs.items()}
    jobs = {name: run.record().jobs["train"] for name, run in runs.items()}
    assert waits["prepare"] == []
    for name, before in (
        ("train", ["prepare"]), ("evaluate", ["train"]), ("export", ["train"]),
        ("smoke", ["export", "evaluate"]),
    ):  # fmt: skip
        assert waits[name] == [f"--dependency=afterok:{':'.join(jobs[b] for b in before)}"]
        assert runs[name].record().awaited == tuple(runs[b].name for b in before)
    script = runs["train"].script("train").read_text()
    node = (runs["train"].path / "node.sh").read_text()
    assert f"--data {runs['prepare'].path}/out" in node and "node.inputs" not in script
    assert 'TRNSLURM_OUT="$PWD/out"' in runs["prepare"].script("train").read_text()
    words = (runs["evaluate"].path / "node.sh").read_text()
    assert '"$TRNSLURM_INPUT_TRAIN_CHECKPOINT" "$TRNSLURM_INPUT_TRAIN_STEP"' in words

    group = runs["train"].record().group
    said = cli("status", group).out
    assert said.startswith(f"{group}: 5 stages: 5 PENDING\n")
    told = json.loads(cli("status", group, "--json").out)
    after = {each["stage"]: each["after"] for each in told["stages"]}
    assert after["smoke"] == ["export", "evaluate"] and told["states"] == {"PENDING": 5}
    own = cli("status", runs["evaluate"].name).out
    assert f"stage evaluate of the pipeline {group}, after {runs['train'].name}" in own
    assert f"waiting for {runs['train'].name}" in own


def test_a_stage_is_done_again_only_if_something_of_it_changed(
    site, project, fake_slurm, cli
) -> None:
    assert cli(*SUBMIT).code == 0
    for name, run in runs_of(site).items():
        if name != "smoke":  # it failed
            complete(run, **({"accuracy": 0.7} if name == "evaluate" else {}))

    def planned() -> dict[str, str]:
        told = json.loads(cli("plan", "nightly.yaml", "--cluster", "pc", "--json").out)
        return {s["stage"]: s["why"] for s in told["stages"] if not s["done"]}

    assert planned() == {"smoke": ""}
    (project / "README.md").write_text("other words\n")
    (project / "nightly.yaml").write_text(STAGES.replace("--time 5", "--time 7"))
    assert planned() == {"smoke": ""}
    (project / "eval.py").write_text("import model  # better\n")
    assert planned() == {"evaluate": "eval.py changed", "smoke": ""}
    (project / "eval.py").write_text(FILES["eval.py"])
    (project / "model.py").write_text("size = 4\n")
    assert planned() == {
        "train": "model.py changed",
        "evaluate": "stage train changed, model.py changed",
        "export": "stage train changed, model.py changed",
        "smoke": "",
    }
    (project / "model.py").write_text(FILES["model.py"])
    (project / "nightly.yaml").write_text(STAGES.replace("--nodes 2", "--nodes 3"))
    assert [*planned()] == ["train", "evaluate", "export", "smoke"]
    (project / "nightly.yaml").write_text(STAGES)

    before = runs_of(site)
    again = cli(*SUBMIT, "--again", "evaluate")
    assert again.code == 0, again
    runs = runs_of(site)
    new = [name for name in NAMES if runs[name] != before[name]]
    assert new == ["evaluate", "smoke"]
    record = runs["smoke"].record()
    assert record.stages == {name: runs[name].name for name in NAMES}
    assert record.awaited == (runs["evaluate"].name,)  # the export is there already
    assert f"done: {before['train'].name}" in again.err
    said = cli("status", record.group).out
    assert "train     prepare           COMPLETED" in said and "done earlier" in said
    for run in (runs["evaluate"], runs["smoke"]):
        complete(run, accuracy=0.7)
    assert cli(*SUBMIT).out == "All stages are done: nothing to submit\n"
    before["export"].out.rename(before["export"].path / "moved")
    assert planned() == {
        "export": f"{before['export'].name} no longer has out",
        "smoke": "stage export runs again",
    }


def test_a_failed_stage_is_resumed_with_those_behind_it(site, project, fake_slurm, cli) -> None:
    assert cli(*SUBMIT).code == 0
    runs = runs_of(site)
    group = runs["train"].record().group
    complete(runs["prepare"])
    complete(runs["train"])
    for name in ("evaluate", "export"):
        write_json(runs[name].state / "train-1.json", {
            "phase": "train", "attempt": 1, "state": "FAILED", "exit_code": 1,
            "reason": "exit code 1 while running on node-1",
        })  # fmt: skip
    ids = {name: run.record().jobs["train"] for name, run in runs.items()}
    fake_slurm.queue(
        *(f"{ids[name]}|FAILED|NonZeroExitCode|x|n" for name in ("evaluate", "export")),
    )
    told = json.loads(cli("status", group, "--json").out)
    assert told["states"] == {"COMPLETED": 2, "FAILED": 2, "CANCELLED": 1}
    assert "never started: " in told["stages"][-1]["status"]["reason"]
    fake_slurm.forget_calls()
    done = cli("resume", group)
    assert done.code == 0, done
    calls = [(c.cwd.name.split("-")[-1], c.arguments[:-1]) for c in fake_slurm.calls("sbatch")]
    assert [name for name, _ in calls] == ["evaluate", "export", "smoke"]
    jobs = [runs[name].record().jobs["train"] for name in ("export", "evaluate")]
    assert calls[2][1][0] == f"--dependency=afterok:{':'.join(jobs)}"


def test_cancel_ends_what_is_behind_a_stage(site, project, fake_slurm, cli) -> None:
    assert cli(*SUBMIT).code == 0
    runs = runs_of(site)
    assert cli("cancel", runs["evaluate"].name).code == 0
    cancelled = {name for name, run in runs.items() if run.cancelled_file.exists()}
    assert cancelled == {"evaluate", "smoke"}
    assert cli("cancel", runs["train"].record().group).code == 0
    assert all(run.cancelled_file.exists() for run in runs.values())


def test_a_refused_stage_leaves_nothing(site, project, fake_slurm, cli) -> None:
    (project / "nightly.yaml").write_text(STAGES.replace("./smoke.sh", "./smok.sh"))
    done = cli(*SUBMIT)
    assert done.code == 1 and "nightly.yaml: stages.smoke: " in done.err
    assert done.err.count("\n") == 1 and not site.runs() and not fake_slurm.calls("sbatch")


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("./train.py --after 4711", "stages.b: --after cannot be set in a stage"),
        ("./train.py --cluster pc", "stages.b: --cluster cannot be set in a stage: pass it"),
        ("./train.py --nodes two", "stages.b: Invalid value for '-n' / '--nodes'"),
        ("./train.py --sweep seed=1,2", "--sweep cannot be set in a stage: submit the sweep on"),
        ("./train.py --each-checkpoint-of last", "in a stage: submit the pipeline, then this"),
        ("./train.py --in 4711", "--in cannot be set in a stage: submit this command on its own"),
        ("./train.py --time 5 -- {lr}", "stages.b: argument '{lr}': unknown placeholder {lr}"),
        ("./train.py --time 5 -- {a.checkpoints}", "stages.b: unknown placeholder {a.checkpoints}"),
        ("./train.py --set seed={a.step}", "stages.b: --set seed={a.step}: {a.step} is known only"),
        ("toy --from {a.checkpoint}", "cannot continue train: only trnslurm's recipes can"),
    ],
)
def test_what_a_stage_cannot_have(site, project, fake_slurm, cli, stage, words) -> None:
    site.recipe(RECIPE)
    (project / "p.yaml").write_text(f"stages:\n  a: ./train.py --time 5\n  b: {stage!r}\n")
    done = cli("submit", "p.yaml", "--cluster", "pc")
    assert done.code == 1 and words in done.err and done.err.startswith("error: p.yaml: ")
    assert not site.runs()


def test_options_of_one_job_are_not_for_a_pipeline(site, project, fake_slurm, cli) -> None:
    for words in (("--nodes", "2"), ("--set", "seed=1")):
        done = cli(*SUBMIT, *words)
        assert done.code == 2 and f"{words[0]} applies to one job" in done.err
    done = cli(*SUBMIT, "--in", "4711")
    assert done.code == 2 and "--in does not work with a pipeline" in done.err
    assert cli(*SUBMIT, "--again", "trian").err.startswith(
        'error: --again trian: there is no stage with that name (did you mean "train"?)'
    )
    assert "only submit and plan accept a pipeline file" in cli("show", "nightly.yaml").err


def test_a_recipe_continues_a_stage_of_a_recipe(
    site, fake_slurm, cli, tmp_path, monkeypatch
) -> None:
    site.recipe(RECIPE)
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("""\
stages:
  one: toy --nodes 2
  two: toy --nodes 2 --from {one.checkpoint} --set seed=2
""")
    assert cli("submit", "two.yaml", "--cluster", "pc").code == 0
    one, two = site.runs()
    plan = json.loads(two.plan_file.read_text())
    assert plan["train"]["init_from"] == f"{one.path}/checkpoints"
    assert two.record().awaited == (one.name,)


def test_a_recipe_reads_data_that_another_stage_makes(site, project, fake_slurm, cli) -> None:
    site.recipe(RECIPE)
    site.profile(device="cpu", data_root=str(site.root))
    (project / "p.yaml").write_text("""\
stages:
  prepare: ./prepare.py --time 5 -- {out}
  one: toy --nodes 2 --set data.path={prepare.out}/tokens
""")
    done = cli("submit", "p.yaml", "--cluster", "pc")
    assert done.code == 0, done
    one, prepare = site.runs()
    assert json.loads(one.plan_file.read_text())["data"] == f"{prepare.out}/tokens"


def test_a_stage_exports_the_checkpoint_of_a_recipe(site, project, fake_slurm, cli) -> None:
    site.recipe(RECIPE)
    exporter = site.write("jobs/toy/export.py", "print('exports')\n")
    (project / "p.yaml").write_text("""\
stages:
  one: toy --nodes 2
  look: ./smoke.sh --time 5 -- {one.export}
""")
    submit = ("submit", "p.yaml", "--cluster", "pc")
    assert cli(*submit).code == 0
    look, one = site.runs()
    script = look.script("train").read_text()
    assert script.count("inputs/one/code/jobs/*/export.py inputs/one/plan.json") == 1
    assert '"$TRNSLURM_INPUT_ONE_EXPORT"' in (look.path / "node.sh").read_text()
    (one.checkpoints / "step-00000010").mkdir(parents=True)
    said = inputs_of(look).out
    target = look.exports / "one-step-10"
    assert said == (
        f"export TRNSLURM_INPUT_ONE_EXPORT={target}\nexport TRNSLURM_INPUT_ONE_STEP=10\n"
    )
    assert (look.path / "inputs/one/code/jobs/toy/export.py").read_text() == exporter.read_text()
    assert (look.path / "inputs/one/checkpoints/step-00000010").is_dir()
    exporter.unlink()
    done = cli(*submit, "--again", "one")
    assert done.code == 1 and "{one.export}: toy has no export.py: use {one.checkpoint}" in done.err


def test_from_python(site, project, fake_slurm) -> None:
    stages = {
        "evaluate": {
            "recipe": "./eval.py", "time": 5, "arguments": ["{train.checkpoint}"],
            "if": "train.loss < 3",
        },
        "train": {"recipe": "./train.py", "nodes": 2, "time": 10, "files": ["train.py"]},
    }  # fmt: skip
    train, evaluate = trnslurm.pipeline("nightly", stages, cluster="pc")
    assert [run.values for run in (train, evaluate)] == [{"stage": "train"}, {"stage": "evaluate"}]
    assert (train.state, evaluate.state) == ("PENDING", "PENDING")
    assert RunDir(evaluate.directory).record().awaited == (train.name,)
    complete(RunDir(train.directory))
    (evaluate,) = trnslurm.pipeline("nightly", stages, cluster="pc")
    assert evaluate.values == {"stage": "evaluate"}
    for wrong, words in (
        (
            {"a": {"recipe": "./eval.py", "chain": True}},
            "stages.a: unknown argument chain: the arguments are",
        ),
        ({"a": {}}, "stages.a: expected the stage's arguments"),
        ({"a": {"recipe": "./eval.py", "after": "b"}}, "stages.a.after: no stage b"),
        ({}, "expected stages"),
    ):
        with pytest.raises(trnslurm.TrnslurmError, match=f"pipeline nightly: .*{words}|{words}"):
            trnslurm.pipeline("nightly", wrong, cluster="pc")


def inputs_of(run: RunDir):
    """Run the program that looks for the inputs, as the batch script does."""
    return run_process([sys.executable, "-P", "-m", "trnslurm.node.inputs"], cwd=run.path)


def test_what_a_stage_takes_is_found_when_it_starts(site, project, fake_slurm, cli) -> None:
    assert cli(*SUBMIT).code == 0
    runs = runs_of(site)
    done = inputs_of(runs["evaluate"])
    assert done.code == 1
    assert done.out == f"train has not saved a checkpoint in {runs['train'].path}\n"
    complete(runs["train"])
    saved = runs["train"].checkpoints / "step-5.pt"
    said = f"export TRNSLURM_INPUT_TRAIN_CHECKPOINT={saved}\nexport TRNSLURM_INPUT_TRAIN_STEP=5\n"
    assert inputs_of(runs["evaluate"]).out == said
    saved.rename(saved.with_name("step-9.pt"))  # later attempts take the same
    assert inputs_of(runs["evaluate"]).out == said

    assert (
        "evaluate has not reported accuracy: it has reported nothing"
        in inputs_of(runs["smoke"]).out
    )
    complete(runs["evaluate"], loss=0.1)
    assert "has not reported accuracy: it reported only step, loss" in inputs_of(runs["smoke"]).out
    complete(runs["evaluate"], accuracy=0.5)
    done = inputs_of(runs["smoke"])
    assert (done.code, done.out) == (
        1,
        "evaluate.accuracy is 0.5, and the run starts only if evaluate.accuracy >= 0.6\n",
    )
    complete(runs["evaluate"], accuracy=0.75)
    assert inputs_of(runs["smoke"]).out == "export TRNSLURM_INPUT_EVALUATE_ACCURACY=0.75\n"
