"""Export the model for its users."""

import json
import sys
from pathlib import Path

import torch

_, weights = torch.load(sys.argv[1], weights_only=True)
Path(sys.argv[2], "model.json").write_text(json.dumps({"weights": weights.tolist()}))
