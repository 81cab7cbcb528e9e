"""Options of `data prepare` for one kind of data, and the recipe keys that they set.

They have a help section of their own, and are refused with recipes of another kind.
"""

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
    "documents": "recipes that read unlabelled text",
    "samples": "recipes that read samples: shards for BERT, labelled rows",
    "hub": "recipes with a dataset from the Hub",
    "hub_text": "recipes with unlabelled text from the Hub",
    "published": "recipes without a dataset from the Hub",
}


class KindOption(click.Option):
    """An option for one kind of data."""

    def __init__(self, *names: Any, kind: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.kind = kind


class KindCommand(click.Command):
    """A command whose help shows the options of each kind by themselves."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, then those of each kind."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        titles = {"": "Options"} | {kind: f"For {recipes}" for kind, recipes in _RECIPES.items()}
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
    """Refuse options given for another kind of data than the recipe's."""
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


_DOCUMENTS = ("line", "blank-line", "file")
# Option -> the key that it sets for this command.
KEYS = {
    "holdout": "data.holdout",
    "processes": "slurm.data_cpus",
    "output": "data.path",
    "seq_len": "seq_len",
    "max_pred": "train.max_pred",
    "task": "data.labelled.task",
    "text_column": "data.labelled.text",
    "label_column": "data.labelled.label",
    "label": "data.labelled.labels",
    **{
        name: f"data.bert.{name}"
        for name in (
            "masked_lm_prob",
            "whole_words",
            "dupe_factor",
            "seed",
            "shards",
            "test_shards",
        )
    },
}

_OPTIONS = (
    kind_option(
        "documents",
        "--document-per",
        type=click.Choice(_DOCUMENTS),
        help="What separates documents  [default: blank-line; rows, if there are any].",
    ),
    kind_option(
        "documents",
        "--document-start",
        metavar="REGEX",
        help="Regex of lines that start a document.",
    ),
    kind_option(
        "documents", "--column", metavar="NAME", help="Column that holds the text  [default: text]."
    ),
    kind_option("samples", "--seq-len", type=int, metavar="N", help="Tokens per sample."),
    kind_option(
        "labelled",
        "--eval",
        multiple=True,
        metavar="FILE|DIR",
        help="Rows to use for evaluation only.",
    ),
    kind_option(
        "labelled",
        "--task",
        metavar="NAME",
        help="GLUE task, which sets columns, labels and metrics; or ner, for words with labels.",
    ),
    kind_option(
        "labelled",
        "--text-column",
        multiple=True,
        metavar="NAME",
        help="Text column; give two for pairs  [default: the recipe's, the task's, or text].",
    ),
    kind_option(
        "labelled",
        "--label-column",
        metavar="NAME",
        help="Label column  [default: the recipe's, the task's, or label].",
    ),
    kind_option(
        "labelled",
        "--label",
        multiple=True,
        metavar="NAME",
        help="Label name; repeat for all labels, in order  [default: the recipe's, or as found].",
    ),
    kind_option(
        "tokens",
        "--end-of-text",
        metavar="TOKEN",
        help="Token that ends a document  [default: the tokenizer's].",
    ),
    kind_option(
        "bert",
        "--wikiextractor",
        multiple=True,
        metavar="DIR",
        help="WikiExtractor output, instead of --text (which also detects it).",
    ),
    kind_option(
        "bert",
        "--wrapped",
        is_flag=True,
        help="Lines are wrapped: a line end does not end a sentence.",
    ),
    kind_option(
        "bert", "--max-pred", type=int, metavar="N", help="Maximum masked tokens per sample."
    ),
    kind_option(
        "bert",
        "--masked-lm-prob",
        type=float,
        metavar="SHARE",
        help="Fraction of tokens to mask  [default: 0.15].",
    ),
    kind_option(
        "bert",
        "--whole-words",
        is_flag=True,
        default=None,
        help="Mask all tokens of a word or none.",
    ),
    kind_option(
        "bert",
        "--dupe-factor",
        type=int,
        metavar="N",
        help="Passes over the text, each with new masks  [default: 5].",
    ),
    kind_option("bert", "--seed", type=int, metavar="N", help="Random seed  [default: 12345]."),
    kind_option(
        "bert",
        "--shards",
        type=int,
        metavar="N",
        help="Training shards  [default: by the size of the text].",
    ),
    kind_option(
        "bert",
        "--test-shards",
        type=int,
        metavar="N",
        help="Shards of held-out documents  [default: 1].",
    ),
)


def kind_options(command: Command) -> Command:
    """Add all of these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
