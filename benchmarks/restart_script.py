"""The training of restart_peer.py, by any launcher: real imports, and little work."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import trnslurm

BEGAN = time.time()
SAVE_EVERY = 20


def main() -> None:
    """Train until somebody ends it."""
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if found := sorted(out.glob("step-*.pt")):
        state = torch.load(found[-1], weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    tokens = torch.arange(64).view(1, -1)
    while True:
        step += 1
        model(input_ids=tokens, labels=tokens).loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            note(out, step)
            if step % SAVE_EVERY == 0:
                save(out, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        time.sleep(0.05)


def note(out: Path, step: int) -> None:
    """Note a step: when the process that did it began, and when it was done."""
    with (out / "steps").open("a") as file:
        file.write(f"{BEGAN} {step} {time.time()}\n")


def save(out: Path, step: int, state: dict[str, object]) -> None:
    """Replace the checkpoint."""
    old = sorted(out.glob("step-*.pt"))
    path = out / f"step-{step:08d}.pt"
    torch.save(state | {"step": step}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    trnslurm.saved(step, path)
    for file in old:
        file.unlink()


if __name__ == "__main__":
    main()
