"""What a fetch ends with: a directory, and what is in it."""

import json
from pathlib import Path
from typing import NamedTuple


class Fetched(NamedTuple):
    """A directory that was fetched now, or before."""

    directory: Path
    what: str = ""
    """Empty: it was there already."""

    def tell(self, *, as_json: bool) -> None:
        """Print it in one line."""
        if as_json:
            facts = {"directory": str(self.directory), "fetched": bool(self.what)}
            print(json.dumps(facts | {"what": self.what}))
        elif self.what:
            print(f"Fetched {self.directory}: {self.what}")
        else:
            print(f"{self.directory} is already fetched, nothing to do")
