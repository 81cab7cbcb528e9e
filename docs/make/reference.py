"""Make the reference of what the code itself declares: commands.md, keys.md and environment.md.

    make goldens

A test compares, so the pages lack no command, option, key or variable.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from trnslurm.cli import cli
from trnslurm.config.recipes import RECIPE_KEYS
from trnslurm.config.schema import Cluster, Recipe
from trnslurm.config.tree import fields_of
from trnslurm.contract.variables import Variable
from trnslurm.plan.keys import Key, keys_of_class
from trnslurm.plan.values import reader

DOCS = Path(__file__).resolve().parents[1]
_COMMANDS = """\
# Commands

Every command of `trnslurm`, with its options. `trnslurm COMMAND --help` prints the same text. The
[cheat sheet](cheatsheet.md) has the commands of an ordinary day on one page.

The exit code is 0 if all went well. It is 1 after an error, which is one line on standard error,
and after a run that did not complete. It is 2 if the command line is wrong, and 130 after Ctrl-C.
"""
_KEYS = """\
# Keys

Every key of a cluster profile and of a recipe, as `--set KEY=VALUE` takes it. A key without a
default is not set. `trnslurm show` prints the value of each key and where it comes from.
"""
_PROFILE = """
## Keys of a profile

A profile is `cluster-config/NAME.yaml`. It can also have the keys `description` and `remote`.
[Cluster profiles](profiles.md) explains how to write one.
"""
_RECIPE = """
## Keys of a recipe

A recipe is `jobs/NAME/recipe.yaml`. It can also have the keys `description` and `presets`, and
these keys of a profile: {}. The keys of `model` and `train` differ between recipes, and
`trnslurm recipes NAME` lists them. [Recipes](recipes.md#keys-of-recipeyaml) explains how to write
one.
"""
_VARIABLES = """\
# Environment variables

trnslurm reads and sets these variables. A test compares this page with the code.
"""
_USERS = (
    *(Variable.CLUSTER, Variable.PATH, Variable.SITE, Variable.ON, Variable.SSH),
    *(Variable.SANDBOXES, Variable.SANDBOX_SLURM),
)
_SCRIPTS = (
    *(Variable.RUN_DIR, Variable.ATTEMPT, Variable.DEVICE, Variable.HOSTS, Variable.NODE),
    *(Variable.CHECKPOINTS, Variable.RESUME, Variable.OUT, Variable.INPUT, Variable.EXPORT),
    *(Variable.FOLLOWED, Variable.FOLLOWED_STEP, Variable.OF_ROLE, Variable.SERVER),
    *(Variable.HOST, Variable.PORT, Variable.EVENT),
)
_OTHERS = tuple(each for each in Variable if each not in (*_USERS, *_SCRIPTS))
_GROUPS = {
    "You can set these on the command line's host:": _USERS,
    "A [custom script](scripts.md), a server or a notification command can read these:": _SCRIPTS,
    "The programs of a job use these among themselves. They may change with any version:": _OTHERS,
}


def files() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "commands.md": "".join(_commands()),
        "keys.md": "".join(_keys()),
        "environment.md": "".join(_variables()),
    }


def _commands() -> Iterator[str]:
    found = list(_all(cli, click.Context(cli, info_name="trnslurm")))
    yield f"{_COMMANDS}\n| command | what it does |\n|---|---|\n"
    for command, context in found:
        if not isinstance(command, click.Group):
            path = context.command_path
            yield f"| [`{path}`](#{_anchor(path)}) | {_cell(command.get_short_help_str(200))} |\n"
    yield "\n## Options of trnslurm itself\n"
    yield from _options(cli, click.Context(cli, info_name="trnslurm"))
    for command, context in found:
        if not isinstance(command, click.Group):
            usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
            yield f"\n## {context.command_path}\n\n    {usage}\n"
            yield from _help(command)
            yield from _options(command, context)


def _all(
    group: click.Group, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, info_name=name, parent=context)
        yield command, below
        if isinstance(command, click.Group):
            yield from _all(command, below)


def _help(command: click.Command) -> Iterator[str]:
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            head, *lines = paragraph.removeprefix("\b\n").splitlines()
            shown = lines if head.rstrip(":") in ("Example", "Examples") else [head, *lines]
            yield "\n" + "".join(f"    {line.strip()}\n" for line in shown)
        else:
            yield f"\n{_prose(' '.join(paragraph.split()))}\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [
        record
        for option in command.params
        if isinstance(option, click.Option) and (record := option.get_help_record(context))
    ]
    if records:
        yield "\n| option | meaning |\n|---|---|\n"
        for names, meaning in records:
            words = ", ".join(f"`{name.strip()}`" for name in re.split(r", (?=-)", names))
            yield f"| {_cell(words)} | {_cell(_prose(' '.join(meaning.split())))} |\n"


def _keys() -> Iterator[str]:
    yield _KEYS
    also = ", ".join(f"`{key}`" for key in sorted(RECIPE_KEYS.keys() - fields_of(Recipe).keys()))
    yield from _keys_of(Cluster, "profile", _PROFILE)
    yield from _keys_of(Recipe, "recipe", _RECIPE.format(also))


def _keys_of(cls: Any, kind: str, about: str) -> Iterator[str]:
    sections: dict[str, list[Key]] = {"": []}
    for key in keys_of_class(cls, reader("", DOCS), partial(_default, cls)):
        section, dot, _ = key.key.partition(".")
        sections.setdefault(section if dot else "", []).append(key)
    for section, keys in sections.items():
        yield f"\n### {section} in a {kind}\n" if section else about
        yield "\n| key | meaning | accepts | default |\n|---|---|---|---|\n"
        for key in keys:
            default = yaml.safe_dump(key.default, default_flow_style=True)
            words = default.removesuffix("...\n").strip()
            shown = f"`{words}`" if key.default not in (None, "", (), {}) else ""
            meaning = re.sub(r"\bNone\b", "null", key.help)
            choices = [f"`{choice}`" if choice else "empty" for choice in key.choices]
            cells = (f"`{key.key}`", _prose(meaning), ", ".join(choices) or key.accepts, shown)
            yield f"| {' | '.join(map(_cell, cells))} |\n"


def _default(cls: Any, key: str) -> Any:
    """Return the default of a dotted key; None if it has none."""
    name, _, below = key.partition(".")
    if below:
        return _default(fields_of(cls)[name], below)
    field = next(each for each in dataclasses.fields(cls) if each.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _variables() -> Iterator[str]:
    yield _VARIABLES
    for about, chosen in _GROUPS.items():
        yield f"\n{about}\n"
        yield "\n| variable | meaning |\n|---|---|\n"
        for each in chosen:
            yield f"| `{each.value}` | {_cell(_prose(each.meaning))} |\n"


def _prose(text: str) -> str:
    """Return text in which Markdown sees options as code, and nothing else that it would change."""
    parts = text.split("`")  # every second one is code already
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(
            r"(?<![\w=-])(--?[a-z][\w-]*)|([*<>\[\]_])",
            lambda found: f"`{found[1]}`" if found[1] else f"\\{found[2]}",
            parts[place],
        )
    return "`".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _anchor(title: str) -> str:
    return title.replace(" ", "-")


if __name__ == "__main__":
    for name, text in files().items():
        (DOCS / name).write_text(text, encoding="utf-8")
