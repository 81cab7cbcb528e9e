"""Chooses where a command runs: on this host, or on the host of --on, TRNSLURM_ON or a profile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trnslurm.config.search import Workspace, packaged_root, read_yaml
from trnslurm.contract.files import read_file
from trnslurm.contract.variables import Variable
from trnslurm.errors import RemoteError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.runs.search import workspace_of

if TYPE_CHECKING:
    from trnslurm.remote.ssh import Place


class Site(Frozen):
    """A host, and the cluster profile that is sent with each command."""

    place: Place
    cluster: str = ""
    """The name of the profile, or empty if none is known."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The profile's files, by their paths below a search path."""


def choose_site(on: str | None, cluster: str | None, path: Sequence[str] = ()) -> Site | None:
    """Return the host on which a command runs, or None for this host.

    `on` is the value of --on. An empty string always chooses this host.
    """
    where = "--on"
    if on is None and Variable.ON in os.environ:
        on, where = os.environ[Variable.ON], str(Variable.ON)
    if on == "":
        return None
    workspace = workspace_of(path)
    name = cluster or workspace.cluster
    if cluster is None and name and name not in dict(_profiles(workspace, name)):
        name = None  # unreadable, such as the profile of a sandbox that is down
    if on is None and (name is None or "remote" not in read_yaml(workspace.cluster_file(name))):
        return None
    from trnslurm.remote.ssh import Place, check_host  # most commands run on this host

    if on is not None:
        check_host(on, where)
        of_host = (n for n, facts in _profiles(workspace) if facts.get("remote") == on)
        name = cluster or next(of_host, name)
    if name is None:
        return Site(place=Place(on)) if on else None
    file = workspace.cluster_file(name)
    facts = read_yaml(file)
    if on is None:
        on = facts.get("remote")
        if on is None:
            return None
        on = check_host(str(on), f"{file}: remote")
    if facts.get("scheduler") == "local":  # `local` means this machine
        return None if cluster and where != "--on" else Site(place=Place(on))
    slurm = facts.get("slurm")
    return Site(
        place=Place(
            host=on,
            bin_dir=_text(slurm, "bin_dir"),
            python=_text(facts, "python"),
            activate=tuple(map(str, facts.get("activate") or ())),
        ),
        cluster=name,
        files={f"cluster-config/{name}.yaml": read_file(file).decode()},
    )


def templates_of(path: Sequence[str]) -> dict[str, str]:
    """Return the user's own templates, for rendering on the other host."""
    found: dict[str, str] = {}
    for directory in reversed(workspace_of(path).template_dirs()):
        if directory != packaged_root() / "templates":
            files = (f for f in directory.rglob("*") if f.is_file())
            found |= {f"templates/{f.relative_to(directory)}": _decoded(f) for f in files}
    return found


def _decoded(file: Path) -> str:
    try:
        return read_file(file).decode()
    except UnicodeDecodeError:
        raise RemoteError(f"{file}: not a UTF-8 text file") from None


def _profiles(
    workspace: Workspace, only: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all readable profiles, or only the given one."""
    for name, file in workspace.clusters().items():
        if only not in (None, name):
            continue
        try:
            yield name, read_yaml(file)
        except TrnslurmError:
            continue


def _text(tree: Any, key: str) -> str:
    value = tree.get(key) if isinstance(tree, Mapping) else None
    return value if isinstance(value, str) else ""
