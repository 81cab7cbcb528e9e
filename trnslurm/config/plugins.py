"""What other Python packages add through entry points in the groups trnslurm.trackers and so on.

The launcher looks for a plug-in only if a name is not built in, because reading the metadata of all
installed packages takes as long as a small command.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trnslurm.errors import ConfigError, TrnslurmError, did_you_mean
from trnslurm.frozen import Frozen

KINDS = ("launcher", "tracker", "notifier", "causes")
_MARK = "[trnslurm."
_LONGEST = 200


class PluginError(TrnslurmError):
    """A plug-in that cannot be used. The message names its package."""


class Plugin(Frozen):
    """An entry point of an installed package."""

    kind: str
    name: str
    value: str
    """The location of its object: MODULE:OBJECT."""
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.package} {self.version}"

    @property
    def module(self) -> str:
        """The module that contains its object."""
        return self.value.partition(":")[0].strip()

    def load(self) -> Any:
        """Import its object."""
        from importlib.metadata import EntryPoint

        with self.blamed():
            return EntryPoint(self.name, self.value, _group(self.kind)).load()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn any error from the plug-in into a one-line error that names its package."""
        try:
            yield
        except (Exception, SystemExit) as error:
            (said, *_) = str(error).strip().splitlines() or [""]
            kind = "" if said and isinstance(error, TrnslurmError) else type(error).__name__
            what = ": ".join(filter(None, [kind, said]))
            raise self.error(what[:_LONGEST]) from error

    def error(self, what: str) -> PluginError:
        """Return an error that names the package."""
        return PluginError(f"{self}: {what}")


def all_plugins() -> list[Plugin]:
    """Return the plug-ins of every kind, sorted by kind and name.

    If a package is on the path twice, the first one counts, as in importlib.metadata.entry_points.
    That function fails if any package has a damaged file. Here such a package simply has no
    plug-ins.
    """
    from importlib import metadata  # takes 40 ms

    found: dict[str, list[Plugin]] = {}
    for package in metadata.distributions():
        try:
            # Most packages have none, and parsing metadata takes most of the time.
            if _MARK in (package.read_text("entry_points.txt") or ""):
                name, points = str(package.metadata["Name"]), package.entry_points
                found.setdefault(_normal(name), [*_plugins_in(points, name, package.version)])
        except Exception:
            continue
    plugins = [plugin for each in found.values() for plugin in each]
    return sorted(plugins, key=lambda p: (KINDS.index(p.kind), p.name, p.package))


def find_plugin(kind: str, name: str) -> Plugin | None:
    """Return the plug-in with a name, or None if no package provides it."""
    found = [plugin for plugin in all_plugins() if (plugin.kind, plugin.name) == (kind, name)]
    if len(found) > 1:
        packages = " and ".join(plugin.package for plugin in found)
        raise ConfigError(f"{kind} {name} is in two packages, {packages}: uninstall one of them")
    if found and not re.fullmatch(r"\w[\w.-]*", name):  # files are named after it, too
        raise found[0].error("its name may contain only letters, digits, and _ . - between them")
    return found[0] if found else None


def plugin_named(kind: str, name: str, where: str, built_in: Iterable[str] = ()) -> Plugin:
    """Return a plug-in, or raise an error that lists the known names and their packages."""
    if plugin := find_plugin(kind, name):
        return plugin
    known = {word: word for word in built_in}
    for each in all_plugins():
        if each.kind == kind:
            known.setdefault(each.name, f"{each.name} (from {each.package})")
    there = (
        f"known: {', '.join(known.values())}" if known else "install the package that provides it"
    )
    raise ConfigError(f"{where} {name}: no such {kind}{did_you_mean(name, known)}; {there}")


def _plugins_in(points: Iterable[Any], package: str, version: str) -> Iterator[Plugin]:
    kinds = {_group(kind): kind for kind in KINDS}
    for point in points:
        if kind := kinds.get(point.group):
            yield Plugin(
                kind=kind, name=point.name, value=point.value, package=package, version=version
            )


def _group(kind: str) -> str:
    return f"trnslurm.{kind.removesuffix('s')}s"


def _normal(name: str) -> str:
    """Return a package's name in the normalized form that pip compares."""
    return re.sub(r"[-_.]+", "-", name).lower()
