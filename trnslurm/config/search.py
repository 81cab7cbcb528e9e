"""The search path for recipes, cluster profiles and templates: the user's directories first."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trnslurm.config.entry import Entry
from trnslurm.config.script import SCRIPT_HINT, Source, is_script
from trnslurm.contract.files import read_file
from trnslurm.contract.variables import Variable
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen

_PACKAGE = Path(__file__).resolve().parent.parent
RUN_ROOT = "~/trnslurm-runs"
"""Where runs are, unless a profile says otherwise."""
SETTINGS_FILE = "trnslurm.yaml"


def packaged_root() -> Path:
    """Return the directory that contains trnslurm's templates/, jobs/ and cluster-config/."""
    installed = _PACKAGE / "share"
    return installed if installed.is_dir() else _PACKAGE.parent


def user_root() -> Path:
    """Return the user's directory with the same layout."""
    config_home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config_home).expanduser() / "trnslurm"


class Workspace(Frozen):
    """The search path, and the user's default cluster."""

    roots: tuple[Path, ...]
    """Directories with jobs/, cluster-config/ and templates/; the first match wins."""
    cluster: str | None
    cluster_source: str

    @classmethod
    def discover(cls, paths: Sequence[str] = (), more: Sequence[Path] = ()) -> Workspace:
        """Read --path, TRNSLURM_PATH, ./trnslurm.yaml and the user's directory, in that order.

        `more` are directories that come after the user's: those of running sandboxes.
        """
        roots = [Path(p) for p in paths]
        roots += [Path(p) for p in os.environ.get(Variable.PATH, "").split(":") if p]
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"search path {root}: no such directory")
            _refuse_unreadable(root)
        cluster, source = os.environ.get(Variable.CLUSTER) or None, str(Variable.CLUSTER)
        for settings_file in (Path(SETTINGS_FILE), user_root() / SETTINGS_FILE):
            settings = _read_settings(settings_file)
            for root in (settings_file.parent / Path(p).expanduser() for p in settings["path"]):
                if not root.is_dir():
                    raise ConfigError(
                        f"{settings_file}: path names {root}, which is not a directory"
                    )
                roots.append(root)
            if cluster is None and settings["cluster"]:
                cluster, source = settings["cluster"], str(settings_file)
        roots += [user_root(), *more, packaged_root()]
        return cls(roots=tuple(roots), cluster=cluster, cluster_source=source if cluster else "")

    def recipes(self) -> dict[str, Path]:
        """Return the directory of every recipe by name."""
        found = [d for root in reversed(self.roots) for d in root.glob("jobs/*/recipe.yaml")]
        return {f.parent.name: f.parent for f in found}

    def clusters(self) -> dict[str, Path]:
        """Return the file of every cluster profile by name."""
        found = [f for root in reversed(self.roots) for f in root.glob("cluster-config/*.yaml")]
        return {f.stem: f for f in found}

    def source(self, name: str) -> Source:
        """Return where a recipe comes from, or raise an error that suggests the nearest name.

        A word that is a path names a custom script; `-m NAME` and `-- NAME` name other commands.
        """
        if not (entry := Entry(name)).is_file:
            return Source(path=Path.cwd(), command=entry)
        if is_script(name):
            if Path(name).is_dir():
                raise ConfigError(
                    f"{name} is a directory, not a script. Refer to a recipe by its name"
                )
            return Source(path=Path(name).absolute())
        known = self.recipes()
        if name not in known and name.endswith((".yaml", ".yml")) and Path(name).is_file():
            raise ConfigError(f"{name}: only submit and plan accept a pipeline file")
        if name not in known and Path("jobs", name, "recipe.yaml").is_file():
            raise ConfigError(f"unknown recipe {name!r}. To use the one in ./jobs, pass --path .")
        more = f"; {SCRIPT_HINT}"
        return Source(path=_known("recipe", name, known, "trnslurm recipes", more=more))

    def cluster_file(self, name: str, place: str = "") -> Path:
        """Return the file of a cluster profile, or raise an error that suggests the nearest name.

        The error begins with the file that contains the name, if there is one.
        """
        place = place or (self.cluster_source if name == self.cluster else "")
        sandbox, _, other = name.partition("-")
        if sandbox == "sandbox" and name not in self.clusters():
            up = f"trnslurm sandbox up --name {other}" if other else "trnslurm sandbox up"
            where = f"{place}: " if place else ""
            raise ConfigError(f"{where}cluster {name!r} is not running: start it with `{up}`")
        return _known("cluster", name, self.clusters(), "trnslurm clusters", place)

    def template_dirs(self) -> list[Path]:
        """Return the directories in which templates are looked up, in order."""
        return [d for root in self.roots if (d := root / "templates").is_dir()]


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, or raise a one-line error with the file and line."""
    return mapping_in(read_text(file), file)


def read_text(file: Path) -> bytes:
    """Return the content of a YAML file, or raise a one-line error."""
    try:
        return read_file(file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None


def mapping_in(text: bytes, file: Path) -> dict[str, Any]:
    """Return the mapping in the text of a YAML file."""
    try:
        tree = parse_yaml(text.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a UTF-8 text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        raise ConfigError(f"{place}: {getattr(error, 'problem', None) or error}") from None
    except ValueError as error:  # no such date
        raise ConfigError(f"{file}: {error}: quote values that are strings") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected `key: value` lines, found {type(tree).__name__}")
    return tree


def take_description(tree: dict[str, Any], where: str) -> str:
    """Remove and return the description, which is only for listings."""
    description = tree.pop("description", "")
    if not isinstance(description, str):
        raise ConfigError(f"{where}: description must be a string, found {str(description)[:40]!r}")
    return description


def take_remote(tree: dict[str, Any], where: str) -> None:
    """Remove the host that submits a profile's jobs, because it is not part of a job."""
    remote = tree.pop("remote", None)
    if remote is not None and not isinstance(remote, str):
        raise ConfigError(f"{where}: remote must be a string, found {str(remote)[:40]!r}")


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML text; reject repeated keys and values that contain themselves."""
    try:
        if len(text) > _SURELY_SHALLOW:
            _refuse_deep(text)
        return yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None


def yaml_line(value: Any) -> str:
    """Return a value as one line of YAML, as it would appear in a recipe."""
    said = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize, allow_unicode=True)
    return said.removesuffix("...\n").removesuffix("\n")


def find_line(file: Path, *keys: str) -> str:
    """Return the line number, and comment, of a nested key in a file; empty if it is missing."""
    try:
        text = file.read_text(encoding="utf-8")
        node: Any = yaml.compose(text, Loader=_Loader)
        for key in keys:
            node = next(value for name, value in node.value if name.value == key)
    except (OSError, ValueError, AttributeError, StopIteration, yaml.YAMLError):
        return ""
    line: int = node.start_mark.line
    comment = text.splitlines()[line].partition(" # ")[2].strip()
    return f"line {line + 1}" + (f" ({comment})" if comment else "")


# libyaml's parser if PyYAML came with it, because it is ten times faster.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TOO_LARGE = 2**63
_MOST_VALUES = 100_000
# libyaml overflows the stack, which kills the process, at about 40,000 levels.
_SURELY_SHALLOW, _DEEPEST = 10_000, 100
_MOST_DIGITS = 80  # of a binary number, with sign and underscores
# YAML 1.1 reads 1:30 as 90 (base 60) and 010 as 8; no user means that.
_OTHER_BASE = r"[^:]*:.*|[-+]?0[0-7_]+"


class _StrictLoader(_Loader):  # type: ignore[misc]
    """SafeLoader that rejects duplicate keys; YAML would silently keep the last one.

    Whole numbers have at most 63 bits; numbers in unintended bases stay strings.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        if _size(node, {}) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_VALUES:,} values, aliases counted", node.start_mark
            )
        self.deep_construct = True  # makes an alias inside the node that it refers to an error
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # <<: own keys override merged ones
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else repr(key))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        if re.fullmatch(_OTHER_BASE, node.value):
            return self.construct_scalar(node)
        if node.tag.endswith("float"):
            return self.construct_yaml_float(node)
        number = self.construct_yaml_int(node) if len(node.value) < _MOST_DIGITS else _TOO_LARGE
        if abs(number) >= _TOO_LARGE:
            raise yaml.constructor.ConstructorError(
                None, None, "a number of 2**63 or more: quote it if it is a string", node.start_mark
            )
        return number


for _tag in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _StrictLoader.construct_number)


def _refuse_deep(text: str | bytes) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise RecursionError


def _size(node: yaml.Node, known: dict[int, int], depth: int = 0) -> int:
    """Return how many values a node has, with each alias expanded."""
    if depth > _DEEPEST:  # independent of Python's own limit
        raise RecursionError
    if id(node) not in known:
        known[id(node)] = 1  # also for an alias inside the node that it refers to
        values = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = [n for v in values for n in (v if isinstance(v, tuple) else (v,))]
        known[id(node)] += sum(_size(n, known, depth + 1) for n in inner)
    return known[id(node)]


def _refuse_unreadable(root: Path) -> None:
    """Reject directories that glob would silently skip."""
    for name in ("jobs", "cluster-config", "templates"):
        try:
            with os.scandir(root / name):
                pass
        except PermissionError:
            raise ConfigError(
                f"search path {root}: its {name} directory is not readable: fix the permissions, "
                "or remove it from the path"
            ) from None
        except OSError:  # it may be missing
            pass


def _known(
    what: str, name: str, known: dict[str, Path], listing: str, place: str = "", more: str = ""
) -> Path:
    if name in known:
        return known[name]
    hint = did_you_mean(name, known) or f"; `{listing}` lists them{more}"
    where = f"{place}: " if place else ""
    raise ConfigError(f"{where}unknown {what} {name!r}{hint}")


def _read_settings(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"path": [], "cluster": None}
    if not file.is_file():
        return settings
    for key, value in read_yaml(file).items():
        if key not in settings:
            raise ConfigError(f"{file}: unknown key {key}{did_you_mean(str(key), settings)}")
        settings[key] = value
    paths = settings["path"] = (
        [settings["path"]] if isinstance(settings["path"], str) else settings["path"]
    )
    if not isinstance(paths, list) or not all(isinstance(p, str) for p in paths):
        raise ConfigError(f"{file}: path must be a list of directories, found {paths!r}")
    if settings["cluster"] is not None and not isinstance(settings["cluster"], str):
        raise ConfigError(f"{file}: cluster must be a name, found {settings['cluster']!r}")
    return settings
