"""runs by state, time and number; note, keep, rm, compare."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import trnslurm
from trnslurm.contract.checkpoints import newest_step
from trnslurm.contract.files import write_json
from trnslurm.contract.states import State
from trnslurm.errors import TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.runs import removal
from trnslurm.runs.status import run_status

ENDED = [{"state": "COMPLETED", "started": "2026-01-01T00:00:00Z", "ended": "2026-01-01T01:00:00Z"}]
FAILED = [{**ENDED[0], "state": "FAILED", "reason": "boom"}]
LOCAL = {"scheduler": "local", "jobs": {}, "phases": ("train",)}


@pytest.fixture
def ended(make_run: Callable[..., RunDir]) -> Callable[..., RunDir]:
    """Make a local run that has ended, with numbers and a checkpoint."""

    def make(name: str, *losses: float, train=ENDED, size: int = 1 << 20, **fields) -> RunDir:
        run = make_run(name, states={"train": train}, **LOCAL | fields)
        lines = [
            {"attempt": 1, "step": n, "steps": 9, "loss": loss} for n, loss in enumerate(losses, 1)
        ]
        run.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        step = run.checkpoints / "step-00000001"
        step.mkdir(parents=True)
        (step / "weights").write_bytes(os.urandom(size))
        return run

    return make


def listed(done) -> list[str]:
    """The runs of a table."""
    assert done.code == 0, done.err
    return [line.split()[0] for line in done.out.partition("\n\n")[0].splitlines()[1:]]


def test_runs_are_chosen_by_state_recipe_and_time(ended, cli) -> None:
    a = ended("20260101-000000-a")
    b = ended("20260102-000000-b", train=FAILED, created="2026-01-02T00:00:00Z")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    c = ended("20260103-000000-c", recipe="bert_mrpc", created=now)
    assert listed(cli("runs")) == [a.name, b.name, c.name]
    assert listed(cli("runs", "--state", "failed")) == [b.name]
    assert listed(cli("runs", "--state", "FAILED", "--recipe", "gpt2_zero1")) == [b.name]
    assert listed(cli("runs", "--since", "2026-01-02")) == [b.name, c.name]
    assert listed(cli("runs", "--since", "12h")) == [c.name]
    assert listed(cli("runs", "--limit", "2")) == [b.name, c.name]
    nobody = cli("runs", "--recipe", "nobody")
    assert (nobody.code, nobody.out, nobody.err) == (0, "", "No runs match\n")
    assert [r["run"] for r in json.loads(cli("runs", "--recipe", "bert_mrpc", "--json").out)] == [
        c.name
    ]


@pytest.mark.parametrize("since", ["soon", "1y", "2026-1-1", "99999999999d", ""])
def test_a_time_that_is_none_is_refused(ended, cli, since: str) -> None:
    ended("20260101-000000-a")
    error = cli("runs", f"--since={since}").error
    assert (
        error == f"--since {since}: expected a date or an age, such as 2026-11-21, 12h, 30d or 4w"
    )


def test_runs_are_sorted_by_what_they_said_last(ended, cli) -> None:
    worse, silent, best = ended("1-a", 1.0, 3.0), ended("2-b"), ended("3-c", 9.0, 2.0)
    assert listed(cli("runs", "--sort", "loss")) == [best.name, worse.name, silent.name]
    assert listed(cli("runs", "--sort", "loss", "--limit", "1")) == [best.name]
    assert "none of the runs report f1, only loss" in cli("runs", "--sort", "f1").error


def test_runs_as_csv(ended, cli) -> None:
    ended("1-a", 1.0, 3.0, note='a "note", with commas')
    ended("2-b")
    rows = list(csv.DictReader(io.StringIO(cli("runs", "--csv").out)))
    assert [(r["run"], r["state"], r["step"], r["loss"]) for r in rows] == [
        ("1-a", "COMPLETED", "2", "3.0"), ("2-b", "COMPLETED", "", ""),
    ]  # fmt: skip
    assert rows[0]["note"] == 'a "note", with commas'
    assert cli("runs", "--csv", "--json").code == 2


def test_a_note_is_shown_and_changed(ended, cli) -> None:
    run = ended("1-a", 1.0)
    assert cli("note", "1-a").out == "\n"
    assert cli("note", "1-a", "warmup", "doubled").code == 0
    assert cli("note", "1-a").out == "warmup doubled\n"
    assert cli("runs").out.splitlines()[1].endswith("warmup doubled")
    assert "note: warmup doubled\n" in cli("status", "1-a").out
    assert cli("note", "1-a", "--clear").code == 0
    assert run.record().note == ""
    for words in (["\x1b]0;x"], ["a\nb"], ["x" * 1001], ["--clear", "x"]):
        assert cli("note", "1-a", *words).code == 2
    assert run.record().note == ""


def test_what_is_removed_is_gone_and_nothing_else(ended, cli) -> None:
    one, other = ended("1-a", 1.0), ended("2-b", 1.0)
    dry = cli("rm", "1-a", "--dry-run")
    assert dry.out.splitlines()[-1] == "1.0 MiB would be freed" and one.path.exists()
    refused = cli("rm", "1-a")
    assert (refused.code, refused.error) == (
        1, "no terminal to ask for confirmation: pass --yes or --dry-run",
    )  # fmt: skip
    assert one.path.exists()
    done = cli("rm", "1-a", "--yes")
    assert done.out.splitlines()[-1] == "Removed 1 run, 1.0 MiB"
    assert [p.name for p in one.path.parent.iterdir()] == [other.name]


def test_checkpoints_alone(ended, cli, stable) -> None:
    run = ended("1-a", 1.0)
    said = json.loads(cli("rm", "1-a", "--checkpoints", "--yes", "--json").out)
    stable.json("rm", said)
    assert said["removed"] and said["runs"][0]["bytes"] == said["bytes"] >= 1 << 20
    assert not run.checkpoints.exists()
    assert run.steps() and cli("status", "1-a").out.startswith("1-a: COMPLETED")
    assert cli("rm", "1-a", "--checkpoints", "--yes").out == "Nothing to remove\n"


def test_nothing_is_removed_through_a_link(ended, cli, tmp_path) -> None:
    """Neither checkpoints that lie elsewhere, nor a run by another path."""
    run = ended("1-a", 1.0)
    (link := tmp_path / "link").symlink_to(run.path)
    said = cli("rm", link, "--yes").error
    assert said == f"{link} is a symbolic link: name the run itself, {run.path}"
    far = run.checkpoints.rename(tmp_path / "far")
    run.checkpoints.symlink_to(far)
    done = cli("rm", "1-a", "--checkpoints", "--yes")
    step = f"{far}/step-00000001"
    assert (done.code, done.out) == (0, "Nothing to remove\n")
    assert done.err == f"1-a: keeping {step}, because it is not in the run directory\n"
    assert Path(step, "weights").exists() and run.record()


def test_checkpoints_of_a_script(ended, cli, tmp_path) -> None:
    """Removed only where nothing else is: not beside the project's files, nor behind a link."""
    run = ended("1-a", size=0)
    run.project_file.parent.mkdir()
    write_json(run.project_file, {})
    work = run.path / "work"
    (work / "out").mkdir(parents=True)
    nothing = f"1-a: keeping {work}, because it may contain more than checkpoints; "
    nothing += "trnslurm rm 1-a removes the"
    assert nothing in cli("rm", "1-a", "--checkpoints", "--yes").err
    run.script("train").write_text('\nexport TRNSLURM_CHECKPOINTS="$PWD/work/"out\n')
    (work / "out/model.pt").write_bytes(os.urandom(1 << 20))
    shipped = run.code / "project/out"
    shipped.mkdir(parents=True)
    done = cli("rm", "1-a", "--checkpoints", "--yes")
    assert f"1-a: keeping {work}/out, because it may contain" in done.err
    assert (work / "out/model.pt").exists()
    shipped.rmdir()
    write_json(run.saved_file, {"step": 7, "path": str(work / "out/model.pt")})
    done = cli("rm", "1-a", "--checkpoints", "--yes")
    assert done.out.endswith("Removed the checkpoints of 1 run, 1.0 MiB\n") and not done.err
    assert work.exists() and not (work / "out").exists() and newest_step(run) == 0
    far = tmp_path / "far"
    far.mkdir()
    (far / "model.pt").write_bytes(b"x")
    (work / "out").symlink_to(far)
    write_json(run.saved_file, {"step": 7, "path": str(far / "model.pt")})
    done = cli("rm", "1-a", "--checkpoints", "--yes")
    assert done.err == f"1-a: keeping {far}/model.pt, because it is not in the run directory\n"
    assert done.out == "Nothing to remove\n" and (far / "model.pt").exists()


def test_a_kept_run_stays(ended, cli) -> None:
    run = ended("1-a")
    assert cli("keep", "1-a").out == "1-a is protected\n"
    assert cli("rm", "1-a", "--yes").error == "1-a is protected: first run trnslurm keep --undo 1-a"
    assert cli("rm", "--older-than", "1h", "--yes").out == "Nothing to remove\n"
    assert "protected: " in cli("status", "1-a").out and run.path.exists()
    assert cli("keep", "--undo", "1-a").out == "1-a can be removed\n"
    assert cli("rm", "1-a", "--yes").code == 0 and not run.path.exists()


def test_a_run_that_may_run_is_never_removed(ended, make_run, fake_slurm, cli) -> None:
    waiting = make_run("3-c")
    fake_slurm.queue(f"1001|PENDING|Priority|N/A|{waiting.path}")
    ended("1-a")
    error = cli("rm", "1-a", "3-c", "--yes").error
    assert error == "3-c is PENDING: first run trnslurm cancel 3-c"
    assert cli("rm", "--older-than", "1h", "--dry-run").out.count("1-a") == 1
    assert "3-c" not in cli("rm", "--older-than", "1h", "--dry-run").out
    assert {p.name for p in waiting.path.parent.iterdir()} == {"1-a", "3-c"}


def test_a_run_that_another_one_starts_from_stays(ended, make_run, fake_slurm, cli) -> None:
    source = ended("1-a")
    heir = make_run("2-b")
    plan = {"train": {"init_from": str(source.checkpoints)}}
    heir.plan_file.write_text(json.dumps(plan))
    fake_slurm.queue(f"1001|PENDING|Priority|N/A|{heir.path}")
    assert cli("rm", "1-a", "--yes").error == "2-b, which is PENDING, starts from 1-a"
    heir.plan_file.write_text(json.dumps({"train": {"init_from": f"{source.path}-other"}}))
    assert cli("rm", "1-a", "--yes").code == 0


def test_what_runs_again_meanwhile_stays(ended, cli, monkeypatch) -> None:
    run = ended("1-a")
    resumed = replace(run_status(run), state=State.PENDING)
    monkeypatch.setattr(removal, "run_status", lambda run, leftovers: resumed)
    assert "error: 1-a is running again: nothing was removed" in cli("rm", "1-a", "--yes").err
    assert run.path.exists()


def test_the_oldest_go_until_the_rest_fits(ended, cli) -> None:
    for number in (1, 2, 3):
        stamp = f"2026-01-0{number}T01:00:00Z"
        ended(f"{number}-a", created=stamp, train=[{**ENDED[0], "ended": stamp}])
    done = cli("rm", "--checkpoints", "--max-size", "1500K", "--dry-run")
    assert listed(done)[:2] == ["1-a", "2-a"] and "3-a" not in done.out
    assert cli("rm", "--checkpoints", "--max-size", "1G").out == "Nothing to remove\n"
    assert cli("rm").code == 2
    assert cli("rm", "1-a", "--older-than", "1d").code == 2


def test_a_directory_that_cannot_be_removed_is_one_line(ended, cli, monkeypatch) -> None:
    run = ended("1-a")

    def fail(directory: Path) -> None:
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(removal.shutil, "rmtree", fail)
    done = cli("rm", "1-a", "--yes", "--checkpoints")
    assert (done.code, done.err) == (
        1, f"error: cannot remove {run.checkpoints} (Permission denied)\n",
    )  # fmt: skip


def test_compare(ended, cli, stable) -> None:
    ended("1-a", 5.0, 4.0)
    ended("2-b", 3.0)
    for name, seed in (("1-a", 1), ("2-b", 2)):
        run = RunDir(Path(cli("status", name).out.splitlines()[-1].removeprefix("run directory: ")))
        run.config_file.write_text(f"config: {{seed: {seed}, steps: 9}}\n")
    lines = cli("compare", "1-a", "2-b").out.splitlines()
    assert [line.split()[0] for line in lines if line] == ["run", "1-a", "2-b", "key", "seed"]
    assert lines[-1].split() == ["seed", "1", "2"]
    facts = json.loads(cli("compare", "1-a", "2-b", "--json").out)
    stable.json("compare", facts, free=["differs", "runs[].last", "runs[].settings"])
    assert facts["differs"] == {"seed": [1, 2]}
    assert [run["last"]["loss"] for run in facts["runs"]] == [4.0, 3.0]
    assert cli("compare", "1-a").out.endswith("Name a second run to compare with.\n")
    (RunDir(run.path.with_name("1-a")).config_file).write_text(run.config_file.read_text())
    assert cli("compare", "1-a", "2-b").out.endswith("The runs have the same configuration.\n")


def test_python_chooses_as_the_command_does(ended) -> None:
    ended("1-a", 1.0), ended("2-b", 0.5, train=FAILED)
    assert [run.name for run in trnslurm.runs(state="failed")] == ["2-b"]
    assert [run.name for run in trnslurm.runs(sort="loss", limit=1)] == ["2-b"]
    with pytest.raises(TrnslurmError, match="state='LATE': expected PENDING, "):
        trnslurm.runs(state=["late"])
    with pytest.raises(TrnslurmError, match="since soon: expected a date or an age"):
        trnslurm.runs(since="soon")
