"""Count how many held-out points the model puts on the correct side."""

import sys
from pathlib import Path

import torch

import trnslurm

points, labels = torch.load(Path(sys.argv[1]) / "held-out.pt", weights_only=True)
step, weights = torch.load(sys.argv[2], weights_only=True)
right = ((points @ weights[:2] + weights[2] > 0) == labels.bool()).float().mean()
trnslurm.report(step=step, accuracy=right.item())
print(f"{right:.1%} of {len(points)} points are correct after step {step}")
