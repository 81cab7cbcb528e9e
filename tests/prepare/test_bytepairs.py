"""tiktoken's ids are those of tokenizers, or are not taken."""

from __future__ import annotations

import random
import sys

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from trnslurm.prepare import bytepairs, tokenizer
from trnslurm.prepare.bytepairs import BytePairs
from trnslurm.prepare.errors import PrepareError

pytest.importorskip("tiktoken")

TEXT = "The cat isn't at home; the 12 other cats' homes are. Où est l'été? 日本語 "


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    made = Tokenizer.from_str(tokenizer.train([TEXT] * 9, 320, 1).decode())
    made.encode_special_tokens = True
    return made


def of(words: str, pairs: list[tuple[str, str]]) -> Tokenizer:
    """Make a tokenizer of all bytes, some more tokens, and merges."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words.split()]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def test_ids_are_equal(trained: Tokenizer) -> None:
    pairs = bytepairs.find(trained)
    assert pairs
    dice = random.Random(1)
    letters = [*TEXT, *"  \n\n\t\r'st\u00a0\u2003\u0301\x85😀", "'ll", "<|endoftext|>"]
    texts = ["", *("".join(dice.choices(letters, k=dice.randrange(60))) for _ in range(2000))]
    expected = [e.ids for e in trained.encode_batch_fast(texts, add_special_tokens=False)]
    found = pairs.encode(texts, 777)
    assert found is not None
    tokens, lengths = found
    assert tokens.tolist() == [token for ids in expected for token in [*ids, 777]]
    assert lengths.tolist() == [len(ids) + 1 for ids in expected]
    assert max(map(max, filter(None, expected))) > 256  # merges were used


def test_a_token_that_merges_do_not_reach_is_left_to_tokenizers() -> None:
    merges = [("a", "b"), ("c", "d"), ("b", "cd"), ("a", "bcd")]
    assert bytepairs.find(of("ab cd bcd abcd", merges)) is None
    assert bytepairs.find(of("ab cd abcd", [("a", "b"), ("c", "d"), ("ab", "cd")]))


def test_ids_in_another_order_than_merges_are_left_to_tokenizers() -> None:
    assert bytepairs.find(of("cd ab", [("a", "b"), ("c", "d")])) is None


@pytest.mark.parametrize("change", ["normalizer", "blank", "pattern", "word", "dropout"])
def test_another_kind_of_tokenizer_is_left_to_tokenizers(change: str) -> None:
    made = of("ab", [("a", "b")])
    assert bytepairs.find(made)
    if change == "normalizer":
        made.normalizer = normalizers.Lowercase()
    elif change == "blank":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "pattern":
        made.pre_tokenizer = pre_tokenizers.Split(Regex("a"), "isolated")
    elif change == "word":
        made.add_tokens(["ab"])
    else:
        made.model.dropout = 0.1
    assert bytepairs.find(made) is None


def test_a_character_that_is_split_otherwise_is_left_to_tokenizers(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = bytepairs.find(trained)
    assert pairs
    # As if the tables of one library were of another Unicode than the other's.
    monkeypatch.setattr(BytePairs, "_is_split_alike", lambda pairs, character: character != "é")
    assert pairs.encode(["a cat", "un été"], 0) is None
    assert pairs.encode(["a cat", "un cat"], 0)


def test_different_ids_are_an_error(trained: Tokenizer) -> None:
    pairs = BytePairs(trained, {bytes([byte]): byte for byte in range(256)}, __import__("tiktoken"))
    with pytest.raises(PrepareError, match="different tokens from 'the cat'"):
        pairs.encode(["the cat"], 0)


def test_characters_of_every_kind_are_told_apart(trained: Tokenizer) -> None:
    pairs = bytepairs.find(trained)
    assert pairs
    assert all(map(pairs._is_split_alike, "aé日1٣²½.-😀\u0301 \t\n\u00a0\u2028\u200b'"))
    other = of("ab", [("a", "b")])
    other.pre_tokenizer = pre_tokenizers.Split(Regex("é"), "isolated")
    pairs._tokenizer = other
    assert not pairs._is_split_alike("é")
    assert not pairs._is_split_alike("1")


def test_text_with_the_marks_is_left_to_tokenizers(trained: Tokenizer) -> None:
    pairs = bytepairs.find(trained)
    assert pairs
    for text in ("a\x7fb", "a\x1fb", "été\x7f"):
        assert pairs.encode(["a cat", text], 0) is None


def test_blanks_are_those_of_the_pattern(trained: Tokenizer) -> None:
    import tiktoken

    bytes_only = {bytes([byte]): byte for byte in range(256)}
    ranks = bytes_only | {b"aa": 256}
    encoding = tiktoken.Encoding("", pat_str=r"\s|aa", mergeable_ranks=ranks, special_tokens={})
    surrogates = range(0xD800, 0xE000)
    every = [chr(n) for n in range(sys.maxunicode + 1) if n not in surrogates]
    # What the pattern does not match is left out, so only blanks have tokens.
    found = [c for c in every if encoding.encode_ordinary(c)]
    assert set(found) == set(bytepairs._BLANKS)
