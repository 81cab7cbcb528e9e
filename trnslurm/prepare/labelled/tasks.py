"""Tasks: GLUE's, as on the Hugging Face Hub, and ner, whose words have labels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trnslurm.prepare.errors import PrepareError

_TAG = re.compile("O|[BIES]-.+")
DEFAULT_METRICS = ("accuracy", "macro_f1")
"""Metrics for rows that do not belong to a task."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The columns, labels and scores of a task."""

    text: tuple[str, ...]
    labels: tuple[str, ...]
    """Label names in numeric order; empty for the labels in the rows, or numbers on the scale."""
    label: str = "label"
    """The column of the label."""
    of_words: bool = False
    """Whether the text is a list of words, and the label a list with a label for each word."""
    metrics: tuple[str, ...] = ("accuracy",)
    scale: tuple[float, float] | None = None
    """The smallest and the largest value of a numeric label."""


_SENTENCES = ("sentence1", "sentence2")

# Metrics: the GLUE paper (arXiv 1804.07461), section 3.
TASKS = {
    "cola": Task(text=("sentence",), labels=("unacceptable", "acceptable"), metrics=("matthews",)),
    "sst2": Task(text=("sentence",), labels=("negative", "positive")),
    "mrpc": Task(
        text=_SENTENCES, labels=("not_equivalent", "equivalent"), metrics=("accuracy", "f1")
    ),
    "stsb": Task(text=_SENTENCES, labels=(), scale=(0, 5), metrics=("pearson", "spearman")),
    "qqp": Task(
        text=("question1", "question2"),
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
    ),
    "mnli": Task(text=("premise", "hypothesis"), labels=("entailment", "neutral", "contradiction")),
    "qnli": Task(text=("question", "sentence"), labels=("entailment", "not_entailment")),
    "rte": Task(text=_SENTENCES, labels=("entailment", "not_entailment")),
    "wnli": Task(text=_SENTENCES, labels=("not_entailment", "entailment")),
}
NER = "ner"
_WORDS = Task(text=("tokens",), label="tags", labels=(), of_words=True)
_ENTITIES = ("entity_f1", "entity_precision", "entity_recall", "accuracy")


def find_task(name: str) -> Task | None:
    """Return the task, or None if no name is given."""
    if not name:
        return None
    if name == NER:
        return _WORDS
    if name not in TASKS:
        raise PrepareError(
            f"--task {name}: must be a GLUE task ({', '.join(TASKS)}), or {NER} for words"
        )
    return TASKS[name]


def find_metrics(task: Task | None, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that are used to evaluate a model."""
    if not task:
        return DEFAULT_METRICS
    if not task.of_words:
        return task.metrics
    # Tags of entities mark where an entity begins and continues; other labels do not.
    return _ENTITIES if all(_TAG.fullmatch(name) for name in labels) else ("accuracy",)
