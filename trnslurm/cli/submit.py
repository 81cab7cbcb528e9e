"""submit: start a job from a recipe or from a reviewed bundle."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.cli.chain import links_of
from trnslurm.cli.follow import report_started, say
from trnslurm.cli.graphs import graphs_ahead_line, graphs_line
from trnslurm.cli.options import (
    choose_cluster,
    config_of,
    parse_nodes,
    recipe_argument,
    spec_options,
    workspace_of,
)
from trnslurm.cli.output import count, dollars, hours
from trnslurm.cluster.cache import CompileCache
from trnslurm.errors import ConfigError, SubmitError
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.render.project import PROJECT_CODE
from trnslurm.runs.result import no_result
from trnslurm.submit.here import check_here
from trnslurm.submit.job import Job, Link, alone, make_job, read_job
from trnslurm.submit.precompile import Need, jobs_ahead, need_of, needs_of
from trnslurm.submit.submit import submit_ahead, submit_chain

# Options that go with --rendered; everything else is fixed in the bundle's files.
_OF_A_BUNDLE = {"rendered", "path", "dry_run", "yes", "follow", "detach", "as_json"}


@click.command("submit")
@recipe_argument(required=False, with_arguments=True)
@click.option("-n", "--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@spec_options
@click.option(
    "--precompile",
    type=click.Choice(["auto", "always", "never"]),
    help="auto: submit a precompile job if graphs are missing; never: training compiles.",
)
@click.option(
    "--elastic",
    metavar="N,N",
    help="Also compile for these node counts, so that a resume on them starts at once.",
)
@click.option("--chain", is_flag=True, help="Also submit the presets that follow.")
@click.option("--rendered", metavar="DIR", help="Submit this reviewed bundle, byte for byte.")
@click.option("--dry-run", is_flag=True, help="Show what it would take; submit nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation of the job's size.")
@click.option(
    "-f", "--follow", is_flag=True, help="On Slurm: wait until the run ends, and show its progress."
)
@click.option(
    "--detach", is_flag=True, help="On the local cluster: return at once; the run continues."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: run, directory, job ids.")
def submit_command(
    recipe: str | None, nodes: int, elastic: str | None, chain: bool, rendered: str | None,
    dry_run: bool, yes: bool, follow: bool, detach: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Submit a job: precompile if needed, then train.

    No precompile job is submitted if the cluster's cache already has the graphs, or if another run
    is compiling them; training then waits for that run's job.

    On the local cluster the run is followed until it ends, and Ctrl-C stops it.

    --from starts from the result of another run. --chain also submits a run for each preset that
    follows this one in the recipe; each waits for the run before it and starts from its result.
    In a chain, --set PRESET:KEY=VALUE applies to the run of one preset only.

    --elastic also compiles the graphs for other node counts. The run does not wait for them, and
    `trnslurm resume --nodes` can then start at once.

    \b
    Example:
      trnslurm submit gpt2_zero1 --nodes 2
      trnslurm submit gpt2_zero1 --nodes 2 --cluster trn1 --dry-run
      trnslurm submit gpt2_zero1 --nodes 2 --precompile never
      trnslurm submit gpt2_zero1 --nodes 2 --elastic 1,4
      trnslurm submit bert_pretrain --preset phase2 --from last
      trnslurm submit bert_pretrain --chain --nodes 16
      trnslurm submit --rendered reviewed
    """
    if (recipe is None) == (rendered is None):
        raise click.UsageError("give either a RECIPE or --rendered DIR")
    if dry_run and as_json:
        raise click.UsageError("--dry-run prints no JSON: see plan --json, show --json")
    if rendered is not None:
        _refuse_options()
        links, others = [alone(read_job(Path(rendered)))], list[Job]()
    else:
        assert recipe is not None
        if chain and elastic:
            raise click.UsageError("--elastic does not work with --chain: leave out one of them")
        links, others = _links(recipe, options, nodes, chain=chain, elastic=elastic)
    for link in links:
        for warning in check_here(link.job):
            click.echo(f"warning: {warning}", err=True)
    cache = CompileCache(links[0].job.profile)
    needs = needs_of(links, cache)
    for need in needs:
        click.echo(_size_line(need), err=not dry_run)
        if line := _project_line(need.job):
            click.echo(line, err=not dry_run)
        if line := graphs_line(need, cache):
            click.echo(line, err=not dry_run)
    ahead = [need_of(job, cache) for job in others]
    for need in ahead:
        click.echo(graphs_ahead_line(need, cache), err=not dry_run)
    if dry_run:
        return
    ahead = [need for need in ahead if need.phases]
    if not yes:
        _confirm([*needs, *ahead])
    _submit_links(links, cache, ahead, follow=follow, detach=detach, as_json=as_json)


def _links(
    recipe: str, options: dict[str, Any], nodes: int, *, chain: bool, elastic: str | None
) -> tuple[list[Link], list[Job]]:
    """Return the jobs of the runs, and those that compile for other node counts."""
    workspace = workspace_of(options)
    cluster, preset = choose_cluster(workspace, recipe, options, to_submit=True)
    if chain:
        return links_of(workspace, recipe, options, nodes, cluster, preset), []
    config = config_of(workspace, recipe, options, cluster, preset)
    if problem := no_result(config):
        raise ConfigError(problem)
    spec = make_spec(config, nodes, name=options["name"])
    if warning := check_memory(spec):
        click.echo(f"warning: {warning}", err=True)
    counts = parse_nodes(elastic, option="--elastic") if elastic else []
    others = jobs_ahead(config, spec, counts, workspace.template_dirs()) if counts else []
    return [alone(make_job(spec, workspace.template_dirs()))], others


def submit_job(job: Job, *, follow: bool, detach: bool, as_json: bool) -> None:
    """Submit a job and report it; follow the run if asked to, and exit with its result."""
    cache = CompileCache(job.profile)
    _submit_links([alone(job)], cache, [], follow=follow, detach=detach, as_json=as_json)


def _submit_links(
    links: Sequence[Link], cache: CompileCache, ahead: Sequence[Need], *, follow: bool,
    detach: bool, as_json: bool,
) -> None:  # fmt: skip
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    runs = submit_chain(links, command, cache=cache, detach=detach, say=say)
    others = submit_ahead([need.job for need in ahead], command, cache=cache, say=say)
    local = links[0].job.local
    report_started(runs, others, local=local, follow=follow, detach=detach, as_json=as_json)


def _size_line(need: Need) -> str:
    job = need.job
    name = job.recipe + (f" ({job.preset})" if job.preset else "")
    if job.local:
        return f"{name} on this machine, as {count(job.nodes, 'node')} ({job.instance_type})"
    line = f"{name} on {job.nodes} x {job.instance_type}: "
    if expected := job.estimate:
        line += (
            f"about {hours(expected.hours)} h, {hours(expected.node_hours)} node-hours, "
            f"{dollars(expected.cost)}; "
        )
    return line + f"at most {hours(need.limit_node_hours)} node-hours by its time limits"


def _project_line(job: Job) -> str:
    """Return what a script of one's own brings along, and where it stands."""
    if job.project is None:
        return ""
    sizes = [len(data) for name, data in job.bundle.files.items() if name.startswith(PROJECT_CODE)]
    line = f"taking along {count(len(sizes), 'file')} ({sum(sizes) / 2**20:.1f} MiB)"
    if job.source_dir:
        line += f" of {job.source_dir}"
    if left_out := job.project["left_out"]:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        line += f", not {', '.join(left_out[:3])}{more} (.gitignore)"
    if links := job.project["links"]:
        line += f"; links to {', '.join(links)}"
    return f"{line}; it runs in a copy of it, work/ of the run directory"


def _confirm(needs: Sequence[Need]) -> None:
    first = needs[0].job
    limit = first.profile.ask_above_node_hours
    expected = sum(
        n.job.estimate.node_hours if n.job.estimate else n.limit_node_hours for n in needs
    )
    if first.local or limit is None or expected <= limit:
        return
    if not sys.stdin.isatty():
        raise SubmitError(
            f"{hours(expected)} node-hours is over the {limit:g} above which {first.cluster} "
            "asks: pass --yes"
        )
    click.confirm(f"That is over {limit:g} node-hours. Submit?", abort=True, err=True)


def _refuse_options() -> None:
    context = click.get_current_context()
    given = [
        option.opts[-1]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) == ParameterSource.COMMANDLINE
        if option.name not in _OF_A_BUNDLE
    ]
    if given:
        raise click.UsageError(
            f"--rendered submits the files as they are: leave out {' '.join(given)}"
        )
