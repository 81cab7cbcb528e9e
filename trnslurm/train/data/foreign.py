"""Tokens that other libraries wrote, in the form in which jobs read text."""

from typing import Any

from trnslurm.datasets.errors import DataError, NoDataError
from trnslurm.datasets.open import EVAL, TRAIN, open_tokens
from trnslurm.train.errors import TrainError


class ForeignTokens:
    """A stream of tokens. Each token that is read must be in the model's vocabulary."""

    def __init__(self, path: str, split: str, vocab_size: int | None) -> None:
        try:
            self._tokens = open_tokens(path, EVAL if split == "eval" else TRAIN)
            self.vocab_size = self._tokens.largest_seen() + 1
            """A lower bound, because not every token of a large corpus has been seen."""
            self.fingerprint = self._tokens.fingerprint()
        except NoDataError:
            raise
        except DataError as error:
            more = ", or set train.eval_every=0" if split == "eval" else ""
            raise TrainError(f"{error}{more}") from error
        self._path, self._limit = path, vocab_size

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> Any:
        try:
            found = self._tokens[part]
        except DataError as error:
            raise TrainError(str(error)) from error
        if self._limit is not None and len(found):
            for token in (int(found.min()), int(found.max())):
                if not 0 <= token < self._limit:
                    raise TrainError(
                        f"{self._path}: found token {token} after position {part.start:,}, but "
                        f"model.vocab_size is {self._limit}: the data and the model use different "
                        "tokenizers"
                    )
        return found
