"""Finds log lines that were followed by steps: what they report did not end the job.

A warning at the start, or an exception that a script caught, may look like any cause. But if
training continued for several steps afterwards, something else ended it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# A line of progress: a numbered step, iteration or epoch with a value, or a bar that moves.
_STEP = re.compile(
    r"(?i)\b(?:global[_ ]?)?(?:step|iter(?:ation)?|it|update|batch|epoch)s?\b\W{0,4}\d.*"
    r"(?:loss|lr|ppl|acc|tokens|samples|it/s|s/it|grad)"
    r"|\bloss\b\W{1,4}\d.*\b(?:step|iter(?:ation)?|epoch|global_step)s?\b\W{0,4}\d"
    r"|['\"]loss['\"]: *['\"]?-?\d|\d%\|[^|]*\| *\d+/\d+ \[.*?(?:it/s|s/it)"
)
_WORDS = ("loss", "it/s", "s/it", "step", "iter", "epoch", "Iter", "Epoch")
_WARNS = re.compile(r"\b(WARN(ING)?|\w*Warning)\b|^\[?W\d*\b")
_INFORMS = re.compile(r"\b(INFO|DEBUG)\b|^\[?I\d{4}\b")
GOES_ON = re.compile(
    r"(?i)\b(skipp(ed|ing)|fall(ing)? back|ignor(ed|ing)|will ignore|trying to (resume|recover))\b"
)
# An error's own text may contain such advice, so these words count only around it.
_GOES_ON = re.compile(rf"{GOES_ON.pattern}|\b(continu(es|ing)|retry(ing)?)\b|\binstead\W*$")
_REMARK = re.compile(
    r"(?i)\b(continu(es|ing)|proceed(s|ing)?|retry(ing)?|recover(ed|ing)|reconnect\w*|fallback"
    r"|default(s|ing) to|will (use|continue|retry|try|proceed)|not (fatal|critical)|non-fatal"
    r"|disabl(ed|ing)|anyway|using \S.{0,40} instead)\b"
)
_ADVISES = re.compile(r"(?i)\b(please|you|your|must|should|try|set|use|cannot|can.t|error)\b")
_OF_LAUNCHERS = re.compile(r"launch|elastic|closing signal|wandb|sigkill_handler|srun: ")
_MOST = 2
"""How many steps other ranks may print after the first rank has died."""


def last_steps(lines: Sequence[str]) -> int:
    """Return the index of the line after which training did not continue.

    Lines about the same step count once.
    """
    begin, steps, last = 0, 0, ""
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at]
        if any(word in line for word in _WORDS) and (match := _STEP.search(line)):
            if match[0] != last:
                last = match[0]
                steps += 1
            if steps > _MOST + 1:
                break
            begin = at + 1
    return begin if steps > _MOST else 0


def says_it_goes_on(line: str) -> bool:
    """Check whether a line says that the program goes on.

    A progress line does not, because it may count skipped steps.
    """
    said = GOES_ON.search(line) or (_REMARK.search(line) and not _ADVISES.search(line))
    return bool(said) and not _STEP.search(line)


def was_caught(before: str, after: str, *, printed: bool = False) -> bool:
    """Check from the lines around a traceback whether a program logged it and continued.

    Ranks that share a log interleave their lines, so a match on one side is not enough,
    unless the traceback itself shows that a handler `printed` it.
    """
    if _OF_LAUNCHERS.search(after):
        return False
    if printed and " NCCL " in after:  # from another thread
        return False
    if printed or _GOES_ON.search(before):
        return _INFORMS.search(after) is not None or _WARNS.search(after) is not None
    return _WARNS.search(before) is not None and (
        _INFORMS.search(after) is not None or _GOES_ON.search(after) is not None
    )
