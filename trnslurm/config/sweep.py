"""The points of a sweep: the values in which its runs differ."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trnslurm.config.search import parse_yaml, yaml_line
from trnslurm.contract.files import read_file
from trnslurm.errors import ConfigError

Point = Mapping[str, str]
"""Key -> value, in the form that --set accepts."""
MOST_RUNS = 1000
_FILE = "--sweep-file"


def points_of(words: Sequence[str], rows: Sequence[Point] = ()) -> list[Point]:
    """Return every combination of the values in `KEY=VALUE,VALUE` words and of `rows`."""
    axes = [_axis(word) for word in words]
    parts: list[Sequence[Point]] = [rows] if rows else []
    parts += [[{key: value} for value in values] for key, values in axes]
    count = 1
    for part in parts:
        count *= len(part)
    if count > MOST_RUNS:
        raise ConfigError(f"the sweep has {count:,} runs, but at most {MOST_RUNS:,} are allowed")
    _refuse_twice([sorted({key for row in part for key in row}) for part in parts])
    points = [_joined(rows) for rows in itertools.product(*parts)]
    seen: set[frozenset[tuple[str, str]]] = set()
    for point in points:
        if (known := frozenset(point.items())) in seen:
            said = " ".join(f"{key}={value}" for key, value in point.items())
            raise ConfigError(f"the sweep contains {said} twice: remove one")
        seen.add(known)
    return points


def _axis(word: str) -> tuple[str, list[str]]:
    key, equals, values = word.partition("=")
    found = [value.strip() for value in values.split(",")]
    if not equals or not key or not all(found):
        raise ConfigError(
            f"--sweep {word}: expected KEY=VALUE,VALUE, as in --sweep train.lr=1e-4,3e-4; for "
            "lists, and "
            f"for strings with commas, use {_FILE}"
        )
    return key, found


def read_points(file: str) -> list[Point]:
    """Return the points in a file: a list of points, or KEY: [values] to combine."""
    try:
        tree = parse_yaml(read_file(Path(file)))
    except OSError as error:
        raise ConfigError(f"{_FILE} {file}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{_FILE} {file}: not valid YAML ({said})") from None
    if isinstance(tree, list) and tree and all(isinstance(row, Mapping) and row for row in tree):
        return [dict(_setting(key, value, file) for key, value in row.items()) for row in tree]
    whole = isinstance(tree, Mapping) and tree
    if not whole or not all(isinstance(values, list) and values for values in tree.values()):
        raise ConfigError(
            f"{_FILE} {file}: expected either `KEY: [VALUE, VALUE]` for each key to combine, or "
            "a list with one `{KEY: VALUE}` per run"
        )
    axes = [[_setting(key, value, file) for value in tree[key]] for key in tree]
    return [dict(pairs) for pairs in itertools.islice(itertools.product(*axes), MOST_RUNS + 1)]


def _setting(key: Any, value: Any, file: str) -> tuple[str, str]:
    if not isinstance(key, str) or not key or "=" in key:
        raise ConfigError(f"{_FILE} {file}: {key!r} is not a configuration key")
    try:
        return key, yaml_line(value)
    except yaml.YAMLError:
        raise ConfigError(f"{_FILE} {file}: {key}: {value!r} is not a valid value") from None


def _refuse_twice(keys: Sequence[Sequence[str]]) -> None:
    seen: set[str] = set()
    for key in itertools.chain.from_iterable(keys):
        if key in seen:
            raise ConfigError(f"the sweep sets {key} in two places: list its values once")
        seen.add(key)


def _joined(rows: Sequence[Point]) -> Point:
    return {key: value for row in rows for key, value in row.items()}
