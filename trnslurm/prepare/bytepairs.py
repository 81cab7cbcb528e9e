"""Byte pair encoding by tiktoken, several times faster, where its tokens are those of tokenizers.

For a tokenizer like GPT-2's they are, by construction:

- Text is split by the same regular expression, which both libraries write down as GPT-2's. They
  have tables of Unicode of their own, so each character is compared when it is first seen.
- Inside a word tokenizers joins the pair that was merged first, and tiktoken any two tokens whose
  joined bytes are a token, the one with the least id first. Say they differ for the first time in
  joining x and y to t. The steps inside x and y did not depend on what is around them, so
  tokenizers, given t's bytes alone, makes x and y too, and stops there. Hence they never differ if
  tokenizers makes one token of the bytes of each token, and ids grow in the order of merges.

What does not fulfil this is left to tokenizers. A sample of all text is compared all the same.
"""

import itertools
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from trnslurm.prepare.errors import PrepareError

# That of tokenizers, without a way back where there is nothing to find, as tiktoken writes it:
# https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# A letter, a digit, a mark and a blank: what a character joins with tells how it is split.
_KINDS = "a1. "
_SAMPLE_CHARACTERS = 2000


class BytePairs:
    """A tokenizer's ids, made by tiktoken where they are proven equal."""

    def __init__(self, tokenizer: Tokenizer, ranks: dict[bytes, int], tiktoken: Any) -> None:
        self._tokenizer = tokenizer
        self.encoding = tiktoken.Encoding(
            "text", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={}
        )
        # It joins one byte of each kind with the first byte of a character, and nothing else.
        probes = {bytes([byte]): byte for byte in range(256)}
        for kind in _KINDS.encode():
            probes |= {bytes([kind, byte]): 256 * kind + byte for byte in range(256)}
        self._probe = tiktoken.Encoding(
            "probe", pat_str=_WORDS, mergeable_ranks=probes, special_tokens={}
        )
        # By their numbers: whether a character was compared, and whether it is split alike.
        self._known = np.zeros(sys.maxunicode + 1, bool)
        self._unlike = np.zeros(sys.maxunicode + 1, bool)

    def encode(self, documents: list[str]) -> list[NDArray[Any]] | None:
        """Return the tokens of each document; None if tokenizers has to make them."""
        characters = np.frombuffer("".join(documents).encode("utf-32-le"), np.uint32)
        for number in np.unique(characters[~self._known[characters]]).tolist():
            self._known[number] = True
            self._unlike[number] = not self._is_split_alike(chr(number))
        if self._unlike[characters].any():
            return None
        found = [self.encoding.encode_to_numpy(text) for text in documents]
        self._compare(documents[len(documents) // 2][:_SAMPLE_CHARACTERS])
        return found

    def _is_split_alike(self, character: str) -> bool:
        """Compare whether each kind before a character is of one word with it."""
        for kind in _KINDS:
            text = f"{kind}{character}"
            words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
            joins = self._probe.encode_ordinary(text)[0] > 255
            if joins != (len(words) == 1):
                return False
        return True

    def _compare(self, text: str) -> None:
        expected = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.encoding.encode_ordinary(text) != expected:
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
    """Return which byte each character of a byte-level vocabulary stands for."""
    # Those that Latin-1 shows stand for themselves; the others follow from 256 on, in order.
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in shown]
    places = {chr(byte): byte for byte in sorted(shown)}
    places |= {chr(256 + number): byte for number, byte in enumerate(others)}
    assert places.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return places
