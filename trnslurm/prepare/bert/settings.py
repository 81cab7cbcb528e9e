"""The settings that decide the samples, besides the text and the tokenizer."""

from dataclasses import dataclass

from trnslurm.prepare.errors import PrepareError

# The share of passes over a document that aim at shorter samples than would fit, so that the model
# sees them too. It is BERT's, which nobody seems to change.
SHORT_SHARE = 0.1
# [CLS] and two [SEP].
SPECIAL = 3
_LEAST_SEQ_LEN = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says about samples."""

    seq_len: int
    max_pred: int
    """The most masked tokens of a sample."""
    masked_lm_prob: float
    """The share of a sample's tokens that is masked, if max_pred allows."""
    dupe_factor: int
    """Passes over the text, each with other pairs and masks."""
    whole_words: bool
    """Mask all tokens of a word or none."""
    seed: int

    def check(self) -> None:
        """Refuse impossible values."""
        if self.seq_len < _LEAST_SEQ_LEN:
            raise PrepareError(f"--seq-len {self.seq_len}: must be {_LEAST_SEQ_LEN} or more")
        if not 1 <= self.max_pred <= self.seq_len - SPECIAL:
            raise PrepareError(
                f"--max-pred {self.max_pred}: must be from 1 to {self.seq_len - SPECIAL}, the "
                f"tokens of a text in --seq-len {self.seq_len}"
            )
        if not 0 < self.masked_lm_prob < 1:
            raise PrepareError(f"--masked-lm-prob {self.masked_lm_prob}: must be between 0 and 1")
        if self.dupe_factor < 1:
            raise PrepareError(f"--dupe-factor {self.dupe_factor}: must be 1 or more")
        if self.seed < 0:
            raise PrepareError(f"--seed {self.seed}: must be 0 or more")
