"""Prepared data: a directory with an index, replaced only with --force."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.files import read_json

FORMAT = 1
INDEX = "index.json"


def read_index(directory: Path) -> dict[str, Any] | None:
    """Read the index of prepared data, or return None if there is none."""
    index = read_json(directory / INDEX)
    if not isinstance(index, dict) or not isinstance(number := index.get("format"), int):
        return None
    if number > FORMAT:
        raise PrepareError(
            f"{directory} was made by a newer trnslurm (format {number}, but this one reads "
            f"{FORMAT}): update trnslurm"
        )
    return index if {"made", "sources", "splits", "tokenizer"} <= index.keys() else None


def describe(path: Path) -> dict[str, Any]:
    """Return the name, size and checksum of a file, as in the index."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def find_damage(directory: Path, index: dict[str, Any]) -> str | None:
    """Read all files of prepared data; return the name of one that differs from the index."""
    splits = index["splits"]
    if not isinstance(splits, dict) or "train" not in splits:
        return INDEX
    for part in (index["tokenizer"], *splits.values()):
        entries = list(_file_entries(part))
        if not entries or any(not {"bytes", "sha256"} <= entry.keys() for entry in entries):
            return INDEX
        for entry in entries:
            path = directory / str(entry["file"])
            if not path.is_file() or any(entry[k] != v for k, v in describe(path).items()):
                return str(entry["file"])
    return None


def _file_entries(values: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries of files, however deeply nested."""
    if isinstance(values, dict) and "file" in values:
        yield values
    elif isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _file_entries(value)


def find_finished(output: Path, wanted: dict[str, Any], *, force: bool) -> dict[str, Any] | None:
    """Return the index of existing data if complete and wanted; refuse to replace other data."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    index = read_index(output)
    if index is None:
        raise PrepareError(f"{output} already exists and is not prepared data: choose another name")
    if force:
        return None
    if differing := _differences(index, wanted):
        raise PrepareError(
            f"{output} was prepared from other input ({'; '.join(differing)}): choose another "
            "name, or replace it with --force"
        )
    if damaged := find_damage(output, index):
        raise PrepareError(f"{output}: {damaged} is damaged: prepare it again with --force")
    return index


def _differences(index: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    differing = [
        f"{key} was {_short(index['made'].get(key))}, now {_short(value)}"
        for key, value in wanted["made"].items()
        if index["made"].get(key) != value
    ]
    before, now = ({s["name"]: s for s in part["sources"]} for part in (index, wanted))
    differing += [f"{name} is new" for name in now.keys() - before.keys()]
    differing += [f"{name} is gone" for name in before.keys() - now.keys()]
    differing += [f"{n} has changed" for n in now.keys() & before.keys() if now[n] != before[n]]
    if not differing and index["sources"] != wanted["sources"]:
        differing.append("other files, or another order")
    return sorted(differing)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    # The beginning of a checksum is enough.
    return text[:12] if len(text) == 64 else text or "(none)"
