"""The options of data preparation, declared once for the program and for `trnslurm data`.

The launcher imports this module too, so it needs only the standard library.
"""

from pathlib import Path
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option of `python -m trnslurm.prepare`, and of the command `trnslurm data`."""

    names: tuple[str, ...]
    type: type[str] | type[int] | type[float] | type[bool] | type[Path]
    help: str
    metavar: str = ""
    many: bool = False
    """Whether the option can be repeated."""
    choices: tuple[str, ...] = ()
    default: Any = None
    """The value that the program uses if the option is omitted."""
    otherwise: str = ""
    """What happens without the option, if there is no default."""
    key: str = ""
    """The recipe's key that `trnslurm data` sets; if empty, it passes the option on."""
    least: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the option's value in Python."""
        return self.names[0].removeprefix("--").replace("-", "_")

    def usage(self, *, of_recipe: bool) -> str:
        """Return the help text with the default, which a recipe's key sets if there is one."""
        default = self.otherwise or ("" if self.default is None else str(self.default))
        if of_recipe and self.key:
            default = "the recipe's" + (f", or {self.otherwise}" if self.otherwise else "")
        return f"{self.help}  [default: {default}]." if default else f"{self.help}."

    def problem(self, value: Any) -> str:
        """Return the reason a value is out of range, or an empty string."""
        limits = []
        if self.least is not None:
            limits.append((value >= self.least, f"{self.least:g} or more"))
        if self.above is not None:
            limits.append((value > self.above, f"more than {self.above:g}"))
        if self.below is not None:
            limits.append((value < self.below, f"less than {self.below:g}"))
        if all(holds for holds, _ in limits):
            return ""
        return f"{self.names[0]} {value}: must be {' and '.join(words for _, words in limits)}"


LEAST_SEQ_LEN = 8

OUTPUT = Option(("--output",), Path, "Output directory", "DIR", key="data.path")
TEXT = Option(
    ("--text", "--input"),
    Path,
    "Text, JSON lines or labeled rows; for BERT also WikiExtractor's output",
    "FILE|DIR",
    many=True,
)
DATASET = Option(("--dataset",), Path, "A fetched dataset, with files by split", "DIR")
WIKIEXTRACTOR = Option(
    ("--wikiextractor",),
    Path,
    "WikiExtractor output, instead of --text (which also detects it)",
    "DIR",
    many=True,
)
TOKENIZER = Option(
    ("--tokenizer",),
    str,
    "Tokenizer, or train:V to train one with V tokens",
    "FILE|DIR|train:V",
    key="data.tokenizer",
    otherwise="the dataset's",
)
DOCUMENT_PER = Option(
    ("--document-per",),
    str,
    "What separates documents",
    choices=("line", "blank-line", "file"),
    otherwise="blank-line, or rows if there are any",
)
DOCUMENT_START = Option(
    ("--document-start",), str, "Regex for lines that start a document", "REGEX"
)
COLUMN = Option(("--column",), str, "Column that contains the text", "NAME", otherwise="text")
END_OF_TEXT = Option(
    ("--end-of-text",), str, "Token that ends a document", "TOKEN", otherwise="the tokenizer's"
)
WRAPPED = Option(("--wrapped",), bool, "Lines are wrapped: a line end does not end a sentence")
SEQ_LEN = Option(
    ("--seq-len",), int, "Tokens per sample", "N", default=128, key="seq_len", least=LEAST_SEQ_LEN
)
EVAL = Option(("--eval",), Path, "Rows to use only for evaluation", "FILE|DIR", many=True)
TASK = Option(
    ("--task",),
    str,
    "GLUE task, which sets columns, labels and metrics; or ner, for words with labels",
    "NAME",
    key="data.labelled.task",
)
TEXT_COLUMN = Option(
    ("--text-column",),
    str,
    "Text column; give two for pairs",
    "NAME",
    many=True,
    otherwise="the task's, or text",
    key="data.labelled.text",
)
LABEL_COLUMN = Option(
    ("--label-column",),
    str,
    "Label column",
    "NAME",
    otherwise="the task's, or label",
    key="data.labelled.label",
)
LABEL = Option(
    ("--label",),
    str,
    "Label name; repeat for all labels, in order",
    "NAME",
    many=True,
    otherwise="the task's, or those found",
    key="data.labelled.labels",
)
MAX_PRED = Option(
    ("--max-pred",), int, "Maximum masked tokens per sample", "N", default=20, key="train.max_pred"
)
MASKED_LM_PROB = Option(
    ("--masked-lm-prob",),
    float,
    "Fraction of tokens to mask",
    "SHARE",
    default=0.15,
    key="data.bert.masked_lm_prob",
    above=0,
    below=1,
)
WHOLE_WORDS = Option(
    ("--whole-words",), bool, "Mask all tokens of a word or none", key="data.bert.whole_words"
)
DUPE_FACTOR = Option(
    ("--dupe-factor",),
    int,
    "Passes over the text, each with new masks",
    "N",
    default=5,
    key="data.bert.dupe_factor",
    least=1,
)
SEED = Option(("--seed",), int, "Random seed", "N", default=12345, key="data.bert.seed", least=0)
SHARDS = Option(
    ("--shards",),
    int,
    "Training shards",
    "N",
    otherwise="depends on the size of the text",
    key="data.bert.shards",
    least=1,
)
TEST_SHARDS = Option(
    ("--test-shards",),
    int,
    "Shards of held-out documents",
    "N",
    default=0,
    key="data.bert.test_shards",
    least=0,
)
HOLDOUT = Option(
    ("--holdout",),
    float,
    "Fraction of documents or rows to hold out for evaluation",
    "SHARE",
    otherwise="0.005, or 0.1 for labeled rows",
    key="data.holdout",
    least=0,
    below=1,
)
PROCESSES = Option(
    ("--processes",),
    int,
    "Processes to use",
    "N",
    otherwise="all CPUs of this host; in a job, slurm.data_cpus",
    least=1,
)
CHUNK_BYTES = Option(
    ("--chunk-bytes",),
    int,
    "Bytes of text to process at a time",
    "N",
    otherwise="depends on the size",
    least=1,
)
FORCE = Option(("--force",), bool, "Replace existing data")
JSON = Option(("--json",), bool, "Print the result as JSON")
REVISION = Option(("--revision",), str, "A branch, tag or commit on the Hub", "NAME")

SOURCES = (TEXT, DATASET, WIKIEXTRACTOR)
"""A preparation uses exactly one of these."""
_FIRST = (TEXT, OUTPUT, DATASET)
_DOCUMENTS = (DOCUMENT_PER, DOCUMENT_START, COLUMN)
_WORK = (TOKENIZER, HOLDOUT, PROCESSES, CHUNK_BYTES, FORCE, JSON)
_BERT = (MAX_PRED, MASKED_LM_PROB, WHOLE_WORDS, DUPE_FACTOR, SEED, SHARDS, TEST_SHARDS)
_LABELLED = (EVAL, TASK, TEXT_COLUMN, LABEL_COLUMN, LABEL)
FORMATS = {
    "tokens": (*_FIRST, *_WORK, *_DOCUMENTS, END_OF_TEXT),
    "bert": (*_FIRST, *_WORK, *_DOCUMENTS, SEQ_LEN, WIKIEXTRACTOR, WRAPPED, *_BERT),
    "labelled": (*_FIRST, *_WORK, SEQ_LEN, *_LABELLED),
}
"""The options of each `data.format`."""
