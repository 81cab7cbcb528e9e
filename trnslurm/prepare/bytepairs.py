"""Byte pair encoding with tiktoken, several times faster, if tokenizers makes the same tokens.

For a tokenizer like GPT-2's both make the same tokens by construction:

- Both split text with the same regular expression, GPT-2's. Each library has its own Unicode
  tables, so each character is compared when it is first seen. The expression looks ahead only for
  one reason: the last of several blanks belongs to the next word. Here a mark is inserted before
  that blank, and another mark after each document. Both marks are special tokens for tiktoken,
  which cuts there. The rest of the expression needs no backtracking, which makes it twice as fast,
  and one call handles many documents.
- Within a word, tokenizers joins the pair that was merged first, and tiktoken joins any two tokens
  whose joined bytes are a token, lowest id first. Assume that they first differ when x and y are
  joined to t. The steps inside x and y do not depend on their surroundings, so tokenizers, given
  only t's bytes, also makes x and y, and stops there. So they never differ if tokenizers encodes
  the bytes of each token as that one token, and ids increase in merge order.

Tokenizers that do not meet these conditions, and text that contains the marks, are left to
tokenizers. A sample of all text is compared nevertheless.
"""

import itertools
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from trnslurm.prepare.errors import PrepareError

# GPT-2's without its lookahead, ...|\s+(?!\S)|\s+ at its end:
# https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# What \s matches there: Unicode's White_Space; a test notices if it changes.
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
_BLANKS += "".join(map(chr, range(0x2000, 0x200B)))
# The marks: control characters that text does not use and that are not blanks.
_END, _CUT = "\x7f", "\x1f"
# A letter, a digit, a mark and a blank: which of them a character joins shows how it is split.
_KINDS = "a1. "
_SAMPLE_CHARACTERS = 500
# Whether both libraries split a character in the same way.
_ALIKE, _UNLIKE, _NEW = range(3)


class BytePairs:
    """Makes a tokenizer's ids with tiktoken where they are proven equal."""

    def __init__(self, tokenizer: Tokenizer, ranks: dict[bytes, int], tiktoken: Any) -> None:
        self._tokenizer = tokenizer
        self._end_id = max(ranks.values()) + 1
        self._cut_id = self._end_id + 1
        marks = {_END: self._end_id, _CUT: self._cut_id}
        self._encoding = tiktoken.Encoding(
            "text", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens=marks
        )
        # It joins one byte of each kind with the first byte of a character, and nothing else.
        probes = {bytes([byte]): byte for byte in range(256)}
        for kind in _KINDS.encode():
            probes |= {bytes([kind, byte]): 256 * kind + byte for byte in range(256)}
        self._probe = tiktoken.Encoding(
            "probe", pat_str=_WORDS, mergeable_ranks=probes, special_tokens={}
        )
        # Indexed by the number of a character.
        self._known = np.full(sys.maxunicode + 1, _NEW, np.uint8)
        self._is_blank = np.zeros(sys.maxunicode + 1, bool)
        self._is_blank[[*map(ord, _BLANKS)]] = True
        self._is_ascii_alike = self._are_alike(np.arange(128, dtype=np.uint32))

    def encode(
        self, documents: list[str], end_of_text: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]] | None:
        """Return all tokens, with an end-of-text token after each document, and the counts.

        Return None if tokenizers must make them.
        """
        marked = self._mark(documents)
        if marked is None:
            return None
        tokens = self._tokens(marked)
        self._compare(documents[len(documents) // 2][:_SAMPLE_CHARACTERS])
        is_end = tokens == self._end_id
        lengths = np.diff(np.flatnonzero(is_end), prepend=-1)
        return np.where(is_end, np.uint32(end_of_text), tokens), lengths

    def _mark(self, documents: list[str]) -> str | None:
        """Join documents with the marks, or return None if they have marks or split differently."""
        text = _END.join([*documents, ""])
        if text.count(_END) != len(documents) or _CUT in text:
            return None
        encoding = "ascii" if text.isascii() and self._is_ascii_alike else "utf-32-le"
        if encoding == "ascii":
            characters: NDArray[Any] = np.frombuffer(text.encode(encoding), np.uint8)
            # Space, and from tab to carriage return: numbers below 0 are large here.
            is_blank = (characters == ord(" ")) | (characters - np.uint8(9) < 5)
        else:
            characters = np.frombuffer(text.encode(encoding), np.uint32)
            if not self._are_alike(characters):
                return None
            is_blank = self._is_blank[characters]
        second = is_blank[1:] & is_blank[:-1]
        if not second.any():
            return text
        last = np.flatnonzero(second[:-1] & ~is_blank[2:] & (characters[2:] != ord(_END))) + 1
        return np.insert(characters, last, ord(_CUT)).tobytes().decode(encoding)

    def _tokens(self, marked: str) -> NDArray[np.uint32]:
        tokens = self._encoding.encode_to_numpy(marked, allowed_special="all")
        found: NDArray[np.uint32] = tokens[tokens != self._cut_id] if _CUT in marked else tokens
        return found

    def _are_alike(self, characters: NDArray[np.uint32]) -> bool:
        """Return whether both split all characters in the same way; compare the new characters."""
        known = self._known[characters]
        for number in np.unique(characters[known == _NEW]).tolist():
            self._known[number] = _ALIKE if self._is_split_alike(chr(number)) else _UNLIKE
        return bool((self._known[characters] == _ALIKE).all())

    def _is_split_alike(self, character: str) -> bool:
        """Check that both join a character with the same kinds of characters before it."""
        for kind in _KINDS:
            text = f"{kind}{character}"
            words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
            joins = self._probe.encode_ordinary(text)[0] > 255
            if joins != (len(words) == 1):
                return False
        return True

    def _compare(self, text: str) -> None:
        expected = self._tokenizer.encode(text, add_special_tokens=False).ids
        marked = self._mark([text])
        if marked is None or self._tokens(marked).tolist() != [*expected, self._end_id]:
            raise PrepareError(
                f"tiktoken and tokenizers make different tokens from {text[:40]!r} …: report this, "
                "uninstall tiktoken, and prepare the data with --force"
            )


def find(tokenizer: Tokenizer) -> BytePairs | None:
    """Return a tokenizer's BytePairs, or None without tiktoken or if its ids could differ."""
    try:
        import tiktoken
    except ImportError:
        return None
    ranks = _ranks(tokenizer)
    return None if ranks is None else BytePairs(tokenizer, ranks, tiktoken)


def _ranks(tokenizer: Tokenizer) -> dict[bytes, int] | None:
    """Return the id of each byte and each merge's bytes, in order, or None if not proven equal."""
    values = json.loads(tokenizer.to_str())
    model, split = values["model"], values["pre_tokenizer"] or {}
    plain = (
        isinstance(tokenizer.model, models.BPE)
        and values["normalizer"] is None
        and all(token["special"] for token in values["added_tokens"])
        and (split.get("type"), split.get("add_prefix_space")) == ("ByteLevel", False)
        and split.get("use_regex", True)
        and not any(
            model.get(key)
            for key in (
                "dropout",
                "continuing_subword_prefix",
                "end_of_word_suffix",
                "ignore_merges",
                "byte_fallback",
            )
        )
    )
    if not plain:
        return None
    vocabulary: dict[str, int] = model["vocab"]
    byte_of = _bytes_of_characters()
    joined = ["".join(pair) for pair in model["merges"]]
    ids = [vocabulary[token] for token in joined]
    if (
        not byte_of.keys() <= vocabulary.keys()
        or any(after <= before for before, after in itertools.pairwise(ids))
        or any(len(tokenizer.model.tokenize(token)) != 1 for token in joined)
    ):
        return None
    tokens = [*byte_of, *joined]
    return {bytes(byte_of[letter] for letter in token): vocabulary[token] for token in tokens}


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents."""
    # Bytes printable in Latin-1 represent themselves; the others start from 256, in order.
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in shown]
    places = {chr(byte): byte for byte in sorted(shown)}
    places |= {chr(256 + number): byte for number, byte in enumerate(others)}
    assert places.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return places
