"""The option by which a custom script takes a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trnslurm.records.run import RunDir
from trnslurm.runs.unreported import _option_of


@pytest.mark.parametrize(
    ("entry", "command", "usual", "option"),
    [
        ("-- nequip-train", "(nequip-train -cn toy a.b=3)", "--ckpt_path", "++ckpt_path="),
        ("-m train", "(python -m train '++a.b=3 4')", "--ckpt_path", "++ckpt_path="),
        ("-m train", "(python -m train --config-name=toy)", "--load", ""),
        ("-- anomalib", "(anomalib fit --a+b=3)", "--ckpt_path", "--ckpt_path"),
        ("-- some", "(some --config_name toy)", "--ckpt_path", ""),
        ("-- some", "(some --cnn=3)", "--load", "--load"),
        ("-- some", "# fit for the job\n(some train)", "--ckpt_path", ""),
    ],
)
def test_what_starts_no_file_of_the_project(
    tmp_path: Path, entry: str, command: str, usual: str, option: str
) -> None:
    """Words for Hydra tell that it takes such words only."""
    run = RunDir(tmp_path)
    run.code.mkdir()
    run.project_file.write_text(json.dumps({"entry": entry}))
    (tmp_path / "node.sh").write_text(f"TRNSLURM_COMMAND={command}\n")
    assert _option_of(run, usual) == option


def test_an_option_of_a_tracker_takes_no_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (run.code / "project").mkdir(parents=True)
    run.project_file.write_text(json.dumps({"entry": "train.py"}))
    (tmp_path / "node.sh").write_text("")
    source = "p = ArgumentParser()\np.add_argument('--wandb-resume-from-id')\n"
    (run.code / "project/train.py").write_text(f"{source}p.add_argument('--load-model')\n")
    assert _option_of(run, "--resume") == "--load-model"
