"""doctor: why a run is not running, and whether nodes are healthy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

import click

from trnslurm.cli.options import cluster_option, json_option, run_name_argument, workspace_option
from trnslurm.cli.output import Terminal, echo_json, echo_table
from trnslurm.config.load import resolve_cluster
from trnslurm.config.search import Workspace
from trnslurm.health.preflight import check_nodes
from trnslurm.records.run import NodeFitness, RunDir
from trnslurm.runs.find import find_run
from trnslurm.runs.search import run_roots
from trnslurm.runs.tables import count
from trnslurm.runs.waiting import diagnose
from trnslurm.schedulers.waiting import Diagnosis

_FACTS = ("devices", "EFA", "run directory", "memory", "open files")
_SAME = ("Python", "torch", "torch-xla", "torch-neuronx")


@click.command("doctor")
@functools.partial(run_name_argument, required=False)
@cluster_option
@click.option(
    "-n",
    "--nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Number of nodes to check  [default: 1].",
)
@click.option("--timeout", default=600.0, help="Number of seconds to wait for the nodes.")
@click.option(
    "--run",
    "measure",
    is_flag=True,
    help="Run a job that measures everything training jobs depend on.",
)
@click.option(
    "--order", is_flag=True, help="Check that RUN has seen every sample exactly once per epoch."
)
@click.option("--report", metavar="FILE", help="With --run: write a file for a bug report.")
@workspace_option
@json_option
def doctor_command(
    run: str | None,
    cluster: str | None,
    nodes: int | None,
    timeout: float,
    measure: bool,
    order: bool,
    report: str | None,
    workspace: Workspace,
    console: Terminal,
) -> None:
    """Show why a run is not running, or check a cluster's nodes.

    The checks are the same ones that run before each job. Use --run for a new cluster, image or
    instance type: it runs a small job, the checkup, on the nodes. The checkup measures limits, EFA,
    versions, the compile cache and the collectives, and takes at most five minutes. The --report
    file contains no names of nodes, users or directories.

    The exit code is 1 if something is wrong.

    \b
    Example:
      trnslurm doctor last
      trnslurm doctor last --order
      trnslurm doctor --cluster trn1 --nodes 2
      trnslurm doctor --run --cluster trn1 --nodes 2 --report checkup.json
    """
    if run and (cluster or nodes or measure):
        raise click.UsageError("doctor RUN does not accept --cluster, --nodes or --run")
    if report and not measure:
        raise click.UsageError("--report requires --run")
    if order:
        if not run:
            raise click.UsageError("--order requires a RUN")
        _check_order(find_run(run, run_roots(workspace)), console)
    if run:
        found = diagnose(find_run(run, run_roots(workspace)))
        if console.as_json:
            echo_json(asdict(found) | {"ok": found.ok})
        else:
            _print_diagnosis(found)
        sys.exit(int(not found.ok))
    if (name := cluster or workspace.cluster) is None:
        raise click.UsageError("pass a RUN or --cluster NAME")
    if measure:
        from trnslurm.cli.checkup import run_checkup  # imports all that submit needs

        sys.exit(run_checkup(workspace, name, nodes or 1, timeout, report, console))
    checked = check_nodes(resolve_cluster(workspace, name), nodes or 1, timeout)
    fit = not any(node.problems for node in checked)
    if console.as_json:
        echo_json({"cluster": name, "nodes": [asdict(node) for node in checked], "ok": fit})
    else:
        _print_nodes(checked)
    sys.exit(int(not fit))


def _print_nodes(nodes: Sequence[NodeFitness]) -> None:
    facts = [name for name in _FACTS if any(name in node.facts for node in nodes)]
    same = [name for name in _SAME if any(name in node.same for node in nodes)]
    header = ("node", "fit", "clock s", *facts, *same)
    rows = [
        (
            node.host,
            "no" if node.problems else "yes",
            f"{node.clock_s:+.1f}",
            *(node.facts.get(name, "-") for name in facts),
            *(node.same.get(n, "-") for n in same),
        )
        for node in nodes
    ]
    echo_table(header, rows, right="clock s")
    lines = [f"{node.host}: {text}" for node in nodes for text in node.problems]
    lines += [f"{node.host}: warning: {text}" for node in nodes for text in node.warnings]
    if lines:
        click.echo("\n" + "\n".join(lines))


def _check_order(run: RunDir, console: Terminal) -> NoReturn:
    from trnslurm.runs.order import check_order

    found = check_order(run)
    if console.as_json:
        stretches = [
            {
                "attempt": each.attempt,
                "workers": each.workers,
                "steps": [each.steps.start, each.steps.stop - 1],
                "data": [[steps.start, steps.stop - 1] for steps in each.data],
            }
            for each in found.stretches
        ]
        echo_json(asdict(found) | {"stretches": stretches, "ok": found.ok})
        sys.exit(int(not found.ok))
    rows = [
        (
            str(each.attempt),
            str(each.workers),
            f"{each.steps.start}-{each.steps.stop - 1}",
            ", ".join(f"{steps.start}-{steps.stop - 1}" for steps in each.data),
        )
        for each in found.stretches
    ]
    echo_table(("attempt", "workers", "steps", "data steps"), rows)
    click.echo("")
    for problem in found.problems:
        click.echo(f"{found.run}: {problem}")
    if found.repeated or found.missed:
        click.echo(
            f"{found.run}: of {found.seen:,} samples seen, {found.repeated:,} were repeated "
            f"and {found.missed:,} were missed"
        )
    if found.ok:
        told = f"{found.seen:,} samples in global batches of {found.global_batch:,}"
        if found.samples:
            rest = found.seen - found.epochs * found.samples
            told += f": {count(found.epochs, 'whole epoch')} of {found.samples:,}"
            told += f", and {rest:,} of the next" if rest else ""
        how = "every sample was seen exactly once in each epoch"
        if not found.counted:
            how = "every step of the data was seen exactly once"
        click.echo(f"{found.run}: {how} ({told})")
    sys.exit(int(not found.ok))


def _print_diagnosis(found: Diagnosis) -> None:
    reason = f" ({found.reason})" if found.reason else ""
    click.echo(f"{found.run}: {found.state}{reason}")
    if found.phase:
        job = f", job {found.job_id}" if found.job_id else ""
        start = found.start or "unknown"
        click.echo(f"waits: {found.phase}{job}; start expected by Slurm: {start}")
    if found.if_submitted_now:
        click.echo(f"if submitted now: {found.if_submitted_now}")
    if found.nodes:
        states = ", ".join(f"{number} {state}" for state, number in found.nodes.items())
        needs = f"it needs {count(found.nodes_needed, 'node')}"
        click.echo(f"partition {found.partition}: {states}; {needs}")
    alike: dict[str, list[str]] = {}
    for node in found.sick:
        alike.setdefault(f"{node.state}: {node.reason}", []).append(node.name)
    for why, names in alike.items():
        click.echo(f"{', '.join(names)}: {why}")
    for host, why in found.left_out.items():
        click.echo(f"{host}: excluded from this run: {why}")
    for text in found.unknown:
        click.echo(f"unknown: {text}")
    for text in found.problems:
        click.echo(f"problem: {text}")
    if found.ok:
        click.echo("nothing to fix")
