"""Detects what a path or URL contains, and opens it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trnslurm.datasets.arrow import Arrow, Parquet
from trnslurm.datasets.cache import Cache
from trnslurm.datasets.errors import DataError, NoDataError
from trnslurm.datasets.files import LINES, SHARDS, Lines, Tars, read_shard_list
from trnslurm.datasets.mds import INDEX, Mds
from trnslurm.datasets.place import Here, Place, open_place, split_path
from trnslurm.datasets.rows import Rows
from trnslurm.datasets.tokens import (
    Blocks,
    TokenRows,
    Tokens,
    read_datatrove,
    read_megatron,
)

TRAIN = ("train",)
EVAL = ("eval", "validation", "valid", "val", "dev")
"""How libraries name the splits for training and evaluation. The test split is used for neither."""
_SPLITS = (*TRAIN, *EVAL, "test")
OTHERS = ("shards", SHARDS)
"""The keys that the index of MDS or of tars has, and no other index.json."""
_STATE, _DICT = "state.json", "dataset_dict.json"
_KINDS = (".idx", ".ds", ".parquet", ".arrow", ".tar", *LINES)
_OF_SPLIT = re.compile(rf"(?:.*/)?({'|'.join(_SPLITS)})[-_.][^/]*")
CACHE_GB = 64.0


class Dataset:
    """Samples by their number, for trnslurm.loader, trnslurm.batches and trnslurm.mix."""

    def __init__(self, read: Rows | Tokens, blocks: Blocks | None) -> None:
        self._read = read
        self._samples: Any = blocks or read
        self._row = blocks.__getitem__ if blocks else read.row  # type: ignore[union-attr]
        self._len = len(self._samples)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, number: int) -> Any:
        """Return a sample: a dict of its columns or, with seq_len, an array of tokens."""
        index = number + self._len if number < 0 else number
        if not 0 <= index < self._len:
            raise IndexError(f"there is no sample {number}: the number of samples is {self._len}")
        try:
            return self._row(index)
        except DataError as error:
            if re.search(r"\bsample \d", str(error)):
                raise
            raise DataError(f"{error} (sample {index})") from error

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(self._len))

    def __repr__(self) -> str:
        return f"<Dataset {describe(self._read)}>"


def dataset(
    path: str | Path,
    *,
    seq_len: int | None = None,
    split: str | None = None,
    column: str | None = None,
    cache: str | Path | None = None,
    cache_gb: float = CACHE_GB,
) -> Dataset:
    """Open data that datatrove, Megatron, MosaicML, datasets, WebDataset or another library wrote.

    With `seq_len`, each sample is a block of that many tokens. `column` names the column of tokens.
    """
    read = open_rows(str(path), split=split, column=column, cache=cache, cache_gb=cache_gb)
    if seq_len is None:
        if isinstance(read, Tokens):
            raise DataError(
                f"{path}: {describe(read)}: pass seq_len, the number of tokens per sample"
            )
        return Dataset(read, None)
    if seq_len < 1:
        raise ValueError(f"trnslurm.dataset: seq_len is {seq_len}: it must be 1 or more")
    tokens = read if isinstance(read, Tokens) else TokenRows(read, column)
    return Dataset(tokens, Blocks(tokens, seq_len))


def open_rows(
    path: str,
    *,
    split: str | None = None,
    column: str | None = None,
    cache: str | Path | None = None,
    cache_gb: float = CACHE_GB,
) -> Rows | Tokens:
    """Open the rows or tokens that a path contains."""
    kept = Cache(Path(cache).expanduser() if cache else None, int(cache_gb * 1e9))
    place, (parent, name) = open_place(path, kept), split_path(path)
    if _is_file(place):
        place = open_place(parent, kept)
    elif name and open_place(parent, kept).find(f"{name}.idx") is not None:
        place, name = open_place(parent, kept), f"{name}.idx"
    else:
        name = ""
    if not name:
        place, names = _of_split(place, split)
    elif split and split.split("|")[0] in EVAL:  # otherwise it would be the training data
        raise DataError(f"{path}: a single file has no split {' or '.join(split.split('|'))}")
    else:
        names = [re.sub(r"\.bin$", ".idx", name)]
    found = _open(place, names, column)
    if found is None:
        raise NoDataError(f"{path}: contains no data in a supported format: see docs/data.md")
    return found


def open_tokens(path: str, split: tuple[str, ...]) -> Tokens:
    """Open the tokens of a split, TRAIN or EVAL, under any of the names that libraries give it."""
    found = open_rows(path, split="|".join(split))
    return found if isinstance(found, Tokens) else TokenRows(found, None)


def describe(read: Rows | Tokens) -> str:
    """Return a one-line description of the data for the user."""
    if not isinstance(read, Tokens):
        return f"{read.kind}, {len(read):,} samples"
    documents = f"{read.documents:,} documents, " if read.documents is not None else ""
    return f"{read.kind}, {documents}{_short(len(read))} tokens"


def _is_file(place: Place) -> bool:
    if isinstance(place, Here):
        return Path(place.path).is_file()
    return place.path.endswith((*_KINDS, ".bin")) and place.find("") is not None


def _of_split(place: Place, split: str | None) -> tuple[Place, list[str] | None]:
    """Return where a split is, and its files if it shares a directory with other splits."""
    wanted = split.split("|") if split else []
    names: list[str] | None = None
    if place.find(INDEX) is not None or place.find(_STATE) is not None:
        there = []
    elif place.find(_DICT) is not None:
        listed = _json(place, _DICT).get("splits")
        there = [str(each) for each in listed] if isinstance(listed, list) else []
    else:
        names = place.names()
        directories = {name.partition("/")[0] for name in names if "/" in name}
        of_files = {m[1] for name in names if (m := _OF_SPLIT.fullmatch(name))}
        there = [each for each in _SPLITS if each in directories | of_files]
        if not there:
            there = [each for each in _SPLITS if place.find(f"{each}/{INDEX}")]
    found = next((each for each in wanted if each in there), None)
    if found is None:
        if there or (wanted and wanted[0] not in TRAIN):
            asked = f"there is no split {' or '.join(wanted)}" if wanted else "name a split"
            has = f": the splits are {', '.join(there)}" if there else ""
            raise place.error("", f"{asked}{has}")
        return place, names
    if names is not None and not any(name.startswith(f"{found}/") for name in names):
        return place, [n for n in names if (m := _OF_SPLIT.fullmatch(n)) and m[1] == found]
    return place.below(found), None


def _open(place: Place, names: list[str] | None, column: str | None) -> Rows | Tokens | None:
    """Open a directory, or some of its files."""
    if names is None:
        if place.find(INDEX) is not None:
            told = _json(place, INDEX)
            if SHARDS in told:
                return read_shard_list(place, told)
            return Mds(place)
        if place.find(_STATE) is not None:
            state = _json(place, _STATE)
            if state.get("_indices_data_files"):
                raise place.error(
                    _STATE, "its rows are reordered by indices: call flatten_indices(), then save"
                )
            try:
                listed = [str(each["filename"]) for each in state["_data_files"]]
            except (LookupError, TypeError):
                raise place.error(_STATE, "damaged: names no files") from None
            if any(Path(each).name != each for each in listed):
                raise place.error(_STATE, "names a file that is not in the same directory")
            return Arrow(place, listed)
        names = place.names()
    by_kind = {kind: [name for name in names if name.endswith(kind)] for kind in _KINDS}
    kinds = [kind for kind, found in by_kind.items() if found]
    if len(kinds) > 1:
        raise place.error(
            "", f"contains {' and '.join(kinds)} files: name a directory with one format"
        )
    if not kinds:
        return None
    found = by_kind[kinds[0]]
    if kinds == [".idx"]:
        return read_megatron(place, [name.removesuffix(".idx") for name in found])
    if kinds == [".ds"]:
        return read_datatrove(place, found)
    if kinds == [".parquet"]:
        return Parquet(place, found, column)
    if kinds == [".arrow"]:
        return Arrow(place, found)
    return (Tars if kinds == [".tar"] else Lines)(place, found)


def _json(place: Place, name: str) -> dict[str, Any]:
    try:
        found = json.loads(place.text(name))
    except (ValueError, RecursionError) as error:
        raise place.error(name, f"cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise place.error(name, "is not a JSON object")
    return found


def _short(count: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return f"{count:,}"
