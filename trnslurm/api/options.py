"""JobOptions: the job that a user asks for, on the command line or in Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, get_args

from trnslurm.api.arguments import (
    PathLike,
    Paths,
    Settings,
    file_name,
    flag,
    one_line_errors,
    one_of,
    search_path,
    settings_of,
    text,
    texts,
    whole,
)
from trnslurm.api.search import run_roots, workspace_of
from trnslurm.config.script import Launcher
from trnslurm.config.search import Workspace
from trnslurm.frozen import Frozen
from trnslurm.runs.result import Checkpoint, find_checkpoint
from trnslurm.runs.root import check_run_root, free_stamp

P = ParamSpec("P")
R = TypeVar("R")
_PRECOMPILE = ("auto", "always", "never")


class SubmitHost:
    """The host that submits: this host. With --on it is a RemoteHost (cli/remote_submit.py)."""

    remote = False

    def find_checkpoint(self, word: str, workspace: Workspace) -> Checkpoint:
        """Return the checkpoint that a value of --from names."""
        return find_checkpoint(word, run_roots(workspace))

    def settle(self, run_root: str, names: Sequence[str]) -> tuple[Path, str]:
        """Return the run root of a profile, and the time stamp for the names of new runs."""
        root = check_run_root(Path(run_root))
        return root, free_stamp(root, names)


class JobOptions(Frozen):
    """The options of submit, render, plan and show; fields are named after them."""

    workspace: Workspace
    recipe: str
    nodes: int = 1
    cluster: str | None = None
    preset: str | None = None
    settings: Sequence[str] = ()
    workers_per_node: int | None = None
    from_run: str | None = None
    time: str | None = None
    name: str | None = None
    sbatch: Sequence[str] = ()
    allow_idle: bool = False
    arguments: Sequence[str] = ()
    launcher: str | None = None
    notify: Sequence[str] = ()
    precompile: str | None = None
    previous: str = ""
    """In a chain: the checkpoints of the previous run, from which this one starts."""
    host: SubmitHost = SubmitHost()

    @classmethod
    def of(cls, recipe: str, path: Sequence[str] = (), **options: Any) -> JobOptions:
        """Return the options of a command line; `path` has the directories to search first."""
        return cls(workspace=workspace_of(path), recipe=recipe, **options)


class JobArguments(TypedDict, total=False):
    """The keyword arguments for these options in Python; docs/python.md describes them."""

    cluster: str | None
    preset: str | None
    settings: Settings
    workers: int | None
    from_run: object
    time: str | int | None
    name: str | None
    sbatch: str | Sequence[str]
    allow_idle: bool
    arguments: Sequence[str]
    launcher: str | None
    notify: str | Sequence[str]
    path: Paths


class SubmitArguments(JobArguments, total=False):
    """The keyword arguments of submit and sweep."""

    precompile: str | None


def options_of(recipe: PathLike, nodes: object, given: Mapping[str, Any]) -> JobOptions:
    """Check the arguments of a call, and return them as options."""

    def optional(name: str, check: Callable[[str, Any], Any]) -> Any:
        value = given.get(name)
        return None if value is None else check(name, value)

    start = given.get("from_run")
    start = getattr(start, "directory", start)  # a Run
    minutes = given.get("time")
    return JobOptions(
        workspace=workspace_of(search_path(given.get("path", ()))),
        recipe=file_name("recipe", recipe),
        nodes=whole("nodes", nodes),
        cluster=optional("cluster", text),
        preset=optional("preset", text),
        settings=settings_of(given.get("settings", ())),
        workers_per_node=optional("workers", whole),
        from_run=None if start is None else file_name("from_run", start),
        time=str(minutes) if isinstance(minutes, int) else optional("time", text),
        name=optional("name", text),
        sbatch=tuple(texts("sbatch", given.get("sbatch", ()))),
        allow_idle=flag("allow_idle", given.get("allow_idle", False)),
        arguments=tuple(texts("arguments", given.get("arguments", ()), one_word=False)),
        launcher=one_of("launcher", given.get("launcher"), get_args(Launcher)),
        precompile=one_of("precompile", given.get("precompile"), _PRECOMPILE),
        notify=tuple(texts("notify", given.get("notify", ()))),
    )


def takes_job(arguments: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function's `**job` these arguments: its signature lists them, and others are refused.

    The function's errors become one line.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = arguments.__annotations__
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
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
