"""The index of prepared data, which is the contract with `trnslurm data prepare`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trnslurm.contract.rundir import DATA_FORMAT
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import read_section

INDEX = "index.json"
PREPARE = "run trnslurm data prepare"

Index = TypeVar("Index")


@dataclass(frozen=True, kw_only=True)
class File:
    """A file next to the index."""

    file: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        # An index from another source must not lead out of its directory.
        if Path(self.file).name != self.file:
            raise TrainError(f"{self.file!r} is not the name of a file in the index's directory")

    def check_size(self, directory: Path) -> None:
        """Compare the size on disk with the index."""
        try:
            size = (directory / self.file).stat().st_size
        except OSError as error:
            raise TrainError(
                f"{directory}: {self.file}: {error.strerror}: {PREPARE} again"
            ) from None
        if size != self.bytes:
            raise TrainError(
                f"{directory}: {self.file} is {size} bytes, expected {self.bytes}: {PREPARE} again"
            )


@dataclass(frozen=True, kw_only=True)
class Tokenizer(File):
    """The tokenizer that made the tokens, for users of the model."""

    name: str


def read_index(directory: Path, kind: str, cls: type[Index]) -> Index:
    """Read the index of prepared data of a kind."""
    path = directory / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise TrainError(f"{directory}: no prepared data ({INDEX} is missing): {PREPARE}") from None
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: cannot be read ({error}): {PREPARE} again") from None
    if isinstance(values, dict):
        found = values.get("kind", "tokens")
        if found != kind:
            raise TrainError(
                f"{directory}: its data is of kind {found}, not {kind}: use other data or {PREPARE}"
            )
        if values.get("format") != DATA_FORMAT:
            raise TrainError(
                f"{path}: format {values.get('format')}, but this code reads {DATA_FORMAT}: "
                f"{PREPARE} again"
            )
    try:
        return read_section(cls, values, where="index")
    except TrainError as error:
        raise TrainError(f"{path}: {error}: {PREPARE} again") from None
