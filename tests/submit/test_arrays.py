"""A sweep as job arrays: what Slurm is given, what is recorded, and where an array cannot serve."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trnslurm.config.search import packaged_root
from trnslurm.contract.files import write_json
from trnslurm.records.run import RunDir
from trnslurm.render import job
from trnslurm.render.code import sha256_of
from trnslurm.runs import tables
from trnslurm.runs.status import run_status
from trnslurm.schedulers.slurm import start as on_slurm
from trnslurm.submission.options import SubmitHost

from ..toy_site import Site

RECIPE = """\
batch: {global_batch: 64}
model: {layers: 2}
train: {lr: 0.5}
graphs: {free: [lr]}
slurm: {time_min: 60}
"""
SWEEP = ("submit", "toy", "--cluster", "pc", "--nodes", "2")
NEVER = ("--precompile", "never")


@pytest.fixture
def arrays(site: Site, fake_slurm) -> None:
    """A cluster that takes arrays."""
    site.recipe(RECIPE)
    fake_slurm.answer("show-config", "MaxArraySize            = 1001")


def runs_of(site: Site) -> list[RunDir]:
    found = [RunDir(file.parent) for file in site.run_root.glob("*/run.json")]
    return sorted(found, key=lambda run: run.name)


def submitted(fake_slurm) -> list[tuple[str, str, str]]:
    """Of each job: the tasks of its array, what it waits for, and the directory's end."""
    found = []
    for call in fake_slurm.calls("sbatch"):
        array = next((li for li in call.script.splitlines() if b"--array=" in li), b"")
        tasks = array.decode().partition("--array=")[2].split(" ")[0]
        waits = next((w for w in call.arguments if w.startswith("--dependency=")), "")
        place = call.cwd.name if not tasks else f"{call.cwd.parent.name}/{call.cwd.name}"
        found.append((tasks, waits.removeprefix("--dependency="), place))
    return found


def test_a_large_sweep_works_out_what_is_alike_once(site, arrays, cli, monkeypatch) -> None:
    hashed: list[int] = []
    dumped: list[str] = []
    dump = yaml.safe_dump

    def dumping(*words: Any, **how: Any) -> str:
        dumped.append(dump(*words, **how))
        return dumped[-1]

    monkeypatch.setattr(job, "sha256_of", lambda files: hashed.append(1) or sha256_of(files))
    monkeypatch.setattr(yaml, "safe_dump", dumping)
    assert cli(*SWEEP, *NEVER, "--sweep", f"train.lr={','.join(map(str, range(20)))}").code == 0
    texts = [run.config_file.read_text().partition("\n")[2] for run in runs_of(site)]
    assert all(text == dump(yaml.safe_load(text), sort_keys=True) for text in texts)
    assert (len(texts), len(hashed)) == (20, 1)
    assert sum(map(len, dumped)) < 5 * len(texts[0])


def test_the_runs_of_a_sweep_share_their_code(site, arrays, cli, tmp_path) -> None:
    """By hard links: each can be removed. What differs is each run's own."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p/train.py").write_text("print()\n")
    on = ("--cluster", "pc", "--set", "device=cuda", "--set", "instance_type=p4d.24xlarge")
    words = ("--time", "60", "--sweep", "places.lr=1,2,3", "--", "{lr}")
    assert cli("submit", str(tmp_path / "p/train.py"), *on, *words).code == 0
    first, *others = (run for run in site.runs() if run.is_run)
    for name in ("project/train.py", "trnslurm.zip"):
        files = [run.code / name for run in (first, *others)]
        assert {file.stat().st_nlink for file in files} == {3}
    assert {(run.path / "plan.json").stat().st_nlink for run in others} == {1}
    shutil.rmtree(first.path)
    assert (others[0].code / "project/train.py").read_text() == "print()\n"


def test_one_array_for_a_sweep(site, arrays, fake_slurm, cli) -> None:
    done = cli(*SWEEP, *NEVER, "--sweep", "train.lr=1,2,3", "--at-most", "2", "--json")
    runs = runs_of(site)
    group = runs[0].record().group
    assert submitted(fake_slurm) == [("1-3%2", "", f"{group}/array-1")]
    assert [run["jobs"] for run in json.loads(done.out)] == [
        {"train": f"1001_{task}"} for task in (1, 2, 3)
    ]
    (call,) = fake_slurm.calls("sbatch")
    lines = call.script.decode().splitlines()
    own = runs[0].script("train").read_text().splitlines()
    options = [line for line in own if line.startswith("#SBATCH ")]
    assert [line for line in lines if line in options] == [
        line for line in options if "--job-name" not in line and "--output" not in line
    ]
    assert "#SBATCH --job-name=toy-train" in lines
    assert "#SBATCH --output=%a/logs/train-%A_%a.log" in lines
    for task, run in enumerate(runs, 1):
        assert (call.cwd / str(task)).resolve() == run.path.resolve()
    # A limit of Slurm's on the number of jobs shows before anything is queued.
    assert [c.arguments[-1] for c in fake_slurm.calls("test-only")] == ["--array=1-3"]
    fake_slurm.queue(f"1001_1 1002|RUNNING|None|N/A|n|{call.cwd}",
                     f"1001_2 1001|PENDING|JobArrayTaskLimit|N/A||{call.cwd}",
                     "1001_3 1001|RUNNING|None|N/A|n|/runs/another/array-1")  # fmt: skip
    assert [run_status(run).words for run in runs] == [
        "RUNNING", "PENDING (waiting for the end of another run of the sweep)",
        "LOST (it never started, and Slurm has no record of it, as after scancel)",
    ]  # fmt: skip


def test_compiled_ahead_once_for_each_graph(site, arrays, fake_slurm, cli) -> None:
    sweep = ("--sweep", "train.lr=0.1,0.2", "--sweep", "model.layers=2,3")
    assert cli(*SWEEP, *sweep).code == 0
    one, two, three, _ = runs = runs_of(site)
    group = one.record().group
    assert submitted(fake_slurm) == [
        ("", "", one.name), ("1-2", "afterok:1001", f"{group}/array-1"),
        ("", "", two.name), ("1-2", "afterok:1003", f"{group}/array-2"),
    ]  # fmt: skip
    jobs = [run.record().jobs for run in runs]
    assert jobs == [
        {"precompile": "1001", "train": "1002_1"}, {"precompile": "1003", "train": "1004_1"},
        {"train": "1002_2"}, {"train": "1004_2"},
    ]  # fmt: skip
    fake_slurm.queue("1001|RUNNING|None|N/A|n", "1002_2 1002|PENDING|Dependency|N/A|")
    assert run_status(three).reason == "waiting for job 1001, which compiles its graphs"


def test_warm_graphs_divide_no_sweep(site, arrays, graphs, fake_slurm, cli) -> None:
    """Nothing waits then, although the graphs differ."""
    site.recipe(RECIPE)
    for layers in (2, 3):
        graphs.fill(graphs.facts(cli, "toy", "--nodes", "2", "--set", f"model.layers={layers}"))
    assert cli(*SWEEP, "--sweep", "model.layers=2,3").code == 0
    assert [tasks for tasks, _, _ in submitted(fake_slurm)] == ["1-2"]


def test_other_options_are_another_array(site, arrays, fake_slurm, cli) -> None:
    sweep = (*SWEEP, *NEVER, "--sweep", "slurm.time_min=60,90", "--sweep", "seed=1,2")
    assert cli(*sweep, "--after", "7:any").code == 1  # no such job
    assert cli(*sweep).code == 0
    assert [tasks for tasks, _, _ in submitted(fake_slurm)] == ["1-2", "1-2"]
    # Two arrays could not take turns.
    fake_slurm.forget_calls()
    assert cli(*sweep, "--at-most", "3").code == 0
    assert [job[:2] for job in submitted(fake_slurm)] == [
        ("", ""), ("", ""), ("", ""), ("", "afterany:1003"),
    ]  # fmt: skip
    # One of its kind is a plain job.
    fake_slurm.forget_calls()
    assert cli(*SWEEP, *NEVER, "--sweep", "slurm.time_min=60,90").code == 0
    assert [job[0] for job in submitted(fake_slurm)] == ["", ""]


@pytest.mark.parametrize(
    ("config", "tasks"),
    [
        ("MaxArraySize = 3", ["1-2", "1-2", ""]),
        ("MaxArraySize = 1001\nSchedulerParameters = defer,max_array_tasks=4", ["1-4", ""]),
        ("MaxArraySize = 0", [""] * 5),
    ],
)
def test_no_more_tasks_than_allowed(
    site, arrays, fake_slurm, cli, config: str, tasks: list[str]
) -> None:
    fake_slurm.answer("show-config", config)
    assert cli(*SWEEP, *NEVER, "--sweep", "seed=1,2,3,4,5").code == 0
    assert [job[0] for job in submitted(fake_slurm)] == tasks


def test_a_template_that_knows_no_task(site, arrays, fake_slurm, cli) -> None:
    """Its script would requeue all tasks, by the array's number."""
    template = (packaged_root() / "templates/batch/closed.j2").read_text()
    site.write("templates/batch/closed.j2", template.replace("TRNSLURM_TASK", "OTHER"))
    assert cli(*SWEEP, *NEVER, "--sweep", "seed=1,2").code == 0
    assert [job[0] for job in submitted(fake_slurm)] == ["", ""]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("AssocMaxSubmitJobLimit", "(waiting jobs count too; sacctmgr show assoc "),
        # Of all users, on Slurm 22.05 and 26.11; sbatch itself would wait, and try again.
        ("allocation failure: Resource temporarily unavailable", "(MaxJobCount, see scontrol "),
        ("allocation failure: MaxJobCount limit reached", "(MaxJobCount, see scontrol "),
    ],
)
def test_too_many_jobs(site, arrays, fake_slurm, cli, words: str, why: str) -> None:
    fake_slurm.refuse("test-only", f"sbatch: error: {words}")
    done = cli(*SWEEP, *NEVER, "--sweep", "seed=1,2,3")
    said = done.err.splitlines()[-1]
    assert said.startswith(f"error: 3 jobs of a sweep: sbatch: {words} {why}")
    assert done.code == 1 and fake_slurm.calls("sbatch") == [] and runs_of(site) == []


def test_refused(site, arrays, fake_slurm, cli) -> None:
    """Nothing is left of the first array either, but what its runs were told."""
    fake_slurm.refuse("sbatch-2", "sbatch: error: Invalid qos specification")
    sweep = (*SWEEP, *NEVER, "--sweep", "slurm.time_min=60,90", "--sweep", "seed=1,2")
    assert cli(*sweep).code == 1
    assert [call.arguments for call in fake_slurm.calls("scancel")] == [["1001_[1,2]"]]
    assert {run_status(run).state for run in runs_of(site)} == {"FAILED"}
    # Without a job, not even a directory is left.
    fake_slurm.refuse("sbatch", "sbatch: error: Invalid qos specification")
    before = sorted(site.run_root.iterdir())
    assert cli(*sweep).code == 1
    assert sorted(site.run_root.iterdir()) == before


def test_another_user_has_made_its_directory(site, arrays, fake_slurm, cli, monkeypatch) -> None:
    """Its script would be theirs to change."""
    site.run_root.mkdir()
    monkeypatch.setattr(
        SubmitHost, "settle", lambda host, root, names: (Path(root), "20260101-000000")
    )
    (site.run_root / "20260101-000000-toy").mkdir(mode=0o777)
    (site.run_root / "20260101-000000-toy").chmod(0o777)
    done = cli(*SWEEP, *NEVER, "--sweep", "seed=1,2")
    assert done.code == 1 and fake_slurm.calls("sbatch") == [] and runs_of(site) == []
    assert "every user can write to" in done.err.splitlines()[-1]


def test_ctrl_c_while_sbatch_is_asked(site, arrays, fake_slurm, cli, monkeypatch) -> None:
    submit = on_slurm._submit

    def interrupted(*arguments) -> str:
        job = submit(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return job

    monkeypatch.setattr(on_slurm, "_submit", interrupted)
    assert cli(*SWEEP, *NEVER, "--sweep", "seed=1,2,3").code == 130
    assert {call.arguments[-1] for call in fake_slurm.calls("scancel")} == {"1001_[1,2,3]"}
    assert [run.record().refused for run in runs_of(site)] == ["interrupted"] * 3
    assert [run.record().jobs for run in runs_of(site)] == [
        {"train": f"1001_{task}"} for task in (1, 2, 3)
    ]


def test_killed_before_the_jobs_were_recorded(site, arrays, fake_slurm, cli) -> None:
    assert cli(*SWEEP, *NEVER, "--sweep", "seed=1,2,3").code == 0
    runs = runs_of(site)
    for run in runs:
        run.write_record(replace(run.record(), jobs={}))
    fake_slurm.forget_calls()
    assert cli("cancel", runs[1].name).code == 0
    assert [call.arguments for call in fake_slurm.calls("scancel")] == [["1001_[2]"]]
    assert cli("cancel", runs[0].record().group).code == 0
    assert fake_slurm.calls("scancel")[-1].arguments == ["1001_[1,3]"]


def test_resumed_alone_and_removed_together(site, arrays, fake_slurm, cli) -> None:
    assert cli(*SWEEP, *NEVER, "--sweep", "seed=1,2,3", "--at-most", "1").code == 0
    runs = runs_of(site)
    place = fake_slurm.calls("sbatch")[0].cwd
    states = ("COMPLETED", "TIMEOUT", "NODE_FAIL")
    fake_slurm.queue(*(f"1001_{n}|{s}|None|N/A|n|{place}" for n, s in enumerate(states, 1)))
    write_json(runs[0].state_file("train", 1), {"state": "COMPLETED", "job_id": "1001_1"})
    for run in runs[1:]:
        write_json(run.state_file("train", 1), {"state": "RUNNING", "job_id": "1001_2"})
    assert cli("resume", runs[0].record().group).code == 0
    # Plain jobs, in their turns again.
    assert submitted(fake_slurm)[1:] == [
        ("", "", runs[1].name), ("", "afterany:1002", runs[2].name),
    ]  # fmt: skip
    fake_slurm.queue("1001_1|COMPLETED|None|N/A|n", "1002|FAILED|None|N/A|n",
                     "1003|FAILED|None|N/A|n")  # fmt: skip
    assert cli("rm", "--yes", runs[0].name, runs[1].name).code == 0
    assert Path(place, "3").exists() and not Path(place, "2").exists()
    assert cli("rm", "--yes", runs[2].name).code == 0
    assert [*site.run_root.glob("[!.]*")] == []


def test_of_many_runs_the_first_and_the_last_are_listed(
    site, arrays, fake_slurm, cli, monkeypatch
) -> None:
    """A job array may have thousands."""
    for name, most in (("MOST", 4), ("FIRST", 2), ("LAST", 1)):
        monkeypatch.setattr(tables, f"_{name}_LINES", most)
    done = cli(*SWEEP, *NEVER, "--sweep", "seed=1,2,3,4,5")
    assert "\nrun  seed\n  1  1\n... 3 more ...\n  5  5\n" in done.err
    started = [line.rpartition("-")[2] for line in done.out.splitlines()[:-1]]
    assert [line[0] for line in started] == ["1", "2", ".", "5"]
    assert started[2] == "... 2 more ..."
