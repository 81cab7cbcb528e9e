"""Checksums of the code that a job imports. Comments and docstrings do not count."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import tokenize
from collections.abc import Iterable, Iterator, Mapping

from trnslurm.declared import check_python
from trnslurm.render.cached import cached
from trnslurm.render.package import sources

_ROOT = "code/"
# Our version, the contract, value checks: modules that do not shape graphs. Neither do facts about
# devices: an ingredient names the device, and code in train acts on these facts. It also does not
# matter to a graph which samples it processes, where they come from, or how results are written.
_OURS = {
    f"{_ROOT}trnslurm/{name}.py"
    for name in (
        *("__init__", "calls", "ddp_pace", "declared", "errors", "frozen", "pace", "tracing"),
        "train/models",
    )
}
_OUR_ROOMS = tuple(
    f"{_ROOT}trnslurm/{name}/"
    for name in ("contract", "datasets", "devices", "mirror", "samples", "saves")
)


def sha256_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the checksum of each file's content."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def checksums(
    files: Mapping[str, bytes], entry: str | None, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the checksums of the entry script and of every file that it imports.

    For a project, `entry` is None and all files count, because its imports are unknown. `known`
    contains checksums of the files' content.
    """
    code = {name: data for name, data in files.items() if name.startswith(_ROOT)}
    known = known or sha256_of(code)
    made_of = [str(entry), *(f"{name} {known[name]}" for name in sorted(code))]
    found = cached(__file__, made_of, lambda: json.dumps(_checksums(sources(code), entry)).encode())
    return dict(json.loads(found))


def _checksums(files: Mapping[str, bytes], entry: str | None) -> dict[str, str]:
    names = {name for name in files if name.startswith(f"{_ROOT}project/")}
    if entry is not None:
        names = _closure(files, f"{_ROOT}{entry}") - _OURS
        names = {name for name in names if not name.startswith(_OUR_ROOMS)}
    return {name.removeprefix(_ROOT): _checksum(files[name]) for name in sorted(names)}


def _closure(files: Mapping[str, bytes], entry: str) -> set[str]:
    """Return the entry and all files that it imports, including imports inside functions."""
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
        tree = _parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        check_python(data, name)
        raise
    return [words for node in _statements(tree) for words in _modules(node, [*package])]


@functools.lru_cache(maxsize=256)
def _parse(source: bytes | str) -> ast.Module:
    return ast.parse(source)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements but no expressions, which make up most of a tree."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, field, ())


def _modules(node: ast.AST, package: list[str]) -> Iterator[list[str]]:
    """Yield the modules that an import statement could refer to, as lists of words."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = [*above, *(node.module or "").split(".")] if node.module else above
        # A name imported from a package could be a module in it.
        yield from ([*base, alias.name] for alias in node.names)


@functools.cache
def _checksum(data: bytes) -> str:
    try:
        text = data.decode()
        # Bytes that declare an encoding may decode to another text.
        same = data.isascii() and b"coding" not in data
        data = _without_comments(text, _parse(data if same else text)).encode()
    except (SyntaxError, ValueError, tokenize.TokenError):
        pass
    return hashlib.sha256(data).hexdigest()


def _without_comments(text: str, tree: ast.Module) -> str:
    """Return Python source without comments, docstrings and blank lines.

    They are cut out of the source text, because ast.unparse differs between Python versions.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    nodes = [*ast.walk(tree)]
    dropped = _docstrings(lines, nodes)
    inside = _inside_texts(nodes) - dropped
    kept = []
    for row, line in enumerate(lines, 1):
        if row in inside:
            kept.append(line)
        elif row not in dropped and line.strip():
            kept.append(line.rstrip())
    return "\n".join(kept)


def _docstrings(lines: list[str], nodes: Iterable[ast.AST]) -> set[int]:
    """Return the rows of string statements, including docstrings of attributes."""
    return {
        row
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and _alone(lines, node.value)
        for row in _rows(node.value)
    }


def _alone(lines: list[str], node: ast.Constant) -> bool:
    """Check that a string is the only thing in its rows."""
    rows = _rows(node)
    after = lines[rows[-1] - 1].encode()[node.end_col_offset :]  # Python counts bytes
    return not lines[rows[0] - 1][: node.col_offset].strip() and not after.strip()


def _inside_texts(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the rows of strings that span multiple rows, in which nothing may be removed."""
    return {
        row
        for node in nodes
        if isinstance(node, ast.expr)
        if isinstance(node.value if isinstance(node, ast.Constant) else node, str | ast.JoinedStr)
        if len(rows := _rows(node)) > 1
        for row in rows
    }


def _rows(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
