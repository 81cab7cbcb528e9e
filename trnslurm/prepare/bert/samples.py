"""Samples as the model reads them: token ids of pairs, some of them masked."""

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.bert.corpus import Corpus
from trnslurm.prepare.bert.pairs import A_END, A_FIRST, B_END, B_FIRST, RANDOM_NEXT
from trnslurm.prepare.bert.settings import SPECIAL, Settings
from trnslurm.prepare.wordpiece import WordPieces

Samples = dict[str, NDArray[np.int64]]

# The shares of the masked tokens that become [MASK], and that stay as they are; the others become
# any token.
_MASKED, _KEPT = 0.8, 0.1


def make_samples(
    corpus: Corpus,
    pairs: NDArray[np.int64],
    pieces: WordPieces,
    settings: Settings,
    numbers: np.random.Generator,
) -> Samples:
    """Return the samples of pairs: arrays by their names in a shard."""
    ids, is_text, segments = _lay_out(corpus, pairs, pieces, settings.seq_len)
    lengths = is_text.sum(axis=1) + SPECIAL
    wanted = np.rint(lengths * settings.masked_lm_prob).astype(np.int64)
    wanted = np.clip(wanted, 1, settings.max_pred)
    keys = numbers.random(ids.shape)
    if settings.whole_words:
        follows_text = np.zeros_like(is_text)
        follows_text[:, 1:] = is_text[:, :-1]
        # Where a part's front was cut off, the rest is a word.
        starts = is_text & ~(pieces.continues[ids] & follows_text)
        chosen = _choose_words(is_text, starts, wanted, keys)
    else:
        chosen = _choose_tokens(is_text, wanted, keys)
    places = np.where(chosen, np.arange(settings.seq_len), settings.seq_len)
    places = np.sort(places, axis=1)[:, : settings.max_pred]
    is_used = places < settings.seq_len
    places[~is_used] = 0
    truth = np.where(is_used, np.take_along_axis(ids, places, axis=1), 0)
    dice = numbers.random(chosen.sum())
    any_token = pieces.ordinary[(numbers.random(len(dice)) * len(pieces.ordinary)).astype(np.int64)]
    kept = np.where(dice < _MASKED + _KEPT, ids[chosen], any_token)
    ids[chosen] = np.where(dice < _MASKED, pieces.mask, kept)
    return {
        "input_ids": ids,
        "input_mask": (np.arange(settings.seq_len) < lengths[:, None]).astype(np.int64),
        "segment_ids": segments,
        "masked_lm_positions": places,
        "masked_lm_ids": truth,
        "next_sentence_labels": pairs[:, RANDOM_NEXT],
    }


def _lay_out(
    corpus: Corpus, pairs: NDArray[np.int64], pieces: WordPieces, seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return [CLS] A [SEP] B [SEP] with padding, where A and B are, and each token's segment."""
    column = np.arange(seq_len)
    first_sep = 1 + (pairs[:, A_END] - pairs[:, A_FIRST])[:, None]
    last_sep = first_sep + 1 + (pairs[:, B_END] - pairs[:, B_FIRST])[:, None]
    in_a = (column > 0) & (column < first_sep)
    in_b = (column > first_sep) & (column < last_sep)
    ids = np.full((len(pairs), seq_len), pieces.pad, np.int64)
    ids[:, 0] = pieces.cls
    ids[(column == first_sep) | (column == last_sep)] = pieces.sep
    source = np.where(in_a, pairs[:, [A_FIRST]] + column - 1, 0)
    source = np.where(in_b, pairs[:, [B_FIRST]] + column - first_sep - 1, source)
    is_text = in_a | in_b
    ids[is_text] = corpus.tokens[source[is_text]]
    segments = ((column > first_sep) & (column <= last_sep)).astype(np.int64)
    return ids, is_text, segments


def _choose_tokens(
    is_text: NDArray[np.bool_], wanted: NDArray[np.int64], keys: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Choose as many tokens of each row as wanted: those with the smallest keys."""
    order = np.argsort(np.where(is_text, keys, np.inf), axis=1)
    chosen = np.zeros_like(is_text)
    np.put_along_axis(chosen, order, np.arange(is_text.shape[1]) < wanted[:, None], axis=1)
    return chosen & is_text


def _choose_words(
    is_text: NDArray[np.bool_],
    starts: NDArray[np.bool_],
    wanted: NDArray[np.int64],
    keys: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Choose whole words of each row, in the order of their keys, each that still fits."""
    rows, columns = is_text.shape
    row = np.arange(rows)[:, None]
    start = np.maximum.accumulate(np.where(starts, np.arange(columns), 0), axis=1)
    sizes = np.zeros((rows, columns), np.int64)
    np.add.at(sizes, (np.broadcast_to(row, start.shape)[is_text], start[is_text]), 1)
    # Only words count, at their starts.
    order = np.argsort(np.where(starts, keys, np.inf), axis=1)
    is_taken = np.zeros_like(is_text)
    left = wanted.copy()
    for place in order.T[: starts.sum(axis=1).max()]:
        size = sizes[row[:, 0], place]
        takes = (size > 0) & (size <= left)
        is_taken[row[:, 0], place] = takes
        left -= np.where(takes, size, 0)
    return np.take_along_axis(is_taken, start, axis=1) & is_text
