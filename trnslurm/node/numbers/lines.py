"""What one line of a log says: a counter, an epoch, numbers with names. No state, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from trnslurm.node.numbers.names import (
    HELD_OUT,
    canonical,
    held_out_name,
    is_known,
    is_loss,
    is_sure,
    with_loss,
)

_MOST_CHARACTERS = 4000
_MOST_NUMBERS = 48
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[-+]?(?:nan|inf(?:inity)?)\b"
)
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# [rank3]: of PyTorch; [default3]: of torchrun --tee; 3: of srun --label; [Rank 3] of many.
_RANK = re.compile(r"\[(?:rank|default)(\d+)\]:|\[rank:? ?(\d+)\]|\A\s*(\d+): ", re.IGNORECASE)

_NO_TEXT = re.compile(r"\d{40}")  # bytes, a matrix; slow to search

# --- counters
_STEP_WORD = (
    r"(?<![\w./@-])(?P<word>(?:global|total|train|training|optim|optimizer|current)[ _-]"
    r"(?:steps?|iters?|iterations?|updates?)|num_updates|steps?|iters?|iterations?|itr|it|updates?|"
    r"batch(?:es)?|mini-?batch)"
)
_STEP = re.compile(
    rf"{_STEP_WORD}(?:\s*\(train\))?\s*(?:[:=#]|no\.?)?\s*[\[(]?\s*"
    r"(?P<at>\d{1,3}(?:,\d{3})+|\d+)(?:\.0+(?!\d))?(?!\d|\.\d|[\w%]|-\d|,\d)(?!\s*(?:ms|sec)\b)"
    r"(?:\s*(?:/|of|out of)\s*(?P<of>\d{1,3}(?:,\d{3})+|\d+)(?!\d|\.\d))?",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    r"(?<![\w./@-])(?:ep|epochs?)\b(?:\s*\(train\))?\s*[:=#]?\s*[\[(]?\s*(?P<at>\d+)(?![\d%]|\.\d)"
    r"\s*(?:(?:/|of)\s*(?P<of>\d+)(?!\d|\.\d))?[\])]?",
    re.IGNORECASE,
)
_BRACKETS = re.compile(
    r"\[\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)\s*(?:,\s*)?(?P<share>\(\s*[\d.]+\s*%\))?\s*\]"
)
# "[3/30][200/938]": an epoch, and what it has done of it.
_PAIR_OF_BRACKETS = re.compile(
    r"\[\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)\s*\](?=\s*\[\s*\d+\s*/\s*\d+\s*\])"
)
# PyTorch's MNIST example counts samples there, and so do its many copies.
_SAMPLES = re.compile(r"train(?:ing)?\s+\Z", re.IGNORECASE)
_UNKNOWN = re.compile(r"(?<![\d/.])(?P<at>\d+)\s*/\s*(?P<of>\d+)(?![\d/.])")
# A line that says only where the training is; what follows is about that.
_HEADING = re.compile(
    r"[^A-Za-z]{0,12}(?:epoch[^A-Za-z]*(?:(?:epoch )?time\b.*)?"
    r"|(?:step|batch|iter|iteration)[^A-Za-z]*/[^A-Za-z]*(?:global_step\b[^A-Za-z]*)?)",
    re.IGNORECASE,
)
# fairseq: "epoch 001:  10 / 500 loss=…"; otherwise the numbers of a fraction could mean anything.
_AFTER_EPOCH = re.compile(r"\A\s*:\s+(?P<at>\d+)\s*/\s*(?P<of>\d+)\s")
_BAR = re.compile(
    r"(?P<at>\d+)/(?P<of>\d+) \[(?:\d+:)?\d+:\d+<(?:(?:\d+ days?, )?(?:\d+:)?\d+:\d+|\?)"
)
_KERAS = re.compile(r"\A\s*(?P<at>\d+)/(?P<of>\d+) +(?:\[[=>.]+\]|[━╸ ]{8,})")
_TORCHTUNE = re.compile(r"\A\s*\d+\|(?P<at>\d+)\|(?=[A-Z])")

# --- numbers
_WORD = r"[A-Za-z][\w./@%]*(?:-[A-Za-z]\w*)*(?: ?\([A-Za-z/%]+\))?"
_PAIR = re.compile(
    rf"(?<![\w.\-/])(?P<name>{_WORD}(?: {_WORD}){{0,4}})[\"']?"
    rf"(?P<by>\s*[:=]\s*|[ \t]+)(?:tensor)?[\[(]?[\"']?(?P<number>{_NUMBER})"
    r"(?P<unit>\s?(?:GiB|GB|MiB|MB|ms|s|%|M|G)(?![\w/]))?(?![\w/.]|:\d|-\d)",
    re.IGNORECASE,
)
_RATE = re.compile(
    rf"(?<![\w.])(?P<number>{_NUMBER}) ?(?P<of>tokens?|tok|samples?)(?:/| per )s(?:ec(?:ond)?)?\b",
    re.IGNORECASE,
)
_AFTER_NUMBER = re.compile(r"\d ?\Z")
_IN_DICT = re.compile(
    rf"[\"'](?P<name>[^\"'\\]{{1,60}})[\"']\s*:\s*[\"']?(?P<number>{_NUMBER})%?"
    r"(?:/(?P<of>\d+))?[\"']?\s*(?=[,}])",
    re.IGNORECASE,
)
_DICT = re.compile(r"\{\s*[\"'][^{}]*[\"']\s*:[^{}]*\}")
_STEPS_IN_DICT = (
    *("global_step", "global_steps", "step", "_step", "iteration", "iter", "current_steps"),
    *("num_updates", "train_steps", "steps", "it", "itr", "valid_num_updates"),
)
# Trainer's last record, and fairseq's of an epoch: means over many steps.
_MEANS = {"train_runtime", "train_num_updates"}
_TOTALS_IN_DICT = ("total_steps", "max_steps", "total_iterations", "max_iters", "num_steps")
_UNIT = re.compile(
    r"\w+/\w+|m?s|sec|[GMK]i?B|it|with|and|at|the|of|in|for|done|after", re.IGNORECASE
)
_ENDS = re.compile(r"_(?:value|avg|mean|total|train|ppl)$")
# Tells of another time than the step's: what was best, what a checkpoint had, a mean over all.
_OTHER_TIME = re.compile(
    r"\b(?:best|lowest|previous|resum\w+|restor\w+|load\w+|early.?stop\w*|patience|"
    r"improv\w+|final|overall|target|expected|saving|saved)\b",
    re.IGNORECASE,
)
_SETTINGS = re.compile(
    r"[=(]\s*\Z|\b(?:config\w*|args|arguments|h?param\w*|settings|options)\b", re.IGNORECASE
)
_HELD_OUT_LINE = re.compile(
    r"(?:^|[\s\[(|'\"])(?:eval_\w+|val|valid|validation|validating|eval|evaluation|evaluating|dev|test|"
    r"testing|inference|predict\w*)(?=$|[\s:\])|'\",])",
    re.IGNORECASE,
)
_HELD_OUT_NAME = re.compile(r"(?:val|valid|validation|eval|evaluation|dev|test)(?:[ _/]|$)", re.I)


class Counter(NamedTuple):
    """How far a line says that the training is."""

    at: int
    of: int | None = None
    word: str = ""
    """step, batch, bar, brackets or samples: what counts."""


class Line(NamedTuple):
    """What a line says."""

    rank: int | None
    counter: Counter | None
    epoch: int | None
    epochs: int | None
    numbers: dict[str, float]
    derived: bool
    held_out: bool
    """Whether the line is about an evaluation."""
    in_dict: bool = False
    """Whether it is a record, as Trainer prints it."""
    bar: bool = False
    """Whether it is a progress bar."""
    heads: bool = False
    """Whether it says only where the training is."""


def pieces(text: str) -> Iterator[str]:
    """Yield the parts of a line: what a bar has overwritten, and a record behind a bar."""
    for part in text.split("\r"):
        part = _COLORS.sub("", part).rstrip()[:_MOST_CHARACTERS]
        bar, record = _BAR.search(part), part.find("{")
        if bar and record > bar.end():
            yield from (part[:record], part[record:])
        elif part.strip():
            yield part


def parse(text: str) -> Line | None:
    """Return what a piece of a line says; None: nothing that a training says about a step."""
    rank, body = _rank_of(text)
    if record := _DICT.search(body):
        return _of_record(rank, body, record)
    if not any(c.isdigit() for c in body) or _NO_TEXT.search(body):
        return None
    bar = _BAR.search(body)
    epoch = _EPOCH.search(body) or _PAIR_OF_BRACKETS.search(body)
    counter = _counter(body, bar, epoch)
    numbers, first_at = _pairs(body)
    known = "lr" in numbers  # such as DeepSpeed's own lines: where it is, but no loss
    if not any(is_sure(name) for name in numbers):
        numbers = {}
    if numbers and _OTHER_TIME.search(body[:first_at]):
        return None
    held_out = bool(_HELD_OUT_LINE.search(body[:first_at] if numbers else body))
    heads = not numbers and bool((counter or epoch) and _HEADING.fullmatch(body))
    if not numbers and not bar and not heads:
        weak = counter is not None and counter.word == "step" and known
        return Line(rank, counter, None, None, {}, False, False) if weak else None
    numbers, held_out = _as_held_out(numbers, held_out)
    numbers, derived = with_loss(numbers)
    at, of = (int(epoch["at"]), _int(epoch["of"])) if epoch else (None, None)
    return Line(rank, counter, at, of, numbers, derived, held_out, bar=bool(bar), heads=heads)


def _rank_of(text: str) -> tuple[int | None, str]:
    """Return the worker that a line names, and the line without that."""
    found = _RANK.search(text[:120])
    if not found:
        return None, text
    number = next(group for group in found.groups() if group is not None)
    return int(number), f"{text[: found.start()]} {text[found.end() :]}"


def _counter(body: str, bar: re.Match[str] | None, epoch: re.Match[str] | None) -> Counter | None:
    if tuned := _TORCHTUNE.match(body):
        return Counter(int(tuned["at"]), None, "step")
    steps = [*_STEP.finditer(body)]
    # "steps 10" without a total is a setting, "it 5" may be prose.
    steps = [
        s for s in steps if s["of"] or not s["word"].lower().endswith(("ches", "steps", "its"))
    ]
    named = [s for s in steps if not s["word"].lower().startswith(("batch", "mini"))]
    if named or steps:
        best = next((s for s in named if "global" in s["word"].lower()), (named or steps)[0])
        word = "step" if named else "batch"
        if word == "batch" and epoch and not best["of"]:
            word = "samples"  # of an epoch of unknown length
        return Counter(_whole(best["at"]), _int(best["of"]), word)
    if bar:
        return Counter(int(bar["at"]), int(bar["of"]), "bar")
    behind = body[epoch.end() :] if epoch else body
    if found := _BRACKETS.search(behind):
        samples = found["share"] or (epoch and _SAMPLES.search(body[: epoch.start()]))
        word = "samples" if samples else "brackets"
        return Counter(int(found["at"]), int(found["of"]), word)
    if found := (_AFTER_EPOCH.search(behind) if epoch else None) or _KERAS.search(body):
        return Counter(int(found["at"]), int(found["of"]), "batch")
    if epoch and (found := _UNKNOWN.search(behind)):
        return Counter(int(found["at"]), int(found["of"]), "samples")
    return None


def _pairs(body: str) -> tuple[dict[str, float], int]:
    """Return the known numbers of a line by canonical name, and where the first one is."""
    numbers: dict[str, float] = {}
    first = len(body)
    for pair in _PAIR.finditer(body):
        if len(numbers) >= _MOST_NUMBERS:
            break
        bare = not pair["by"].strip()
        if (
            bare
            and "/" in pair["name"].split(" ")[-1]
            and _AFTER_NUMBER.search(body[: pair.start()])
        ):
            continue  # the unit of the number before
        name = _known_name(pair["name"], bare=bare)
        if name and name not in numbers:
            numbers[name] = _value(pair["number"])
            first = min(first, pair.start("number"))
    for rate in _RATE.finditer(body):
        name = "samples_per_s" if rate["of"].lower().startswith("s") else "tokens_per_s"
        if numbers and name not in numbers:
            numbers[name] = _value(rate["number"])
    return numbers, first


def _known_name(words: str, *, bare: bool) -> str:
    """Return the canonical name of a number, of which the last words count; empty: unknown."""
    if "/" in words and _HELD_OUT_NAME.search(words) and "train" in words.lower():
        return ""  # "Train/Val Loss" is one of two
    parts = words.split(" ")
    while len(parts) > 1 and _UNIT.fullmatch(parts[0]):  # of the number before, or no name
        parts = parts[1:]
    for count in range(min(3, len(parts)), 0, -1):
        name = canonical(" ".join(parts[-count:]))
        ends = _ENDS.sub("", name)
        if not is_known(name):
            continue
        if is_known(canonical(parts[-1])) or is_known(canonical(" ".join(parts[-2:]))):
            return name
        if ends != name and not bare:
            return name
    return ""


def _as_held_out(numbers: dict[str, float], held_out: bool) -> tuple[dict[str, float], bool]:
    """Name the numbers of an evaluation so, and tell whether the line is about that alone."""
    if not held_out:
        return numbers, bool(numbers) and all(name.startswith(HELD_OUT) for name in numbers)
    keep = ("lr", "grad_norm")
    found = {
        n if n.startswith((HELD_OUT, "train", "test_")) or n in keep else held_out_name(n): v
        for n, v in numbers.items()
    }
    return found, not any(name.startswith("train") for name in found)


def _of_record(rank: int | None, body: str, record: re.Match[str]) -> Line | None:
    """Return what a line with a JSON object or a Python dict says."""
    if _SETTINGS.search(body[: record.start()]):
        return None
    raw: dict[str, float] = {}
    totals: dict[str, int] = {}
    for found in _IN_DICT.finditer(record[0]):
        if len(raw) >= _MOST_NUMBERS:
            break
        name = found["name"]
        if found["of"]:  # ms-swift: 'global_step/max_steps': '295/4491'
            name = name.partition("/")[0]
            totals[name] = int(found["of"])
        raw[name] = _value(found["number"])
    if not _MEANS.isdisjoint(raw):
        return None
    step = next((n for n in _STEPS_IN_DICT if n in raw and raw[n] == raw[n] // 1 >= 0), None)
    counter = None
    if step:
        total = totals.get(step) or next((int(raw[n]) for n in _TOTALS_IN_DICT if n in raw), None)
        counter = Counter(int(raw[step]), total, "step")
    epoch = raw.get("epoch")
    known = {*_STEPS_IN_DICT, *_TOTALS_IN_DICT}
    numbers = {canonical(name): value for name, value in raw.items() if name not in known}
    numbers = {n: v for n, v in numbers.items() if n and not (is_loss(n) and "weight" in n)}
    if not any(is_sure(name) for name in numbers):
        return None
    held_out = all(n.startswith(HELD_OUT) for n in numbers if is_sure(n))
    numbers, derived = with_loss(numbers)
    whole = int(epoch) if step is None and epoch is not None and _is_whole(record[0]) else None
    return Line(rank, counter, whole, None, numbers, derived, held_out, in_dict=True)


def _is_whole(record: str) -> bool:
    """Check whether a JSON object counts epochs; Trainer's dicts have a part of one, or '5'."""
    return bool(re.search(r"\"epoch\"\s*:\s*\d+\s*[,}]", record))


def _value(digits: str) -> float:
    return float(digits.replace(",", ""))


def _whole(digits: str) -> int:
    return int(digits.replace(",", ""))


def _int(digits: str | None) -> int | None:
    return _whole(digits) if digits else None
