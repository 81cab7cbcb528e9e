"""Finds the project files that affect what a script does, as far as its imports show."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

# Modules with which a script starts or reads code that its imports do not show.
_HIDDEN = {"importlib", "runpy", "subprocess", "imp", "pkgutil"}
_HIDDEN_CALLS = {"__import__", "exec", "eval", "system", "popen", "execv", "execvp", "execve"}
_SELDOM_READ = (".md", ".rst", ".ipynb")


def used_by(files: Mapping[str, bytes], entry: str, beside: Collection[str] = ()) -> set[str]:
    """Return the names of the files that can affect what an entry does.

    Among Python files these are the modules that it imports, directly or not, unless something
    hints at more. All other files count too. Documents, and the files `beside` it that others
    start, count only if a file names them.
    """
    python = {name for name in files if name.endswith(".py")}
    imported = _imported(files, entry, python) if entry in python else None
    sure = {entry, *(imported or ())} & {*files}
    others = {*files} - sure - (python if imported is not None else set())
    doubtful = {name for name in others if name.endswith(_SELDOM_READ) or name in beside}
    if imported is not None:  # modules that only others start
        doubtful |= {*beside} & python - sure
    sure |= others - doubtful
    while named := {name for name in doubtful - sure if _is_named(name, files, sure)}:
        sure |= named
    return sure


def _is_named(name: str, files: Mapping[str, bytes], among: Collection[str]) -> bool:
    path = PurePosixPath(name)
    words = re.escape(path.name)
    if path.suffix == ".py":  # python -m NAME
        words += rf"|-m\s+[\w.]*{re.escape(path.stem)}"
    pattern = re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])".encode())
    return any(pattern.search(files[other]) for other in among)


def _imported(files: Mapping[str, bytes], entry: str, python: Collection[str]) -> set[str] | None:
    """Return the project modules that a script imports, or None if it could use others, too."""
    roots = ["", "src/", f"{PurePosixPath(entry).parent}/".removeprefix("./")]
    found, left = {entry}, [entry]
    while left:
        name = left.pop()
        try:
            tree = ast.parse(files[name])
        except (SyntaxError, ValueError, RecursionError):
            return None
        for node in ast.walk(tree):
            if _is_hidden(node):
                return None
            more = {p for p in _modules(node, name, roots) if p in python} - found
            found |= more
            left += more
    return found


def _is_hidden(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in _HIDDEN for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in _HIDDEN
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in _HIDDEN_CALLS and not (name == "eval" and isinstance(called, ast.Attribute))
    return False


def _modules(node: ast.AST, name: str, roots: Collection[str]) -> Iterator[str]:
    """Yield the possible files of modules that a statement imports or a string names."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value.endswith(".py") and len(node.value) < 200:
            yield from (f"{root}{node.value.removeprefix('./')}" for root in roots)
        return
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
        modules += [f"{modules[0]}.{alias.name}".strip(".") for alias in node.names]
        if node.level:
            above = PurePosixPath(name).parents
            base = above[min(node.level, len(above)) - 1]
            roots = [f"{base}/".removeprefix("./")]
    for module in modules:
        parts = [*filter(None, module.split("."))]
        for root in roots:
            for n in range(len(parts) + 1):
                yield f"{root}{'/'.join([*parts[:n], '__init__.py'])}"
            if parts:
                yield f"{root}{'/'.join(parts)}.py"
