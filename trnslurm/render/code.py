"""Checksums of the code that a job imports, which comments and docstrings do not change."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import tokenize
from collections.abc import Iterator, Mapping

from trnslurm.declared import check_python

_ROOT = "code/"
# Our version, names of files, checks of values: nothing that shapes a graph.
_OURS = {
    f"{_ROOT}trnslurm/{name}.py"
    for name in ("__init__", "contract", "declared", "errors", "rundir", "train/models")
}


def checksums(files: Mapping[str, bytes], entry: str | None) -> dict[str, str]:
    """Return the checksum of the entry script and of every file that it imports.

    Of a project, of which nothing is known, that of all its files: `entry` is None.
    """
    names = {name for name in files if name.startswith(f"{_ROOT}project/")}
    if entry is not None:
        names = _closure(files, f"{_ROOT}{entry}") - _OURS
    return {name.removeprefix(_ROOT): _checksum(files[name]) for name in sorted(names)}


def _closure(files: Mapping[str, bytes], entry: str) -> set[str]:
    """Return the entry and all files that it imports, in functions too."""
    found: set[str] = set()
    left = [entry]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _imported(files, name)
    return found


def _imported(files: Mapping[str, bytes], name: str) -> Iterator[str]:
    # A script also imports files next to it by their bare names.
    bases = [_ROOT, name.rpartition("/")[0] + "/"]
    package = name.removeprefix(_ROOT).split("/")[:-1]
    for words in _all_modules(files[name], name, tuple(package)):
        for base in bases:
            # Importing a module runs the __init__.py of every package above it.
            for count in range(1, len(words) + 1):
                path = base + "/".join(words[:count])
                yield from (p for p in (f"{path}.py", f"{path}/__init__.py") if p in files)


@functools.cache  # a plan reads the same files for every node count
def _all_modules(data: bytes, name: str, package: tuple[str, ...]) -> list[list[str]]:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        check_python(data, name)
        raise
    return [words for node in _statements(tree) for words in _modules(node, [*package])]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements, and no expressions, which are most of a tree."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, field, ())


def _modules(node: ast.AST, package: list[str]) -> Iterator[list[str]]:
    """Yield the modules that an import statement may name, as words."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = [*above, *(node.module or "").split(".")] if node.module else above
        # A name imported from a package may be a module in it.
        yield from ([*base, alias.name] for alias in node.names)


@functools.cache
def _checksum(data: bytes) -> str:
    try:
        data = _without_comments(data.decode()).encode()
    except (SyntaxError, ValueError, tokenize.TokenError):
        pass
    return hashlib.sha256(data).hexdigest()


def _without_comments(text: str) -> str:
    """Return Python source without comments, docstrings and blank lines.

    They are cut out of the text: source made again from its syntax differs between versions.
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    dropped: set[int] = set()
    inside: set[int] = set()  # of a text of several lines, in which nothing may be cut
    for node in ast.walk(tree):
        # A text that is a whole statement is a docstring; an attribute's follows it.
        if isinstance(node, ast.Expr) and _is_text(node.value):
            if not lines[node.value.lineno - 1][: node.value.col_offset].strip():
                dropped.update(_rows(node.value))
        elif isinstance(node, ast.expr) and (isinstance(node, ast.JoinedStr) or _is_text(node)):
            rows = _rows(node)
            inside.update(rows if len(rows) > 1 else ())
    inside -= dropped
    kept = []
    for row, line in enumerate(lines, 1):
        if row in inside:
            kept.append(line)
        elif row not in dropped and line.strip():
            kept.append(line.rstrip())
    return "\n".join(kept)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _rows(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
