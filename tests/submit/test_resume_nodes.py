"""resume --nodes: the same run continues on another number of nodes."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import yaml

from trnslurm.records.run import RunDir
from trnslurm.submission import resize
from trnslurm.submission.job import read_job

from ..toy_site import write_attempt

ROOT = Path(__file__).parents[2]
TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")
RANGE = """\
steps: 30
batch: {global_batch: 384}
train: {init_from: '', stop_at: 0, save_every: 5}
slurm: {time_min: 60}
"""
REPLACED = {"config.yaml", "graphs.json", "node.sh", "plan.json", "precompile.sbatch",
            "train.sbatch"}  # fmt: skip


def contents(run: RunDir) -> dict[str, bytes]:
    """Every file of the run's bundle."""
    files = [run.path / name for name in run.record().sha256]
    return {str(f.relative_to(run.path)): f.read_bytes() for f in files}


def test_a_range_goes_on_as_it_is_or_as_another(graphs, site, fake_slurm, cli) -> None:
    """Each number has files of its own; those that the new range lacks are removed."""
    site.recipe(RANGE)
    sets = ("--set", "precompile=never")
    assert cli("submit", "toy", "--cluster", "pc", "--nodes", "1-4", *sets).code == 0
    run = site.run()
    attempts = itertools.count(1)

    def resumed(*options: str) -> set[str]:
        """The counts that have files of their own after a resume."""
        write_attempt(run, "train", next(attempts), state="FAILED", job_id="1")
        fake_slurm.queue()
        done = cli("resume", "last", *options)
        assert done.code == 0, done
        assert as_recorded(run)
        return {place.name.removeprefix("nodes-") for place in run.path.glob("nodes-*")}

    before = contents(run)
    assert resumed() == {"1", "2", "3"} and contents(run) == before
    resumed("--stop-at", "7")
    plans = [json.loads(f.read_text()) for f in run.path.glob("**/plan.json")]
    assert [plan["train"]["stop_at"] for plan in plans] == [7] * 4
    assert resumed("--nodes", "2-4") == {"2", "3"}
    assert resumed("--nodes", "4") == set()
    assert resumed("--nodes", "1-2") == {"1"}
    assert run.record().nodes == 2
    write_attempt(run, "train", next(attempts), state="FAILED", job_id="1")
    fake_slurm.queue()
    wrong = cli("resume", "last", "--nodes", "4-2").error
    assert "the first number must be smaller than the second" in wrong


@pytest.fixture
def ended(graphs, site, fake_slurm, cli):
    """A run on two nodes whose training ran into its time limit."""
    assert cli(*TOY).code == 0
    run = site.run()
    write_attempt(run, "precompile", 1, state="COMPLETED", job_id="1001")
    write_attempt(run, "train", 1, state="TIMEOUT", reason="time limit", job_id="1002")
    fake_slurm.queue()
    fake_slurm.forget_calls()
    return run


def as_recorded(run: RunDir) -> bool:
    """Whether its files are those of the record, and none lies aside."""
    now = {name: hashlib.sha256(data).hexdigest() for name, data in contents(run).items()}
    return now == dict(run.record().sha256) and not run.files_aside.exists()


def test_scripts_and_plan_are_rendered_again_and_the_code_stays(
    ended, graphs, site, fake_slurm, cli, tmp_path
) -> None:
    before = contents(ended)
    site.recipe("steps: 1\nbatch: {global_batch: 1}\n")  # today's recipe is not asked
    site.write("jobs/toy/train.py", "print('something else')\n")
    done = cli("resume", "last", "--nodes", "1")
    beginning = f"{ended.name} has no checkpoint, so it starts from the beginning\n"
    assert (done.code, done.err) == (0, beginning)
    assert done.out.startswith(f"Submitted {ended.name}  precompile 1003  train 1004\n")
    after = contents(ended)
    assert {name for name in before if before[name] != after[name]} == REPLACED
    assert before.keys() == after.keys() and as_recorded(ended)
    plan = json.loads(after["plan.json"])
    assert (plan["nodes"], plan["workers"], plan["batch"]["global_batch"]) == (1, 32, 64)
    assert plan["batch"]["accumulation"] == 2
    submitted = [call.script for call in fake_slurm.calls("sbatch")]
    assert submitted == [after["precompile.sbatch"], after["train.sbatch"]]
    assert b"#SBATCH --nodes=1\n" in after["train.sbatch"]
    record = ended.record()
    assert (record.nodes, record.history[0]["nodes"]) == (1, 2)
    assert record.history[0]["jobs"] == {"precompile": "1001", "train": "1002"}
    assert "toy on 1 node of pc" in cli("status", "last").out


def test_and_back_again_gives_the_first_files(ended, fake_slurm, cli) -> None:
    before = contents(ended)
    for nodes in ("1", "2"):
        assert cli("resume", "last", "--nodes", nodes).code == 0
        fake_slurm.queue()
    after = contents(ended)
    assert {n for n in before if before[n] != after[n]} <= {"plan.json", "graphs.json"}
    assert json.loads(before["plan.json"]) == json.loads(after["plan.json"])
    assert [entry["nodes"] for entry in ended.record().history] == [2, 1]


def test_warm_graphs_need_no_precompile(ended, graphs, fake_slurm, cli) -> None:
    """The key is that of a submission with this number of nodes."""
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "1"))
    assert cli("resume", "last", "--nodes", "1").out.startswith(
        f"Submitted {ended.name}  train 1003\n"
    )
    assert ended.record().phases == ("train",)


def test_what_cannot_be_is_refused_before_anything_is_touched(ended, cli, site, graphs) -> None:
    record, before = ended.record_file.read_bytes(), contents(ended)
    assert cli("resume", "last", "--nodes", "3").error == (
        f"{ended.name} cannot continue with --nodes 3: global batch 64 at micro-batch 1 is "
        "64 micro-batches per step, fewer than 3 x 32 workers; nearest: 2 nodes"
    )
    assert (
        "use at most 4, or pass --set slurm.max_nodes=NUMBER"
        in cli("resume", "last", "--nodes", "9").error
    )
    assert cli("resume", "last", "--nodes", "0").code == 1
    assert (ended.record_file.read_bytes(), contents(ended)) == (record, before)


def test_a_batch_that_would_grow_is_refused(graphs, site, fake_slurm, cli) -> None:
    site.recipe("steps: 9\nbatch: {mode: per_worker, per_worker: 2}\nslurm: {time_min: 9}\n")
    assert cli(*TOY).code == 0
    write_attempt(site.run(), "train", 1, state="TIMEOUT", job_id="1002")
    fake_slurm.queue()
    assert (
        "grows its global batch with the number of nodes (batch.mode per_worker): 128 on 2, 64 on 1"
        in (cli("resume", "last", "--nodes", "1").error)
    )


def test_other_templates_are_refused(ended, site, cli) -> None:
    """More than the node count would change, and nobody would see it."""
    text = (ROOT / "templates/batch.sbatch.j2").read_text()
    site.write("templates/batch.sbatch.j2", text.replace("umask", "true another; umask", 1))
    error = cli("resume", "last", "--nodes", "1").error
    assert error.startswith(f"{ended.path}/precompile.sbatch (rendered by trnslurm ")
    assert error.endswith(f"or run trnslurm submit toy --from {ended.name} --nodes 1")
    assert cli("resume", "last").code == 0  # as it was submitted


@pytest.mark.parametrize("files", [0, 3, 5, 6])
def test_interrupted_while_files_are_replaced(ended, cli, monkeypatch, files: int) -> None:
    """Killed after so many files, the next resume finds one whole state, and continues from it."""
    replace, left = Path.replace, [files]

    def stop(self: Path, target: Path) -> Path:
        if self.parent == ended.files_aside:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        code = cli("resume", "last", "--nodes", "1").code
    assert code == (130 if files < len(REPLACED) else 0)
    if code:
        assert ended.files_aside.exists()
        assert cli("status", "last").code == 0
        assert cli("resume", "last").code == 0
    assert ended.record().nodes == yaml.safe_load(ended.config_file.read_text())["nodes"] == 1
    assert as_recorded(ended)


def test_interrupted_before_the_record(ended, cli, monkeypatch) -> None:
    """Nothing has happened yet: what lies aside is thrown away."""
    before = contents(ended)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "write_record", stop)
        assert cli("resume", "last", "--nodes", "1").code == 130
    assert ended.files_aside.exists()
    assert cli("resume", "last").code == 0
    assert contents(ended) == before and as_recorded(ended)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("gpt2_zero1", ("--cluster", "trn1")),
        ("gpt2_zero1", ("--cluster", "local", "--preset", "tiny")),
        ("bert_pretrain", ("--cluster", "trn1", "--preset", "phase2")),
        (
            "gpt2_zero1",
            ("-c", "p4d", "--time", "90", "--set=seed=3", "--sbatch=--comment=é 'x'"),
        ),
    ],
)
def test_a_config_read_back_renders_the_same(
    home, cli, tmp_path, recipe: str, options: tuple[str, ...]
) -> None:
    """What resume --nodes rests on, for recipes and profiles as they are delivered."""
    bundle = tmp_path / "bundle"
    assert cli("render", recipe, "--nodes", "2", *options, "-o", bundle).code == 0
    job = read_job(bundle)
    templates = [ROOT / "templates"]
    other = resize.resize(RunDir(bundle), job, 1, None, templates)
    there = tmp_path / "other"
    assert cli("render", recipe, "--nodes", "1", *options, "-o", there).code == 0
    fresh = read_job(there).bundle.files
    assert [n for n in fresh if not resize._same(n, fresh[n], other.bundle.files[n])] == []
