"""Trains by Ray Train on two workers; one dies at a step of the first attempt."""

import os
import sys
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

OUT, STEPS, DIES_AT = Path(sys.argv[1]).absolute(), 8, 4


def loop() -> None:
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    if found := ray.train.get_checkpoint():
        with found.as_directory() as place:
            state = torch.load(Path(place) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        done = state["step"]
    for step in range(done + 1, STEPS + 1):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 4, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.6f} world {world}", flush=True)
        if step == DIES_AT and done == 0 and rank == 1:
            os._exit(1)
        with tempfile.TemporaryDirectory() as place:
            kept = None
            if rank == 0:
                state = {"model": model.state_dict(), "step": step}
                torch.save(state, Path(place) / "state.pt")
                kept = Checkpoint.from_directory(place)
            ray.train.report({"step": step}, checkpoint=kept)


trainer = TorchTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(name="trained", storage_path=str(OUT)),
)
trainer.fit()
