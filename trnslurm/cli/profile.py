"""profile: show where the time of a running job's steps goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import click

from trnslurm.cli.options import json_option, path_option, run_argument
from trnslurm.cli.output import Terminal, echo_json
from trnslurm.errors import RunError
from trnslurm.records.run import RunDir
from trnslurm.runs.profile import Recorded, all_recorded, ask, recorded
from trnslurm.runs.status import run_status
from trnslurm.runs.tables import count
from trnslurm.tracing import MOST_STEPS

_LEAST_SHARE = 0.005


def _ranks(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter("worker ranks, separated by commas, such as 0,8")
    return tuple(sorted({int(word) for word in words}))


@click.command("profile")
@run_argument
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_STEPS),
    default=3,
    metavar="N",
    help="Number of steps to record.",
)
@click.option(
    "--workers",
    default="0",
    metavar="RANKS",
    callback=_ranks,
    help="Workers to record, such as 0,8.",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Also record the contents of a GPU's memory, for pytorch.org/memory_viz.",
)
@path_option
@json_option
def profile_command(
    run: RunDir, steps: int, workers: tuple[int, ...], memory: bool, console: Terminal
) -> None:
    """Profile the next steps of a running job and show where the time goes.

    The workers keep training. The traces are in profile/ in the run directory. Open them with
    https://ui.perfetto.dev or chrome://tracing. For a run that has ended, the command shows what
    was recorded.

    \b
    Example:
      trnslurm profile last
      trnslurm profile last --steps 10 --workers 0,8
    """
    shown: Iterable[Recorded] = all_recorded(run) if run_status(run).final else ()
    if not shown:
        name = ask(run, steps=steps, workers=workers, memory=memory)
        console.say(
            f"Asked {count(len(workers), 'worker')} to record the next {count(steps, 'step')}"
        )
        shown = recorded(run, name, workers)
    found = []
    for each in shown:
        found.append(each)
        if console.as_json:
            continue
        who = f"worker {each.rank} on {each.host}"
        if each.problem:
            click.echo(f"{who}: {each.problem}")
            continue
        shares = [f"{kind} {v:.0%}" for kind, v in each.shares.items() if v >= _LEAST_SHARE]
        click.echo(f"{who}, {count(each.steps, 'step')} in {each.seconds:.2f} s:")
        click.echo(f"  {', '.join(shares)}")
        if each.trace:
            click.echo(f"  trace: {each.trace}")
        if each.memory:
            click.echo(f"  memory: {each.memory}")
    if console.as_json:
        echo_json([asdict(each) for each in found])
    if all(each.problem for each in found):
        raise RunError(f"{run.name}: none of the workers recorded their steps")
