"""WordPiece tokenizers: BERT's own from a tokenizer.json, or one trained on the text itself."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trnslurm.prepare import tokenizer
from trnslurm.prepare.errors import PrepareError

LEAST = 100
TOKEN = np.dtype(np.uint32)
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CONTINUES = "##"
# More characters would crowd a vocabulary; the rest become [UNK].
_MOST_CHARACTERS = 1000
# Words whose tokens are remembered, which uses a few hundred megabytes.
_MOST_KNOWN = 500_000


@dataclass(frozen=True, kw_only=True)
class WordPieces:
    """A tokenizer, and the facts about its vocabulary that masking needs."""

    tokenizer: Tokenizer
    vocab_size: int
    """One more than the largest token id."""
    pad: int
    cls: int
    sep: int
    mask: int
    continues: NDArray[np.bool_]
    """For each token id, whether it continues a word."""
    ordinary: NDArray[np.int64]
    """The ids of text tokens, in order."""

    known: dict[str, bytes] | None
    """The tokens of words seen before, if words are independent of each other."""

    def encode(self, texts: list[str]) -> list[bytes]:
        """Return the tokens of each text as the bytes of an array of TOKEN."""
        if self.known is None:
            return self._encode(texts)
        # Several times faster than complete texts, because most words were seen before.
        if len(self.known) > _MOST_KNOWN:
            self.known.clear()
        words = [text.replace("\n", " ").split(" ") for text in texts]
        new = list(set(chain.from_iterable(words)) - self.known.keys())
        self.known.update(zip(new, self._encode(new), strict=True))
        # Joining bytes takes less time than joining lists and making an array of them.
        return [b"".join(map(self.known.__getitem__, text)) for text in words]

    def _encode(self, texts: list[str]) -> list[bytes]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, TOKEN).tobytes() for encoding in encodings]


def load(path: Path) -> WordPieces:
    """Load a WordPiece tokenizer.json that has BERT's special tokens."""
    read = tokenizer.read(path)
    if not isinstance(read.model, models.WordPiece):
        raise PrepareError(
            f"{path} is {type(read.model).__name__}, not WordPiece: choose a BERT tokenizer"
        )
    vocabulary = read.get_vocab(with_added_tokens=True)
    if missing := [name for name in _SPECIAL if name not in vocabulary]:
        raise PrepareError(f"{path} has no token {', '.join(missing)}: choose a BERT tokenizer")
    prefix = read.model.continuing_subword_prefix
    size = max(vocabulary.values()) + 1
    continues = np.zeros(size, bool)
    continues[[number for name, number in vocabulary.items() if name.startswith(prefix)]] = True
    return WordPieces(
        tokenizer=read,
        vocab_size=size,
        pad=vocabulary["[PAD]"],
        cls=vocabulary["[CLS]"],
        sep=vocabulary["[SEP]"],
        mask=vocabulary["[MASK]"],
        continues=continues,
        ordinary=np.array(sorted(n for name, n in vocabulary.items() if name not in _SPECIAL)),
        known={} if _is_word_by_word(read) else None,
    )


def _is_word_by_word(read: Tokenizer) -> bool:
    """Check whether each word has the same tokens in any text, as in BERT's own tokenizers."""
    parts = json.loads(read.to_str())
    kinds = [(parts[key] or {}).get("type") for key in ("normalizer", "pre_tokenizer")]
    added = {token["content"] for token in parts["added_tokens"]}
    return kinds == ["BertNormalizer", "BertPreTokenizer"] and added <= set(_SPECIAL)


def train(texts: Callable[[str], Iterable[str]], vocab_size: int, processes: int) -> bytes:
    """Train a lowercase tokenizer like BERT's; the same text makes the same bytes.

    `texts` returns all the text, for a step of that name; it is called twice.
    """
    os.environ["RAYON_NUM_THREADS"] = str(processes)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    trained = _tokenizer(models.WordPiece(unk_token="[UNK]"))
    counts: Counter[str] = Counter()
    for text in texts("counting characters"):
        counts.update(trained.normalizer.normalize_str(text))
    by_count = sorted(counts, key=lambda character: (-counts[character], character))
    characters = sorted([c for c in by_count if not c.isspace()][:_MOST_CHARACTERS])
    # The trainer numbers the characters that continue a word in the order of a hash table, so
    # each run would merge different pairs first. Special tokens are numbered in order.
    # A mark or a Chinese character is a separate word and does not continue one.
    split, normalize = trained.pre_tokenizer.pre_tokenize_str, trained.normalizer.normalize_str
    inside = [c for c in characters if len(split(normalize(f"a{c}"))) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*_SPECIAL, *(f"{_CONTINUES}{character}" for character in inside)],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    tokenizer.learn(trained, texts("training the tokenizer"), trainer)
    vocabulary = trained.get_vocab(with_added_tokens=True)
    if len(vocabulary) > vocab_size:
        raise PrepareError(
            f"--tokenizer train:{vocab_size}: the characters of the text already make "
            f"{len(vocabulary)} tokens: use a larger V"
        )
    # A new tokenizer, whose only special tokens are BERT's.
    made = _tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(prefix=_CONTINUES)
    made.add_special_tokens(list(_SPECIAL))
    values = json.loads(made.to_str())
    # The library writes the vocabulary in a different order each time.
    values["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    return f"{json.dumps(values, indent=2, ensure_ascii=False)}\n".encode()


def _tokenizer(model: models.WordPiece) -> Tokenizer:
    made = Tokenizer(model)
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made
