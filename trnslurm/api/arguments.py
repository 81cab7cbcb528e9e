"""Checks the arguments of the Python functions, and warns their callers about problems."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, get_args

import yaml

from trnslurm.config.entry import as_name
from trnslurm.config.script import Launcher, batch_script
from trnslurm.config.search import yaml_line
from trnslurm.console import Console
from trnslurm.errors import ConfigError, TrnslurmError, TrnslurmWarning
from trnslurm.runs.search import workspace_of
from trnslurm.submission.options import AS_SLURM, JobOptions, parse_range

_OURS = str(Path(__file__).resolve().parents[1])

_PRECOMPILE = ("auto", "always", "never")

P = ParamSpec("P")
R = TypeVar("R")
PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Settings = Mapping[str, Any] | Sequence[str]


def one_line_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise a TrnslurmError instead of an OSError, with the command line's text."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise TrnslurmError(f"{where}{error.strerror or error}") from error

    return wrapper


class PythonConsole(Console):
    """Issues Python warnings at the line that called the library, and collects other remarks."""

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
    """Return settings as `key=value` strings. Values in a mapping are Python objects."""
    if isinstance(settings, Mapping):
        return tuple(f"{text('settings', key)}={_written(key, settings[key])}" for key in settings)
    return texts("settings", settings)


def _written(key: str, value: Any) -> str:
    """Return a value as one line of YAML, as in a recipe."""
    value = value.item() if hasattr(value, "item") else value  # a NumPy number
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    value = list(value) if isinstance(value, tuple) else value
    try:
        return yaml_line(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"settings: {key}={value!r} is not a number, a string, or a list or mapping of these"
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
    """Return an argument that must be one or more whole numbers."""
    if isinstance(value, Sequence | range) and not isinstance(value, str):
        return [whole(name, each) for each in value]
    return [whole(name, value)]


def text(name: str, value: Any) -> Any:
    """Return an argument that must be a string or None."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: expected a string")
    return value


def file_name(name: str, value: object) -> str:
    """Return an argument that must be a path or a name."""
    if isinstance(value, str | os.PathLike) and "\0" not in (found := os.fspath(value)):
        return str(found)
    raise ConfigError(f"{name}={value!r}: expected a path or a name")


def one_of(name: str, value: Any, known: Sequence[str]) -> Any:
    """Return an argument that must be one of these strings, or None."""
    if value is not None and value not in known:
        raise ConfigError(f"{name}={value!r}: expected {', '.join(known[:-1])} or {known[-1]}")
    return value


def flag(name: str, value: object) -> bool:
    """Return an argument that must be True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False")
    return value


def texts(name: str, value: object, *, one_word: bool = True) -> tuple[str, ...]:
    """Return an argument that must be strings. With `one_word`, it may be a single string."""
    if isinstance(value, str) and not one_word:
        raise ConfigError(
            f"{name}={value!r}: expected a list of strings, such as {value.split()!r}"
        )
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, Sequence) or not all(isinstance(each, str) for each in several):
        raise ConfigError(f"{name}={value!r}: expected strings")
    return tuple(several)


class JobArguments(TypedDict, total=False):
    """The keyword arguments for these options in Python. See docs/python.md."""

    cluster: str | None
    preset: str | None
    settings: Settings
    spares: int | None
    workers: int | None
    gpus: str | int | None
    cpus: int | None
    mem: str | int | None
    from_run: object
    time: str | int | None
    name: str | None
    sbatch: str | Sequence[str]
    env: str | Sequence[str]
    allow_idle: bool
    arguments: Sequence[str]
    launcher: str | None
    notify: str | Sequence[str]
    path: Paths


class SubmitArguments(JobArguments, total=False):
    """The keyword arguments of submit and sweep."""

    precompile: str | None
    after: object


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "cluster": text,
    "preset": text,
    "settings": lambda _, value: settings_of(value),
    "spares": whole,
    "workers": whole,
    "gpus": lambda name, value: text(name, str(value) if isinstance(value, int) else value),
    "cpus": whole,
    "mem": lambda name, value: text(name, str(value) if isinstance(value, int) else value),
    "from_run": lambda name, value: file_name(name, getattr(value, "directory", value)),  # a Run
    "time": lambda name, value: text(name, str(value) if isinstance(value, int) else value),
    "name": text,
    "sbatch": texts,
    "env": texts,
    "allow_idle": flag,
    "arguments": functools.partial(texts, one_word=False),
    "launcher": functools.partial(one_of, known=get_args(Launcher)),
    "precompile": functools.partial(one_of, known=_PRECOMPILE),
    "notify": texts,
    "after": lambda name, value: file_name(name, getattr(value, "directory", value)),
}
FIELD_OF = {"workers": "workers_per_node"}
"""Argument -> the field of JobOptions, if the names differ."""


def options_of(recipe: PathLike, nodes: object, given: Mapping[str, Any]) -> JobOptions:
    """Check the arguments of a call, and return them as options. None means not given."""
    word, asked = file_name("recipe", recipe), nodes_of(nodes)
    values = {
        FIELD_OF.get(name, name): check(name, given[name])
        for name, check in _CHECKS.items()
        if given.get(name) is not None
    }
    if script := batch_script(word):
        asked = {"nodes": script.told_nodes or AS_SLURM} if asked == {"nodes": 1} else asked
        values.setdefault("name", as_name(script.name) if script.name else None)
    workspace = workspace_of(search_path(given.get("path", ())))
    return JobOptions(workspace=workspace, recipe=word, **asked, **values)


def nodes_of(nodes: object) -> dict[str, Any]:
    """Return the options for a number of nodes, or for a range such as "2-4"."""
    if isinstance(nodes, str) and (found := parse_range(nodes)):
        return {"nodes": found[1], "least_nodes": found[0]}
    return {"nodes": whole("nodes", nodes)}


def takes_job(arguments: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function's `**job` these arguments: its signature lists them, and others are rejected.

    The function's errors become one line.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = arguments.__annotations__
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=getattr(kind, "__forward_arg__", kind),  # as the author wrote it
            )
            for name, kind in known.items()
        ]
        checked = one_line_errors(function)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - known.keys() - {p.name for p in own}:
                raise TypeError(f"{function.__name__}() has no argument {name!r}")
            return checked(*args, **kwargs)

        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *more]
        )
        return wrapper

    return decorate
