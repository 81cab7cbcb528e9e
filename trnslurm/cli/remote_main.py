"""The entry point on the --on host: runs the command line, or a program such as @submit."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click

from trnslurm.cli import end_with
from trnslurm.cli import main as run_command_line
from trnslurm.cli.costs import graphs_lines
from trnslurm.cli.output import Terminal, echo_json
from trnslurm.cli.site import profile_here
from trnslurm.cli.submit import confirm_and_submit
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.errors import RunError
from trnslurm.remote.parcel import unpack
from trnslurm.report.history import histories_of
from trnslurm.runs.result import find_checkpoint
from trnslurm.runs.search import run_roots, workspace_of
from trnslurm.submission.options import SubmitHost
from trnslurm.submission.propose import checked

_LARGEST = 64 << 20


def main() -> NoReturn:
    """Run the command line, or one of these programs (@NAME)."""
    first, *words = sys.argv[2:]
    os.environ[Variable.ON] = ""  # this is the host of --on
    if first.startswith("@"):
        end_with(lambda: _PROGRAMS[first](words))
    run_command_line([first, *words])


def _hello(words: Sequence[str]) -> None:
    """Do nothing: when this runs, the launcher is already installed."""


def _submit(words: Sequence[str]) -> None:
    """Submit the parcel next to the working directory."""
    request = Path.cwd().parent
    sent, sys.argv, options = unpack(request / "parcel", request)
    console = Terminal(yes=True, **options)
    submission = checked(sent, SubmitHost(), console)
    for line in () if submission.sweep else graphs_lines(submission):
        click.echo(line, err=not console.dry_run)
    confirm_and_submit(submission, console)


def _settle(words: Sequence[str]) -> None:
    """Print a profile's run root on this host, and the time stamp for naming new runs."""
    root, stamp = SubmitHost().settle(words[0], words[1:])
    echo_json([str(root), stamp])


def _profile(words: Sequence[str]) -> None:
    """Print the cluster profile of this host."""
    partition, name, bin_dir, seconds = (word or None for word in words)
    echo_json(profile_here(partition, name, bin_dir, float(seconds) if seconds else None))


def _checkpoint(words: Sequence[str]) -> None:
    """Print the checkpoint that a --from value refers to."""
    found = find_checkpoint(words[0], run_roots(workspace_of()))
    echo_json({"path": str(found.path), "facts": found.facts, "passed_over": found.passed_over})


def _histories(words: Sequence[str]) -> None:
    """Write the files for a report into the working directory."""
    found = histories_of(words, run_roots(workspace_of()))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for history in found:
            files = RunFiles(history.run.path)
            named = (
                files.record_file,
                files.plan_file,
                files.config_file,
                files.metrics_file,
                *sorted(files.state.glob("*.json")),
            )
            for file in named:
                if file.is_file() and not file.is_symlink():
                    tar.add(file, f"{history.run.name}/{file.relative_to(files.path)}")
    if len(out.getvalue()) > _LARGEST:
        raise RunError(f"the records of these {len(found)} runs are too large: select fewer runs")
    Path("runs.tar.gz").write_bytes(out.getvalue())
    Path("statuses.json").write_text(json.dumps([asdict(each.status) for each in found]))


_PROGRAMS: dict[str, Callable[[Sequence[str]], object]] = {
    "@hello": _hello,
    "@profile": _profile,
    "@submit": _submit,
    "@settle": _settle,
    "@checkpoint": _checkpoint,
    "@histories": _histories,
}
