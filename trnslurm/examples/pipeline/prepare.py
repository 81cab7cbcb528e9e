"""Generate the data: points in a plane, labeled with the side of a line they are on."""

import sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
torch.manual_seed(0)
points = torch.randn(2000, 2)
labels = (points @ torch.tensor([1.0, -2.0]) > 0.3).float()
torch.save((points[:1600], labels[:1600]), out / "train.pt")
torch.save((points[1600:], labels[1600:]), out / "held-out.pt")
print(f"{len(points)} points in {out}")
