"""The project of a custom script: the files that a run copies, and those that it links to."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from trnslurm.config.above import names_above
from trnslurm.config.entry import Entry
from trnslurm.contract.files import read_file
from trnslurm.contract.rundir import NODE_SCRIPT, RunFiles
from trnslurm.errors import RenderError
from trnslurm.frozen import Frozen
from trnslurm.render.large import MOST_MIB, many_in_one, sizes_of, too_large

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

PROJECT_FACTS = str(RunFiles(Path()).project_file)
PROJECT_CODE = "code/project/"
_RELATIVE_IMPORT = re.compile(rb"^from \.+[\w.]* import ", re.MULTILINE)
_READS_VARIABLE = re.compile(
    rb"""\b(?:environ(?:\.get|\.pop)?|getenv)\s*[(\[]\s*["']([A-Z][A-Z0-9_]*)["']"""
)
_READS_IN_YAML = re.compile(rb"\$\{oc\.env: *([A-Z][A-Z0-9_]*)")  # of OmegaConf
# A job has these already, or should not get them: secrets belong in files.
_OF_A_JOB = re.compile(
    r"PATH|HOME|USER|LANG|TMPDIR|PWD|SHELL|PYTHONPATH|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|(SLURM|TRNSLURM|NEURON_RT)_\w+|\w*(KEY|TOKEN|SECRET|PASSWORD)\w*"
)
_MPI = re.compile(rb"^\s*(?:from|import) +mpi4py\b", re.MULTILINE)
_STOPS = re.compile(rb"\b(?:should_stop|RunCallback)\b")
# Fabric follows the variables that trnslurm sets, whatever its num_nodes is.
_LIGHTNING = re.compile(
    rb"^(?:from|import) +(?:pytorch_)?lightning\b"
    rb"(?!\.fabric\b|(?:\.pytorch)?\.(?:utilities|loggers)\b| +import +Fabric\b)",
    re.MULTILINE,
)
_ONE_NODE = re.compile(rb"""^[^#\n]*\bnum_nodes["']?\s*[:=]\s*1\b""", re.MULTILINE)
# add_argument("--num_nodes", type=int, default=1), cfg.get("num_nodes", 1)
_ONE_BY_DEFAULT = re.compile(rb"""["']((?:--)?num[_-]nodes)["']\s*,[^)\n]*\b1\b\s*\)""")
_OF_TESTS = re.compile(r"(?:.*/)?tests?/.*")
_NODES_SET = re.compile(rb"""\bnum[_-]nodes["']?[= ]\s*\d""")
_GIT_TIMEOUT_S = 20
# Options that name what a script reads, and options with similar names that do not.
# Examples: torchtitan's --hf_assets_path, and --model_name_or_path of transformers' examples.
_READS = re.compile(
    r"(?i)data|input|corpus|assets|tokenizer|pretrained|name_or_path"
    r"|(train|valid(ation)?|test)_(file|dir|path)"
)
_WRITES = re.compile(r"(?i)out|save|log|cache|checkpoint|ckpt|result")
_MOST_SCRIPT = 1 << 20
_DATA_NAME = r"((?:\.{1,2}/)?(?:data|datasets?|inputs?|corpus|corpora)(?:/[\w.-]+)*)"
_DATA = re.compile(rf"""["']{_DATA_NAME}/?["']""")
# Settings files, in which strings need no quotation marks. A key does not count.
_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf")
_DATA_OF_SETTINGS = re.compile(rf"""(?<![\w./-]){_DATA_NAME}/?(?![\w./:-])""")
_OF_DATA = re.compile(rf"{_DATA_NAME}/?")
# A part of a path that says that it is data: data, train_data, datasets-small; not metadata.
_HOLDS_DATA = re.compile(r"(?i)(?:.*[_-])?(?:data|datasets?|inputs?|corpus|corpora)(?:[_-].*)?")
# `tokenizer_path: ./models/bpe.json`, as in YAML, JSON and TOML.
_SETTING = re.compile(
    r"""(?m)^[ \t{-]*["']?([\w.-]+)["']?[ \t]*[:=][ \t]*["']?([\w./-]+)["']?[ \t]*,?"""
    r"""[ \t]*(?:#.*)?$"""
)
_OF_SHELL = re.compile(r"#!.*\b(?:ba|da|z|k)?sh\b")
_OWN_DIRECTORY = re.compile(r"(?:\$\{?(?:PWD|SLURM_SUBMIT_DIR)\}?|\$\(pwd\)|`pwd`)/")
# Files that no script reads. They are left out without a mention.
_NEVER = (
    *("__pycache__", "node_modules", ".git", ".gitignore", ".gitattributes", ".github", ".venv"),
    *(".idea", ".vscode", ".ipynb_checkpoints", ".DS_Store", ".pre-commit-config.yaml", ".tox"),
)


class _Rules(Frozen, kw_only=False):
    """The rules of a directory's .gitignore."""

    directory: Path
    spec: GitIgnoreSpec

    def ignores(self, path: Path, *, is_dir: bool) -> bool | None:
        """Return whether the rules ignore a path, or None if no rule matches."""
        name = path.relative_to(self.directory).as_posix()
        return self.spec.check_file(f"{name}/" if is_dir else name).include


def _read_rules(directory: Path) -> _Rules:
    from pathspec import GitIgnoreSpec  # few commands need it

    lines = read_file(directory / ".gitignore").decode(errors="replace").splitlines()
    return _Rules(directory, GitIgnoreSpec.from_lines(lines))


def _rules_above(root: Path) -> tuple[_Rules, ...]:
    """Return the rules above, up to the repository's root; empty if they ignore this directory."""
    parents = [*root.parents]
    top = next((n for n, parent in enumerate(parents) if (parent / ".git").exists()), None)
    if top is None or (root / ".git").exists():
        return ()
    above = [p for p in reversed(parents[: top + 1]) if (p / ".gitignore").is_file()]
    rules = tuple(map(_read_rules, above))
    ways = (root, *parents[:top])
    ignored = any(
        rule.ignores(path, is_dir=True)
        for rule in rules
        for path in ways
        if rule.directory in path.parents
    )
    return () if ignored else rules


class _Walk:
    """A walk through a project, file by file and sorted by name.

    Hidden files that git does not track are left out.
    """

    def __init__(
        self, root: Path, linked: Sequence[Path], read: Sequence[Path], kept: Sequence[Path]
    ) -> None:
        self.root, self.linked, self.read = root, linked, read
        self.links: dict[str, str] = {}
        self.left_out: list[str] = []
        self._tracked = _tracked(root) | _with_parents(
            path.relative_to(root).as_posix() for path in kept
        )

    def all(self) -> Iterator[Path]:
        """Yield the project files to copy, by the ignore rules of the whole repository."""
        return self.files(self.root, _rules_above(self.root))

    def files(self, directory: Path, rules: tuple[_Rules, ...] = ()) -> Iterator[Path]:
        """Yield the files to copy; collect the links and the ignored files."""
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
            elif entry.name in _NEVER or path.suffix == ".pyc" or _is_cache(entry.name):
                continue
            elif (
                self._hidden(path)
                or (entry.is_symlink() and _is_loop(path))
                or self._ignored(path, rules, is_dir=entry.is_dir())
            ):
                self._leave_out(path)
            elif entry.is_symlink() and not _inside(path, self.root):
                self._link(path)
            elif entry.is_dir(follow_symlinks=False):
                if not (path / "pyvenv.cfg").exists() and not _is_run(path):
                    yield from self.files(path, rules)
            elif stat.S_ISREG(entry.stat().st_mode):
                yield path

    def _leave_out(self, path: Path) -> None:
        """Leave out a path, but link to data, and to paths that the script's arguments name in it.

        In a directory that they name, some files can be ignored, such as a model's *.json.
        """
        read = [named for named in self.read if named == path or path in named.parents]
        inside = any(named in path.parents for named in self.read)
        if (inside or self._is_data(path)) and not path.name.startswith("."):
            read = [path]
        for named in read:
            self._link(named)
        if path not in read:
            self.left_out.append(path.relative_to(self.root).as_posix())

    def link_to(self, paths: Iterable[Path]) -> None:
        """Link to paths that were left out, individually or with their directory."""
        left_out = {self.root / name for name in self.left_out}
        for path in paths:
            if not left_out.isdisjoint((path, *path.parents)):
                self._link(path)
        self.left_out = [name for name in self.left_out if name not in self.links]

    def link_whole(self, name: str) -> None:
        """Link to a directory instead of to its contents."""
        self.links = {n: to for n, to in self.links.items() if not n.startswith(f"{name}/")}
        self._link(self.root / name)

    def _is_data(self, path: Path) -> bool:
        """Check whether a path's name says that it is data: perhaps only a library mentions it."""
        parts = path.relative_to(self.root).parts
        return any(map(_HOLDS_DATA.fullmatch, parts)) and not any(map(_WRITES.search, parts))

    def _link(self, path: Path) -> None:
        self.links[path.relative_to(self.root).as_posix()] = str(path.resolve())

    def _hidden(self, path: Path) -> bool:
        """Check for a hidden file, except files that git tracks and that are not a .env."""
        if not path.name.startswith("."):
            return False
        tracked = path.relative_to(self.root).as_posix() in self._tracked
        return not tracked or path.name.startswith(".env")

    def _ignored(self, path: Path, rules: tuple[_Rules, ...], *, is_dir: bool) -> bool:
        """Check whether git would ignore a path. The nearest .gitignore with a match decides."""
        if path.relative_to(self.root).as_posix() in self._tracked:
            return False
        answers = (rule.ignores(path, is_dir=is_dir) for rule in reversed(rules))
        return next((answer for answer in answers if answer is not None), False)


def _tracked(root: Path) -> frozenset[str]:
    """Return hidden or ignored files that git tracks anyway, with their directories.

    Without git, or outside a repository, there are none.
    """
    words = ("ls-files", "-z", "--cached")
    names = {*_git(root, *words, "--ignored", "--exclude-standard")}
    names.update(_git(root, *words, "--", ":(glob)**/.*", ":(glob)**/.*/**"))
    return _with_parents(names)


def _with_parents(names: Iterable[str]) -> frozenset[str]:
    """Return relative paths and the directories above them."""
    found = {*names}
    above = {str(parent) for name in found for parent in PurePosixPath(name).parents}
    return frozenset(above - {"."}).union(found)


def _git(root: Path, *words: str) -> list[str]:
    """Return what git prints in a directory, split at NUL, or nothing if git fails."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words],
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return os.fsdecode(done.stdout).split("\0")[:-1] if done.returncode == 0 else []


def _is_loop(path: Path) -> bool:
    """Check whether a link leads back to itself."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _is_cache(name: str) -> bool:
    """Check for a tool's cache directory, such as .pytest_cache."""
    return name.startswith(".") and name.endswith("cache")


def _is_run(directory: Path) -> bool:
    """Check for a run directory, such as that of an earlier run of this project."""
    return RunFiles(directory).is_run and (directory / NODE_SCRIPT).exists()


def _inside(path: Path, root: Path) -> bool:
    """Check whether a link points to a file inside the project, which is copied."""
    real = path.resolve()
    return real.is_relative_to(root.resolve()) and real.is_file()


def _words_of(script: Path) -> list[str]:
    """Return the words of a shell script's commands, or nothing for any other file."""
    text = _text_of(script)
    if not _OF_SHELL.match(text):
        return []
    words: list[str] = []
    for line in _OWN_DIRECTORY.sub("./", text.replace("\\\n", " ")).splitlines():
        try:
            words += shlex.split(line, comments=True)
        except ValueError:  # a string that spans lines
            words += line.split()
    return words


def _data_of(file: Path) -> Iterator[str]:
    """Yield the relative data paths among the strings of a Python script or settings file."""
    found = _DATA_OF_SETTINGS if file.suffix in _SETTINGS else _DATA
    if file.suffix in (".py", *_SETTINGS):
        yield from (match[1] for match in found.finditer(_text_of(file)))


def _values_set(file: Path, *, any_key: bool = False) -> Iterator[str]:
    """Yield the values in a settings file whose keys suggest that the values are read.

    With any_key, yield all values except those that seem to be written.
    """
    for key, value in _SETTING.findall(_text_of(file)) if file.suffix in _SETTINGS else ():
        reads = any_key or _READS.search(key)
        if reads and not _WRITES.search(key) and not (any_key and _WRITES.search(value)):
            yield value


def _text_of(file: Path) -> str:
    """Return the text of a script or settings file; empty if it is not readable."""
    try:
        return read_file(file, _MOST_SCRIPT).decode(errors="replace")
    except OSError:
        return ""


def _values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the values among a script's arguments, each with its option, if it has one."""
    before = ""
    for word in arguments:
        option, equals, value = word.partition("=")
        yield (option, value) if equals else (before, word)
        before = "" if equals or not word.startswith("-") else word


def _values_read(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the paths of input files that a script's arguments name."""
    for option, value in _values(arguments):
        reads = _READS.search(option) or _OF_DATA.fullmatch(value)
        if value and reads and not _WRITES.search(option):
            yield value


def _settings_of(arguments: Sequence[str], root: Path) -> Iterator[Path]:
    """Yield the settings files in a project that a script's arguments name."""
    for option, value in _values(arguments):
        path = Path(os.path.normpath(root / value))
        if path.suffix not in _SETTINGS or not path.is_relative_to(root) or _READS.search(option):
            continue
        with suppress(OSError):
            if path.is_file() and path.stat().st_size <= _MOST_SCRIPT:
                yield path


def _beside(names: Iterable[str], root: Path) -> dict[str, str]:
    """Return links to data next to a project: a script's `../data/x` is under `../data`."""
    tops = {name.split("/")[1] for name in names if name.startswith("../")}
    found = {f"../{top}": root.parent / top for top in sorted(tops)}
    return {name: str(path.resolve()) for name, path in found.items() if path.exists()}


def _environments(words: Sequence[str], root: Path) -> Iterator[Path]:
    """Yield the virtual environments in a project from which a script starts programs."""
    for word in words:
        path = Path(os.path.normpath(root / word))
        above = path.parents if "/" in word and path.is_relative_to(root) else ()
        inside = (p for p in above if p != root and p.is_relative_to(root))
        yield from (p for p in inside if (p / "pyvenv.cfg").is_file())


def _inside_of(root: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the named paths that exist inside a project."""
    for name in names:
        path = Path(os.path.normpath(root / name))
        if path != root and path.is_relative_to(root) and path.exists():
            yield path


def project_files(
    root: Path, entry: str, links: Sequence[str], arguments: Sequence[str] = ()
) -> dict[str, bytes]:
    """Return a project's files for a bundle, and a JSON file that lists what is not copied.

    Files that git ignores are linked to if their names suggest data, or if an argument, a command
    in a shell script or a settings file says that they are read. So is data next to the project.
    Settings files that an argument names are copied.
    """
    if not root.is_dir():
        raise RenderError(f"project {root}: no such directory")
    linked = [root / name for name in links]
    for path in linked:
        if not path.exists():
            raise RenderError(f"links: {path} does not exist")
    script = root / entry if Entry(entry).is_file else root
    told = _words_of(script)
    named = [*_values_read([*arguments, *told])]
    settings = [*_settings_of(arguments, root)]
    data = [name for file in (script, *settings) for name in _data_of(file)]
    set_there = [name for file in settings for name in _values_set(file)]
    environments = {*_environments(told, root), *_environments(told, script.parent)}
    linked += environments
    # Its directory may be ignored as a whole.
    read = [*_inside_of(root, [*named, *set_there]), *environments]
    read += [p for p in _inside_of(script.parent, _values_read(told)) if p.is_relative_to(root)]
    walk = _Walk(root, linked, read, settings)
    walk.links |= _beside(filter(_OF_DATA.fullmatch, [*named, *data, *set_there]), root)
    files: dict[str, bytes] = {}
    sizes = sizes_of(root, walk.all())
    if walk.left_out:
        walk.link_to(_inside_of(root, (n for file in sizes for n in _values_set(root / file))))
        others = (n for file in sizes for n in _values_set(root / file, any_key=True))
        walk.link_to(path for path in _inside_of(root, others) if path.is_file())
    for name in many_in_one(walk.links, sizes):
        walk.link_whole(name)
        sizes = {file: size for file, size in sizes.items() if not file.startswith(f"{name}/")}
    large = too_large(root, sizes, {entry, *(p.relative_to(root).as_posix() for p in settings)})
    walk.links |= {name: str((root / name).resolve()) for name in large}
    for name in sizes:
        path = root / name
        if any(path == root / link or root / link in path.parents for link in large):
            continue
        try:
            files[f"{PROJECT_CODE}{name}"] = read_file(path, MOST_MIB << 20)
        except OSError as error:
            raise RenderError(f"{path}: cannot be read ({error.strerror})") from None
    if Entry(entry).is_file and f"{PROJECT_CODE}{entry}" not in files:
        why = "is ignored by .gitignore" if (root / entry).is_file() else "does not exist"
        raise RenderError(f"project {root}: {entry} {why}")
    facts: dict[str, Any] = {"entry": entry, "links": walk.links, "left_out": sorted(walk.left_out)}
    facts |= {"large": large} if large else {}
    texts = {file: _text_of(file) for file in (script, *settings) if file.is_file()}
    facts |= {"above": above} if (above := [*names_above(texts, root)]) else {}
    files[PROJECT_FACTS] = f"{json.dumps(facts, indent=2)}\n".encode()
    return files


def module_of(files: Mapping[str, bytes], entry: str) -> str:
    """Return the module name of a script that Python must start as a module; otherwise empty.

    Such a script is in a package and has a relative import, which fails in a script that is started
    by path.
    """
    path = PurePosixPath(entry)
    if not _RELATIVE_IMPORT.search(files.get(f"{PROJECT_CODE}{path}", b"")):
        return ""
    parts = [path.stem]
    for parent in path.parents:
        if f"{PROJECT_CODE}{parent}/__init__.py" not in files:
            break
        parts.insert(0, parent.name)
    root = path.parents[len(parts) - 1]  # of the packages: the project, or its src
    return ".".join(parts) if len(parts) > 1 and str(root) in (".", "src") else ""


def variables_read(files: Mapping[str, bytes]) -> set[str]:
    """Return the variables that a project's Python and YAML files read, except a job's own."""
    found: set[str] = set()
    for name, data in files.items():
        if name.startswith(PROJECT_CODE) and name.endswith((".py", ".yaml", ".yml")):
            reads = _READS_VARIABLE if name.endswith(".py") else _READS_IN_YAML
            found.update(match[1].decode() for match in reads.finditer(data))
    return {name for name in found if not _OF_A_JOB.fullmatch(name)}


def imports_mpi(files: Mapping[str, bytes], entry: str) -> bool:
    """Check whether a script imports mpi4py."""
    return bool(_MPI.search(files.get(f"{PROJECT_CODE}{entry}", b"")))


def asks_to_stop(files: Mapping[str, bytes]) -> bool:
    """Check whether a project seems to ask whether it should stop, directly or in a callback."""
    own = (d for n, d in files.items() if n.startswith(PROJECT_CODE) and n.endswith(".py"))
    return any(_STOPS.search(data) for data in own)


def one_node_in(files: Mapping[str, bytes], entry: str, nodes: int) -> tuple[str, str]:
    """Return the file that seems to set Lightning's num_nodes to 1, and the argument to change it.

    Both are empty if no file sets it. A Trainer without num_nodes uses the job's number of nodes.
    """
    own = {
        path: data
        for name, data in files.items()
        if name.startswith(PROJECT_CODE) and name.endswith((".py", ".yaml", ".yml"))
        if not _OF_TESTS.fullmatch(path := name.removeprefix(PROJECT_CODE))
    }
    if _NODES_SET.search(files.get(NODE_SCRIPT, b"")) or not any(
        _LIGHTNING.search(data) for name, data in own.items() if name.endswith(".py")
    ):
        return "", ""
    hydra = b"hydra.main" in own.get(entry, b"")
    for name, data in own.items():
        if found := _ONE_BY_DEFAULT.search(data):
            option = found[1].decode()
            word = f"++{option}={nodes}" if hydra else f"--{option.lstrip('-')}={nodes}"
            return name, word
        if _ONE_NODE.search(data):
            word = f"{'' if hydra else '--'}trainer.num_nodes={nodes}"
            return name, word if hydra or not name.endswith(".py") else ""
    return "", ""
