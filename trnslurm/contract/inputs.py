"""What a run uses from other runs: their directories, newest checkpoints and metrics."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from trnslurm.contract.variables import Variable
from trnslurm.frozen import Frozen

NAME = r"[a-z][a-z0-9_]{0,29}"
"""The name of a run as used by runs that depend on it."""
RUN, OUT = "run", "out"
"""Known before the other run starts: its directory, and the directory for its results."""
CHECKPOINT, STEP, EXPORT = "checkpoint", "step", "export"
"""Its newest checkpoint, the checkpoint's step, and a Hugging Face folder made from it. Any other
word is a metric that the run reports."""
_CONDITION = rf"(?P<name>{NAME})\.(?P<metric>[^\s<>=!]+)\s*(?P<sign>[<>]=?)\s*(?P<bound>\S+)"
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Input(Frozen):
    """A run from which another run uses something."""

    name: str
    run: str
    """The directory of the run."""
    wants: tuple[str, ...] = ()
    """What is known only when the run starts: the other run's checkpoint, step and metrics."""


class Condition(Frozen):
    """A condition on another run's metric that must hold for a run to start."""

    name: str
    metric: str
    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.name}.{self.metric} {self.sign} {self.bound:g}"

    def holds(self, value: float) -> bool:
        return _SIGNS[self.sign](value, self.bound)


def condition_in(text: str) -> Condition | None:
    """Return the condition in a text such as `evaluate.accuracy >= 0.6`."""
    if not (found := re.fullmatch(_CONDITION, text.strip())):
        return None
    with suppress(ValueError):
        bound = float(found["bound"])
        if math.isfinite(bound):
            return Condition(
                name=found["name"], metric=found["metric"], sign=found["sign"], bound=bound
            )
    return None


def inputs_in(told: Mapping[str, Any]) -> list[Input]:
    """Return the inputs in inputs.json, without damaged ones."""
    found = []
    for name, values in told.get("inputs", {}).items():
        with suppress(LookupError, TypeError):
            found.append(Input(name=name, run=values["run"], wants=tuple(values["wants"])))
    return found


def variable_of(name: str, place: str) -> str:
    """Return the variable that holds what a run uses from another one."""
    return f"{Variable.INPUT}_{name.upper()}_{place.upper()}"
