"""Options of `trnslurm data`, from their declarations in trnslurm.prepare.options.

Options for some recipes have help sections of their own, and are refused with other recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.cli.options import Command
from trnslurm.config.schema import Config
from trnslurm.prepare.options import CHUNK_BYTES, DATASET, FORMATS, Option

# Readers of an option -> the recipes that they are; in the order of the help.
_RECIPES = {
    "tokens": "recipes that read token files",
    "bert": "recipes that read shards for BERT",
    "labelled": "recipes that read labelled rows",
    "tokens bert": "recipes that read unlabelled text",
    "bert labelled": "recipes that read samples: shards for BERT, labelled rows",
    "hub": "recipes with a dataset from the Hub",
    "hub text": "recipes with unlabelled text from the Hub",
    "published": "recipes without a dataset from the Hub",
}
_OF_PROGRAM = (DATASET, CHUNK_BYTES)
PREPARE_OPTIONS = {
    option: " ".join(name for name, own in FORMATS.items() if option in own)
    for option in dict.fromkeys(option for own in FORMATS.values() for option in own)
    if option not in _OF_PROGRAM
}
"""Each option of `data prepare`, and its readers."""


class KindOption(click.Option):
    """An option for some recipes."""

    def __init__(self, *names: Any, kind: str = "", **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.kind = kind


class KindCommand(click.Command):
    """A command whose help shows the options for some recipes in their own sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, then those for some recipes."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        titles = {"": "Options"} | {kind: f"For {recipes}" for kind, recipes in _RECIPES.items()}
        for kind, title in titles.items():
            own = [option for option in options if getattr(option, "kind", "") == kind]
            records = [record for option in own if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def data_option(option: Option, kind: str = "") -> Callable[[Command], Command]:
    """Add a declared option, for all recipes or for some."""
    value: Any = option.type
    if option.choices:
        value = click.Choice(option.choices)
    elif option.type is int and option.least is not None and not option.key:
        # The range of a recipe's key is checked with the recipe.
        value = click.IntRange(int(option.least))
    elif option.type not in (int, float, bool):
        value = str
    return click.option(
        *option.names,
        cls=KindOption,
        kind=kind,
        type=value,
        is_flag=option.type is bool,
        default=None,
        multiple=option.many,
        metavar=option.metavar or None,
        help=option.usage(of_recipe=True),
    )


def prepare_options(command: Command) -> Command:
    """Add the options of `data prepare`."""
    for option, kind in reversed(PREPARE_OPTIONS.items()):
        command = data_option(option, "" if kind == " ".join(FORMATS) else kind)(command)
    return command


def refuse_others(config: Config) -> None:
    """Refuse options for other recipes."""
    data = config.recipe.data
    text = data.format != "labelled"
    kinds = {kind for kind in PREPARE_OPTIONS.values() if data.format in kind.split()}
    kinds |= {"", "hub" if data.dataset else "published"}
    kinds |= {"hub text"} if data.dataset and text else set()
    ctx = click.get_current_context()
    for option in ctx.command.params:
        if not isinstance(option, KindOption) or option.kind in kinds:
            continue
        if ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{option.opts[0]} is for {_RECIPES[option.kind]}, which {config.title} is not: "
                "leave it out"
            )
