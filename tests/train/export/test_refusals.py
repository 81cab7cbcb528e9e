"""What is not exported, and that nothing half done is left."""

import fcntl
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from trnslurm.render.bundle import Bundle
from trnslurm.render.package import package_files
from trnslurm.train.errors import TrainError

from ...processes import run_process
from .folders import FOLDER, TOKENIZER, change_plan, load, logits, model_of, names

REPO = Path(__file__).parents[3]


def test_a_damaged_newest_is_named_and_the_one_before_is_taken(export, run_dir):
    file = run_dir / "checkpoints" / "step-00000006" / "rank-00001-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 4)

    with pytest.raises(TrainError, match=r"step-00000006 is damaged \(rank-00001-.*use another"):
        export("--step", 6)
    assert not (run_dir / "exported").exists()
    out, err = export()
    assert err.startswith(f"warning: {file.parent} is damaged (rank-00001-of-00002.safetensors: ")
    assert err.count("\n") == 1
    assert "(step 3, " in out
    exported = load(run_dir / "exported" / "step-3")
    assert torch.equal(logits(exported), logits(model_of(run_dir, 3)))
    # It is the run's to set it aside.
    assert names(run_dir / "checkpoints") == ["step-00000003", "step-00000006"]


def test_nothing_to_export(export, run_dir):
    with pytest.raises(TrainError, match=r"checkpoints: no checkpoint of step 4; there are 3, 6$"):
        export("--step", 4)
    for step in (3, 6):
        (run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(TrainError, match=r"checkpoints: no checkpoint is complete$"):
        export()
    for rest in ("checkpoints/step-00000003", "checkpoints/step-00000006", "checkpoints"):
        shutil.rmtree(run_dir / rest)
        with pytest.raises(TrainError, match="no checkpoint"):
            export()
    assert not (run_dir / "exported").exists()


def test_a_plan_of_another_model_is_refused(export, run_dir):
    plan = json.loads((run_dir / "plan.json").read_text())
    change_plan(run_dir, model=plan["model"] | {"n_embd": 32})
    with pytest.raises(TrainError, match=r"step-00000006 does not match the model in plan\.json$"):
        export()


def test_what_is_there_already_is_not_overwritten(export, run_dir, tmp_path):
    output = tmp_path / "there"
    output.mkdir()
    export("--output", output)
    before = (output / "model.safetensors").read_bytes()
    with pytest.raises(TrainError, match=r"there already exists: pass --force to replace it$"):
        export("--output", output, "--step", 3)
    assert (output / "model.safetensors").read_bytes() == before
    (output / "of a user").touch()
    export("--output", output, "--step", 3, "--force")
    assert (output / "model.safetensors").read_bytes() != before
    assert names(output) == sorted(FOLDER + TOKENIZER)
    with pytest.raises(TrainError, match=r"is not an export: choose another --output$"):
        export("--output", run_dir, "--force")
    assert names(tmp_path) == ["a run's dir", "there"]


@pytest.mark.parametrize("limit", [100, 100_000], ids=["config", "weights"])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_full_disk_leaves_nothing_new(export, run_dir, limit, replacing):
    if replacing:
        export()
    exported = run_dir / "exported"
    before = sorted(exported.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(TrainError, match=r"step-6: cannot be written .*File too large"):
            export("--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(exported.rglob("*")) == before


def test_a_signal_leaves_nothing(export, run_dir, monkeypatch):
    def die(self, folder, **_):
        (folder / "half").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", die)
    with pytest.raises(SystemExit) as end:
        export()
    assert end.value.code == 128 + signal.SIGTERM
    assert names(run_dir / "exported") == []


def test_what_killed_exports_left_is_removed(export, run_dir):
    exported = run_dir / "exported"
    left = [exported / f".step-6.{name}" for name in ("partial-1", "replaced-2", "partial-3")]
    mine = exported / ".step-6.partial-mine"
    for folder in (*left, mine):
        folder.mkdir(parents=True)
    busy = os.open(left[2], os.O_RDONLY)  # of another export, which still runs
    fcntl.flock(busy, fcntl.LOCK_EX)
    export()
    assert names(exported) == [left[2].name, mine.name, "step-6"]
    os.close(busy)


def test_by_hand(run_dir):
    """As the script's docstring says."""
    parts = ("train", "samples", "datasets", "saves", "mirror", "declared.py", "errors.py")
    Bundle(files=package_files(parts)).write(run_dir)
    shutil.copytree(REPO / "jobs" / "gpt2_zero1", run_dir / "code" / "jobs" / "gpt2_zero1")

    command = [sys.executable, "code/jobs/gpt2_zero1/export.py", "plan.json", "--output", "there"]
    env = os.environ | {"PYTHONPATH": "code/trnslurm.zip", "USE_TORCH_XLA": "0"}
    done = run_process(command, cwd=run_dir, env=env)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"Wrote {run_dir / 'there'} (step 6, 0.1 M parameters)\n"
