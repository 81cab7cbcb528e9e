"""Caps on what a run may use: planned, shown, reached, and raised by a resume."""

from __future__ import annotations

import json

import pytest

from trnslurm.records.run import RunDir
from trnslurm.submission.job import read_job

from ..toy_site import write_attempt

RECIPE = "steps: 30\nbatch: {global_batch: 64}\nslurm: {time_min: 60}\n"
TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2", "--precompile", "never")
REACHED = "it has used its 4 node-hours (slurm.max_node_hours)"


def caps(run: RunDir) -> object:
    return json.loads(run.caps_file.read_text())


@pytest.fixture
def capped(site, fake_slurm, cli) -> RunDir:
    """A run that has ended because it used its node-hours."""
    site.recipe(RECIPE)
    assert cli(*TOY, "--set", "slurm.max_node_hours=4").code == 0
    run = site.run()
    write_attempt(
        run, "train", 1, state="STOPPED", cause="cap", job_id=run.record().jobs["train"],
        reason=f"{REACHED}; saved step 20", nodes=2,
        started="2026-01-01T00:00:00Z", ended="2026-01-01T02:00:00Z",
    )  # fmt: skip
    (run.checkpoints / "step-00000020").mkdir(parents=True)
    fake_slurm.queue()
    return run


def test_dollars_are_node_hours_at_the_price_of_the_instance(site, fake_slurm, cli) -> None:
    site.recipe(RECIPE)
    done = cli(*TOY, "--set", "slurm.max_cost=43", "--set", "slurm.max_attempts=7")
    assert "within its time limits, 2 node-hours and 7 attempts over all attempts" in done.err
    assert caps(site.run()) == {
        "attempts": 7, "node_hours": 2.0, "key": "slurm.max_cost", "stop_before_s": 300
    }  # fmt: skip


@pytest.mark.parametrize("text", ["{", "[1]", '{"node_hours": "x"}', '{"attempts": [3]}'])
def test_damaged_caps_of_a_bundle(site, fake_slurm, cli, tmp_path, text: str) -> None:
    site.recipe(RECIPE)
    assert cli("render", *TOY[1:6], "-o", str(tmp_path / "b")).code == 0
    (tmp_path / "b/caps.json").write_text(text)
    done = cli("submit", "--rendered", str(tmp_path / "b"))
    assert (done.code, fake_slurm.calls("sbatch")) == (1, [])
    assert done.err.endswith("error: toy: its caps.json is damaged: render the bundle again\n")


def test_status_says_what_raises_the_cap_and_resume_refuses_without(capped, fake_slurm, cli):
    shown = cli("status", "last").out
    assert shown.startswith(f"{capped.name}: STOPPED ({REACHED}; saved step 20)\n")
    more = f"trnslurm resume {capped.name} --set slurm.max_node_hours=MORE"
    assert f"\nnext: {more}\n" in shown
    fake_slurm.forget_calls()
    refused = cli("resume", "last")
    assert (refused.code, fake_slurm.calls("sbatch")) == (1, [])
    assert f"error: {capped.name} cannot continue: {REACHED}: run {more}\n" in refused.err
    nothing = cli("resume", "last", "--set", "slurm.max_node_hours=0").err
    assert nothing == "error: slurm.max_node_hours is 0.0; it must be more than 0\n"
    other = cli("resume", "last", "--set", "steps=9").err
    assert "--set steps=9: only slurm.max_node_hours, slurm.max_cost, slurm.max_att" in other
    assert fake_slurm.calls("sbatch") == []
    assert caps(capped)["node_hours"] == 4.0


def test_resume_raises_the_cap(capped, fake_slurm, cli) -> None:
    fake_slurm.forget_calls()
    assert cli("resume", "last", "--set", "slurm.max_node_hours=9").code == 0
    assert len(fake_slurm.calls("sbatch")) == 1
    assert caps(capped)["node_hours"] == 9.0
    assert read_job(capped.path).profile.slurm.max_node_hours == 9.0
