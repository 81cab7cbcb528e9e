"""A run that train.stop_at ended: what status says, and how it goes on."""

from __future__ import annotations

import json

import pytest

from trnslurm.records.run import RunDir

from ..toy_site import write_attempt

RECIPE = """\
steps: 30
batch: {global_batch: 64}
train: {init_from: '', stop_at: 12, save_every: 5}
slurm: {time_min: 60}
presets: {a: {then: b}, b: {seq_len: 32}}
"""
TOY = ("submit", "toy", "--cluster", "pc", "--preset", "a", "--nodes", "2")


def end_at(run: RunDir, step: int, *, steps: int = 30, attempt: int = 1) -> None:
    """Leave what a training leaves that has ended after a step."""
    job = run.record().jobs["train"]
    write_attempt(run, "train", attempt, state="COMPLETED", job_id=job)
    (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"attempt": attempt, "step": step, "steps": steps}) + "\n")


@pytest.fixture
def ended(graphs, site, fake_slurm, cli) -> RunDir:
    """A run of 30 steps that has ended at step 12, as it was to."""
    site.recipe(RECIPE)
    graphs.fill(graphs.facts(cli, "toy", "--preset", "a", "--nodes", "2"))
    assert cli(*TOY).code == 0
    end_at(site.run(), 12)
    fake_slurm.queue()
    fake_slurm.forget_calls()
    return site.run()


def plan(run: RunDir) -> dict[str, object]:
    return json.loads(run.plan_file.read_text())


def test_status_says_where_it_ended_and_what_continues_it(ended, cli) -> None:
    shown = cli("status", "last").out
    assert shown.startswith(f"{ended.name}: COMPLETED (train.stop_at, step 12 of 30)\n")
    assert f"\nnext: trnslurm resume {ended.name}\n" in shown
    assert "train.stop_at, step 12 of 30" in cli("runs").out


def test_it_goes_on_to_the_last_step(ended, fake_slurm, cli) -> None:
    done = cli("resume", "last")
    where = ended.checkpoints / "step-00000012"
    assert (done.code, done.err) == (0, f"{ended.name} continues after step 12 from {where}\n")
    assert done.out.startswith(f"Submitted {ended.name}  ")
    assert plan(ended)["train"]["stop_at"] == 0
    assert json.loads(cli("status", "last", "--json").out)["state"] == "PENDING"
    end_at(ended, 30, attempt=2)
    fake_slurm.queue()
    assert cli("status", "last").out.startswith(f"{ended.name}: COMPLETED\n")
    assert (
        cli("resume", "last").error == f"{ended.name} is COMPLETED, so there is nothing to resume"
    )


def test_it_goes_on_to_another_step_and_then_to_the_last(ended, fake_slurm, cli) -> None:
    """Also on other nodes: the files that it leaves are those of its configuration."""
    assert cli("resume", "last", "--stop-at", "20").code == 0
    assert plan(ended)["train"]["stop_at"] == 20
    end_at(ended, 20, attempt=2)
    fake_slurm.queue()
    assert "COMPLETED (train.stop_at, step 20 of 30)" in cli("status", "last").out
    assert cli("resume", "last", "--nodes", "1").code == 0
    now = plan(ended)
    assert (now["nodes"], now["train"]["stop_at"], now["steps"]) == (1, 0, 30)
    assert ended.record().earlier["train"] == 2


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("12", "the run already has a checkpoint of step 12: choose a later step"),
        ("31", "the run has 30 steps. To continue to the last one, omit the option"),
    ],
)
def test_a_step_that_cannot_be_is_refused(ended, fake_slurm, cli, step: str, why: str) -> None:
    before = ended.plan_file.read_bytes()
    error = cli("resume", "last", "--stop-at", step).error
    assert error == f"{ended.name} cannot continue with --stop-at {step}: {why}"
    assert cli("resume", "last", "--stop-at", "-1").code == 1
    assert (ended.plan_file.read_bytes(), fake_slurm.calls("sbatch")) == (before, [])


def test_a_run_that_failed_before_ends_where_it_was_to(ended, fake_slurm, cli) -> None:
    """Unless another step is asked for."""
    write_attempt(ended, "train", 2, state="TIMEOUT", job_id=ended.record().jobs["train"])
    assert cli("resume", "last").code == 0
    assert plan(ended)["train"]["stop_at"] == 12
    write_attempt(ended, "train", 3, state="TIMEOUT", job_id=ended.record().jobs["train"])
    fake_slurm.queue()
    assert cli("resume", "last", "--stop-at", "0").code == 0
    assert plan(ended)["train"]["stop_at"] == 0


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(ended, cli) -> None:
    (ended.checkpoints / "step-00000012").rmdir()
    assert "next:" not in cli("status", "last").out
    assert "(train.stop_at, step 12 of 30) and has no checkpoint" in cli("resume", "last").error


def test_what_ended_otherwise_has_nothing_to_resume(ended, cli) -> None:
    """As a script that ends early by itself: its plan names no such step."""
    ended.plan_file.write_text(json.dumps({"steps": 30, "train": {"stop_at": 0}}))
    assert cli("status", "last").out.startswith(f"{ended.name}: COMPLETED\n")
    assert "nothing to resume" in cli("resume", "last").error


def test_watch_takes_it_for_completed(ended, fake_slurm, cli) -> None:
    done = cli("watch", "last", "--resume", "--every", "0.05s")
    assert done.code == 0
    assert done.out.endswith(f"next: trnslurm resume {ended.name}\n")
    assert fake_slurm.calls("sbatch") == []


@pytest.mark.parametrize("begun", [False, True])
def test_the_next_run_of_a_chain_waits_again_unless_it_has_begun(
    graphs, site, fake_slurm, cli, begun: bool
) -> None:
    site.recipe(RECIPE)
    assert (
        cli(*TOY, "--chain", "--set", "a:train.stop_at=12", "--set", "b:train.stop_at=0").code == 0
    )
    a, b = site.runs()
    end_at(a, 12)
    jobs = b.record().jobs
    fake_slurm.queue(*[f"{job}|PENDING|Priority|N/A|" for job in jobs.values()])
    if begun:
        write_attempt(b, "precompile", 1, state="COMPLETED", job_id=jobs["precompile"])
        write_attempt(b, "train", 1, state="FAILED", job_id=jobs["train"])
        fake_slurm.queue()
    fake_slurm.forget_calls()
    assert cli("resume", a.path).code == 0
    submitted = {call.cwd for call in fake_slurm.calls("sbatch")}
    assert submitted == ({a.path} if begun else {a.path, b.path})


def test_it_continues_after_an_end_for_want_of_better_checkpoints(ended, fake_slurm, cli) -> None:
    ended.enough_file.write_text('{"why": "eval/f1 was best at step 6: 0.5"}')
    why = "ended early: eval/f1 was best at step 6: 0.5; saved step 12"
    job = ended.record().jobs["train"]
    write_attempt(ended, "train", 1, state="COMPLETED", job_id=job, reason=why, cause="enough")
    shown = cli("status", "last").out
    assert shown.startswith(f"{ended.name}: COMPLETED ({why})\n") and "\nnext: " not in shown
    assert cli("resume", "last").err.startswith(f"{ended.name} continues after step 12 from ")
    assert not ended.enough_file.exists()
