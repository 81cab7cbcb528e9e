"""Options of data prepare for one kind of data only, and the keys of a recipe that they set."""

from __future__ import annotations

import click

from trnslurm.cli.kinds import kind_option
from trnslurm.cli.options import Command

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
        help="Default: blank-line; of JSON lines, tables and datasets a row.",
    ),
    kind_option(
        "documents", "--document-start", metavar="REGEX", help="Lines that begin a document."
    ),
    kind_option("documents", "--column", metavar="NAME", help="The text of a row; default: text."),
    kind_option("samples", "--seq-len", type=int, metavar="N", help="Tokens of a sample."),
    kind_option(
        "labelled", "--eval", multiple=True, metavar="FILE|DIR", help="Rows for evaluation alone."
    ),
    kind_option("labelled", "--task", metavar="NAME", help="Of GLUE: columns, labels and metrics."),
    kind_option(
        "labelled",
        "--text-column",
        multiple=True,
        metavar="NAME",
        help="Twice: a pair; default: the recipe's, the task's, or text.",
    ),
    kind_option(
        "labelled", "--label-column", metavar="NAME", help="Default: the recipe's, else label."
    ),
    kind_option(
        "labelled",
        "--label",
        multiple=True,
        metavar="NAME",
        help="All of them, in order; repeated; default: the recipe's, or as found.",
    ),
    kind_option(
        "tokens", "--end-of-text", metavar="TOKEN", help="Default: the tokenizer's usual one."
    ),
    kind_option(
        "bert",
        "--wikiextractor",
        multiple=True,
        metavar="DIR",
        help="What WikiExtractor made, in the place of --text; --text finds out by itself.",
    ),
    kind_option(
        "bert", "--wrapped", is_flag=True, help="Lines are wrapped: no sentence ends there."
    ),
    kind_option(
        "bert", "--max-pred", type=int, metavar="N", help="Most masked tokens of a sample."
    ),
    kind_option(
        "bert", "--masked-lm-prob", type=float, metavar="SHARE", help="Of its tokens, masked: 0.15."
    ),
    kind_option(
        "bert",
        "--whole-words",
        is_flag=True,
        default=None,
        help="Mask all tokens of a word or none.",
    ),
    kind_option(
        "bert", "--dupe-factor", type=int, metavar="N", help="Passes over the text, masked anew: 5."
    ),
    kind_option("bert", "--seed", type=int, metavar="N", help="Of everything random: 12345."),
    kind_option(
        "bert",
        "--shards",
        type=int,
        metavar="N",
        help="Training shards; default: by the text's size.",
    ),
    kind_option("bert", "--test-shards", type=int, metavar="N", help="Of held-out documents: 1."),
)


def kind_options(command: Command) -> Command:
    """Add them all."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
