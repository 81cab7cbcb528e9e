"""What one log line says: a step that it names, and metrics with exact names. Stateless.

A line counts only if it names a step with a word, or is a record of Trainer. A line about held-out
data, a best or saved step, or settings says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

_MOST_CHARACTERS = 4000
_MOST_NUMBERS = 32
NUMBER = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf)\b"
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?!\d|[.,-]\d)"
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# [rank3]: PyTorch; [default3]: torchrun --tee; 3: srun --label; [1,3]<stdout>: mpirun
# --tag-output; [Rank 3] many scripts.
_RANK = re.compile(
    r"\[(?:rank|default)(\d+)\]:|\[rank:? ?(\d+)\]|\A\s*(\d+): |\A\[1,(\d+)\]<std(?:out|err)>:",
    re.IGNORECASE,
)
HELD_OUT_WORDS = re.compile(
    r"(?<![a-z])(?:val|valid|validat\w*|eval\w*|test\w*|dev|infer\w*|predict\w*|held.?out)"
    r"(?![a-z])",
    re.IGNORECASE,
)
ASIDE = re.compile(
    # a time that is not the step's, or a mean over many steps
    r"(?<![a-z])(?:"
    r"best|lowest|previous|resum\w*|restor\w*|load(?:ed|ing)|early.?stop\w*|patience|improv\w*|"
    r"final|finally|overall|target|expected|sav(?:ed|ing)|train_runtime|finished in|class|"
    # settings
    r"config\w*|args|arguments|h?param\w*|settings|options|namespace)(?![a-z])",
    re.IGNORECASE,
)
EPOCH = re.compile(
    r"(?:(?<![a-z])epoch(?:\(train\))?(?![a-z])[\"']?[\s:=#\[(]{0,4}"
    r"|\btrain: \[?(?=\d+(?: |/\d+\])\[))"
    r"(?P<number>\d+)(?!\d|\.\d)",
    re.IGNORECASE,
)
# What may stand before a name.
_FREE = re.compile(
    r"(?:\A|[^\w\s]|\s\s|\t|(?<![a-z_])\d[\d.e+-]*(?: ?[a-z%]{1,4}(?:/[a-z]+)?)?"
    r"|\b(?:info|debug|at|completed|current|finished))\s?\Z",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?<![\w./@-])(?P<word>(?P<all>global[ _-]?step|num_updates)|(?:train(?:ing)?[ _])?"
    rf"(?:step|iteration|iter|update))(?P<many>s?)\b\s*[:=#]?\s*[\[(]?\s*(?P<at>{_WHOLE})"
    rf"(?![\w%])(?!\s*(?:ms|s|sec\w*)\b)(?:\s*(?:/|of)\s*(?P<of>{_WHOLE})(?!\w))?",
    re.IGNORECASE,
)
# A place in an epoch: `batch 100/600`, or `[ 10/391]` right after the epoch's number in brackets.
_PLACE = re.compile(
    rf"(?:(?<![\w./@-])batch(?:es)?\b\s*[:=#]?\s*[\[(]?\s*|(?<=\d\])\s*\[\s*)"
    rf"(?P<at>{_WHOLE})\s*(?:/|of)\s*(?P<of>{_WHOLE})(?!\w)",
    re.IGNORECASE,
)
_BAR = re.compile(
    r"\A(?P<what>[^|]*?)\d+%\|[^|]*\|\s*(?P<at>\d+)/(?P<of>\d+) "
    r"\[(?:\d+:)?\d+:\d+<(?:(?:\d+ days?, )?(?:\d+:)?\d+:\d+|\?)"
)
# `Epoch 3`, `Epoch [3/10]`, `loss: 2.31`: a bar of an epoch's batches, or of one loop over all.
_BATCHES_BAR = re.compile(
    rf"\s*(?:train(?:ing)?(?: progress)?\s*)?(?:epoch[\s:=#\[(]*\d+(?:\s*/\s*\d+)?[\])]?)?[\s:,|-]*"
    rf"(?:(?:train(?:ing)?[ _/])?loss\s*[:=]?\s*(?:{NUMBER})[\s:,|-]*)?",
    re.IGNORECASE,
)
_STEPS_BAR = re.compile(r"\s*(?:(?:global|train(?:ing)?) )?steps?:\s*", re.IGNORECASE)
_NAMES = {
    "loss": r"(?:train(?:ing)?[ _/]|lm[ _]|total_)?loss",
    "lr": r"lr|learning[ _]rate",
    "grad_norm": r"grad(?:ient)?[ _]norm|gnorm",
    "tokens_per_s": r"tok(?:ens)?[/_ ](?:per[_ ])?s(?:ec(?:ond)?)?",
    "mfu": r"mfu",
}
_NAME = re.compile(
    r"(?<![\w./@-])(?:" + "|".join(f"(?P<{n}>{form})" for n, form in _NAMES.items()) + r")"
    rf"(?P<by>\s*[:=]\s*|\s+)(?:tensor\()?(?P<number>{NUMBER})(?![\w/]|\.\w|[:-]\d)",
    re.IGNORECASE,
)
# A record ends its line. Trainer's is a dict, others are JSON.
_RECORD = re.compile(r"(?P<before>[^{]*)(?P<record>\{\s*[\"'][^{}]*\})\s*\Z")
_IN_RECORD = re.compile(
    r"[\"'](?P<name>[^\"'\\]{1,60})[\"']\s*:\s*"
    rf"[\"']?(?P<number>{NUMBER})(?:/(?P<of>\d+))?[\"']?\s*(?=[,}}])",
    re.IGNORECASE,
)
_OF_ALL = ("global_step", "global_steps", "global_step/max_steps", "num_updates", "current_steps")
_OF_ANY = ("step", "iteration", "iter")
_TOTALS = ("total_steps", "max_steps")


class Line(NamedTuple):
    """What a line says."""

    step: int | None = None
    steps: int | None = None
    numbers: dict[str, float] = {}  # noqa: RUF012 (never changed)
    sure: bool = False
    """Whether the step is named as a step of the whole training run."""
    epoch: int | None = None
    """The epoch in the line. A step may restart in each epoch."""
    batch: tuple[int, int] | None = None
    """The position and total of a progress bar of batches, which may restart."""
    bar: tuple[int, int] | None = None
    """The position and total of a progress bar without a name, such as Trainer's."""


def pieces(text: str) -> Iterator[str]:
    """Yield the parts of a line: text that a bar has overwritten, and a record after a bar."""
    for part in text.split("\r"):
        part = _COLORS.sub("", part).rstrip()[:_MOST_CHARACTERS]
        bar, record = _BAR.search(part), part.find("{")
        if bar and record > bar.end() and "]" in part[bar.end() : record]:
            yield from (part[:record], part[record:])
        elif part.strip():
            yield part


def parse(text: str) -> Line | None:
    """Return what a piece of a line says, or None if it says nothing about a training step."""
    counts = EPOCH.search(text)
    epoch = int(counts["number"]) if counts else None
    body = _RANK.sub(" ", text, count=1)
    if not (HELD_OUT_WORDS.search(body) or ASIDE.search(body)):
        if record := _RECORD.match(body):
            found = _of_record(record["record"])
        elif bar := _BAR.match(body):
            found = _of_bar(body, bar)
        else:
            found = _of_words(body, in_epoch=counts is not None)
        if found:
            return found._replace(epoch=epoch)
    return Line(epoch=epoch) if counts else None


def free_at(before: str) -> bool:
    """Check whether a name may begin after this text: "mlm loss" is no loss, "per step" no step."""
    return bool(_FREE.search(before))


def rank_of(text: str) -> int | None:
    """Return the worker that a piece of a line names, or None."""
    found = _RANK.search(text)
    return int(next(group for group in found.groups() if group)) if found else None


def _of_words(body: str, *, in_epoch: bool) -> Line | None:
    """Return what a line of text says: one step and one loss."""
    numbers = _numbers(body)
    steps = [s for s in _STEP.finditer(body) if free_at(body[: s.start()])]
    steps = [s for s in steps if s["of"] or not s["many"] or s["all"]]
    sure = [s for s in steps if s["all"]]
    steps = sure or steps or ([*_PLACE.finditer(body)] if in_epoch else [])
    if not numbers or len({s["at"] for s in steps}) != 1:
        return None
    at, of = _whole(steps[0]["at"]), _whole(steps[0]["of"] or "0")
    if of and at > of:
        return None
    return Line(step=at, steps=of or None, numbers=numbers, sure=bool(sure))


def _of_bar(body: str, bar: re.Match[str]) -> Line | None:
    """Return what a tqdm bar says. The bar counts steps only if it says so."""
    at, of = int(bar["at"]), int(bar["of"])
    numbers = _numbers(re.sub("[\"']", "", body[bar.end() :]))
    if _STEPS_BAR.fullmatch(bar["what"]):
        return Line(step=at, steps=of, numbers=numbers)
    if not bar["what"].strip():
        return Line(bar=(at, of))
    if not _BATCHES_BAR.fullmatch(bar["what"]):
        return None
    numbers = numbers or _numbers(bar["what"])
    return Line(batch=(at, of), numbers=numbers) if numbers else None


def _numbers(body: str) -> dict[str, float]:
    """Return the metrics of a line that has exactly one loss, or none."""
    found: dict[str, str] = {}
    losses: dict[str, set[str]] = {}
    for each in islice(_NAME.finditer(body), _MOST_NUMBERS):
        sure = each["by"].strip() or "." in each["number"] or each["number"].isalpha()
        if not sure or not free_at(body[: each.start()]):
            continue
        name = next(n for n in _NAMES if each[n])
        found.setdefault(name, each["number"])
        if name == "loss":
            losses.setdefault(each["loss"].lower(), set()).add(each["number"])
    return _with_loss(found, losses)


def _of_record(record: str) -> Line | None:
    """Return what a JSON object or Python dict says. A Trainer record has no step."""
    raw: dict[str, str] = {}
    total = 0
    for each in _IN_RECORD.finditer(record):
        raw[each["name"]] = each["number"]
        total = int(each["of"] or total)
    found: dict[str, str] = {}
    losses: dict[str, set[str]] = {}
    for key, number in raw.items():
        for name, form in _NAMES.items():
            if re.fullmatch(form, key, re.IGNORECASE):
                found.setdefault(name, number)
                if name == "loss":
                    losses.setdefault(key, set()).add(number)
    numbers = _with_loss(found, losses)
    key = next((n for n in (*_OF_ALL, *_OF_ANY) if raw.get(n, "").isdigit()), "")
    if not numbers or (not key and "epoch" not in raw):
        return None
    if not key:
        return Line(numbers=numbers)
    total = next((int(raw[n]) for n in _TOTALS if raw.get(n, "").isdigit()), total)
    return Line(step=int(raw[key]), steps=total or None, numbers=numbers, sure=key in _OF_ALL)


def _with_loss(found: dict[str, str], losses: dict[str, set[str]]) -> dict[str, float]:
    """Return the metrics if they include one loss: the value named loss, or the only candidate."""
    named = losses.get("loss") or {each for values in losses.values() for each in values}
    if len(named) != 1:
        return {}
    return {n: float(v.replace(",", "")) for n, v in (found | {"loss": named.pop()}).items()}


def _whole(digits: str) -> int:
    return int(digits.replace(",", ""))
