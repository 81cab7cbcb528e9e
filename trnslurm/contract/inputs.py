"""What a run takes from other runs: their directories, newest checkpoints and numbers."""

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
"""What a run may be called by those that take something from it."""
RUN, OUT = "run", "out"
"""Known before the other run has begun: its directory, and where it writes its results."""
CHECKPOINT, STEP, EXPORT = "checkpoint", "step", "export"
"""Its newest checkpoint, the step of that, and a Hugging Face folder made of it. Any other word is
a number that it reports."""
_CONDITION = rf"(?P<name>{NAME})\.(?P<metric>[^\s<>=!]+)\s*(?P<sign>[<>]=?)\s*(?P<bound>\S+)"
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Input(Frozen):
    """A run from which another run takes something."""

    name: str
    run: str
    """Its directory."""
    wants: tuple[str, ...] = ()
    """What is known only when the other run starts: its checkpoint, step, and numbers."""


class Condition(Frozen):
    """What must hold of a number of another run, so that a run starts."""

    name: str
    metric: str
    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.name}.{self.metric} {self.sign} {self.bound:g}"

    def holds(self, value: float) -> bool:
        return _SIGNS[self.sign](value, self.bound)


def condition_in(text: str) -> Condition | None:
    """Return the condition that a text is, such as `evaluate.accuracy >= 0.6`."""
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
    """Return the inputs of which inputs.json tells, without those that are damaged."""
    found = []
    for name, values in told.get("inputs", {}).items():
        with suppress(LookupError, TypeError):
            found.append(Input(name=name, run=values["run"], wants=tuple(values["wants"])))
    return found


def variable_of(name: str, place: str) -> str:
    """Return the variable that has what a run takes from another one."""
    return f"{Variable.INPUT}_{name.upper()}_{place.upper()}"
