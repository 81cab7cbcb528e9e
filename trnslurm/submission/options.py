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
    """The host that submits: this host, or a RemoteHost with --on (cli/remote.py)."""

    remote = False

    def find_checkpoint(self, word: str, workspace: Workspace) -> Checkpoint:
        """Return the checkpoint that a value of --from refers to."""
        return find_checkpoint(word, run_roots(workspace))

    def settle(self, run_root: str, names: Sequence[str]) -> tuple[Path, str]:
        """Return the run root of a profile, and the time stamp for naming new runs."""
        root = check_run_root(Path(run_root))
        return root, free_stamp(root, names)


AS_SLURM = 0


class JobOptions(Frozen):
    """The options of submit, render, plan and show. Fields have the names of the options."""

    workspace: Workspace
    recipe: str
    nodes: int = 1
    """The node count. AS_SLURM means as many as the tasks of a batch script need."""
    least_nodes: int | None = None
    """The smallest number of nodes, if a range was given."""
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
    """The run whose checkpoints the job receives."""
    previous: str = ""
    """In a chain: the checkpoints of the previous run, from which this run starts."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """In a pipeline: the directories of the previous runs, by stage."""
    starts_if: str = ""
    """In a pipeline: the condition that must hold when the run starts."""
    host: SubmitHost = SubmitHost()


def parse_range(text: str) -> tuple[int, int] | None:
    """Return both numbers of a range of nodes such as `2-4`, or None if it is not a range."""
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    return (int(found[1]), int(found[2])) if found else None
