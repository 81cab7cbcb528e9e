"""Options for data of one format only: by themselves in the help, refused with other recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.cli.options import Command
from trnslurm.config import Config

# Value of data.format -> whose options these are.
_WHOSE = {"tokens": "recipes that read token files", "bert": "recipes that read shards for BERT"}


class FormatOption(click.Option):
    """An option for data of one format."""

    def __init__(self, *names: Any, data_format: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.data_format = data_format


class FormatCommand(click.Command):
    """A command whose help shows the options of each format by themselves."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that all have, then those of one format."""
        titles = {"": "Options"} | {name: f"Of {whose}" for name, whose in _WHOSE.items()}
        for name, title in titles.items():
            options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
            own = [o for o in options if getattr(o, "data_format", "") == name]
            records = [option.get_help_record(ctx) for option in own]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record])


def format_option(data_format: str, *names: str, **attributes: Any) -> Callable[[Command], Command]:
    """Add an option for data of one format."""
    return click.option(*names, cls=FormatOption, data_format=data_format, **attributes)


def refuse_others(config: Config) -> None:
    """Refuse what the command being run was given for another format than the recipe's."""
    ctx = click.get_current_context()
    for option in ctx.command.params:
        if not isinstance(option, FormatOption):
            continue
        given = ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if given and option.data_format != config.recipe.data.format:
            raise click.UsageError(
                f"{option.opts[0]} is for {_WHOSE[option.data_format]}, and "
                f"{config.recipe_name} does not: leave it out"
            )
