"""The names of numbers: which are known, and the one name that each has in metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Mapping

HELD_OUT = "eval_"
"""The prefix of what was measured on held-out data, as in our own trainings."""
_NO_WORD = re.compile(r"[^a-z0-9]+")
_HELD_OUT = re.compile(r"(?:val|valid|validation|eval|evaluation|dev|heldout|held_out)_(.+)")
_TIMES = re.compile(r"(?:eval|test|train)_(?:runtime|(?:samples|steps)_per_second)")
_HELD_OUT_LAST = re.compile(r"(.+)_(?:val|valid|validation|eval|evaluation|dev)")
_MOST_CHARACTERS = 60
# The loss of the whole step, where no number is named loss: the first that is there.
_WHOLE = (
    *("train_loss", "training_loss", "loss_train", "total_loss", "loss_total", "tot_loss"),
    *("lm_loss", "train_total_loss", "loss_train_total", "train_loss_total", "avg_loss"),
    *("avg_train_loss", "average_train_loss", "mean_train_loss"),
    *("average_loss", "mean_loss", "train_avg_loss", "reduced_train_loss", "train_loss_step"),
    *("train_loss_epoch", "loss_step", "loss_avg", "loss_value"),
)
_SAME = {
    **dict.fromkeys(("learning_rate", "lrate", "learningrate", "current_lr", "train_lr"), "lr"),
    **dict.fromkeys(("gnorm", "gradnorm", "gradient_norm", "grad_norm_total"), "grad_norm"),
    **dict.fromkeys(
        ("tokens_s", "tok_s", "tokens_sec", "tok_sec", "tokens_per_sec", "tokens_per_second"),
        "tokens_per_s",
    ),
    **dict.fromkeys(
        ("samples_s", "samples_sec", "samples_per_sec", "samples_per_second", "sample_s"),
        "samples_per_s",
    ),
    **dict.fromkeys(("eval_lm_loss", "eval_average_loss", "eval_avg_loss"), "eval_loss"),
    "eval_lm_loss_value": "eval_loss",
    "eval_lm_loss_ppl": "eval_ppl",
}
# A setting, or a comparison with another time.
_SETTING = re.compile(
    r"(?:^|_)(?:weights?|scale|type|coef|coeff|factor|fn|func|function|ratio|interval|beta|alpha|"
    r"gamma|lambda|threshold|mult|every|patience|best|min|minimum|max|eps|target|initial|final|"
    r"lowest|smoothing|decay|bs|size|runtime|scaler|py|landscape|curve)(?:_|$)"
)
_LOSS = re.compile(
    r"(?:^|.*_)(?:loss|losses|ppl|perplexity|nll|bpb|bpc|cross_?entropy|xent|elbo|logloss|mlogloss)"
    r"(?:_\w+)?|loss\d*"
)
_SCORE = re.compile(
    r"(?:\w+_)?(?:acc|accuracy|acc1|acc5|acc_1|acc_5|top1|top5|top_1|top_5|prec_1|prec_5|prec1|"
    r"f1|bleu|wer|cer|miou|mean_iou|dice|auc|rouge\w*|reward|rewards|reward_mean|mean_reward)"
)
_USUAL = re.compile(
    r"(?:\w+_)?(?:lr|learning_rate|lrate|grad_norm|gnorm|gradnorm|norm|mfu|hfu|tflops|throughput|"
    r"(?:tokens|tok|samples|sample)_(?:s|sec|per_s|per_sec|per_second)|tps|tgs|wps|ups|memory|mem|"
    r"max_mem|gpu_mem|max_memory|reserved_memory|entropy|kl|precision|recall|score|loss_scale)"
)


def snake(name: str) -> str:
    """Return a name in lower case, with single underscores."""
    return _NO_WORD.sub("_", name.lower()).strip("_")[:_MOST_CHARACTERS]


def canonical(name: str) -> str:
    """Return the name that a number has in metrics.jsonl; train_loss and the like stay.

    It is empty for what Trainer tells about a whole training, such as the mean of all losses, and
    for how long an evaluation took.
    """
    word = snake(name)
    if name.startswith(("train/train_", "train/total_flos")) or _TIMES.fullmatch(word):
        return ""
    if held := _HELD_OUT.fullmatch(word) or _HELD_OUT_LAST.fullmatch(word):
        word = f"{HELD_OUT}{held[1]}"
    if name.startswith(("train/", "Train/")) and word != "train_loss":
        word = word.removeprefix("train_")
    return _SAME.get(word, word)


def held_out_name(name: str) -> str:
    """Return the name of a number of an evaluation, from its canonical name."""
    word = f"{HELD_OUT}{name}"
    return _SAME.get(word, word)


def is_loss(name: str) -> bool:
    """Check whether a canonical name is that of a loss, and not of a setting of it."""
    return bool(_LOSS.fullmatch(name)) and not _SETTING.search(name)


def is_sure(name: str) -> bool:
    """Check whether a number of this canonical name is one that only a training writes."""
    return is_loss(name) or (bool(_SCORE.fullmatch(name)) and not _SETTING.search(name))


def is_known(name: str) -> bool:
    """Check whether a canonical name is one of the usual numbers of a step."""
    return is_sure(name) or bool(_USUAL.fullmatch(name))


def with_loss(numbers: Mapping[str, float]) -> tuple[dict[str, float], bool]:
    """Return numbers of which one is named loss, if one is the whole loss; and whether by that."""
    found = {name: value for name, value in numbers.items() if name}
    if "loss" in found:
        return found, False
    for name in _WHOLE:
        if name in found:
            loss = found.pop(name)
            return {"loss": loss} | found, True
    return found, False
