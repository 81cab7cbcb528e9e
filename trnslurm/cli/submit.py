"""submit: start a job from a recipe or from a reviewed bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.api.choice import parse_nodes
from trnslurm.api.submit import Proposal, propose, propose_bundle
from trnslurm.api.sweep import propose_sweep
from trnslurm.api.tables import count, dollars, hours
from trnslurm.cli.elsewhere import chosen_site, find_checkpoint_there, submit_there
from trnslurm.cli.follow import report_started
from trnslurm.cli.graphs import graphs_ahead_line, graphs_line
from trnslurm.cli.options import recipe_argument, spec_options
from trnslurm.cli.output import say
from trnslurm.cli.sweep import proposal_lines
from trnslurm.cluster.cache import CompileCache
from trnslurm.config.sweep import points_of, read_points
from trnslurm.errors import SubmitError
from trnslurm.remote.place import Site
from trnslurm.render.project import PROJECT_CODE
from trnslurm.submit.here import check_notify
from trnslurm.submit.job import Job, alone
from trnslurm.submit.precompile import Need

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
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY=V,V",
    help="Submit a run for each of these values; of several keys, for each combination.",
)
@click.option("--sweep-file", metavar="FILE", help="Values of a sweep, in YAML.")
@click.option(
    "--at-most", type=click.IntRange(min=1), metavar="N", help="Runs of a sweep at a time."
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
    recipe: str | None, nodes: int, elastic: str | None, sweep: tuple[str, ...],
    sweep_file: str | None, at_most: int | None, chain: bool, rendered: str | None, dry_run: bool,
    yes: bool, follow: bool, detach: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Submit a job: precompile if needed, then train.

    No precompile job is submitted if the cluster's cache already has the graphs, or if another run
    is compiling them; training then waits for that run's job.

    On the local cluster the run is followed until it ends, and Ctrl-C stops it.

    --from starts from the result of another run. --chain also submits a run for each preset that
    follows this one in the recipe; each waits for the run before it and starts from its result.
    In a chain, --set PRESET:KEY=VALUE applies to the run of one preset only.

    --sweep submits a run for each of some values, with one name for all; what has the same graphs
    is compiled once. On the local cluster its runs follow one another.

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
      trnslurm submit gpt2_zero1 --nodes 2 --sweep train.lr=1e-4,3e-4 --sweep seed=1,2 --at-most 2
      trnslurm submit --rendered reviewed
    """
    if (recipe is None) == (rendered is None):
        raise click.UsageError("give either a RECIPE or --rendered DIR")
    if dry_run and as_json:
        raise click.UsageError("--dry-run prints no JSON: see plan --json, show --json")
    if rendered is not None:
        _refuse_options()
        site = chosen_site(None, options["path"])
        proposal = propose_bundle(Path(rendered), say, elsewhere=site is not None)
    else:
        assert recipe is not None
        if site := chosen_site(options["cluster"], options["path"]):
            options["cluster"] = options["cluster"] or site.cluster or None
            options["find_checkpoint"] = find_checkpoint_there(site)
        several = {"--sweep": sweep or sweep_file, "--chain": chain, "--elastic": elastic}
        if len(asked := [option for option, value in several.items() if value]) > 1:
            raise click.UsageError(
                f"{asked[1]} does not work with {asked[0]}: leave out one of them"
            )
        if at_most and not several["--sweep"]:
            raise click.UsageError("--at-most is for --sweep")
        if several["--sweep"]:
            points = points_of(sweep, read_points(sweep_file) if sweep_file else ())
            swept = propose_sweep(
                recipe, nodes, options, points, at_most=at_most, say=say,
                elsewhere=site is not None,
            )  # fmt: skip
            click.echo("\n".join(proposal_lines(swept)), err=not dry_run)
            go_on(
                swept, site, dry_run=dry_run, yes=yes, follow=follow, detach=detach,
                as_json=as_json,
            )  # fmt: skip
            return
        counts = parse_nodes(elastic, option="--elastic") if elastic else []
        proposal = propose(
            recipe, nodes, options, chain=chain, elastic=counts, say=say,
            elsewhere=site is not None,
        )  # fmt: skip
    for need in proposal.needs:
        click.echo(_size_line(need), err=not dry_run)
        if line := _project_line(need.job):
            click.echo(line, err=not dry_run)
        if site is None and (line := graphs_line(need, proposal.cache)):
            click.echo(line, err=not dry_run)
    for need in proposal.ahead if site is None else ():
        click.echo(graphs_ahead_line(need, proposal.cache), err=not dry_run)
    go_on(proposal, site, dry_run=dry_run, yes=yes, follow=follow, detach=detach, as_json=as_json)


def say_graphs(proposal: Proposal, *, dry_run: bool) -> None:
    """Print of what was sent from elsewhere which graphs are compiled, and which will be."""
    for need in proposal.needs:
        if line := graphs_line(need, proposal.cache):
            click.echo(line, err=not dry_run)
    for need in proposal.ahead:
        click.echo(graphs_ahead_line(need, proposal.cache), err=not dry_run)


def go_on(
    proposal: Proposal, site: Site | None, *, dry_run: bool, yes: bool, follow: bool, detach: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Submit what was shown, here or on the host of a site, unless that was all."""
    if not (yes or dry_run):
        _confirm(proposal)
    if site:
        options = {"dry_run": dry_run, "follow": follow, "as_json": as_json}
        sys.exit(submit_there(site, proposal, _command(), options))
    if not dry_run:
        _start(proposal, follow=follow, detach=detach, as_json=as_json)


def submit_job(job: Job, *, follow: bool, detach: bool, as_json: bool) -> None:
    """Submit a job and report it; follow the run if asked to, and exit with its result."""
    for warning in check_notify(job):
        say(f"warning: {warning}")
    cache = CompileCache(job.profile)
    proposal = Proposal(links=[alone(job)], needs=[], ahead=[], cache=cache)
    _start(proposal, follow=follow, detach=detach, as_json=as_json)


def _start(proposal: Proposal, *, follow: bool, detach: bool, as_json: bool) -> None:
    runs, others = proposal.start(_command(), detach=detach, say=say)
    local = proposal.local
    report_started(runs, others, local=local, follow=follow, detach=detach, as_json=as_json)


def _command() -> list[str]:
    """Return what the user called, for the record."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


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


def _confirm(proposal: Proposal) -> None:
    first, expected = proposal.links[0].job, proposal.expected_node_hours
    limit = first.profile.ask_above_node_hours
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
