"""JobOptions: the job that a user asks for, on the command line or in Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from trnslurm.config.search import Workspace
from trnslurm.frozen import Frozen
from trnslurm.runs.result import Checkpoint, find_checkpoint
from trnslurm.runs.root import check_run_root, free_stamp
from trnslurm.runs.search import run_roots


class SubmitHost:
    """The host that submits: this host. With --on it is a RemoteHost (cli/remote.py)."""

    remote = False

    def find_checkpoint(self, word: str, workspace: Workspace) -> Checkpoint:
        """Return the checkpoint that a value of --from names."""
        return find_checkpoint(word, run_roots(workspace))

    def settle(self, run_root: str, names: Sequence[str]) -> tuple[Path, str]:
        """Return the run root of a profile, and the time stamp for the names of new runs."""
        root = check_run_root(Path(run_root))
        return root, free_stamp(root, names)


AS_SLURM = 0


class JobOptions(Frozen):
    """The options of submit, render, plan and show; fields are named after them."""

    workspace: Workspace
    recipe: str
    nodes: int = 1
    """AS_SLURM: as many as have room for the tasks of a batch script."""
    least_nodes: int | None = None
    """Of a range: the smallest number of nodes."""
    cluster: str | None = None
    preset: str | None = None
    settings: Sequence[str] = ()
    workers_per_node: int | None = None
    gpus: str | None = None
    cpus: int | None = None
    mem: str | None = None
    from_run: str | None = None
    spares: int | None = None
    time: str | None = None
    name: str | None = None
    sbatch: Sequence[str] = ()
    env: Sequence[str] = ()
    allow_idle: bool = False
    arguments: Sequence[str] = ()
    launcher: str | None = None
    launcher_arguments: Sequence[str] = ()
    notify: Sequence[str] = ()
    precompile: str | None = None
    after: str | None = None
    follows: str = ""
    """The run whose checkpoints it gets."""
    previous: str = ""
    """In a chain: the checkpoints of the previous run, from which this one starts."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """In a pipeline: the directories of the runs before it, by their stages."""
    starts_if: str = ""
    """In a pipeline: what must hold when it starts."""
    host: SubmitHost = SubmitHost()


def parse_range(text: str) -> tuple[int, int] | None:
    """Return both numbers of a range of nodes such as `2-4`; None: it is not one."""
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    return (int(found[1]), int(found[2])) if found else None
