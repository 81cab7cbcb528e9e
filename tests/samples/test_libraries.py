"""trnslurm.loader under accelerate and Lightning, killed and started on other workers."""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path

import pytest

import trnslurm

from ..processes import run_process

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).with_name("library_training.py")
SAMPLES, EPOCHS, GLOBAL_BATCH = 29, 4, 8


def train(library: str, out: Path, workers: int, start: int = 1, dies: int = 0) -> None:
    environment = {
        "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(out),
        "PYTHONPATH": str(Path(trnslurm.__file__).parents[1]),
    }  # fmt: skip
    done = run_process(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={workers}", SCRIPT, library, out, str(start), str(dies)],
        env=environment,
    )  # fmt: skip
    assert (done.code == 0) == (dies == 0), done.err


def computed(out: Path) -> dict[int, tuple[list[int], float]]:
    """Return the samples and the loss of each step, as the last start computed it."""
    steps: dict[int, tuple[list[int], float]] = {}
    files: dict[int, list[Path]] = collections.defaultdict(list)
    for file in sorted(out.glob("log-*")):
        files[int(file.name.split("-")[1])].append(file)
    for attempt in sorted(files):
        new: dict[int, tuple[list[int], float]] = {}
        for line in (json.loads(text) for f in files[attempt] for text in f.open()):
            ids, loss = new.get(line["step"], ([], 0.0))
            new[line["step"]] = (sorted(ids + line["ids"]), loss + line["loss"])
        steps |= new
    return steps


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_each_step_has_its_samples_whatever_was_killed(library: str, tmp_path: Path) -> None:
    """Two workers, killed; two again, killed in turn; then three."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    train(library, tmp_path / "whole", 2)
    for start, (workers, dies) in enumerate(((2, 5), (2, 11), (3, 0)), 1):
        train(library, tmp_path / "killed", workers, start, dies)
    whole, killed = computed(tmp_path / "whole"), computed(tmp_path / "killed")
    wanted = {
        step.number: sorted(i for micro in step.micro_batches for i in micro.indices)
        for step in trnslurm.batches(
            SAMPLES, global_batch=GLOBAL_BATCH, seed=5, epochs=EPOCHS, rank=0, world_size=1
        )
    }
    assert {step: ids for step, (ids, _) in whole.items()} == wanted
    assert {step: ids for step, (ids, _) in killed.items()} == wanted
    on_two = [step for step in wanted if step <= 9]  # the last checkpoint of two workers
    assert [killed[step][1] for step in on_two] == [whole[step][1] for step in on_two]
    for step in wanted.keys() - {*on_two}:
        assert killed[step][1] == pytest.approx(whole[step][1], rel=1e-5)
