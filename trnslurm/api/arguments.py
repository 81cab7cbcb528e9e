"""Check the arguments of the Python functions, and warn their callers of problems."""

from __future__ import annotations

import functools
import operator
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import yaml

from trnslurm.config.search import yaml_line
from trnslurm.console import Console
from trnslurm.errors import ConfigError, TrnslurmError, TrnslurmWarning

_OURS = str(Path(__file__).resolve().parents[1])

P = ParamSpec("P")
R = TypeVar("R")
PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Settings = Mapping[str, Any] | Sequence[str]


def one_line_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise a TrnslurmError instead of an OSError, with the CLI's text."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise TrnslurmError(f"{where}{error.strerror or error}") from error

    return wrapper


class PythonConsole(Console):
    """Issues Python warnings at the line that called the library; collects other remarks."""

    def tell(self, text: str) -> None:
        if not text.startswith("warning: "):
            return
        level, frame = 1, sys._getframe()
        while frame.f_back and frame.f_code.co_filename.startswith(_OURS):
            level, frame = level + 1, frame.f_back
        warnings.warn(text.removeprefix("warning: "), TrnslurmWarning, stacklevel=level)

    @property
    def other_remarks(self) -> tuple[str, ...]:
        """The remarks that are not warnings."""
        return tuple(text for text in self.remarks if not text.startswith("warning: "))


def search_path(path: Paths) -> tuple[str, ...]:
    """Return the directories to search first."""
    several = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    return tuple(file_name("path", each) for each in several)


def settings_of(settings: Settings) -> tuple[str, ...]:
    """Return settings as `key=value` texts; a mapping has Python values."""
    if isinstance(settings, Mapping):
        return tuple(f"{text('settings', key)}={_written(key, settings[key])}" for key in settings)
    return tuple(texts("settings", settings))


def _written(key: str, value: Any) -> str:
    """Return a value as one line of YAML, as in a recipe."""
    value = value.item() if hasattr(value, "item") else value  # a NumPy number
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    value = list(value) if isinstance(value, tuple) else value
    try:
        return yaml_line(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"settings: {key}={value!r} is no number, text, list or mapping of these"
        ) from None


def whole(name: str, value: object, *, least: int = 1) -> int:
    """Return an argument that must be a whole number."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected a whole number")
    if number < least:
        raise ConfigError(f"{name}={value!r}: expected at least {least}")
    return number


def wholes(name: str, value: object) -> list[int]:
    """Return an argument that must be a whole number, or several."""
    if isinstance(value, Sequence | range) and not isinstance(value, str):
        return [whole(name, each) for each in value]
    return [whole(name, value)]


def text(name: str, value: Any) -> Any:
    """Return an argument that must be text or None."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: expected text")
    return value


def file_name(name: str, value: object) -> str:
    """Return an argument that must be a path or a name."""
    if isinstance(value, str | os.PathLike) and "\0" not in (found := os.fspath(value)):
        return str(found)
    raise ConfigError(f"{name}={value!r}: expected a path or a name")


def one_of(name: str, value: Any, known: Sequence[str]) -> Any:
    """Return an argument that must be one of these texts, or None."""
    if value is not None and value not in known:
        raise ConfigError(f"{name}={value!r}: expected {', '.join(known[:-1])} or {known[-1]}")
    return value


def flag(name: str, value: object) -> bool:
    """Return an argument that must be True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False")
    return value


def texts(name: str, value: object, *, one_word: bool = True) -> list[str]:
    """Return a list of texts; `one_word`: a single text is a list of one."""
    if isinstance(value, str) and not one_word:
        raise ConfigError(f"{name}={value!r}: expected a list of words, as {value.split()!r}")
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, Sequence) or not all(isinstance(each, str) for each in several):
        raise ConfigError(f"{name}={value!r}: expected texts")
    return list(several)
