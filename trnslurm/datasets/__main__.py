"""Tells the launcher what a path contains: python -m trnslurm.datasets PATH [train] [eval]."""

from __future__ import annotations

import json
import sys

from trnslurm.datasets.errors import DataError, NoDataError
from trnslurm.datasets.open import EVAL, TRAIN, describe, open_tokens


def main() -> None:
    """Print, as JSON, what each split contains, or the error, or {} if the format is unknown."""
    path, *splits = sys.argv[1:]
    found: dict[str, object] = {}
    try:
        for split, names in {"train": TRAIN, "eval": EVAL}.items():
            if split in splits:
                tokens = open_tokens(path, names)
                found[split] = {
                    "found": describe(tokens),
                    "tokens": len(tokens),
                    "vocab_size": tokens.largest_seen() + 1,
                }
    except NoDataError:
        found = {}
    except DataError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
