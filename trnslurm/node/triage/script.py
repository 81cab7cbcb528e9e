"""Facts about a failure from the run's copy of the script and its configuration.

A traceback names a variable without a value, or a missing key. The script shows where the variable
would have been set, and the configuration shows which keys it has.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Union

from trnslurm.contract.files import read_file, read_json
from trnslurm.contract.rundir import NODE_SCRIPT, RunFiles
from trnslurm.node.triage.budget import is_spent
from trnslurm.node.triage.evidence import Suspect
from trnslurm.node.triage.words import frames_in

_NO_VALUE = re.compile(r"(?:UnboundLocalError|NameError): .*?'(\w+)'")
_NO_KEY = re.compile(r"KeyError: '([\w.-]+)'$")
_CONFIG = re.compile(r"(?<![\w./-])[\w./-]+\.(?:ya?ml|json|toml)\b")
# A key of YAML, JSON or TOML, or a table of TOML.
_KEY = re.compile(
    r"""(?:^|[{,])[ \t]*(?:- )?["']?([\w.-]+)["']?[ \t]*[:=]|^\[\[?([\w.-]+)\]""", re.MULTILINE
)
_BATCH_SIZE = re.compile(
    r"""(?:^|(?<=[\s"'(]))(?![\w.-]*(?:eval|val|test|global))[\w.-]*batch[-_]size\b""", re.MULTILINE
)
_OF_CONFIG = re.compile(r"(?i)conf|cfg|\bargs|param|\bopt|setting|hydra")
_LONGEST, _LONGEST_LINE = 1 << 20, 80
_MOST_FILES, _MOST_LINES = 8, 4
_Block = Union[ast.stmt, ast.ExceptHandler]
_Place = tuple[int, tuple[_Block, ...]]
"""A line, and the blocks around it that may not run."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Told(NamedTuple):
    """Facts from the copy about an exception."""

    cause: str
    fix: str
    proven: bool


def told_by_script(run: Path, suspect: Suspect) -> Told | None:
    """Return facts from the copy about the exception that ended a worker, or None."""
    last = suspect.lines[-1]
    if last.startswith("SyntaxError: ") and (told := _newer_syntax(run, suspect)):
        return told
    if (name := _NO_VALUE.match(last)) and (cause := _where_set(run, suspect, name[1])):
        fix = f"set {name[1]} before that, or find out why that code did not run"
        return Told(cause, fix, proven=True)
    code = [line for line in suspect.lines if line.startswith("    ")][-1:]
    key = _NO_KEY.match(last) if any(map(_OF_CONFIG.search, code)) else None
    if key and (cause := _lacks(run, key[1])):
        return Told(cause, "correct the key there, or in the script", proven=False)
    return None


def batch_size(run: Path) -> str:
    """Return the option in the job's command that sets the batch size, or ""."""
    named = _BATCH_SIZE.search(_text_of(run / NODE_SCRIPT))
    return named[0] if named else ""


def _newer_syntax(run: Path, suspect: Suspect) -> Told | None:
    """Return that a file has syntax of a newer Python, if this Python can parse the file."""
    file, number = next(iter(reversed(frames_in(suspect.lines))), ("", "0"))
    try:
        ast.parse(_text_in(run, file) or "?")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    files = RunFiles(run).preflight_files("train", 1)
    theirs = next((python for f in files if (python := _python_in(read_json(f)))), "an older one")
    ours = ".".join(map(str, sys.version_info[:2]))
    cause = f"{Path(file).name}, line {number} has syntax that Python {ours} can read"
    cause += f", but the node's Python ({theirs}) is too old for it"
    return Told(
        cause, "set a newer Python in the profile (python), or rewrite that line", proven=False
    )


def _python_in(record: dict[str, Any]) -> str:
    """Return the Python version that a preflight found on its first node."""
    nodes = record.get("nodes")
    same = nodes[0].get("same") if isinstance(nodes, list) and nodes else None
    return str(same.get("Python") or "") if isinstance(same, dict) else ""


def _where_set(run: Path, suspect: Suspect, name: str) -> str:
    """Return the lines that set a variable, if the function sets it only on some paths."""
    file, number = next(iter(reversed(frames_in(suspect.lines))), ("", "0"))
    text, at = _text_in(run, file), int(number)
    try:
        found = [place for place in _sets(_scope_of(ast.parse(text), at), name, ()) if place[0]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    if not found or not all(above or line > at for line, above in found):
        return ""  # it is set on every path, but was deleted
    line, above = found[0]
    where = f"{Path(file).name} sets {name} only at line"
    if len(found) > 1:
        lines = ", ".join(str(line) for line, _ in found[:_MOST_LINES])
        return f"{where}s {lines}, each in a block that may not run or after line {at}"
    if not above:
        return f"{where} {line}, after line {at}"
    if isinstance(above[-1], ast.ExceptHandler):
        return f"{where} {line}, and Python deletes it at the end of that `except`"
    block = above[-1].lineno
    said = text.split("\n")[block - 1].strip()
    said = said if len(said) <= _LONGEST_LINE else f"{said[:_LONGEST_LINE]}…"
    return f"{where} {line}, within `{said}` of line {block}"


def _scope_of(tree: ast.AST, line: int) -> ast.AST:
    """Return the innermost function around a line, or the module."""
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(functions, key=lambda node: node.lineno, default=tree)


def _sets(node: ast.AST, name: str, above: tuple[_Block, ...]) -> Iterator[_Place]:
    """Yield the lines at which a scope sets a variable, with the conditions around them."""
    for child in ast.iter_child_nodes(node):
        inside = above
        if isinstance(child, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try)):
            inside = (*above, child)
        if isinstance(child, ast.ExceptHandler):
            if child.name == name:
                yield child.lineno, (*above, child)
            inside = (*above, child)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and child.id == name:
            yield child.lineno, above
        if isinstance(child, ast.alias) and (child.asname or child.name.partition(".")[0]) == name:
            yield getattr(child, "lineno", 0), above
        if isinstance(child, _SCOPES):
            if getattr(child, "name", "") == name:
                yield child.lineno, above
            continue
        yield from _sets(child, name, inside)


def _lacks(run: Path, key: str) -> str:
    """Return the configuration file that lacks a key, and the most similar key."""
    command = _text_of(run / NODE_SCRIPT)
    told = []
    for file in list(dict.fromkeys(_CONFIG.findall(command)))[:_MOST_FILES]:
        text = _text_in(run, file)
        keys = {word for pair in _KEY.findall(text) for word in pair if word}
        if not keys or key in keys or is_spent():
            continue
        near = difflib.get_close_matches(key, sorted(keys), 1)
        told.append(f"{file} has no {key}" + (f", but {near[0]}" if near else ""))
    return "; ".join(told[:2])


def _text_in(run: Path, file: str) -> str:
    """Return a text file from the run's copy, or "" if it is not in the copy."""
    place = (run / "work" / file).resolve()
    return _text_of(place) if (run / "work").resolve() in place.parents else ""


def _text_of(file: Path) -> str:
    try:
        return read_file(file, _LONGEST).decode(errors="replace")
    except OSError:
        return ""
