"""Options for one kind of data only: by themselves in the help, refused with other recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.cli.options import Command
from trnslurm.config import Config

# Kind -> the recipes whose options these are.
_RECIPES = {
    "tokens": "recipes that read token files",
    "bert": "recipes that read shards for BERT",
    "labelled": "recipes that read labelled rows",
    "documents": "recipes that read text, without labels",
    "samples": "recipes that read samples: shards for BERT, labelled rows",
    "hub": "recipes with a dataset of the Hub",
    "hub_text": "recipes with a text of the Hub, without labels",
    "published": "recipes without a dataset of the Hub",
}


class KindOption(click.Option):
    """An option for one kind of data."""

    def __init__(self, *names: Any, kind: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.kind = kind


class KindCommand(click.Command):
    """A command whose help shows the options of each kind by themselves."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that all have, then those of each kind."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        titles = {"": "Options"} | {kind: f"Of {recipes}" for kind, recipes in _RECIPES.items()}
        for kind, title in titles.items():
            own = [option for option in options if getattr(option, "kind", "") == kind]
            records = [record for option in own if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def kind_option(kind: str, *names: str, **attributes: Any) -> Callable[[Command], Command]:
    """Add an option for one kind of data."""
    return click.option(*names, cls=KindOption, kind=kind, **attributes)


def refuse_others(config: Config) -> None:
    """Refuse what the command being run was given for another kind of data than the recipe's."""
    data = config.recipe.data
    kinds = {data.format, "hub" if data.dataset else "published"}
    if data.format != "labelled":
        kinds |= {"documents", "hub_text"} if data.dataset else {"documents"}
    kinds |= {"samples"} if data.format != "tokens" else set()
    ctx = click.get_current_context()
    for option in ctx.command.params:
        if not isinstance(option, KindOption) or option.kind in kinds:
            continue
        if ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{option.opts[0]} is for {_RECIPES[option.kind]}, which {config.title} is not: "
                "leave it out"
            )
