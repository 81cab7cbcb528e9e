"""submit: from a recipe, or a reviewed bundle, to a running job."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from trnslurm.cli.options import (
    choose_cluster,
    config_of,
    recipe_argument,
    spec_options,
    workspace_of,
)
from trnslurm.cli.output import count, dollars, echo_json, hours
from trnslurm.errors import SubmitError
from trnslurm.run import RunDir
from trnslurm.spec import make_spec
from trnslurm.submit import Job, cancel, job_of, job_of_bundle, submit


@click.command("submit")
@recipe_argument(required=False)
@click.option("-n", "--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@spec_options
@click.option("--rendered", metavar="DIR", help="Submit this reviewed bundle, byte for byte.")
@click.option("--dry-run", is_flag=True, help="Say what it would take, and stop there.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask about the size of the job.")
@click.option("-f", "--follow", is_flag=True, help="On Slurm: stay until the run has ended.")
@click.option("--detach", is_flag=True, help="On the local cluster: return, and let it run on.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: run, directory, job ids.")
def submit_command(
    recipe: str | None, nodes: int, rendered: str | None, dry_run: bool, yes: bool, follow: bool,
    detach: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Submit a job: precompile if needed, then train.

    On the local cluster it is followed until it ends, and Ctrl-C stops it.

    \b
    Example:
      trnslurm submit gpt2_zero1 --nodes 2
      trnslurm submit gpt2_zero1 --nodes 2 --cluster trn1 --dry-run
      trnslurm submit --rendered reviewed
    """
    if (recipe is None) == (rendered is None):
        raise click.UsageError("give either a RECIPE or --rendered DIR")
    if rendered is not None:
        _refuse_options(options, nodes)
        job = job_of_bundle(Path(rendered))
    else:
        assert recipe is not None
        workspace = workspace_of(options)
        cluster, preset = choose_cluster(workspace, recipe, options, to_submit=True)
        config = config_of(workspace, recipe, options, cluster, preset)
        spec = make_spec(config, nodes, name=options["name"])
        job = job_of(spec, workspace.template_dirs())
    click.echo(_size_line(job), err=not dry_run)
    if dry_run:
        return
    if not yes:
        _confirm(job)
    submit_job(job, follow=follow, detach=detach, as_json=as_json)


def submit_job(job: Job, *, follow: bool, detach: bool, as_json: bool) -> None:
    """Submit, say so, and stay with the run if that is wanted; its end is then our exit code."""
    run = submit(job, [Path(sys.argv[0]).name, *sys.argv[1:]], detach=detach)
    local = job.scheduler == "local"
    jobs = {} if local else dict(run.record().jobs)
    if as_json:
        echo_json({"run": run.name, "directory": str(run.path), "jobs": jobs})
    else:
        ids = "".join(f"  {phase} {job_id}" for phase, job_id in jobs.items())
        click.echo(f"Submitted {run.name}{ids}")
    if follow or (local and not detach):
        sys.exit(_follow(run, local=local, quiet=as_json))
    if not as_json:
        click.echo(f"See: trnslurm status {run.name}")


def _follow(run: RunDir, *, local: bool, quiet: bool) -> int:
    from trnslurm.cli.following import follow_run

    try:
        status = follow_run(run, quiet=quiet)
    except KeyboardInterrupt:
        if not local:
            click.echo(f"\n{run.name} goes on: trnslurm status {run.name}", err=True)
            return 130
        click.echo("\nStopping …", err=True)
        cancel(run)
        click.echo(f"{run.name}: CANCELLED", err=True)
        return 130
    return 0 if status.state == "COMPLETED" else 1


def _size_line(job: Job) -> str:
    name = job.recipe + (f" ({job.preset})" if job.preset else "")
    if job.scheduler == "local":
        return f"{name} on this machine, as {count(job.nodes, 'node')} ({job.instance_type})"
    line = f"{name} on {job.nodes} x {job.instance_type}: "
    if expected := job.estimate:
        line += (
            f"about {hours(expected.hours)} h, {hours(expected.node_hours)} node-hours, "
            f"{dollars(expected.cost)}; "
        )
    return line + f"at most {hours(job.limit_node_hours)} node-hours by its time limits"


def _confirm(job: Job) -> None:
    limit = job.ask_above_node_hours
    expected = job.estimate.node_hours if job.estimate else job.limit_node_hours
    if job.scheduler == "local" or limit is None or expected <= limit:
        return
    if not sys.stdin.isatty():
        raise SubmitError(
            f"{hours(expected)} node-hours is over the {limit:g} above which {job.cluster} asks: "
            "pass --yes"
        )
    click.confirm(f"That is over {limit:g} node-hours. Submit?", abort=True, err=True)


def _refuse_options(options: dict[str, Any], nodes: int) -> None:
    given = [name for name, value in options.items() if value and name != "path"]
    context = click.get_current_context()
    source = context.get_parameter_source("nodes")
    if source is not None and source.name == "COMMANDLINE":
        given.append("nodes")
    if given:
        words = shlex.join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"--rendered submits the files as they are: leave out {words}")
