"""--from: which checkpoint of which run, what is written down of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trnslurm.records.run import RunDir

RECIPE = """\
steps: 36000
batch: {global_batch: 64}
model: {layers: 2, dropout: 0.1}
train: {init_from: "", keep_every: 0}
slurm: {time_min: 5}
"""
DONE = {"precompile": [{"state": "COMPLETED"}], "train": [{"state": "COMPLETED"}]}
TRAINING = {"precompile": [{"state": "COMPLETED"}], "train": [{"state": "RUNNING"}]}
TOY = ("toy", "--cluster", "pc")
FACTS = {"recipe": "toy", "model.layers": 2, "model.dropout": 0.1}


def save(run: RunDir, step: int, *, content: bytes = b"rows", **facts: object) -> Path:
    """Make what a launcher looks at of a checkpoint."""
    path = run.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "rank-00000-of-00001.safetensors").write_bytes(content)
    files = {"rank-00000-of-00001.safetensors": {"bytes": 4, "sha256": "?"}}
    manifest = {"step": step, "facts": FACTS | facts, "files": files}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def trained(site, make_run) -> RunDir:
    """A run that has ended, with checkpoints of steps 20 and 100."""
    site.recipe(RECIPE)
    run: RunDir = make_run("20260101-000000-first", states=DONE)
    save(run, 20)
    save(run, 100)
    return run


def test_the_very_checkpoint_is_written_down(trained, site, fake_slurm, cli, monkeypatch) -> None:
    newest = str(trained.checkpoints / "step-00000100")
    for word in ("last", "first", str(trained.path), newest):
        done = cli("show", *TOY, "--from", word, "--json")
        assert done.err == f"From {newest}\n"
        shown = json.loads(done.out)
        assert shown["config"]["train"]["init_from"] == newest
        assert shown["origins"]["train.init_from"] == {
            "layer": "command line", "source": f"--from {word}",
        }  # fmt: skip
    monkeypatch.chdir(trained.checkpoints)
    older = str(trained.checkpoints / "step-00000020")
    assert f'"init_from": "{older}"' in cli("render", *TOY, "--from", "step-00000020").out
    assert cli("plan", *TOY, "--nodes", "1", "--from", "last").code == 0

    assert cli("submit", *TOY, "--from", "last").code == 0
    run = site.runs()[-1]
    assert json.loads(run.plan_file.read_text())["train"]["init_from"] == newest
    assert yaml.safe_load(run.config_file.read_text())["config"]["train"]["init_from"] == newest


def test_what_is_not_whole_is_passed_over(trained, cli) -> None:
    cut = save(trained, 200, content=b"ro")
    (save(trained, 300) / "manifest.json").write_text('{"step": 300, "fil')
    (trained.checkpoints / "step-00000400.tmp-1").mkdir()
    (save(trained, 500) / "rank-00000-of-00001.safetensors").unlink()
    done = cli("show", *TOY, "--from", "first")
    warnings = [line.partition(" is incomplete: ")[2] for line in done.err.splitlines()[:-1]]
    assert warnings == [
        "rank-00000-of-00001.safetensors: No such file or directory",
        "manifest.json is missing or damaged",
        "rank-00000-of-00001.safetensors has only 2 of 4 bytes",
    ]
    assert done.err.splitlines()[-1] == f"From {trained.checkpoints}/step-00000100"
    named = cli("submit", *TOY, "--from", cut)
    assert named.error.startswith(f"{cut} is incomplete: ")


def test_refusals_are_one_line_and_make_nothing(trained, site, fake_slurm, cli, make_run) -> None:
    make_run("20260102-000000-empty", states=DONE)
    save(make_run("20260103-000000-other", states=DONE), 5, recipe="bert")
    deep = save(make_run("20260104-000000-deep", states=DONE), 5, **{"model.layers": 3})
    save(make_run("20260105-000000-cut", states=DONE), 5, content=b"")
    said = {
        "nothing": "no run 'nothing' in ",
        "empty": "20260102-000000-empty has no checkpoints: none were saved, or they were deleted",
        "other": "step-00000005 is from the recipe bert, not toy",
        "deep": f"{deep} does not match the model of the recipe: model.layers was 3, but is 2 now",
        "cut": "20260105-000000-cut has no valid checkpoint: ",
        f"{trained.checkpoints}/step-00000007": "step-00000007: no such checkpoint",
        "first --set train.init_from=x": "and --set train.init_from=… contradict each other",
    }
    before = site.runs()
    for words, expected in said.items():
        done = cli("submit", *TOY, "--from", *words.split())
        assert done.code == 1
        assert expected in done.error
    assert site.runs() == before
    assert fake_slurm.calls("sbatch") == []


def test_a_recipe_may_begin_with_another_ones_results(trained, site, cli, make_run) -> None:
    site.recipe(f"{RECIPE}begins_with: [bert]\n".replace("dropout", "num_labels: 2, dropout"))
    heads = {"recipe": "bert", "model.next_sentence": 2}
    taken = save(make_run("20260103-000000-bert", states=DONE), 5, **heads)
    save(make_run("20260104-000000-deep", states=DONE), 5, **heads | {"model.layers": 3})
    save(make_run("20260105-000000-gpt", states=DONE), 5, recipe="gpt")
    assert cli("show", *TOY, "--from", "bert").err == f"From {taken}\n"
    assert cli("show", *TOY, "--from", "deep").error.endswith("model.layers was 3, but is 2 now")
    assert cli("show", *TOY, "--from", "gpt").error.endswith("from the recipe gpt, not toy or bert")
    # Of its own recipe everything is compared.
    assert cli("show", *TOY, "--from", "first").error.endswith(
        "model.num_labels was None, but is 2 now"
    )


def test_another_rate_of_dropout_is_the_same_model(trained, cli) -> None:
    assert cli("show", *TOY, "--from", "first", "--set", "model.dropout=0.0").code == 0


@pytest.mark.parametrize(("keep_every", "taken"), [(0, False), (30, False), (50, True)])
def test_a_run_that_goes_on_must_keep_it(
    site, fake_slurm, cli, make_run, keep_every: int, taken: bool
) -> None:
    site.recipe(RECIPE)
    run = make_run(states=TRAINING, heartbeat_age_s=1)
    run.plan_file.write_text(json.dumps({"steps": 300, "train": {"keep_every": keep_every}}))
    path = save(run, 100)
    fake_slurm.queue("1002|RUNNING|None|x|node-[1-2]")
    for word in ("last", path):
        done = cli("show", *TOY, "--from", word)
        assert (done.code == 0) is taken
        if not taken:
            assert done.error == (
                f"{run.name} is RUNNING and will delete step-00000100 when it has newer "
                "checkpoints: wait until it ends, or name a checkpoint that train.keep_every keeps"
            )


def test_a_reviewed_bundle_has_its_parameters_already(trained, cli, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert cli("render", *TOY, "--from", "last", "-o", bundle).code == 0
    done = cli("submit", "--rendered", bundle, "--from", "last")
    assert (done.code, "omit --from" in done.error) == (2, True)


def test_a_file_is_for_another_option(site, fake_slurm, cli, tmp_path: Path) -> None:
    site.recipe(RECIPE)
    (tmp_path / "ckpt_1.pt").touch()
    error = cli("submit", *TOY, "--from", tmp_path / "ckpt_1.pt").error
    assert error.endswith(f"is a file: pass it with --set train.init_from={tmp_path}/ckpt_1.pt")


def test_a_preset_that_goes_on_from_another_says_so(fake_slurm, site, cli) -> None:
    site.recipe(RECIPE + "presets: {one: {then: two}, two: {}}\n")
    two = ("toy", "--preset", "two", "--cluster", "pc")
    error = cli("submit", *two).error
    assert error.startswith("toy (two) continues one: pass --from RUN, or --set ")
    assert cli("render", *two).err.startswith("warning: toy (two) continues one: ")
    assert cli("submit", *two, "--set", 'train.init_from=""').code == 0
    assert cli("submit", "toy", "--preset", "one", "--cluster", "pc").code == 0
