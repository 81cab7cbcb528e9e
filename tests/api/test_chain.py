"""submit --chain: two runs of which the second waits for the first, and starts from its result."""

from __future__ import annotations

import json

import pytest

from trnslurm.contract.files import write_json
from trnslurm.runs.status import run_status

from ..waiting import eventually

RECIPE = """\
batch: {global_batch: 64}
model: {layers: 2}
train: {init_from: "", save_every: 5, lr: 1.0}
slurm: {time_min: 60}
default_preset: one
presets:
  one: {then: two, steps: 10, train: {lr: 0.5}}
  two: {steps: 20, train: {lr: 0.5}}
  deep: {then: one, model: {layers: 3}}
"""
CHAIN = ("submit", "toy", "--cluster", "pc", "--nodes", "2", "--chain")


@pytest.fixture
def chained(site, fake_slurm, cli):
    """The two runs of a chain that was submitted."""
    site.recipe(RECIPE)
    done = cli(*CHAIN)
    assert done.code == 0, done
    return site.runs()


def test_two_runs_whose_jobs_wait_for_each_other(chained, fake_slurm, cli) -> None:
    one, two = chained
    calls = fake_slurm.calls("sbatch")
    assert [c.cwd for c in calls] == [one.path, one.path, two.path, two.path]
    after = [c.arguments[:-1] for c in calls]
    assert after[0] == []
    for number, words in enumerate(after[1:], 1001):
        assert words == [f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes"]
    assert [r.record().jobs for r in chained] == [
        {"precompile": "1001", "train": "1002"}, {"precompile": "1003", "train": "1004"},
    ]  # fmt: skip
    plans = [json.loads(run.plan_file.read_text()) for run in chained]
    assert [(p["preset"], p["steps"]) for p in plans] == [("one", 10), ("two", 20)]
    assert [p["train"]["init_from"] for p in plans] == ["", f"{one.path}/checkpoints"]
    assert [run.name.split("-", 2)[2] for run in chained] == ["toy-one", "toy-two"]
    assert (one.record().then, two.record().after) == (two.name, one.name)

    said = cli("status", two.name)
    assert said.out.startswith(f"{two.name}: PENDING (precompile: waiting for {one.name})")
    assert f"starts from the result of {one.name}\n" in said.out
    assert f"{two.name} starts from its result\n" in cli("status", one.name).out
    seen = json.loads(cli("status", two.name, "--json").out)
    assert (seen["after"], seen["then"]) == (one.name, "")
    assert [run["state"] for run in json.loads(cli("runs", "--json").out)] == ["PENDING"] * 2


def test_dry_run_json_and_the_question_are_about_both(site, fake_slurm, cli) -> None:
    site.recipe(RECIPE)
    done = cli(*CHAIN, "--dry-run")
    where = "on 2 x trn1.32xlarge, 32 workers per node"
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        f"toy (one) {where}", "Graphs", f"toy (two) {where}", "Graphs",
    ]  # fmt: skip
    site.profile(ask_above_node_hours=10)  # at most 8 node-hours each
    asked = cli(*CHAIN)
    assert "16.0 node-hours exceeds the 10 above which pc asks" in asked.err
    assert site.runs() == []
    done = cli(*CHAIN, "--yes", "--json")
    assert [(r["run"], r["jobs"]) for r in json.loads(done.out)] == [
        (run.name, run.record().jobs) for run in site.runs()
    ]


def test_settings_for_both_and_for_one(site, fake_slurm, cli) -> None:
    site.recipe(RECIPE)
    words = ("seed=7", "train.lr=0.1", "one:steps=2", "two:train.save_every=3")
    assert cli(*CHAIN, *(word for setting in words for word in ("--set", setting))).code == 0
    plans = [json.loads(run.plan_file.read_text()) for run in site.runs()]
    found = [(p["seed"], p["train"]["lr"], p["steps"], p["train"]["save_every"]) for p in plans]
    assert found == [(7, 0.1, 2, 5), (7, 0.1, 20, 3)]


REFUSED = {
    "--set steps=3": "have different values of steps: use --set one:steps=… or --set two:steps=…",
    "--set tow:steps=3": "--set tow:steps=3: 'tow' is not in the chain one, two",
    "--set train.init_from=x": "--chain and --set train.init_from=… contradict each other",
    "--set one:train.save_every=0": "train.save_every is 0, so two would not find a checkpoint",
    "--preset two": "--chain: no preset follows toy (two)",
    "--preset deep": "toy (one) cannot continue toy (deep): model.layers was 3, but is 2 now",
    "--rendered x": "pass either a RECIPE or --rendered DIR",
    "--set two:data.path=nowhere --set data_root=/tmp": "no prepared data at /tmp/nowhere",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_a_chain(site, fake_slurm, cli, options: str) -> None:
    site.recipe(RECIPE)
    done = cli(*CHAIN, *options.split())
    assert done.code in (1, 2)
    assert REFUSED[options] in done.err.splitlines()[-1]
    assert fake_slurm.calls("sbatch") == []
    assert site.runs() == []


def test_all_or_nothing(site, fake_slurm, cli) -> None:
    site.recipe(RECIPE)
    fake_slurm.refuse("sbatch-3", "sbatch: error: No such job")
    done = cli(*CHAIN)
    assert done.code == 1
    one, two = site.runs()
    assert done.err.splitlines()[-1] == "error: sbatch: No such job"
    assert fake_slurm.calls("scancel")[0].arguments == ["1002", "1001"]
    for run in (one, two):
        status = run_status(run)
        assert (status.state, status.reason) == (
            "FAILED", "rejected at submission: sbatch: No such job",
        )  # fmt: skip


def test_nothing_is_left_if_the_second_cannot_be_made(site, fake_slurm, cli, monkeypatch) -> None:
    from trnslurm.submission import submit

    site.recipe(RECIPE)
    make, made = submit.create_run, []

    def full(root, name: str, **more):
        if made:
            raise OSError(28, "No space left on device", str(root))
        made.append(make(root, name, **more))
        return made[0]

    monkeypatch.setattr(submit, "create_run", full)
    assert cli(*CHAIN).code == 1
    assert not made[0].path.exists()
    assert fake_slurm.calls("sbatch") == []


def test_cancelling_the_first_cancels_what_waits_for_it(chained, fake_slurm, cli) -> None:
    one, two = chained
    done = cli("cancel", one.name)
    assert done.out == f"Cancelled {one.name}\nCancelled {two.name}\n"
    assert fake_slurm.calls("scancel")[0].arguments == ["1004", "1003", "1002", "1001"]
    assert {run_status(run).state for run in chained} == {"CANCELLED"}


def test_cancelling_the_second_leaves_the_first_alone(chained, fake_slurm, cli) -> None:
    one, two = chained
    assert cli("cancel", two.name).out == f"Cancelled {two.name}\n"
    assert fake_slurm.calls("scancel")[0].arguments == ["1004", "1003"]
    assert run_status(one).state == "PENDING"


def test_the_second_says_why_it_never_starts(chained, fake_slurm, cli) -> None:
    one, two = chained
    write_json(one.state / "precompile-1.json", {"phase": "precompile", "attempt": 1,
                                                 "state": "COMPLETED"})  # fmt: skip
    write_json(one.state / "train-1.json", {"phase": "train", "attempt": 1, "state": "FAILED"})
    never = f"{two.name}: CANCELLED (precompile: never started: {one.name} is FAILED)"
    gone = ["1003|CANCELLED|Dependency|N/A|", "1004|CANCELLED|Dependency|N/A|"]
    for queue in (["1002|FAILED|NonZeroExitCode|x|n", *gone], gone, []):
        fake_slurm.queue(*queue)
        assert cli("status", two.name).out.startswith(never), queue
    fake_slurm.queue("1003|PENDING|DependencyNeverSatisfied|N/A|")
    reason = f"precompile: {one.name} failed, so it will never start"
    assert cli("status", two.name).out.startswith(f"{two.name}: FAILED ({reason})")


@pytest.fixture
def here(site):
    """Make this machine the cluster `here`; its Python runs bash lines as launcher."""

    def make(program: str) -> tuple[str, ...]:
        site.here(program)
        site.recipe(RECIPE)
        return ("submit", "toy", "--cluster", "here", "--chain")

    return make


def test_here_they_run_one_after_the_other(site, here, run_cli) -> None:
    submit = here('date +%s.%N > began; grep init_from plan.json; ls -d "$(dirname "$PWD")"/*')
    done = run_cli(*submit)
    one, two = site.runs()
    assert done.code == 0, done
    assert [line for line in done.out.splitlines() if line.startswith("Submitted")] == [
        f"Submitted {one.name}", f"Submitted {two.name}",
    ]  # fmt: skip
    assert f"{one.name}: COMPLETED" in done.out and f"{two.name}: COMPLETED" in done.out
    assert float((one.path / "began").read_text()) < float((two.path / "began").read_text())
    assert f'"init_from": "{one.path}/checkpoints"' in two.node_log("train", 1, 0).read_text()
    assert "train attempt 1: COMPLETED" in (two.logs / "train-local.log").read_text()


def test_here_the_second_does_not_follow_a_failure(site, here, run_cli) -> None:
    done = run_cli(*here("exit 3"), "--json")
    one, two = site.runs()
    assert done.code == 1
    assert [run_status(run).state for run in (one, two)] == ["FAILED", "CANCELLED"]
    assert run_status(two).reason == f"never started: {one.name} is FAILED"
    assert not list(two.state.glob("*.json"))


def test_here_cancelling_the_first_ends_both(site, here, run_cli, cli) -> None:
    submit = here("touch began; exec sleep 600")
    assert run_cli(*submit, "--detach").code == 0
    one, two = site.runs()
    eventually((one.path / "began").exists)
    assert cli("cancel", one.name).out == f"Cancelled {one.name}\nCancelled {two.name}\n"
    assert {run_status(run).state for run in (one, two)} == {"CANCELLED"}
    assert not one.record().local_job_alive


def test_here_the_second_can_be_cancelled_while_it_waits(site, here, run_cli, cli) -> None:
    submit = here("touch began; until [ -e go ]; do sleep 0.05; done")
    assert run_cli(*submit, "--detach").code == 0
    one, two = site.runs()
    eventually((one.path / "began").exists)
    waits = run_status(two)
    assert (waits.state, waits.reason) == ("PENDING", f"waiting for {one.name}")
    assert cli("cancel", two.name).out == f"Cancelled {two.name}\n"
    assert run_status(one).state == "RUNNING"
    (one.path / "go").touch()
    eventually(lambda: all(run_status(run).final for run in (one, two)))
    assert (run_status(one).state, run_status(two).state) == ("COMPLETED", "CANCELLED")
    assert not (two.path / "began").exists()
