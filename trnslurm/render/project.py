"""The directory of a custom script: what of it a run takes along, and what it links to."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trnslurm.errors import RenderError
from trnslurm.frozen import Frozen
from trnslurm.rundir import RunFiles, read_file

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

PROJECT_FACTS = str(RunFiles(Path()).project_file)
PROJECT_CODE = "code/project/"
_MOST_MIB, _MOST_FILES = 64, 20_000
_NEVER = ("__pycache__", "node_modules")


class _Rules(Frozen, kw_only=False):
    """A directory's .gitignore."""

    directory: Path
    spec: GitIgnoreSpec

    def says(self, path: Path, *, is_dir: bool) -> bool | None:
        """Return whether it ignores a path; None if it says nothing of it."""
        name = path.relative_to(self.directory).as_posix()
        return self.spec.check_file(f"{name}/" if is_dir else name).include


def _read_rules(directory: Path) -> _Rules:
    from pathspec import GitIgnoreSpec  # few commands need it

    lines = read_file(directory / ".gitignore").decode(errors="replace").splitlines()
    return _Rules(directory, GitIgnoreSpec.from_lines(lines))


class _Walk:
    """A walk through a project, file by file, in the order of names."""

    def __init__(self, root: Path, linked: Sequence[Path]) -> None:
        self.root, self.linked = root, linked
        self.links: dict[str, str] = {}
        self.left_out: list[str] = []

    def files(self, directory: Path, rules: tuple[_Rules, ...] = ()) -> Iterator[Path]:
        """Yield what is taken along; collect the links, and what is ignored."""
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            raise RenderError(f"{directory}: cannot be read ({error.strerror})") from None
        if (directory / ".gitignore").is_file():
            rules = (*rules, _read_rules(directory))
        for entry in entries:
            path = Path(entry.path)
            if path in self.linked:
                self._link(path)
            elif entry.name.startswith(".") or entry.name in _NEVER or path.suffix == ".pyc":
                continue
            elif self._ignored(path, rules, is_dir=entry.is_dir()):
                self.left_out.append(path.relative_to(self.root).as_posix())
            elif entry.is_symlink() and not _inside(path, self.root):
                self._link(path)
            elif entry.is_dir(follow_symlinks=False):
                if not (path / "pyvenv.cfg").exists():
                    yield from self.files(path, rules)
            elif stat.S_ISREG(entry.stat().st_mode):
                yield path

    def _link(self, path: Path) -> None:
        self.links[path.relative_to(self.root).as_posix()] = str(path.resolve())

    @staticmethod
    def _ignored(path: Path, rules: tuple[_Rules, ...], *, is_dir: bool) -> bool:
        """As git: the nearest .gitignore that says anything decides."""
        said = (rule.says(path, is_dir=is_dir) for rule in reversed(rules))
        return next((word for word in said if word is not None), False)


def _inside(path: Path, root: Path) -> bool:
    """Check whether a link leads to a file of the project, which is copied; else it stays one."""
    real = path.resolve()
    return real.is_relative_to(root.resolve()) and real.is_file()


def project_files(root: Path, entry: str, links: Sequence[str]) -> dict[str, bytes]:
    """Return a project's files as those of a bundle, with what is said of the others."""
    if not root.is_dir():
        raise RenderError(f"project {root}: no such directory")
    linked = [root / name for name in links]
    for path in linked:
        if not path.exists():
            raise RenderError(f"links: {path} does not exist")
    walk = _Walk(root, linked)
    files: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for path in walk.files(root):
        name = path.relative_to(root).as_posix()
        top = name.partition("/")[0]
        sizes[top] = sizes.get(top, 0) + path.stat().st_size
        if sum(sizes.values()) > _MOST_MIB << 20 or len(files) >= _MOST_FILES:
            raise RenderError(_too_much(root, sizes, len(files)))
        try:
            files[f"{PROJECT_CODE}{name}"] = read_file(path, _MOST_MIB << 20)
        except OSError as error:
            raise RenderError(f"{path}: cannot be read ({error.strerror})") from None
    if f"{PROJECT_CODE}{entry}" not in files:
        why = "is ignored by .gitignore" if (root / entry).is_file() else "is not there"
        raise RenderError(f"project {root}: {entry} {why}")
    facts: dict[str, Any] = {"links": walk.links, "left_out": sorted(walk.left_out)}
    files[PROJECT_FACTS] = f"{json.dumps(facts, indent=2)}\n".encode()
    return files


def _too_much(root: Path, sizes: dict[str, int], count: int) -> str:
    largest = max(sizes, key=lambda name: sizes[name])
    many = f"more than {_MOST_FILES:,} files" if count >= _MOST_FILES else ""
    what = many or f"more than {_MOST_MIB} MiB, most of it in {largest}"
    return (
        f"project {root} has {what}: --set 'links=[{largest}]' links to what the script reads "
        "there; what it does not need belongs into .gitignore"
    )
