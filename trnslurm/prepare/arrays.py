"""Files of arrays, which hold what is finished of a piece of work."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def path_of(directory: Path, number: int) -> Path:
    """Return the file of a finished piece."""
    return directory / f"{number:07}.npz"


def read_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """Read a file of arrays; None if it is missing or damaged (the format has checksums)."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
