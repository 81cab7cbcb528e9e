"""stacks: what each worker of a running job is doing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from trnslurm.cli.options import json_option, path_option, run_argument
from trnslurm.cli.output import Terminal, echo_json
from trnslurm.cluster.execute import stacks_in_run
from trnslurm.node.hosts import spans
from trnslurm.records.run import RunDir
from trnslurm.runs.tables import count

_SHOWN = 12
"""The number of innermost frames shown. Most readers need only the first few."""


@click.command("stacks")
@run_argument
@click.option("--full", is_flag=True, help="Print every thread of every worker.")
@path_option
@json_option
def stacks_command(run: RunDir, full: bool, console: Terminal) -> None:
    """Show what each worker of a running job is doing.

    It prints the Python stack of each worker, with the innermost frame first. Workers with the same
    stack are shown together. A worker with a different stack may be holding up the others. The
    workers keep running.

    \b
    Example:
      trnslurm stacks last
      trnslurm stacks last --full > stacks.txt
    """
    workers = stacks_in_run(run)
    if console.as_json:
        echo_json(workers)
    elif full:
        for worker in workers:
            click.echo(f"{_name(worker)}, {worker['program']}\n{worker['text'] or '  (none)'}\n")
    else:
        click.echo("\n".join(_lines(workers, f"{run.path}/")))


def _lines(workers: Sequence[Mapping[str, Any]], place: str) -> Iterator[str]:
    """Yield the groups of workers at the same location, the largest first.

    Files in the run's directory and in packages have short names.
    """
    groups: dict[tuple[tuple[str, int, str], ...], list[Mapping[str, Any]]] = {}
    for worker in workers:
        groups.setdefault(tuple(tuple(f) for f in worker["frames"]), []).append(worker)
    for frames, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        names = ",".join(spans([w["rank"] for w in members if w["rank"] is not None]))
        what = f"{count(len(members), 'worker')}: {names}" if names else _name(members[0])
        yield what if len(members) > 1 else f"{_name(members[0])}, {members[0]['program']}"
        for file, line, function in frames[:_SHOWN]:
            short = file.removeprefix(place).rpartition("/site-packages/")[2]
            yield f"  {short}:{line} {function}"
        if len(frames) > _SHOWN:
            yield f"  and {len(frames) - _SHOWN} more: --full"
        if not frames:
            yield (
                "  no Python stack: the process is stopped, still loading a library, or not a "
                "Python program"
            )
        yield ""


def _name(worker: Mapping[str, Any]) -> str:
    who = "process" if worker["rank"] is None else f"worker {worker['rank']}"
    return f"{who} on {worker['host']}"
