"""Finds what a run uses from others, and prints bash lines that set its variables.

    python -m trnslurm.node.inputs

The first attempt looks for the inputs, and later attempts use the same ones. If an input is
missing, or the condition for the run's start does not hold, this program prints why instead, and
the exit code is 1.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import sys
from pathlib import Path

from trnslurm.contract.checkpoints import newest
from trnslurm.contract.files import last_lines, read_json, write_json
from trnslurm.contract.inputs import (
    CHECKPOINT,
    EXPORT,
    STEP,
    Input,
    condition_in,
    inputs_in,
    variable_of,
)
from trnslurm.contract.rundir import PLAN, RunFiles
from trnslurm.node.state import RUN

_MOST_CHARS = 300


class MissingError(Exception):
    """An input is missing or invalid."""


def main() -> int:
    """Print the variables to set, or why the run cannot start."""
    taken = read_json(RUN.taken_file)
    if not taken:
        try:
            taken = _take()
        except MissingError as error:
            # The message becomes part of a JSON string in bash.
            print(re.sub(r'["\\]|[^ -~]', "?", str(error))[:_MOST_CHARS])
            return 1
        write_json(RUN.taken_file, taken)
    for name, value in taken.items():
        print(f"export {name}={shlex.quote(str(value))}")
    return 0


def _take() -> dict[str, str]:
    told = read_json(RUN.inputs_file)
    inputs = {one.name: one for one in inputs_in(told)}
    if (condition := condition_in(str(told.get("if", "")))) and condition.name in inputs:
        value = _number(inputs[condition.name], condition.metric)
        if not condition.holds(value):
            raise MissingError(
                f"{condition.name}.{condition.metric} is {value:g}, and the run starts only if "
                f"{condition}"
            )
    found = {}
    for one in inputs.values():
        wants = dict.fromkeys((*one.wants, STEP) if EXPORT in one.wants else one.wants)
        for place in wants:
            found[variable_of(one.name, place)] = _found(one, place)
    return found


def _found(one: Input, place: str) -> str:
    if place not in (CHECKPOINT, STEP, EXPORT):
        return f"{_number(one, place)!r}"
    if not (saved := newest(RunFiles(Path(one.run)), takes=True)):
        raise MissingError(f"{one.name} has not saved a checkpoint in {one.run}")
    if place == CHECKPOINT:
        return str(saved.path)
    if not saved.step:
        raise MissingError(f"{one.name}: the step of its checkpoint {saved.path} is unknown")
    if place == STEP:
        return str(saved.step)
    _lay_out(RunFiles(Path(one.run)), saved.path, RunFiles(RUN.input(one.name)))
    return str(RUN.export(f"{one.name}-step-{saved.step}").absolute())


def _lay_out(run: RunFiles, checkpoint: Path, alone: RunFiles) -> None:
    """Make what export.py needs for another run: its code, and only this checkpoint."""
    shutil.rmtree(alone.path, ignore_errors=True)
    alone.checkpoints.mkdir(parents=True)
    alone.code.symlink_to(run.code)
    shutil.copy2(run.path / PLAN, alone.path)
    (alone.checkpoints / checkpoint.name).symlink_to(checkpoint.absolute())


def _number(one: Input, metric: str) -> int | float:
    """Return the last value of a metric that a run has reported."""
    known: dict[str, None] = {}
    for line in last_lines(RunFiles(Path(one.run)).metrics_file):
        value = line.get(metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return value
        known |= dict.fromkeys(line)
    told = f"it reported only {', '.join(known)}" if known else "it has reported nothing"
    raise MissingError(f"{one.name} has not reported {metric}: {told}")


if __name__ == "__main__":
    sys.exit(main())
