"""submit: start a job from a recipe or from a reviewed bundle."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from trnslurm.cli import chosen_site, completer
from trnslurm.cli.costs import submission_lines
from trnslurm.cli.options import (
    ScriptCommand,
    nodes_option,
    recipe_argument,
    refuse_pairs,
    spec_options,
    sweep_options,
    takes_console,
)
from trnslurm.cli.output import Terminal, command_line, echo_json
from trnslurm.config.pipeline import is_pipeline
from trnslurm.config.sweep import points_of, read_points
from trnslurm.console import Console
from trnslurm.errors import SubmitError
from trnslurm.remote.place import Site
from trnslurm.runs.search import run_roots
from trnslurm.runs.tables import hours
from trnslurm.submission.choice import parse_nodes
from trnslurm.submission.options import JobOptions, SubmitHost
from trnslurm.submission.propose import Request, propose
from trnslurm.submission.submission import Submission

if TYPE_CHECKING:
    from trnslurm.submission.follow import Rule
    from trnslurm.submission.halving import Asked

# Options that go with --rendered; everything else is fixed in the bundle's files.
_OF_A_BUNDLE = {
    "rendered",
    "holder",
    "after",
    "path",
    "dry_run",
    "yes",
    "follow",
    "detach",
    "as_json",
}


@click.command("submit", cls=ScriptCommand)
@recipe_argument(required=False, with_arguments=True)
@nodes_option
@spec_options
@click.option(
    "--precompile",
    type=click.Choice(["auto", "always", "never"]),
    help="auto: submit a precompile job if graphs are missing; never: compile during training.",
)
@click.option(
    "--compile-for",
    metavar="N,N",
    help="Also compile for these node counts, so that a resume on one of them starts at once.",
)
@click.option("--elastic", hidden=True, metavar="N,N", help="Old name of --compile-for.")
@sweep_options("Submit")
@click.option(
    "--at-most",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of a sweep's runs, or of jobs for checkpoints, to run at a time.",
)
@click.option(
    "--halving",
    metavar="N[:STEPS]",
    help="Stop the worst runs of a sweep early: the best 1/N continue to N times as many steps.",
)
@click.option(
    "--lowest",
    metavar="METRIC",
    help="The best run or checkpoint is the one with the lowest METRIC.",
)
@click.option(
    "--highest",
    metavar="METRIC",
    help="The best run or checkpoint is the one with the highest METRIC.",
)
@click.option(
    "--each-checkpoint-of",
    "each_checkpoint_of",
    metavar="RUN",
    shell_complete=completer("run"),
    help="Start a job for every checkpoint of this run, with {checkpoint} and {step}.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --each-checkpoint-of: use one checkpoint in every N steps.",
)
@click.option(
    "--patience",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --each-checkpoint-of: end that run when N newer checkpoints are no better.",
)
@click.option("--chain", is_flag=True, help="Also submit the presets that follow.")
@click.option(
    "--again",
    multiple=True,
    metavar="STAGE",
    help="For a pipeline: run this stage even if it is done.",
)
@click.option("--rendered", metavar="DIR", help="Submit this reviewed bundle, byte for byte.")
@click.option(
    "--after",
    metavar="RUN|JOB[:CONDITION]",
    shell_complete=completer("run"),
    help="Wait for a run or any Slurm job to succeed (:ok), to end (:any) or to fail (:failed).",
)
@click.option(
    "--in",
    "holder",
    metavar="JOB",
    shell_complete=completer("job"),
    help="Run at once in a job that you already hold, for example from salloc, and follow the log.",
)
@click.option(
    "--dry-run", is_flag=True, help="Show what would be submitted, without submitting it."
)
@click.option("-y", "--yes", is_flag=True, help="Submit a job of any size without confirmation.")
@click.option(
    "-f", "--follow", is_flag=True, help="On Slurm: wait until the run ends, and show its progress."
)
@click.option(
    "--detach",
    is_flag=True,
    help="On the local cluster, and with --in: return at once; the run keeps running.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the run, its directory and its job ids as JSON."
)
@takes_console
def submit_command(
    recipe: str | None,
    compile_for: str | None,
    elastic: str | None,
    rendered: str | None,
    chain: bool,
    each_checkpoint_of: str | None,
    every: int | None,
    patience: int | None,
    again: tuple[str, ...],
    holder: str | None,
    console: Terminal,
    **options: Any,
) -> None:
    """Submit a job: precompile if needed, then train.

    If the cluster's cache already has the graphs, no precompile job is submitted. If another run is
    compiling them, training waits for that run's job.

    On the local cluster, the command follows the run until it ends, and Ctrl-C stops the run.

    RECIPE can also be the path of a script, or of a batch script with its own #SBATCH options. Put
    any other command after --, as in: -- torchrun train.py --lr 1e-4.

    --from starts from the result of another run. --chain also submits a run for each preset that
    follows this one in the recipe. Each run waits for the previous one and starts from its result.
    In a chain, --set PRESET:KEY=VALUE applies to the run of one preset only.

    --sweep submits a run for each of several values, under one name. Runs with the same graphs
    share one precompile. On Slurm, the runs are tasks of job arrays. On the local cluster, they run
    one after another.

    --halving N stops the worst runs of a sweep early. All runs train for part of their steps, then
    the best 1/N continue to N times as many steps, and so on, until one run reaches the last step.
    Each such rung is a job array that waits for the previous rung. N:STEPS sets the steps of the
    first rung.

    --compile-for also compiles the graphs for other node counts. The run does not wait for them.
    `trnslurm resume --nodes` can then start at once.

    --each-checkpoint-of starts the job for each checkpoint of a training run, for example to
    evaluate it. The first node of that run submits the jobs to Slurm.

    RECIPE can also be a pipeline: a YAML file of stages, each with the arguments of `trnslurm
    submit`. A stage is not run again if nothing about it has changed.

    --in runs it within seconds in a job that you already hold. If the job has more nodes than the
    run needs, the run uses the first ones. Ctrl-C ends the run, not the job.

    \b
    Example:
      trnslurm submit gpt2_zero1 --nodes 2
      trnslurm submit gpt2_zero1 --nodes 2 --cluster trn1 --dry-run
      trnslurm submit gpt2_zero1 --nodes 2 --precompile never
      trnslurm submit gpt2_zero1 --nodes 2-4 --spares 1
      trnslurm submit gpt2_zero1 --nodes 2 --compile-for 1,4
      trnslurm submit bert_pretrain --preset phase2 --from last
      trnslurm submit bert_pretrain --chain --nodes 16
      trnslurm submit gpt2_zero1 --nodes 2 --sweep train.lr=1e-4,3e-4 --sweep seed=1,2 --at-most 2
      trnslurm submit gpt2_zero1 --nodes 2 --sweep train.lr=1e-4,3e-4,1e-3 --halving 3
      trnslurm submit job.sbatch
      trnslurm submit --nodes 2 -- torchrun train.py --lr 1e-4
      trnslurm submit --nodes 2 -m torchtitan.train -- --job.config_file llama.toml
      trnslurm submit ./train.py --time 60 --gpus 2 --cpus 8 --mem 64G
      trnslurm submit ./train.py --nodes 2 --env HF_HOME --env WANDB_PROJECT
      trnslurm submit ./train.py --nodes 2 --in 4711
      trnslurm submit gpt2_zero1 --nodes 2 --after 4711:any
      trnslurm submit ./eval.py --each-checkpoint-of last --every 1000 --time 60 -- {checkpoint}
      trnslurm submit pipeline.yaml
      trnslurm submit --rendered reviewed
    """
    if (recipe is None) == (rendered is None):
        raise click.UsageError("pass either a RECIPE or --rendered DIR")
    if elastic:
        console.tell("warning: --elastic has been renamed to --compile-for")
        compile_for = compile_for or elastic
    if console.dry_run and console.as_json:
        raise click.UsageError("--dry-run does not print JSON: use plan --json or show --json")
    site, host = chosen_site(), SubmitHost()
    if site and holder is not None:
        raise click.UsageError(
            f"--in works only on the cluster itself: ssh {site.place.host}, and run it there"
        )
    if site and options["after"] is not None:
        raise click.UsageError(
            f"--after looks for the job on this host: run ssh {site.place.host} first"
        )
    if site:
        from trnslurm.cli.remote import RemoteHost  # most submissions stay on this host

        host = RemoteHost(site)
    if recipe is not None and is_pipeline(recipe):
        if site:
            raise click.UsageError(
                f"pipelines can be submitted only from the cluster itself: ssh {site.place.host}"
            )
        _submit_pipeline(Path(recipe), options, again, console)
        return
    if again:
        raise click.UsageError("--again works only with the stages of a pipeline, a YAML file")
    sweep, file, at_most = (options.pop(name) for name in ("sweep", "sweep_file", "at_most"))
    lowest, highest = options.pop("lowest"), options.pop("highest")
    follows = each_checkpoint_of is not None
    halving = _halving(bool(sweep or file), options.pop("halving"), lowest, highest, follows)
    refuse_pairs({"--after": options["after"], "--in": holder})
    rule = None
    if each_checkpoint_of is not None:
        _refuse_beside_follow(site, rendered, sweep or file, chain, compile_for, holder, options)
        from trnslurm.runs.find import find_run
        from trnslurm.submission.follow import Rule

        followed = find_run(each_checkpoint_of, run_roots(options["workspace"]))
        rule = Rule.of(
            followed,
            every=every or 0,
            at_most=at_most or 1,
            lowest=lowest,
            highest=highest,
            patience=patience or 0,
        )
        options["follows"] = followed.name
    elif every or patience:
        name = "--every" if every else "--patience"
        raise click.UsageError(f"{name} requires --each-checkpoint-of")
    if rendered is not None:
        _refuse_options()
        request = Request(
            options=JobOptions(recipe="", host=host, **options),
            rendered=Path(rendered),
            holder=holder,
        )
    else:
        more = {"--sweep": sweep or file, "--chain": chain, "--compile-for": compile_for}
        refuse_pairs(more | {"--in": holder})
        if at_most and not (sweep or file or rule):
            raise click.UsageError("--at-most requires --sweep or --each-checkpoint-of")
        if site:
            options["cluster"] = options["cluster"] or site.cluster or None
        request = Request(
            options=JobOptions(recipe=recipe or "", host=host, **options),
            chain=chain,
            points=points_of(sweep, read_points(file) if file else ()) if sweep or file else (),
            at_most=at_most,
            halving=halving,
            compile_for=parse_nodes(compile_for, option="--compile-for") if compile_for else (),
            holder=holder,
        )
    submission = propose(request, console)
    if rule:
        from trnslurm.submission.follow import check

        check(rule, submission)
    around = os.environ.get("SLURM_JOB_ID") if holder is None and not site else None
    if around and submission.job.has_queue:
        console.say(f"This shell is inside job {around}. To run there, pass --in {around}")
    for line in submission_lines(submission, remote=host.remote):
        click.echo(line, err=not console.dry_run)
    if rule:
        _follow(submission, rule, console)
    else:
        confirm_and_submit(submission, console, site)


def _submit_pipeline(
    file: Path, options: dict[str, Any], again: tuple[str, ...], console: Terminal
) -> None:
    """Submit the stages of a pipeline that are not done."""
    from trnslurm.cli.pipeline import pipeline_lines, pipeline_request

    submission = propose(pipeline_request(file, options, again, submit_command), console)
    for line in pipeline_lines(submission):
        click.echo(line, err=not console.dry_run)
    if submission.runs:
        confirm_and_submit(submission, console)
    elif console.as_json:
        echo_json({"pipeline": submission.pipeline, "stages": dict(submission.stages)})
    else:
        click.echo("All stages are done: nothing to submit")


def _halving(
    sweeps: bool, text: str | None, lowest: str | None, highest: str | None, follows: bool
) -> Asked | None:
    """Return how the worst runs of a sweep are stopped early, or None if they are not."""
    if text is None:
        if (lowest or highest) and not follows:
            raise click.UsageError(
                "--lowest and --highest require --halving or --each-checkpoint-of"
            )
        return None
    if not sweeps:
        raise click.UsageError("--halving requires --sweep")
    from trnslurm.submission.halving import parse_halving

    return parse_halving(text, lowest=lowest, highest=highest)


def _refuse_beside_follow(site: Site | None, *given: Any) -> None:
    """Reject options that cannot be combined with --each-checkpoint-of."""
    names = ("--rendered", "--sweep", "--chain", "--compile-for", "--in")
    refuse_pairs({"--each-checkpoint-of": True, **dict(zip(names, given[:-1], strict=True))})
    refuse_pairs({"--each-checkpoint-of": True, "--after": given[-1]["after"]})
    if site:
        raise click.UsageError(
            f"--each-checkpoint-of works only on the cluster itself: ssh {site.place.host}"
        )


def _follow(submission: Submission, rule: Rule, console: Terminal) -> None:
    """Submit a job for each checkpoint of a run."""
    if console.dry_run:
        return
    from trnslurm.runs.followers import followers_of
    from trnslurm.submission.follow import follow

    place = follow(submission, rule, command_line())
    group = f"{rule.run.name}.{place.name}"
    [found] = [each for each in followers_of(rule.run) if each.group == group]
    if console.as_json:
        echo_json({"follows": rule.run.name, "directory": str(place), **asdict(found)})
    else:
        click.echo(f"{rule.run.name}: {found.words}")


def confirm_and_submit(submission: Submission, console: Console, site: Site | None = None) -> None:
    """Submit on this host, or on the host of a site, unless this is a dry run."""
    if not (console.yes or console.dry_run):
        _confirm(submission)
    if site:
        from trnslurm.cli.remote import submit_remotely

        sys.exit(submit_remotely(site, submission, command_line(), console))
    if not console.dry_run:
        from trnslurm.cli.follow import report_started  # a dry run needs neither
        from trnslurm.submission.submit import submit

        runs, extras = submit(submission, command_line(), console)
        report_started(runs, console, extras)


def _confirm(submission: Submission) -> None:
    first, expected = submission.job, submission.expected_node_hours
    limit = first.profile.ask_above_node_hours
    asks = first.has_queue and not submission.held
    if not asks or limit is None or expected <= limit:
        return
    if not sys.stdin.isatty():
        raise SubmitError(
            f"{hours(expected)} node-hours exceeds the {limit:g} above which {first.cluster} asks "
            "for confirmation: pass --yes"
        )
    click.confirm(f"That is more than {limit:g} node-hours. Submit?", abort=True, err=True)


def _refuse_options() -> None:
    context = click.get_current_context()
    given = [
        option.opts[-1]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) == ParameterSource.COMMANDLINE
        if option.name not in _OF_A_BUNDLE
    ]
    if given:
        raise click.UsageError(f"--rendered submits the files unchanged: omit {' '.join(given)}")
