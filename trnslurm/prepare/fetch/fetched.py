"""The result of a fetch: a directory and its contents."""

import json
from pathlib import Path
from typing import NamedTuple


class Fetched(NamedTuple):
    """A directory that was fetched now or earlier."""

    directory: Path
    what: str = ""
    """A summary of the contents; empty if they were already there."""

    def tell(self, *, as_json: bool) -> None:
        """Print the result on one line."""
        if as_json:
            facts = {"directory": str(self.directory), "fetched": bool(self.what)}
            print(json.dumps(facts | {"what": self.what}))
        elif self.what:
            print(f"Fetched {self.directory}: {self.what}")
        else:
            print(f"{self.directory} is already fetched; there is nothing to do")
