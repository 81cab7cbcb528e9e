"""resume: a run goes on where it was."""

from __future__ import annotations

import click

from trnslurm.cli.options import json_option, path_option, run_argument, run_roots, workspace_of
from trnslurm.cli.output import echo_json
from trnslurm.cli.started import report_started, say
from trnslurm.errors import ConfigError
from trnslurm.runs import find_run
from trnslurm.submit import resume


@click.command("resume")
@run_argument
@click.option("-n", "--nodes", type=int, help="Go on with this number of nodes.")
@path_option
@click.option("-f", "--follow", is_flag=True, help="On Slurm: stay until the run has ended.")
@click.option("--detach", is_flag=True, help="On the local cluster: return, and let it run on.")
@json_option
def resume_command(
    run: str, nodes: int | None, path: tuple[str, ...], follow: bool, detach: bool, as_json: bool
) -> None:
    """Submit a run again that has not completed: it goes on from its newest checkpoint.

    In the same directory, with the same code and configuration, whatever ended it. Nothing of it
    may be running, and Slurm must say so. The runs of a chain that wait for it are submitted too.

    With --nodes it goes on with another number of nodes: the global batch is kept, and graphs that
    are not compiled for that number are compiled first.

    A run that Slurm holds because its launch failed is released instead.

    \b
    Example:
      trnslurm resume last
      trnslurm resume last --nodes 4
    """
    if nodes is not None and nodes < 1:
        raise ConfigError(f"--nodes {nodes}: a job needs at least one node")
    workspace = workspace_of({"path": path})
    directory = find_run(run, run_roots(workspace))
    done = resume(
        directory, nodes=nodes, template_dirs=workspace.template_dirs(), detach=detach, say=say
    )
    if done.released and as_json:
        echo_json({"run": directory.name, "directory": str(directory.path), "jobs": {},
                   "released": list(done.released)})  # fmt: skip
        return
    if done.released:
        click.echo(f"Released job {', '.join(done.released)} of {directory.name}")
        return
    local = directory.record().scheduler == "local"
    report_started(done.runs, local=local, follow=follow, detach=detach, as_json=as_json)
