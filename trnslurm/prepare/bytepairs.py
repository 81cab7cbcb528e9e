"""Byte pair encoding by tiktoken, several times faster, if tokenizers makes the same tokens.

For a tokenizer like GPT-2's both make the same tokens by construction:

- Both split text by the same regular expression, GPT-2's. Each library has its own tables of
  Unicode, so each character is compared when it is first seen. The expression looks ahead only for
  this: the last of several blanks belongs to the next word. Here a mark is put before that blank,
  and another mark after each document; both are special tokens to tiktoken, at which it cuts. The
  rest of the expression needs no backtracking, which makes it twice as fast, and many documents are
  one call.
- Inside a word tokenizers joins the pair that was merged first; tiktoken joins any two tokens whose
  joined bytes are a token, the one with the lowest id first. Assume that they first differ in
  joining x and y to t. The steps inside x and y do not depend on their surroundings, so tokenizers,
  given t's bytes alone, makes x and y too, and stops there. So they never differ if tokenizers
  makes one token of the bytes of each token, and ids increase in the order of merges.

Tokenizers that do not meet these conditions, and text with the marks in it, are left to tokenizers.
A sample of all text is compared nevertheless.
"""

import itertools
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from trnslurm.prepare.errors import PrepareError

# GPT-2's without what looks ahead, ...|\s+(?!\S)|\s+ at its end:
# https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# What \s matches there: Unicode's White_Space; a test notices if it changes.
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
_BLANKS += "".join(map(chr, range(0x2000, 0x200B)))
# The marks: control characters that text does not use and that are no blanks.
_END, _CUT = "\x7f", "\x1f"
# A letter, a digit, a mark and a blank: how a character is split shows in which of them it joins.
_KINDS = "a1. "
_SAMPLE_CHARACTERS = 500
# Whether both libraries split a character alike.
_ALIKE, _UNLIKE, _NEW = range(3)


class BytePairs:
    """A tokenizer's ids, made by tiktoken where they are proven equal."""

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
        # By the number of a character.
        self._known = np.full(sys.maxunicode + 1, _NEW, np.uint8)
        self._is_blank = np.zeros(sys.maxunicode + 1, bool)
        self._is_blank[[*map(ord, _BLANKS)]] = True
        self._is_ascii_alike = self._are_alike(np.arange(128, dtype=np.uint32))

    def encode(
        self, documents: list[str], end_of_text: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]] | None:
        """Return all tokens, with an end of text after each document, and how many each has.

        None: tokenizers has to make them.
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
        """Join documents with the marks; None if their text has marks or is split differently."""
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
        """Return whether all characters are split alike; compare those that are new."""
        known = self._known[characters]
        for number in np.unique(characters[known == _NEW]).tolist():
            self._known[number] = _ALIKE if self._is_split_alike(chr(number)) else _UNLIKE
        return bool((self._known[characters] == _ALIKE).all())

    def _is_split_alike(self, character: str) -> bool:
        """Compare whether a character is in one word with each kind of character before it."""
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
                f"tiktoken and tokenizers make different tokens of {text[:40]!r} …: report this, "
                "uninstall tiktoken, and prepare the data with --force"
            )


def find(tokenizer: Tokenizer) -> BytePairs | None:
    """Return a tokenizer's BytePairs; None without tiktoken, or if its ids might be others."""
    try:
        import tiktoken
    except ImportError:
        return None
    ranks = _ranks(tokenizer)
    return None if ranks is None else BytePairs(tokenizer, ranks, tiktoken)


def _ranks(tokenizer: Tokenizer) -> dict[bytes, int] | None:
    """Return the id of each byte and each merge's bytes, in order; None if not proven equal."""
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
    # Bytes that Latin-1 shows are represented by themselves, the others from 256 on, in order.
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in shown]
    places = {chr(byte): byte for byte in sorted(shown)}
    places |= {chr(256 + number): byte for number, byte in enumerate(others)}
    assert places.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return places
