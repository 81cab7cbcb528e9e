"""The marks on a job's Settings that say which keys of `train` shape its graphs, read as text.

A job that builds on trnslurm.train annotates its settings (`lr: Free[float]`); the launcher neither
imports torch nor runs a job's code to see them. trnslurm/train/settings.py says what they mean.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

SETTINGS = "Settings"


def marked(files: Mapping[str, bytes], entry: str, mark: str) -> set[str]:
    """Return the marked fields of the entry script's class Settings and of its bases."""
    return {
        field.target.id
        for settings in _classes(files, entry, SETTINGS)
        for field in settings.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if mark in {node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)}
    }


def _classes(files: Mapping[str, bytes], path: str, name: str) -> Iterator[ast.ClassDef]:
    """Yield a class and its bases, from whichever files they are imported."""
    try:
        tree = ast.parse(files.get(path, b""))
    except (SyntaxError, ValueError):
        return  # it will not run either
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from _classes(files, path, base.id)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    module = f"code/{node.module.replace('.', '/')}"
                    for file in (f"{module}.py", f"{module}/__init__.py"):
                        yield from _classes(files, file, alias.name)
