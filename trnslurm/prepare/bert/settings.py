"""The settings that decide the samples, besides the text and the tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trnslurm.prepare.bert import sentences, wikiextractor
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.text.documents import Chunk

# The share of passes over a document that aim at shorter samples, so that the model sees these too.
# The share is BERT's.
SHORT_SHARE = 0.1
# [CLS] and two [SEP].
SPECIAL = 3


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How text becomes samples; the index has these fields."""

    articles: bool = False
    """Documents are WikiExtractor's, with their markup."""
    wrapped: bool = False
    """Lines are wrapped: a line end does not end a sentence."""
    seq_len: int
    max_pred: int
    """The most masked tokens of a sample."""
    masked_lm_prob: float
    """The share of a sample's tokens to mask, up to max_pred."""
    dupe_factor: int
    """Passes over the text, each with new pairs and masks."""
    whole_words: bool
    """Mask all tokens of a word or none."""
    seed: int

    def check(self) -> None:
        """Refuse more masked tokens than a text has."""
        if not 1 <= self.max_pred <= self.seq_len - SPECIAL:
            raise PrepareError(
                f"--max-pred {self.max_pred}: must be from 1 to {self.seq_len - SPECIAL}, the "
                f"tokens of a text in --seq-len {self.seq_len}"
            )

    def sentences(self, chunk: Chunk) -> Iterator[str]:
        """Yield the sentences of all documents of a chunk."""
        for document in chunk.documents():
            yield from self.split(document, chunk.lines.path)

    def split(self, document: str, path: Path) -> Iterator[str]:
        """Return the sentences of a document, none of them blank."""
        text = wikiextractor.article(document, path) if self.articles else document
        return sentences.split(text, wrapped=self.wrapped)
