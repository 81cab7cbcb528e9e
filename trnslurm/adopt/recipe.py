"""Writes an adopted batch script as a recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trnslurm.adopt.found import Adopted
from trnslurm.adopt.texts import shell_word, with_values
from trnslurm.config.command import launcher_for, read_command
from trnslurm.config.entry import Entry
from trnslurm.config.load import set_layer
from trnslurm.config.recipes import RECIPE_KEYS, write_recipe
from trnslurm.config.schema import Cluster, Recipe
from trnslurm.config.script import Source
from trnslurm.config.times import parse_time
from trnslurm.config.tree import defaults_of, merge, nest
from trnslurm.errors import ConfigError

_HEAD = """\
# Made from {file} by trnslurm adopt.{without}
# The project is submitted with the run, except what .gitignore names. Keys: docs/scripts.md.
"""


def save_as_recipe(found: Adopted, name: str, environ: Mapping[str, str], *, force: bool) -> str:
    """Write jobs/NAME/recipe.yaml; return the command line that submits it."""
    file = Path("jobs", name, "recipe.yaml")
    unclear = [str(line.number) for line in found.unclear if line.number]
    if not found.command:
        raise ConfigError(
            f"{found.file}: trnslurm found no training command: run trnslurm adopt to see why"
        )
    if unclear and not force:
        raise ConfigError(
            f"{found.file}: lines {', '.join(unclear)} were not understood: use --force to write "
            "the "
            "recipe without them"
        )
    tree, rest = _tree(found, environ)
    project = Path(with_values(found.directory, environ) or ".").absolute()
    tree["project"] = os.path.relpath(project, file.parent.absolute())
    without = f" Without lines {', '.join(unclear)}." if unclear else ""
    text = _HEAD.format(file=found.file.name, without=without)
    text += yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1000)
    write_recipe(file, text, force=force)
    return f"trnslurm submit {name} --path . {' '.join(map(shell_word, rest))}".rstrip()


def _tree(found: Adopted, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the content of the recipe, and the options that it cannot contain."""
    command = read_command([with_values(word, environ) for word in found.command])
    entry = Entry(command.recipe)
    tree: dict[str, Any] = {"description": f"{entry.label}, from {found.file.name}"}
    tree |= Source(path=Path(), command=entry).tree()
    tree |= {"launcher": command.launcher, "arguments": [*command.arguments]}
    if command.launcher_arguments:
        tree["launcher_arguments"] = [*command.launcher_arguments]
    if entry.is_file:
        tree["entry"] = entry.name.removeprefix("./")
    known = defaults_of(Cluster) | defaults_of(Recipe)
    rest: list[str] = []
    for option, value in _pairs(found.options):
        if option == "--set" and re.split(r"[.=]", value)[0] in RECIPE_KEYS:
            tree = merge(tree, set_layer(with_values(value, environ), known).tree)
        elif option == "--time":
            tree = merge(tree, nest("slurm.time_min", parse_time(value)))
        elif option == "--launcher":
            tree["launcher"] = value
        elif option == "--per":
            tree["launcher"] = launcher_for(command.recipe, "node")
        else:
            rest += [option, value] if value else [option]
    return tree, rest


def _pairs(options: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the options with their values."""
    pairs: list[tuple[str, str]] = []
    words = [*options]
    while words:
        option = words.pop(0)
        pairs.append((option, "" if "=" in option else words.pop(0)))
    return pairs
