"""A training that is killed and goes on with other workers: torchrun, DDP, the real thing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import trnslurm

from ..processes import run_process

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
import trnslurm

out, dies = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
data = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
done = 0
if os.path.exists(f"{out}/model"):
    saved = torch.load(f"{out}/model")
    done = saved.pop("done")
    model.module.load_state_dict(saved)
steps = trnslurm.batches(23, global_batch=8, micro_batch=2, epochs=2, seed=5, start=done)
for step in steps:
    for micro in step.micro_batches:
        loss = model(data[micro.indices]).square().mean() * (micro.weight * steps.world_size)
        loss.backward()
        if micro.weight:
            with open(f"{out}/{step.number}-{dist.get_rank()}-{steps.world_size}", "a") as file:
                print(*micro.indices, file=file)
    with torch.no_grad():
        for value in model.parameters():
            value -= 0.01 * value.grad
            value.grad = None
    if step.number == dies and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({**model.module.state_dict(), "done": step.number}, f"{out}/model")
dist.destroy_process_group()
"""


def test_a_killed_training_goes_on_with_other_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(trnslurm.__file__).parents[1]),
    }  # fmt: skip
    for workers, dies in ((3, 2), (2, 0)):
        done = run_process(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={workers}", script, tmp_path, str(dies)],
            env=environment,
        )  # fmt: skip
        assert (done.code == 0) == (dies == 0), done.err
    # One process that is never interrupted.
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
    for step in trnslurm.batches(
        23, global_batch=8, epochs=2, seed=5, micro_batch=2, rank=0, world_size=1
    ):
        ids = [i for micro in step.micro_batches for i in micro.indices]
        model.zero_grad()
        model(data[ids]).square().mean().backward()
        with torch.no_grad():
            for value in model.parameters():
                value -= 0.01 * value.grad
        # Step 2 was computed twice: the first time it was lost.
        files = tmp_path.glob(f"{step.number}-*-{3 if step.number < 2 else 2}")
        assert sorted(int(i) for f in files for i in f.read_text().split()) == sorted(ids)
    trained = torch.load(tmp_path / "model")
    torch.testing.assert_close(trained["weight"], model.weight.detach())
