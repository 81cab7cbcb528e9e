"""Each checkpoint of a training gets a job, once, and Slurm lets no more run than are wanted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trnslurm.contract.rundir import RunFiles
from trnslurm.node import follow
from trnslurm.records.run import RunDir
from trnslurm.runs.followers import followers_of

SBATCH = """#!/bin/bash
[ ! -e ../refused ] || { echo "sbatch: error: $(cat ../refused)" >&2; exit 1; }
case "$*" in *afterany:forgotten*) echo "Job dependency problem" >&2; exit 1;; esac
echo "${PWD##*/} $* $SLURM_NTASKS$TRNSLURM_ATTEMPT" >> ../asked
echo "$((100 + $(wc -l < ../asked)));cluster"
"""
SQUEUE = "#!/bin/bash\ncat ../queue\n"


class Training:
    """A run with a bundle that follows it, and a Slurm that notes what it is asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = RunFiles(root / "gpt")
        place = self.files.follow / "eval"
        (place / "code/project").mkdir(parents=True)
        (place / "logs").mkdir()
        for name in ("code/project/eval.py", "train.sbatch", "logs/.keep"):
            (place / name).write_text("x")
        (place / "run.json").write_text('{"run": "eval", "name": "eval", "jobs": {}}')
        self.rule()

    def rule(self, every: int = 0, at_most: int = 2, **more: object) -> None:
        rule = {"every": every, "at_most": at_most, **more}
        (self.files.follow / "eval/rule.json").write_text(json.dumps(rule))

    def exports(self) -> None:
        """Have the bundle take exported checkpoints."""
        script = 'set -eu\nexport TRNSLURM_EXPORT="$PWD/exported"  # written\n'
        (self.files.follow / "eval/train.sbatch").write_text(script)
        (self.files.code / "jobs/gpt").mkdir(parents=True)
        (self.files.code / "jobs/gpt/export.py").write_text("export")
        (self.files.path / "plan.json").write_text("{}")

    def save(self, *steps: int) -> None:
        for step in steps:
            place = self.files.checkpoints / f"step-{step:08d}"
            (place / "part").mkdir(parents=True)
            (place / "part/weights").write_text(str(step))

    def look(self) -> list[str]:
        """Look once; return what Slurm has been asked in all."""
        assert follow.main([str(self.files.path)]) == 0
        asked = self.root / "asked"
        return asked.read_text().splitlines() if asked.exists() else []

    def own(self, step: int) -> Path:
        return self.root / f"gpt.eval-{step}"

    def end(self, step: int, state: str = "COMPLETED", **numbers: float) -> None:
        """End the job for a checkpoint."""
        run = RunFiles(self.own(step))
        run.state.mkdir(exist_ok=True)
        run.state_file("train", 1).write_text(json.dumps({"state": state}))
        if numbers:
            run.metrics_file.write_text(json.dumps({"attempt": 1, "step": 1, **numbers}) + "\n")

    def score(self) -> None:
        """Look as one of these jobs does when it ends."""
        assert follow.main([str(self.files.path), "--score"]) == 0

    @property
    def best(self) -> list[str]:
        """What is kept as the best."""
        kept = self.files.best_checkpoints("eval")
        return [path.name for path in kept.iterdir()] if kept.is_dir() else []


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        program = tmp_path / "bin" / name
        program.write_text(text.replace("../queue", str(tmp_path / "queue")))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("TRNSLURM_ATTEMPT", "1")
    return Training(tmp_path)


def test_each_checkpoint_once_and_no_more_at_a_time(training: Training) -> None:
    training.save(10, 20, 30)
    first = training.look()
    assert first == [
        "gpt.eval-10 --parsable train.sbatch ",
        "gpt.eval-20 --parsable train.sbatch ",
        "gpt.eval-30 --parsable --dependency=afterany:101 train.sbatch ",
    ]
    assert training.look() == first
    shutil.rmtree(training.files.checkpoints)  # as keep_last does
    training.save(40)
    assert training.look()[3:] == [
        "gpt.eval-40 --parsable --dependency=afterany:102 train.sbatch ",
    ]
    own = training.own(10)
    assert (own / "followed/checkpoint/part/weights").read_text() == "10"
    assert (own / "followed/step").read_text() == "10\n"
    record = json.loads((own / "run.json").read_text())
    assert record["jobs"] == {"train": "101"} and record["group"] == "gpt.eval"
    assert (record["run"], record["values"]) == ("gpt.eval-10", {"step": "10"})
    kept = {path.name for path in own.iterdir()}
    assert kept == {"code", "logs", "train.sbatch", "run.json", "followed"}


def test_the_code_that_exports_a_checkpoint_is_with_it(training: Training) -> None:
    """As a run of its own, so that the training may end, go on or be removed."""
    training.exports()
    training.save(10, 20)
    training.look()
    shutil.rmtree(training.files.checkpoints)
    shutil.rmtree(training.files.code)
    alone = RunFiles(training.own(10) / "followed/run")
    assert (alone.code / "jobs/gpt/export.py").read_text() == "export"
    assert alone.plan_file.read_text() == "{}"
    assert [path.name for path in alone.checkpoints.iterdir()] == ["step-00000010"]
    assert (alone.checkpoints / "step-00000010/part/weights").read_text() == "10"


@pytest.mark.parametrize(
    ("saved", "every", "started"),
    [
        ((10, 20, 30, 40), 20, [20, 40]),
        ((7, 14, 21, 28, 35), 10, [14, 21, 35]),  # the first at or after each multiple
        ((5,), 10, []),
    ],
)
def test_one_in_so_many_steps(training: Training, saved, every, started) -> None:
    training.rule(every=every)
    for step in saved:
        training.save(step)
        training.look()
    assert sorted(training.files.mark_files("eval")) == started


def test_what_slurm_refuses_is_tried_again_and_said_once(training: Training, capfd) -> None:
    training.save(10, 20)
    (training.root / "queue").write_text("")
    (training.root / "refused").write_text("Invalid partition")
    assert training.look() == training.look() == []
    assert len(training.files.mark_files("eval")) == 1, "it asks Slurm for one more at a time"
    problem = json.loads((training.files.follow / "eval/problem.json").read_text())
    assert "Invalid partition" in problem["why"]
    assert capfd.readouterr().err.count("Invalid partition") == 1
    (training.root / "refused").unlink()
    (training.root / "queue").write_text("")
    assert [line.split()[0] for line in training.look()] == ["gpt.eval-10", "gpt.eval-20"]
    assert json.loads((training.files.follow / "eval/problem.json").read_text()) == {}


@pytest.mark.parametrize("queued", [True, False])
def test_a_death_between_sbatch_and_its_note(training: Training, queued: bool) -> None:
    """The job is looked for by its directory, and not submitted a second time."""
    training.save(10)
    asked = training.look()
    mark = training.files.mark_file("eval", 10)
    mark.write_text('{"run": "gpt.eval-10"}')
    (training.root / "queue").write_text(f"101 {training.own(10)}\n" if queued else "9 /x\n")
    if not queued:
        state = RunFiles(training.own(10)).state_file("train", 1)
        state.parent.mkdir()
        state.write_text('{"state": "RUNNING", "job_id": "101"}')
    assert training.look() == asked
    assert json.loads(mark.read_text())["job"] == "101"


def test_a_death_before_the_run_is_whole(training: Training) -> None:
    training.save(10)
    training.files.mark_file("eval", 10).write_text('{"run": "gpt.eval-10"}')
    (training.root / ".gpt.eval-10.new").mkdir()
    assert len(training.look()) == 1


def test_a_job_that_slurm_has_forgotten_holds_up_nobody(training: Training) -> None:
    training.rule(at_most=1)
    training.save(10, 20)
    training.files.mark_file("eval", 10).write_text('{"run": "x", "job": "forgotten"}')
    assert training.look() == ["gpt.eval-20 --parsable train.sbatch "]


@pytest.mark.parametrize(("state", "left"), [("COMPLETED", False), ("FAILED", True)])
def test_a_checkpoint_is_let_go_when_its_job_has_completed(
    training: Training, state: str, left: bool
) -> None:
    training.exports()
    training.save(10)
    training.look()
    export = training.own(10) / "exported/step-10"
    export.mkdir(parents=True)
    training.end(10, state)
    training.look()
    assert (training.own(10) / "followed/checkpoint").exists() == left
    assert (training.own(10) / "followed/run").exists() == left
    assert export.exists() == left
    assert (training.files.checkpoints / "step-00000010/part/weights").exists()


@pytest.mark.parametrize(
    ("highest", "best"), [(True, ["step-00000020"]), (False, ["step-00000010"])]
)
def test_the_best_checkpoint_stays(training: Training, highest: bool, best: list[str]) -> None:
    """Whoever looks, in whichever order the jobs end, and though keep_last deletes the others."""
    training.rule(metric="accuracy", highest=highest)
    training.save(10, 20, 30)
    training.look()
    shutil.rmtree(training.files.checkpoints)
    training.end(30, accuracy=0.5)
    training.score()
    assert training.best == ["step-00000030"]
    training.end(10, accuracy=0.4)
    training.end(20, accuracy=0.7)
    asked = training.look()
    assert training.best == best and training.look() == asked
    assert not (training.own(20) / "followed/step-00000020").exists(), "it is let go"
    (follower,) = followers_of(RunDir(training.files.path))
    assert follower.best and follower.best.checkpoint.endswith(best[0])
    assert f"best: step {best[0][-2:]}, {0.7 if highest else 0.4}, kept as /" in follower.words
    training.save(40)
    training.look()
    assert {path.name for path in training.own(40).iterdir()} == {
        *("code", "logs", "train.sbatch", "run.json", "followed")
    }


def test_a_death_between_two_bests(training: Training) -> None:
    """The link of the best is there before its score, and a link without a score is no best."""
    training.rule(metric="loss")
    training.save(10, 20)
    training.look()
    training.end(10, loss=2.0)
    training.score()
    (training.files.best_checkpoints("eval") / "step-00000020").mkdir()
    (follower,) = followers_of(RunDir(training.files.path))
    assert follower.best and follower.best.checkpoint.endswith("10")
    training.end(20, loss=3.0)
    training.score()
    assert training.best == ["step-00000010"]


def test_a_training_that_gets_no_better_is_asked_to_end(training: Training) -> None:
    training.rule(metric="accuracy", highest=True, patience=2)
    enough = training.files.enough_file
    enough.parent.mkdir()
    training.save(10, 20, 30, 40, 50, 60)
    training.look()
    training.end(10, accuracy=0.4)
    training.end(20, accuracy=0.7)
    training.end(30, "FAILED")
    training.end(40, accuracy=0.7)
    training.score()
    assert not enough.exists(), "one that failed does not count"
    training.end(50, accuracy=float("nan"))
    training.score()
    assert not enough.exists(), "nor does one that has no number"
    training.end(60, accuracy=0.6)
    training.score()
    assert json.loads(enough.read_text())["why"] == "eval/accuracy was best at step 20: 0.7"
    enough.unlink()  # as resume does
    training.save(70, 80)
    training.look()
    assert not enough.exists()
    training.end(70, accuracy=0.1)
    training.end(80, accuracy=0.2)
    training.look()
    assert enough.exists(), "as many more were awaited"
