"""A bundle: all files of a rendered job, including a snapshot of the code for its nodes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from trnslurm.config.schema import Config
from trnslurm.contract.files import naming
from trnslurm.contract.rundir import (
    CAPS,
    CONFIG,
    INGREDIENTS,
    INPUTS,
    MIRROR,
    NODE_SCRIPT,
    NOTIFY,
    OF_COUNT,
    PLAN,
    ROLE_SCRIPT,
    ROLES,
    STRATEGY,
    RunFiles,
)
from trnslurm.errors import RenderError
from trnslurm.frozen import Frozen
from trnslurm.render.code import sha256_of
from trnslurm.render.package import MAX_CODE_MIB, ON_NODES, package_files, read, sources, tree
from trnslurm.render.project import PROJECT_CODE, project_files

_CODE = f"{RunFiles(Path()).code}/"
_PROGRAMS = (b"#!", b"\x7fELF")
_PATTERNS = (
    "*.sbatch",
    "precompile.sh",
    "train.sh",
    NODE_SCRIPT,
    NOTIFY,
    PLAN,
    CAPS,
    MIRROR,
    CONFIG,
    STRATEGY,
    INGREDIENTS,
    INPUTS,
    ROLES,
    ROLE_SCRIPT.format("*"),
)


class Bundle(Frozen):
    """All files of a rendered job, by their paths inside the bundle's directory."""

    files: Mapping[str, bytes]
    """File names and contents."""
    known: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Known checksums of some of the files."""

    def __repr__(self) -> str:
        scripts = [name for name in self.files if "/" not in name]
        return f"<Bundle of {len(self.files)} files: {', '.join(scripts)} …>"

    def sha256(self) -> dict[str, str]:
        """Return the checksum of each file."""
        left = {name: data for name, data in self.files.items() if name not in self.known}
        found = {**self.known, **sha256_of(left)}
        return {name: found[name] for name in self.files}

    def write(self, directory: Path, like: tuple[Path, Bundle] | None = None) -> None:
        """Write all files to an existing directory.

        If `like` is the directory of another bundle with the same code, both directories share the
        code by hard links. Nothing writes to a run's code later.
        """
        for name, data in self.files.items():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if like and name.startswith(_CODE) and like[1].files.get(name) == data:
                with suppress(OSError):  # another file system, or one without them
                    target.hardlink_to(like[0] / name)
                    continue
            with naming(target):
                target.write_bytes(data)
            if name.startswith(PROJECT_CODE) and data.startswith(_PROGRAMS):
                target.chmod(target.stat().st_mode | 0o100)


def read_bundle(directory: Path) -> Bundle:
    """Return the bundle in a directory, byte for byte, without the results of a run."""
    if not directory.is_dir():
        raise RenderError(f"{directory}: no such directory")
    if not (directory / PLAN).is_file():
        raise RenderError(f"{directory} is not a rendered bundle: it has no {PLAN}")
    places = (directory, *directory.glob(OF_COUNT.format("*")))
    found = [f for place in places for pattern in _PATTERNS for f in place.glob(pattern)]
    found += [f for f in RunFiles(directory).code.rglob("*") if "__pycache__" not in f.parts]
    if link := next((f for f in found if f.is_symlink()), None):
        raise RenderError(f"{link} is a link, but a bundle cannot contain links: render it again")
    files = {str(f.relative_to(directory)): read(f) for f in found if f.is_file()}
    return Bundle(files=dict(sorted((files | kept_directories()).items())))


def kept_directories() -> dict[str, bytes]:
    """Return the empty directories of a bundle, as files.

    Slurm writes no log if the directory is missing, and git does not store empty directories.
    """
    files = RunFiles(Path())
    return {f"{directory}/.keep": b"" for directory in (files.logs, files.state)}


def diff(old: Bundle, new: Bundle) -> Iterator[str]:
    """Yield the unified diff of two bundles, line by line."""
    was, now = sources(old.files), sources(new.files)
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name), now.get(name)
        if before != after:
            yield from difflib.unified_diff(
                _lines(before), _lines(after), f"old/{name}", f"new/{name}", lineterm=""
            )


def _lines(data: bytes | None) -> list[str]:
    return [] if data is None else data.decode(errors="replace").splitlines()


def snapshot(config: Config, *, parts: Sequence[str] = ON_NODES) -> dict[str, bytes]:
    """Return the code for the nodes: the job's directory and parts of this package."""
    files, recipe, job_dir = package_files(parts), config.recipe, config.code_dir
    if recipe.project:
        return files | project_files(job_dir, recipe.entry, recipe.links, recipe.arguments)
    jobs = job_dir.resolve().parent
    for file in job_dir.rglob("*"):
        if file.is_symlink() and not file.resolve().is_relative_to(jobs):
            raise RenderError(f"{file} is a link to a file outside {jobs}: copy the file instead")
    files |= dict(tree(job_dir, f"code/{config.code_name}"))
    if f"code/{config.code_name}/{recipe.entry}" not in files:
        raise RenderError(f"{job_dir}: the recipe's entry {recipe.entry} does not exist")
    mib = sum(map(len, files.values())) / 2**20
    if mib > MAX_CODE_MIB:
        raise RenderError(
            f"{job_dir} is {mib:.0f} MiB, but a snapshot can be at most {MAX_CODE_MIB} MiB: "
            "move data out of the directory"
        )
    return files
