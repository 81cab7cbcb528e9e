"""A checkpoint that a job follows, exported in that job: by the lines of its batch script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from trnslurm.node import follow
from trnslurm.render.bundle import Bundle
from trnslurm.render.container import Inside
from trnslurm.render.package import package_files
from trnslurm.render.subjects import ExportPart
from trnslurm.render.template import fill, open_templates

from ..conftest import JOB
from .folders import FOLDER, TOKENIZER, load, logits, model_of, names

BEFORE = """set -euo pipefail
trap 'echo "code $? while $TRNSLURM_DOING"' EXIT
TRNSLURM_DOING=starting TRNSLURM_FOLLOWED_STEP=$(< followed/step)
export TRNSLURM_EXPORT="$PWD/exported/step-$TRNSLURM_FOLLOWED_STEP"
"""


def test_a_followed_checkpoint_is_exported_once(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """The training's directory may be gone. What fails is named, and leaves no folder."""
    wanted = logits(model_of(run_dir, 3))
    parts = ("train", "samples", "datasets", "saves", "mirror", "declared.py", "errors.py")
    Bundle(files=package_files(parts)).write(run_dir)
    shutil.copytree(JOB, run_dir / "code/jobs/gpt2_zero1")
    place = run_dir / "follow/eval"
    (place / "code").mkdir(parents=True)
    (place / "logs").mkdir()
    (place / "run.json").write_text("{}")
    (place / "rule.json").write_text('{"every": 0, "at_most": 1}')
    part = ExportPart(
        place="followed/run", step="$TRNSLURM_FOLLOWED_STEP", target="$TRNSLURM_EXPORT"
    )
    values = {"container": Inside(), "project": SimpleNamespace(exports=(part,))}
    export = fill(open_templates([JOB.parents[1] / "templates"]), "batch/export.j2", values)
    (place / "train.sbatch").write_text(f"{BEFORE}{export}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert follow.main([str(run_dir)]) == 0
    shutil.rmtree(run_dir)

    def start(step: int) -> tuple[int, str, Path]:
        own = run_dir.with_name(f"{run_dir.name}.eval-{step}")
        environ = os.environ | {"TRNSLURM_PYTHON": sys.executable}
        done = subprocess.run(
            ["bash", "train.sbatch"], cwd=own, env=environ, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, own / f"exported/step-{step}"

    code, said, folder = start(3)
    assert (code, said.partition(" (")[0]) == (0, f"Wrote {folder}"), said
    assert names(folder) == sorted(FOLDER + TOKENIZER)
    assert torch.equal(logits(load(folder)), wanted)
    assert start(3) == (0, "code 0 while starting\n", folder)

    part = "rank-00001-of-00002.safetensors"
    damaged = run_dir.with_name(f"{run_dir.name}.eval-6") / "followed/step-00000006" / part
    os.truncate(damaged, damaged.stat().st_size - 4)
    code, said, folder = start(6)
    assert code == 1
    last = said.splitlines()[-1]
    assert last.startswith("code 1 while exporting the checkpoint of step 6: "), said
    assert f"step-00000006 is damaged ({part}" in last
    assert not folder.exists()
