"""Samples as the model reads them: the token ids of pairs, some of them masked."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.bert.corpus import Corpus
from trnslurm.prepare.bert.pairs import A_END, A_FIRST, B_END, B_FIRST, RANDOM_NEXT
from trnslurm.prepare.bert.settings import SPECIAL, SampleSettings
from trnslurm.prepare.wordpiece import WordPieces

Samples = dict[str, NDArray[np.integer[Any]]]

# The shares of masked tokens that become [MASK] and that stay unchanged. The others become a
# random token.
_MASKED, _KEPT = 0.8, 0.1


def make_samples(
    corpus: Corpus,
    pairs: NDArray[np.int64],
    pieces: WordPieces,
    settings: SampleSettings,
    numbers: np.random.Generator,
) -> Samples:
    """Return the samples for pairs: arrays by their names in a shard."""
    ids, is_text, segments = _lay_out(corpus, pairs, pieces, settings.seq_len)
    lengths = (pairs[:, [A_END, B_END]] - pairs[:, [A_FIRST, B_FIRST]]).sum(axis=1) + SPECIAL
    wanted = np.rint(lengths * settings.masked_lm_prob).astype(np.int64)
    wanted = np.clip(wanted, 1, settings.max_pred)
    keys = numbers.random(ids.shape)
    if settings.whole_words:
        follows_text = np.zeros_like(is_text)
        follows_text[:, 1:] = is_text[:, :-1]
        # If the front of a part was cut off, its first tokens count as a word.
        starts = is_text & ~(pieces.continues[ids] & follows_text)
        chosen = _choose_words(is_text, starts, wanted, keys)
    else:
        chosen = _choose_tokens(is_text, wanted, keys)
    # Row by row, from left to right.
    row, column = np.nonzero(chosen)
    counts = np.count_nonzero(chosen, axis=1)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    places, truth = np.zeros((2, len(pairs), settings.max_pred), np.int32)
    places[row, number] = column
    before = ids[row, column]
    truth[row, number] = before
    dice = numbers.random(len(row))
    any_token = pieces.ordinary[(numbers.random(len(dice)) * len(pieces.ordinary)).astype(np.int64)]
    kept = np.where(dice < _MASKED + _KEPT, before, any_token)
    ids[row, column] = np.where(dice < _MASKED, pieces.mask, kept)
    return {
        "input_ids": ids,
        "input_mask": (np.arange(settings.seq_len) < lengths[:, None]).view(np.int8),
        "segment_ids": segments,
        "masked_lm_positions": places,
        "masked_lm_ids": truth,
        "next_sentence_labels": pairs[:, RANDOM_NEXT],
    }


def _lay_out(
    corpus: Corpus, pairs: NDArray[np.int64], pieces: WordPieces, seq_len: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int8]]:
    """Return padded [CLS] A [SEP] B [SEP], where A and B are, and each token's segment."""
    firsts = pairs[:, [A_FIRST, B_FIRST]]
    counts = pairs[:, [A_END, B_END]] - firsts
    column, row = np.arange(seq_len, dtype=np.int32), np.arange(len(pairs))
    first_sep = 1 + counts[:, 0].astype(np.int32)
    last_sep = first_sep + 1 + counts[:, 1].astype(np.int32)
    in_b = (column > first_sep[:, None]) & (column <= last_sep[:, None])
    is_text = column <= last_sep[:, None]
    ids = np.full((len(pairs), seq_len), pieces.pad, np.int32)
    for place, token in ((0, pieces.cls), (first_sep, pieces.sep), (last_sep, pieces.sep)):
        ids[row, place] = token
        is_text[row, place] = False
    # Row by row, the tokens of A and then of B, in the same order as their positions in is_text.
    each = counts.ravel()
    before = firsts.ravel() - np.cumsum(each) + each
    ids[is_text] = corpus.tokens[np.arange(each.sum()) + np.repeat(before, each)]
    return ids, is_text, in_b.view(np.int8)


def _choose_tokens(
    is_text: NDArray[np.bool_], wanted: NDArray[np.int64], keys: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Choose the wanted number of tokens in each row: those with the smallest keys."""
    keys = np.where(is_text, keys, np.inf)
    most = int(wanted.max())
    # Sorting only the smallest keys takes a third of the time.
    smallest = np.sort(np.partition(keys, most - 1, axis=1)[:, :most], axis=1)
    return (keys <= smallest[np.arange(len(keys)), wanted - 1][:, None]) & is_text


def _choose_words(
    is_text: NDArray[np.bool_],
    starts: NDArray[np.bool_],
    wanted: NDArray[np.int64],
    keys: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Choose whole words in each row in the order of their keys; skip words that no longer fit."""
    rows, columns = is_text.shape
    row = np.arange(rows)[:, None]
    start = np.maximum.accumulate(np.where(starts, np.arange(columns), 0), axis=1)
    sizes = np.zeros((rows, columns), np.int64)
    np.add.at(sizes, (np.broadcast_to(row, start.shape)[is_text], start[is_text]), 1)
    # The key of a word is the key of its first token.
    order = np.argsort(np.where(starts, keys, np.inf), axis=1)
    is_taken = np.zeros_like(is_text)
    left = wanted.copy()
    for place in order.T[: starts.sum(axis=1).max()]:
        size = sizes[row[:, 0], place]
        takes = (size > 0) & (size <= left)
        is_taken[row[:, 0], place] = takes
        left -= np.where(takes, size, 0)
    return np.take_along_axis(is_taken, start, axis=1) & is_text
