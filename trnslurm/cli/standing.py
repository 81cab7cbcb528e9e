"""Print the states of a sweep's runs, and which run is best."""

from __future__ import annotations

from dataclasses import asdict

import click

from trnslurm.api.run import progress, swept_keys
from trnslurm.api.tables import count, figure, format_values
from trnslurm.cli.output import echo_json, echo_table
from trnslurm.runs.status import Standing


def echo_sweep(standing: Standing, *, as_json: bool = False) -> None:
    """Print the states and scores of a sweep's runs, and the best run."""
    best, statuses, metric = standing.best, standing.statuses, standing.metric
    scored = list(zip(statuses, standing.scores, strict=True))
    if as_json:
        echo_json(
            {
                "sweep": standing.group,
                "states": standing.states,
                "metric": metric,
                "best": best.run if best else None,
                "next": standing.mend,
                "runs": [{**asdict(status), "score": score} for status, score in scored],
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
            s.state,
            progress(s)[0],
            figure(score, ".4f"),
            s.reason,
        )
        for s, score in scored
    ]
    echo_table(("run", *keys, "state", "step", metric, "reason"), rows, right=f"step,{metric}")
    click.echo()
    for status, score in scored:
        if status == best:
            so_far = "" if standing.final else " so far"
            said = f"{metric} {figure(score, '.4f')} with {format_values(status.values)}"
            click.echo(f"best{so_far}: {status.run}, {said}")
            break
    if standing.mend:
        click.echo(f"next: {standing.mend}")
