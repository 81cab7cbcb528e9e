"""Chooses what a run links to if a project is too large to copy completely."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from trnslurm.errors import RenderError

MOST_MIB = 64
_MOST_FILES, _MOST_WALKED = 20_000, 200_000
# A run copies these, whatever their size.
_PROGRAMS = frozenset({
    ".py", ".pyx", ".pyi", ".sh", ".bash", ".sbatch", ".slurm", ".yaml", ".yml", ".toml", ".ini",
    ".cfg", ".conf", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".jl",
    ".r", ".lua", ".proto", ".j2", ".jinja",
})  # fmt: skip
_MOST_LINKS = 100
_LEAST_BYTES, _LEAST_FILES = 1 << 20, 500


def sizes_of(root: Path, files: Iterable[Path]) -> dict[str, int]:
    """Return the files of a project with their sizes."""
    sizes: dict[str, int] = {}
    for path in files:
        sizes[path.relative_to(root).as_posix()] = path.stat().st_size
        if len(sizes) > _MOST_WALKED:
            raise RenderError(_too_much(root, sizes))
    return sizes


def too_large(root: Path, sizes: Mapping[str, int], kept: set[str]) -> list[str]:
    """Return what a run links to because the project is too large to copy completely."""
    if sum(sizes.values()) <= MOST_MIB << 20 and len(sizes) <= _MOST_FILES:
        return []
    found = _linked(sizes, kept)
    if found is None:
        raise RenderError(_too_much(root, sizes))
    return found


def many_in_one(links: Iterable[str], copied: Iterable[str]) -> list[str]:
    """Return the data directories with so many links that one link to each is better.

    In these directories git tracks only a placeholder, such as .gitkeep.
    """
    counts = Counter(name.rpartition("/")[0] for name in links)
    many = {name for name, count in counts.items() if name and count > _MOST_LINKS}
    programs = [name for name in copied if _is_program(name)] if many else []
    return sorted(d for d in many if not any(name.startswith(f"{d}/") for name in programs))


def _too_much(root: Path, every: Mapping[str, int]) -> str:
    sizes: dict[str, int] = {}
    for name, size in every.items():
        top = name.partition("/")[0]
        sizes[top] = sizes.get(top, 0) + size
    largest = max(sizes, key=lambda name: sizes[name])
    many = f"more than {_MOST_FILES:,} files" if len(every) > _MOST_FILES else ""
    what = many or f"more than {MOST_MIB} MiB, most of it in {largest}"
    return (
        f"project {root} has {what}. Use --set 'links=[{largest}]' to link to files that the "
        "script "
        "reads, and list files that it does not need in .gitignore"
    )


def _linked(sizes: Mapping[str, int], kept: Iterable[str]) -> list[str] | None:
    """Return as few files and directories as possible whose removal lets the rest be copied.

    They are data, weights or pictures: directories in which no file is part of a program, and large
    files elsewhere. Return None if even all of them are not enough.
    """
    whole = _directories_of_data(sizes, kept)
    weights: dict[str, tuple[int, int]] = {}
    for name, size in sizes.items():
        above = next((f"{p}" for p in reversed(PurePosixPath(name).parents) if f"{p}" in whole), "")
        if not above and (_is_program(name) or name in kept):
            continue
        count, total = weights.get(above or name, (0, 0))
        weights[above or name] = (count + 1, total + size)
    found: list[str] = []
    files, left = len(sizes), sum(sizes.values())
    for name, (count, total) in sorted(weights.items(), key=lambda each: each[1][::-1])[::-1]:
        helps = (left > MOST_MIB << 20 and total >= _LEAST_BYTES) or (
            files > _MOST_FILES and count >= _LEAST_FILES
        )
        if helps:
            found.append(name)
            files, left = files - count, left - total
    return sorted(found) if files <= _MOST_FILES and left <= MOST_MIB << 20 else None


def _directories_of_data(sizes: Mapping[str, int], kept: Iterable[str]) -> set[str]:
    """Return the directories in which no file, at any depth, is part of a program."""
    programs: dict[str, bool] = defaultdict(bool)
    for name in sizes:
        has_program = name in kept or _is_program(name)
        for above in PurePosixPath(name).parents:
            programs[str(above)] |= has_program
    return {name for name, has_program in programs.items() if not has_program} - {"."}


def _is_program(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in _PROGRAMS
