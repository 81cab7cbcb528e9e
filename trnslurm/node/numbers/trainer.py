"""The log_history in a checkpoint-N/trainer_state.json, written by Trainer (transformers 4.57)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trnslurm.node.numbers.names import canonical, with_loss
from trnslurm.node.numbers.sighting import Sighting

NAME = "trainer_state.json"
# The last entry is about the whole training run: its loss is a mean over all steps.
_OF_ALL = "train_runtime"


def history(state: Mapping[str, Any]) -> list[Sighting]:
    """Return what a state file says about each step, in order."""
    entries = state.get("log_history")
    steps = state.get("max_steps")
    total = steps if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0 else None
    found = []
    for entry in entries if isinstance(entries, list) else []:
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or step < 0 or _OF_ALL in entry:
            continue
        numbers = with_loss(
            {
                canonical(str(name)): float(value)
                for name, value in entry.items()
                if isinstance(value, (int, float))
                and not isinstance(value, bool)
                and name != "step"
            }
        )
        if numbers:
            found.append(Sighting(step, numbers, total))
    return found
