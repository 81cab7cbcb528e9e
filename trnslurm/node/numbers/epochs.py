"""Reads one loss per epoch from a log that names no step of the whole training run.

A script that logs epochs prints the loss in a line with the epoch, or below a line with the epoch.
The loss is certain only when the epoch has ended, unless the script prints one line per epoch.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import NamedTuple

from trnslurm.node.numbers.lines import ASIDE, EPOCH, HELD_OUT_WORDS, NUMBER, free_at
from trnslurm.node.numbers.sighting import Sighting

_MEAN = r"(?:(?:avg|average|averaged|mean|epoch|running|total)[ _.-]*)"
_TRAIN_LOSS = rf"(?:train(?:ing)?[ _/.-]*{_MEAN}?loss|loss[ _/]train(?:ing)?)"
_LOSS = re.compile(
    rf"(?<![\w./@-])(?:(?P<train>{_MEAN}?{_TRAIN_LOSS})|(?P<plain>{_MEAN}*loss|lm_loss))[\"']?"
    rf"(?:\s*(?:\([\w ]+\)\s*)?(?:[:=]|\bis\b)\s*|\s+(?=\S*[.n]))(?:tensor\()?(?P<number>{NUMBER})"
    r"(?![\w/]|\.\w|[:-]\d)",
    re.IGNORECASE,
)
_HELD_OUT_LOSS = re.compile(
    r"(?<![a-z])(?:val|valid|validation|eval|dev)[ _/.-]*(?:avg|average|mean)?[ _]*loss[\"']?"
    rf"\s*[:=]?\s*(?:tensor\()?(?P<number>{NUMBER})(?![\w/]|\.\w|[:-]\d)",
    re.IGNORECASE,
)
_MOST_LOSSES = 8
"""The losses of a piece that are examined. A longer list is not the loss of an epoch."""
_OF = re.compile(r"\s*(?:/|of)\s*(\d+)")


class _Loss(NamedTuple):
    """The loss of a piece of a log."""

    numbers: dict[str, float]
    named: bool
    """Whether the text says that it is the training loss."""


class EpochReader:
    """What the previous lines say about the epoch in progress."""

    def __init__(self, first: int | None = None) -> None:
        """Start with the number of the run's first epoch, if an earlier attempt has read it."""
        self._first = first
        self._epoch: int | None = None
        self._total: int | None = None
        self._held: _Loss | None = None
        """The loss to yield when the epoch has ended."""
        self._seen = 0
        """The losses of the epoch so far."""
        self._before = 0
        """The losses of the epoch before."""
        self._held_out = False
        """Whether the epoch's evaluation has begun, so that a plain loss is not of training."""
        self._named = False
        """Whether the log names its training loss, so that no other loss counts."""
        self.contradicts = False
        self._certain: list[Sighting] = []

    def take(self, *, end: bool = False) -> list[Sighting]:
        """Return the losses that have become certain."""
        # A last epoch with fewer losses than the one before may have been cut off.
        if end and self._before and self._seen >= self._before and not self.contradicts:
            self._end()
        taken, self._certain = self._certain, []
        return taken

    def feed(self, piece: str) -> None:
        """Process a piece of a line."""
        if self.contradicts:
            return
        found, loss = EPOCH.search(piece), _loss(piece)
        if found and ASIDE.search(piece[: found.start()]):
            return
        if found and (loss or not ASIDE.search(piece)):
            epoch = int(found["number"])
            if self._epoch is not None and epoch < self._epoch:
                self.contradicts = True
                return
            if epoch != self._epoch:
                self._end()
                self._begin(epoch, _OF.match(piece, found.end("number")))
        if loss and self._epoch is not None:
            self._take(loss)
        elif self._epoch is not None and HELD_OUT_WORDS.search(piece):
            self._held_out = True

    def _begin(self, epoch: int, of: re.Match[str] | None) -> None:
        if self._first is None:
            self._first = min(epoch, 1)
        # The last epoch of `0/9` may be 8 or 9.
        total = int(of[1]) if of and self._first else None
        self._epoch, self._total = epoch, total
        self._before, self._seen, self._held, self._held_out = self._seen, 0, None, False

    def _take(self, loss: _Loss) -> None:
        if not loss.named and (self._held_out or self._named):
            return
        if loss.named and not self._named:
            self._named, self._seen = True, 0
        self._seen += 1
        self._held = loss
        if self._before == 1:
            self._end()

    def _end(self) -> None:
        if self._held:
            epoch, first = self._epoch or 0, self._first or 0
            numbers = {**self._held.numbers, "epoch": float(epoch)}
            self._certain.append(Sighting(max(0, epoch - first + 1), numbers, self._total))
            self._held = None


def _loss(piece: str) -> _Loss | None:
    """Return the one training loss in a piece of a log."""
    if "loss" not in piece.lower():
        return None
    named: set[str] = set()
    plain: set[str] = set()
    for each in islice(_LOSS.finditer(piece), _MOST_LOSSES):
        before = piece[: each.start()]
        if ASIDE.search(before):
            break
        if each["train"]:
            named.add(each["number"])
        elif free_at(before) and not HELD_OUT_WORDS.search(before):
            plain.add(each["number"])
    losses = named or plain
    if len(losses) != 1:
        return None
    numbers = {"loss": float(next(iter(losses)).replace(",", ""))}
    held_out = {each["number"] for each in _HELD_OUT_LOSS.finditer(piece)}
    if len(held_out) == 1:
        numbers["eval_loss"] = float(next(iter(held_out)).replace(",", ""))
    return _Loss(numbers, named=bool(named))
