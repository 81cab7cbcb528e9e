"""A small character-level GPT, with plain DistributedDataParallel.

    trnslurm submit ./train.py --nodes 2 --set checkpoints=out
    torchrun --nproc_per_node 2 train.py    # without trnslurm, on this machine

The code does not use trnslurm: it saves to --out, and resumes from the files there. The samples of
a step depend only on the step's number, so the losses are the same on any number of workers.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everybody does
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, heads, positions, width of a head
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.characters, self.positions = (nn.Embedding(n, width) for n in (characters, context))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.characters(ids) + self.positions.weight[: ids.shape[1]]
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(__file__), help="the text to learn")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="samples per step, over all workers")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        parser.error(f"--batch {options.batch} cannot be divided among {world} workers")

    text = options.text.read_text()
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(character) for character in text])

    torch.manual_seed(0)
    sizes = options.context, options.width, options.heads, options.layers
    model = DistributedDataParallel(GPT(len(alphabet), *sizes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    done, newest = 0, options.out / "newest.pt"
    if newest.exists():
        state = torch.load(newest, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]

    for step in range(done + 1, options.steps + 1):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - options.context, (options.batch,), generator=generator)
        mine = starts[rank::world, None] + torch.arange(options.context)
        loss = model(ids[mine].to(device), ids[mine + 1].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps:
            total = loss.detach()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {total.item() / world:.5f}", flush=True)
        if rank == 0 and (step % options.save_every == 0 or step == options.steps):
            options.out.mkdir(parents=True, exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step}, options.out / "unfinished.pt")
            (options.out / "unfinished.pt").replace(newest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
