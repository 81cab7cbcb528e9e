"""runs, status, logs, triage, exec: inspect runs."""

from __future__ import annotations

import csv
import functools
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from trnslurm.cli.options import (
    json_option,
    path_option,
    run_argument,
    run_or_sweep_argument,
    sweep_argument,
    workspace_option,
)
from trnslurm.cli.output import Terminal, echo_json, echo_table, echo_text
from trnslurm.config.search import Workspace
from trnslurm.console import Console
from trnslurm.contract.attempt import Attempt
from trnslurm.contract.metrics import read_from
from trnslurm.contract.states import OF_A_RUN, EndCause, State
from trnslurm.node.hosts import brief
from trnslurm.records.foreign import printable
from trnslurm.records.run import ByHand, RunDir
from trnslurm.runs.by_hand import UNKNOWN
from trnslurm.runs.explain import explained
from trnslurm.runs.facts import facts_of
from trnslurm.runs.followers import followers_of
from trnslurm.runs.halving import RungOf
from trnslurm.runs.logs import choose_log, follow_log, last_states, log_of, print_log
from trnslurm.runs.mirrored import mirrored
from trnslurm.runs.nodes import nodes_told
from trnslurm.runs.pipeline import PipelineStanding, is_pipeline, pipeline_of
from trnslurm.runs.restarts import restarted
from trnslurm.runs.saved import saved
from trnslurm.runs.search import RunFilter, latest_metrics, list_statuses
from trnslurm.runs.silence import UNTOLD_S, last_output, no_numbers
from trnslurm.runs.standing import Standing, standing_of
from trnslurm.runs.status import RunStatus, choose_attempt, run_status
from trnslurm.runs.tables import (
    RIGHT,
    cells_of,
    count,
    figure,
    format_values,
    parse_time,
    progress,
    runs_table,
    swept_keys,
)
from trnslurm.runs.usage import usage_of
from trnslurm.schedulers.interface import PhaseStatus
from trnslurm.slurm.reasons import LACKS_NODES

if TYPE_CHECKING:
    from trnslurm.node.triage.finding import Finding

_SHOWN_ATTEMPTS = 5
_SHOWN_NODES = 4
_SHOWN_FIXES = 3
_PHASE_COLUMNS: dict[str, Callable[[PhaseStatus], str]] = {
    "phase": lambda p: p.phase,
    "state": lambda p: p.state,
    "job": lambda p: p.job_id or "-",
    "attempt": lambda p: str(p.attempt or "-"),
    "started": lambda p: p.started or "-",
    "ended": lambda p: p.ended or "-",
    "hosts": lambda p: brief(p.hosts.split(",")) or "-",
    "reason": lambda p: p.reason,
}
_CSV = (
    *("run", "state", "recipe", "preset", "cluster", "nodes", "created"),
    *("group", "note", "reason"),
)


@click.command("runs")
@sweep_argument
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Show all runs, not only the newest 20."
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(OF_A_RUN, case_sensitive=False),
    help="Show only runs in this state; repeat for several states.",
)
@click.option("--recipe", metavar="NAME", help="Show only runs of this recipe.")
@click.option(
    "--since",
    metavar="TIME",
    help="Show only runs submitted since TIME, such as 12h, 30d or 2026-11-21.",
)
@click.option("--sort", metavar="METRIC", help="Sort by the latest value of METRIC, lowest first.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Show at most N of these runs."
)
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print CSV, with the latest value of every metric."
)
@workspace_option
@json_option
def runs_command(
    workspace: Workspace, console: Terminal, since: str | None, as_csv: bool, **options: Any
) -> None:
    """List runs, or the runs of one sweep, with their states, newest last.

    If you select by state, recipe, time or metric, the command searches all runs.

    \b
    Example:
      trnslurm runs
      trnslurm runs 20261123-113000-gpt2_zero1
      trnslurm runs --state FAILED --state LOST --since 7d
      trnslurm runs --recipe gpt2_zero1 --sort eval_loss --limit 5 --csv
    """
    if as_csv and console.as_json:
        raise click.UsageError("--csv and --json: pass only one of them")
    chosen = RunFilter(since="" if since is None else parse_time(since), **options)
    statuses, broken = list_statuses(workspace, chosen)
    for error in broken:
        console.warn(str(error))
    if console.as_json:
        echo_json([asdict(status) for status in statuses])
        return
    if as_csv:
        _echo_csv(statuses)
        return
    if not statuses:
        none_yet = "No runs yet. To start one: trnslurm submit gpt2_zero1 --nodes 2"
        console.say("No runs match" if chosen.selects else none_yet)
        return
    header, rows = runs_table(statuses, values=chosen.sweep is not None)
    if (sort := chosen.sort) is not None and sort not in header:
        header = [*header[:-1], sort, header[-1]]
        values = [figure(latest_metrics(status).get(sort), ".5g") for status in statuses]
        rows = [[*row[:-1], value, row[-1]] for row, value in zip(rows, values, strict=True)]
    if any(status.note for status in statuses):
        header = [*header, "note"]
        rows = [[*row, status.note] for row, status in zip(rows, statuses, strict=True)]
    echo_table(header, rows, right=f"{RIGHT},{sort}")


def _echo_csv(statuses: Sequence[RunStatus]) -> None:
    """Print runs with the latest value of every metric, as CSV."""
    metrics = [latest_metrics(status) for status in statuses]
    names = list(dict.fromkeys(name for each in metrics for name in each))
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*_CSV, "step", "steps", *names])
    for status, latest in zip(statuses, metrics, strict=True):
        steps = [status.metrics.get(name) for name in ("step", "steps")]
        fields = [getattr(status, name) for name in _CSV]
        out.writerow([*fields, *steps, *(latest.get(name) for name in names)])


@click.command("status")
@run_or_sweep_argument
@click.option(
    "--lowest",
    metavar="METRIC",
    help="For a sweep: the best run is the one with the lowest METRIC.",
)
@click.option(
    "--highest",
    metavar="METRIC",
    help="For a sweep: the best run is the one with the highest METRIC.",
)
@path_option
@json_option
def status_command(
    runs: Sequence[RunDir], lowest: str | None, highest: str | None, console: Terminal
) -> None:
    """Show the state of a run or a sweep, and why.

    The state of a run is one word. The best run of a sweep is the one with the lowest latest
    held-out loss, or the lowest latest loss if nothing is held out.

    \b
    Example:
      trnslurm status last
      trnslurm status 20261123-113000-bert_mrpc --highest eval_f1
    """
    run, *others = runs
    if is_pipeline(click.get_current_context().params["run"], runs):
        if lowest or highest:
            raise click.UsageError("--lowest and --highest compare the runs of a sweep")
        echo_pipeline(pipeline_of(runs), console)
        return
    if others:
        echo_sweep(standing_of(runs, lowest=lowest, highest=highest), console)
        return
    if lowest or highest:
        raise click.UsageError("--lowest and --highest compare the runs of a sweep")
    status, failure = explained(run, run_status(run, leftovers=True))
    if console.as_json:
        echo_json(facts_of(run, status, failure))
        return
    say_end(status, failure)
    _say_lacking_nodes(run, status)
    preset = f" ({status.preset})" if status.preset else ""
    hosts = status.phases[-1].hosts
    on = len(hosts.split(",")) if hosts else status.nodes  # a training may have lost some
    nodes = count(on, "node") if on == status.nodes else f"{on} of {count(status.nodes, 'node')}"
    click.echo(f"{status.recipe}{preset} on {nodes} of {status.cluster}\n")
    columns = dict(_PHASE_COLUMNS)
    if all(phase.reason in status.reason for phase in status.phases):
        del columns["reason"]  # the first line has it
    echo_table(*cells_of(columns, status.phases))
    click.echo()
    if left_out := status.precompile.get("left_out"):
        click.echo(f"no precompile job: {left_out}")
    elif key := status.precompile.get("key"):
        click.echo(f"graph key: {key}")
    _say_chain(run, status)
    if "step" in status.metrics:
        step, loss = progress(status)
        place = read_from(status.metrics)
        whence = f" (read from {place})" if place else ""
        told = f", loss {loss}" if "loss" in status.metrics else _some_loss(status)
        click.echo(f"step {step}{told}{_age_of(status)}{whence}")
    elif line := no_numbers([status]):
        click.echo(line)
    if again := restarted(run, status):
        click.echo(again)
    _say_silence(run, status)
    usage = usage_of(run, status)
    if not status.final and usage.now:
        click.echo(f"use: {usage.brief()}")
    for line in usage.told():
        click.echo(line)
    for name, text in nodes_told(run, status.nodes, status.attempts).items():
        click.echo(f"{name}: {text}")
    if line := _saved(run):
        click.echo(f"saved: {line}")
    if copies := mirrored(run):
        click.echo(f"mirror: {copies}")
    _say_attempts(status)
    for line in failure.report() if failure and not status.state.failed else ():
        echo_text(line)
    if status.note:
        click.echo(f"note: {status.note}")
    if status.kept:
        click.echo("protected: trnslurm rm will not remove it")
    if isinstance(run.record(), ByHand):
        click.echo(UNKNOWN)
    click.echo(f"run directory: {status.path}")


def say_end(status: RunStatus, failure: Finding | None) -> None:
    """Print the state, why the run failed, and what to do, without repetition."""
    words, then, why = status.words.partition("; not restarted, ")  # it is not what happened
    echo_text(f"{status.run}: {words}{then and ')'}")
    if failure and status.state.failed:
        echo_text("\n".join(failure.report(words, status.next)))
    elif status.next:
        echo_text(f"next: {status.next}")
    if then:
        echo_text(f"not restarted, {why.removesuffix(')')}")


def _say_lacking_nodes(run: RunDir, status: RunStatus) -> None:
    """Print which nodes a waiting run lacks and may never get, and what to do about it."""
    if status.final or not any(words in status.reason for words in LACKS_NODES):
        return
    from trnslurm.runs.waiting import diagnose  # asks Slurm for all nodes

    why = diagnose(run)
    for problem in why.problems:
        click.echo(problem)
    for node in why.sick[:_SHOWN_NODES]:
        click.echo(f"{node.name}: {node.state}: {node.reason}")


def _some_loss(status: RunStatus) -> str:
    """Return one of a run's training losses, such as a GAN's, or else a held-out one, if any."""
    names = (name for name in status.metrics if "loss" in name.lower())
    name = min(names, key=lambda name: name.startswith("eval"), default="")
    return f", {printable(name)} {figure(status.metrics[name], '.4f')}" if name else ""


def _age_of(status: RunStatus) -> str:
    """Return the age of a running job's last step, in words."""
    at = status.metrics.get("time")
    if status.state is not State.RUNNING or not isinstance(at, int | float):
        return ""
    if (attempt := status.metrics.get("attempt")) not in (None, status.phases[-1].attempt):
        return f" in attempt {attempt}; attempt {status.phases[-1].attempt} is starting"
    return f", {_in_words(time.time() - at)} ago"


def _saved(run: RunDir) -> str:
    """Return the checkpoint that a custom script saved without reporting it, and its age."""
    if not (left := saved(run)):
        return ""
    taken = "" if left.taken else "; the script does not load it"
    return f"{printable(left.name)} ({left.form}), {_in_words(left.age_s)} ago{taken}"


def _in_words(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _say_silence(run: RunDir, status: RunStatus) -> None:
    """Print how long a running job has made no progress, and how to find out why."""
    last = status.phases[-1]
    if status.state is not State.RUNNING or last.phase != "train":
        return
    at = status.metrics.get("time")
    step_at = at if isinstance(at, int | float) else -math.inf
    silent = time.time() - max(step_at, last_output(run, last))
    if UNTOLD_S <= silent < math.inf:
        click.echo(
            f"no steps and no output for {_in_words(silent)}: run trnslurm stacks {run.name} to "
            "see where its workers are"
        )


def _say_chain(run: RunDir, status: RunStatus) -> None:
    """Print the previous and the next run in its chain, or its sweep."""
    if run.followed.is_dir():
        step = status.values.get("step", "?")
        followed = status.group.removesuffix(f".{run.record().name}")
        click.echo(f"for the checkpoint of step {step} of {followed}")
    elif stages := run.record().stages:
        own = next((stage for stage, name in stages.items() if name == run.name), "?")
        before = ", ".join(stages[name] for name in run.record().stages_before)
        after = f", after {before}" if before else ""
        click.echo(f"stage {own} of the pipeline {status.group}{after}")
    elif status.group:
        click.echo(f"in the sweep {status.group}, with {format_values(status.values)}")
    if status.after:
        click.echo(f"starts from the result of {status.after}")
    if status.copied_from:
        click.echo(f"continues {status.copied_from}")
    if status.then:
        click.echo(f"{status.then} starts from its result")
    for follower in followers_of(run):
        click.echo(follower.words)


def _say_attempts(status: RunStatus) -> None:
    """Print the number of attempts, and how the latest ones ended."""
    if len(status.attempts) > 1:
        shown = status.attempts[-_SHOWN_ATTEMPTS:]
        ends, said = [], status.reason
        for attempt in shown:
            reason = unsaid(attempt.reason, said)
            said = f"{said}\n{attempt.reason}"
            ends.append(f"{attempt.attempt} {attempt.state}" + (f" ({reason})" if reason else ""))
        number = len(status.attempts)
        more = "… " if number > len(shown) else ""
        click.echo(f"attempts: {number}: {more}{', '.join(ends)}")
    for before in status.history:
        nodes = count(before["nodes"], "node")
        click.echo(f"resumed {before['resumed']}, when it was {before['state']} on {nodes}")


def unsaid(reason: str, said: str) -> str:
    """Return the part of an attempt's reason that has not been printed yet."""
    if not reason or reason in said:
        return ""
    counted, colon, what = reason.partition(": ")  # such as "crash 2 of 3 in a row: KeyError: …"
    return counted if colon and what in said else reason


@click.command("logs")
@run_argument
@click.option("--node", type=int, default=0, help="Number of the node.")
@click.option(
    "--phase",
    type=click.Choice(["precompile", "train", "prepare"]),
    help="Phase  [default: the latest].",
)
@click.option("--batch", is_flag=True, help="Show the log of the batch script.")
@click.option(
    "--role", metavar="NAME", help="Show the log of a server of this role, whose number is --node."
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until the run ends.")
@click.option("-n", "--lines", type=int, default=100, help="Number of last lines (0 for all).")
@path_option
def logs_command(run: RunDir, follow: bool, lines: int, **which: Any) -> None:
    """Print the log of a node or of the batch script.

    For a line that a progress bar keeps rewriting, only the last state is printed.

    \b
    Example:
      trnslurm logs last -f
      trnslurm logs last --node 1 -n 20
      trnslurm logs last --role rollout --node 1
    """
    last = lines if lines > 0 else None
    if follow:
        choose = functools.partial(choose_log, run, **which)
        chunks = follow_log(choose, lambda: run_status(run).final, lines=last)
    else:
        chunks = print_log(log_of(run, **which), last)
    if not (follow and sys.stdout.isatty()):  # there a progress bar moves
        chunks = last_states(chunks)
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


@click.command("triage")
@run_argument
@click.option(
    "--phase",
    type=click.Choice(["precompile", "train", "prepare"]),
    help="Phase  [default: the last].",
)
@click.option("--attempt", type=int, metavar="N", help="Attempt  [default: the newest].")
@click.option(
    "--ask",
    "command",
    metavar="COMMAND",
    help="Pass the last lines of the logs, without secrets, to a command and print the answer.",
)
@path_option
@json_option
def triage_command(
    run: RunDir, phase: str | None, attempt: int | None, command: str | None, console: Terminal
) -> None:
    """Show which worker failed first, why, and what to do.

    The command searches the logs of all nodes and the workers' files in state/. If the run is
    waiting, it shows why. If this attempt has not failed, it lists earlier attempts that have, and
    the exit code is 1.

    \b
    Example:
      trnslurm triage last
      trnslurm triage last --attempt 1 --json
      trnslurm triage last --ask 'llm -m local'
    """
    from trnslurm.node.triage.diagnosis import diagnose, nothing_found  # many patterns

    if command is not None and console.as_json:
        raise click.UsageError("--ask prints its answer as text: omit --json")

    if not (phase or attempt or console.as_json):
        status = run_status(run)
        if status.state.waiting and not status.attempts:
            click.echo(f"{run.name}: {status.words}: nothing has failed")
            _say_lacking_nodes(run, status)
            sys.exit(1)
    chosen = choose_attempt(run, phase=phase, attempt=attempt)
    where = (run.path, chosen.phase, chosen.attempt)
    over = chosen.state.under_way and run_status(run).state.failed
    found = diagnose(*where, over=over)
    if console.as_json:
        echo_json(asdict(found) if found else None)
    elif found:
        echo_text("\n".join(found.report()))
    else:
        click.echo("\n".join(nothing_found(*where)))
        _say_earlier_failures(run, chosen, phase)
    if command is not None:
        from trnslurm.runs.opinion import ask, extract

        answer = ask(command, extract(run, chosen, found, os.environ))
        click.echo(f"{command} answers:\n{textwrap.indent(answer, '  ')}")
    sys.exit(0 if found else 1)


def _say_earlier_failures(run: RunDir, chosen: Attempt, phase: str | None) -> None:
    """Print which attempts failed before this one, and the commands that show why."""
    earlier = [a for a in run.attempts(chosen.phase) if a.attempt < chosen.attempt]
    failed = [a for a in earlier if a.crashed or a.cause == EndCause.ERROR]
    option = f" --phase {phase}" if phase else ""
    for each in failed[-_SHOWN_ATTEMPTS:]:
        reason = f" ({each.reason})" if each.reason else ""
        command = f"trnslurm triage {run.name}{option} --attempt {each.attempt}"
        click.echo(f"attempt {each.attempt} failed{reason}: {command}")


@click.command("exec", context_settings={"ignore_unknown_options": True})
@run_argument
@click.option("--node", type=int, default=0, help="Number of the node.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@path_option
def exec_command(run: RunDir, node: int, command: tuple[str, ...]) -> None:
    """Run a command, or a shell, on a node of a running job.

    On Slurm, the command runs as a job step inside the job's allocation. Without a command, you get
    a shell with the run's environment, in the directory where its script runs.

    \b
    Example:
      trnslurm exec last -- neuron-top
      trnslurm exec last --node 1 -- ps -ef
      trnslurm exec last --node 1
    """
    from trnslurm.cluster.execute import exec_in_run  # as slow to import as all of these

    sys.exit(exec_in_run(run, node, command))


def echo_pipeline(standing: PipelineStanding, console: Console) -> None:
    """Print the state of each stage of a pipeline, and what to do."""
    if console.as_json:
        stages = [{**asdict(each), "state": each.state} for each in standing.stages]
        facts = {"pipeline": standing.group, "states": standing.states, "stages": stages}
        echo_json(facts | {"next": standing.next})
        return
    states = ", ".join(f"{number} {state}" for state, number in standing.states.items())
    click.echo(f"{standing.group}: {count(len(standing.stages), 'stage')}: {states}\n")
    rows = []
    for each in standing.stages:
        step, loss = progress(each.status) if each.status else ("-", "-")
        reason = each.status.reason if each.status else ""
        reason = reason or ("done earlier" if each.earlier else "")
        after = ", ".join(each.after) or "-"
        rows.append((each.stage, after, each.state, step, loss, each.run, reason))
    header = ("stage", "after", "state", "step", "loss", "run", "reason")
    echo_table(header, rows, right="step,loss")
    if standing.next:
        click.echo(f"\nnext: {standing.next}")


def _rung_cells(rung: RungOf | None) -> tuple[str, str]:
    if rung is None:
        return "-", "-"
    return f"{rung.rung}/{rung.rungs}", str(rung.rank or "-")


def _rung_facts(rung: RungOf | None) -> dict[str, int | None]:
    return {"rung": rung.rung if rung else None, "rank": (rung.rank if rung else 0) or None}


def echo_sweep(standing: Standing, console: Console) -> None:
    """Print the states and scores of a sweep's runs, and the best run."""
    best, statuses, metric = standing.best, standing.statuses, standing.metric
    scored = list(zip(statuses, standing.scores, strict=True))
    if console.as_json:
        echo_json(
            {
                "sweep": standing.group,
                "states": standing.states,
                "metric": metric,
                "best": best.run if best else None,
                "next": standing.mend,
                "halving": standing.halving.facts() if standing.halving else None,
                "runs": [
                    {**asdict(status), "score": score, **_rung_facts(rung)}
                    for (status, score), rung in zip(scored, standing.rungs, strict=True)
                ],
            }
        )
        return
    states = ", ".join(f"{number} {state}" for state, number in standing.states.items())
    click.echo(f"{standing.group}: {count(len(statuses), 'run')}: {states}\n")
    keys = swept_keys(statuses)
    rows = [
        (
            s.run,
            *(s.values.get(key, "-") for key in keys),
            *(_rung_cells(rung) if standing.halving else ()),
            s.state,
            progress(s)[0],
            figure(score, ".4f"),
            s.reason,
        )
        for (s, score), rung in zip(scored, standing.rungs, strict=True)
    ]
    at = ("rung", "rank") if standing.halving else ()
    header = ("run", *keys, *at, "state", "step", metric, "reason")
    echo_table(header, rows, right=f"rank,step,{metric}")
    click.echo()
    for status, score in scored:
        if status == best:
            so_far = "" if standing.final else " so far"
            said = f"{metric} {figure(score, '.4f')} with {format_values(status.values)}"
            click.echo(f"best{so_far}: {status.run}, {said}")
            break
    if line := no_numbers(statuses):
        click.echo(line)
    if standing.mend:
        click.echo(f"next: {standing.mend}")
    for what, names in [*standing.to_correct.items()][:_SHOWN_FIXES]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"{names[0]}{more}: {what}")
