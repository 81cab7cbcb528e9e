"""The settings that determine the samples, in addition to the text and the tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trnslurm.prepare.bert import sentences, wikiextractor
from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.text.documents import Chunk

# The share of passes over a document that aim for shorter samples, so that the model sees these
# too. The share is BERT's.
SHORT_SHARE = 0.1
# [CLS] and two [SEP].
SPECIAL = 3


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How text becomes samples. The index has these fields."""

    articles: bool = False
    """Whether documents come from WikiExtractor, with its markup."""
    wrapped: bool = False
    """Whether lines are wrapped, so that a line end does not end a sentence."""
    seq_len: int
    max_pred: int
    """The maximum number of masked tokens per sample."""
    masked_lm_prob: float
    """The share of a sample's tokens to mask, up to max_pred."""
    dupe_factor: int
    """Passes over the text, each with new pairs and masks."""
    whole_words: bool
    """Mask either all tokens of a word or none."""
    seed: int

    def check(self) -> None:
        """Reject more masked tokens than a text has."""
        if not 1 <= self.max_pred <= self.seq_len - SPECIAL:
            raise PrepareError(
                f"--max-pred {self.max_pred}: must be from 1 to {self.seq_len - SPECIAL}, the "
                f"number of text tokens with --seq-len {self.seq_len}"
            )

    def sentences(self, chunk: Chunk) -> Iterator[str]:
        """Yield the sentences of all documents in a chunk."""
        for document in chunk.documents():
            yield from self.split(document, chunk.lines.path)

    def split(self, document: str, path: Path) -> Iterator[str]:
        """Return the sentences of a document, none of them blank."""
        text = wikiextractor.article(document, path) if self.articles else document
        return sentences.split(text, wrapped=self.wrapped)
