"""Results of other runs that a recipe uses, in its arguments and in its start condition."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trnslurm.config.schema import Recipe
from trnslurm.contract.inputs import (
    CHECKPOINT,
    NAME,
    OUT,
    RUN,
    Condition,
    Input,
    condition_in,
)
from trnslurm.contract.rundir import RunFiles
from trnslurm.errors import ConfigError

_PLACE = rf"(?<![{{$])\{{({NAME})\.(\w+)\}}"


def taken_in(text: str, names: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield each input in a text as its name and placeholder, such as train and checkpoint."""
    for name, place in re.findall(_PLACE, text):
        if name in names:  # other braces have no meaning, or are a role's
            yield name, place


def static_places(inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the facts about inputs that are known before their runs have begun."""
    found: dict[str, str] = {}
    for name, run in inputs.items():
        files = RunFiles(Path(run))
        found |= {f"{name}.{RUN}": str(files.path), f"{name}.{OUT}": str(files.out)}
    return found


def inputs_of(recipe: Recipe) -> list[Input]:
    """Return the inputs of a recipe, with what it uses from each. Reject impossible ones."""
    words = [*recipe.arguments, *recipe.resume_arguments]
    words += [word for role in recipe.roles.values() for word in role.command]
    taken = [pair for word in words for pair in taken_in(word, recipe.inputs)]
    found = []
    for name, run in recipe.inputs.items():
        where = f"inputs.{name}"
        if not re.fullmatch(NAME, name):
            raise ConfigError(
                f"{where}: a name may contain only lowercase letters, digits and _, as in train_2"
            )
        if not run.startswith("/"):
            raise ConfigError(f"{where}: {run!r} is not the absolute path of a run directory")
        for other, place in taken:
            if other == name and place.startswith("check") and place != CHECKPOINT:
                raise ConfigError(
                    f"unknown placeholder {{{name}.{place}}}: use {{{name}.{CHECKPOINT}}}, for "
                    "example"
                )
        wants = dict.fromkeys(p for n, p in taken if n == name and p not in (RUN, OUT))
        found.append(Input(name=name, run=run, wants=tuple(wants)))
    return found


def condition_of(recipe: Recipe) -> Condition | None:
    """Return the condition for a recipe's start. Reject a condition that cannot be parsed."""
    if not recipe.starts_if:
        return None
    found = condition_in(recipe.starts_if)
    if found is None:
        raise ConfigError(
            f"starts_if is {recipe.starts_if!r}: expected NAME.METRIC, one of < <= > >=, and a "
            "number, as in evaluate.accuracy >= 0.6"
        )
    if found.name not in recipe.inputs:
        known = ", ".join(recipe.inputs) or "no input at all"
        raise ConfigError(
            f"starts_if is {recipe.starts_if!r}: there is no {found.name}, only {known}"
        )
    return found


def inputs_json(recipe: Recipe) -> dict[str, Any]:
    """Return the contents of inputs.json, or an empty mapping if a recipe has no inputs."""
    condition = condition_of(recipe)
    each = {one.name: {"run": one.run, "wants": [*one.wants]} for one in inputs_of(recipe)}
    return {"inputs": each} | ({"if": str(condition)} if condition else {}) if each else {}


def looks_for_inputs(recipe: Recipe) -> bool:
    """Check whether anything must be looked up when the run starts."""
    return bool(condition_of(recipe)) or any(one.wants for one in inputs_of(recipe))
