"""Which checkpoint of a run did best when it was evaluated."""

import math
from pathlib import Path

from trnslurm.rundir import checkpoints_in
from trnslurm.train.checkpoint.manifest import DamagedError, check_sizes


def find_best(root: Path, name: str = "") -> Path | None:
    """Find the checkpoint with the best score of this name; of several, the first that had it.

    Without a name, the name is that of the newest scored one. None: no whole one has a score.
    """
    best, highest = None, -math.inf
    for checkpoint in checkpoints_in(root):  # from the newest down
        try:
            score = check_sizes(checkpoint).score
        except DamagedError:
            continue
        name = name or next(iter(score), "")
        value = score.get(name, math.nan)
        height = -value if name.endswith("loss") else value
        if math.isfinite(height) and height >= highest:
            best, highest = checkpoint, height
    return best
