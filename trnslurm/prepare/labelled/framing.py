"""Tokenizers of BERT and its relatives, as each frames a text: [CLS] … [SEP], <s> … </s>."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.processors import BertProcessing

from trnslurm.prepare import tokenizer, wordpiece
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import replacing

_PADS = ("<pad>", "[PAD]")


@dataclass(frozen=True, kw_only=True)
class Framing:
    """A tokenizer that frames texts, and what fills a sample up."""

    tokenizer: Tokenizer
    vocab_size: int
    """One more than the largest token id."""
    pad: int


def load(path: Path) -> Framing:
    """Load a tokenizer.json: WordPiece, framed as by BERT, or another with a frame of its own."""
    read = tokenizer.read(path)
    if isinstance(read.model, models.WordPiece):
        pieces = wordpiece.load(path)
        read.post_processor = BertProcessing(("[SEP]", pieces.sep), ("[CLS]", pieces.cls))
        return Framing(tokenizer=read, vocab_size=pieces.vocab_size, pad=pieces.pad)
    vocabulary = read.get_vocab(with_added_tokens=True)
    pad = next((vocabulary[name] for name in _PADS if name in vocabulary), None)
    if pad is None or read.post_processor is None or not read.num_special_tokens_to_add(False):
        raise PrepareError(
            f"{path}: is {type(read.model).__name__} without a token for padding, or without any "
            "around a text: choose a tokenizer of BERT's, RoBERTa's or ALBERT's"
        )
    return Framing(tokenizer=read, vocab_size=max(vocabulary.values()) + 1, pad=pad)


def begin_words(path: Path) -> None:
    """Change a tokenizer.json of RoBERTa's so that words by themselves begin as in a text.

    Its tokens of a word differ after a space; transformers asks for add_prefix_space=True as well.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    changed = False
    for part in _parts(values.get("pre_tokenizer") or {}):
        if part.get("add_prefix_space") is False:
            part["add_prefix_space"] = changed = True
    if changed:
        with replacing(path) as stream:
            stream.write(f"{json.dumps(values, indent=2, ensure_ascii=False)}\n".encode())


def _parts(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return parts
