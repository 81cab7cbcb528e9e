"""Lines about what a sweep will cost, before it is submitted."""

from __future__ import annotations

from collections.abc import Iterator

from trnslurm.api.tables import count, dollars, hours, text_table
from trnslurm.cli.graphs import graphs_line
from trnslurm.submit.precompile import graphs_of
from trnslurm.submit.submission import Submission

_IN_WORDS = {"warm": "compiled", "compiling": "being compiled"}


def sweep_lines(submission: Submission) -> Iterator[str]:
    """Yield the values and the cost of each run of a sweep, and the cost of all runs."""
    jobs = [run.job for run in submission.runs]
    job = jobs[0]
    name = job.recipe + (f" ({job.preset})" if job.preset else "")
    where = f"on {job.nodes} x {job.instance_type}"
    if job.local:
        where = f"on this machine, as {count(job.nodes, 'node')} ({job.instance_type})"
    turns = f", {submission.at_most} at a time" if submission.at_most else ""
    yield from (f"{count(len(jobs), 'run')} of {name} {where}{turns}:", "")
    yield from text_table(*_costs(submission), right="run,hours,node-hours,cost")
    yield ""
    needs = [need for need in submission.needs if need.decision != "before"]
    yield from dict.fromkeys(filter(None, (graphs_line(n, submission.cache) for n in needs)))
    if not job.local:
        yield _in_all(submission)


def _costs(submission: Submission) -> tuple[list[str], list[list[str]]]:
    keys = list(dict.fromkeys(key for run in submission.runs for key in run.values))
    header = ["run", *keys]
    rows = [
        [str(number), *(run.values.get(key, "-") for key in keys)]
        for number, run in enumerate(submission.runs, 1)
    ]
    expected = [run.job.estimate for run in submission.runs]
    if any(expected):
        header += ["hours", "node-hours", "cost"]
        for row, known in zip(rows, expected, strict=True):
            row += (
                [hours(known.hours), hours(known.node_hours), dollars(known.cost)]
                if known
                else ["-"] * 3
            )
    if any(need.decision not in ("none", "never") for need in submission.needs):
        header.append("graphs")
        compiled = [graphs_of(need.job) for need in submission.needs]
        for row, need, own in zip(rows, submission.needs, compiled, strict=True):
            same = f"as run {compiled.index(own) + 1}"
            row.append(
                same if need.decision == "before" else _IN_WORDS.get(need.decision, "precompile")
            )
    return header, rows


def _in_all(submission: Submission) -> str:
    expected = [run.job.estimate for run in submission.runs]
    known = [estimate for estimate in expected if estimate]
    about = ""
    if len(known) == len(expected):
        prices = [estimate.cost for estimate in known if estimate.cost is not None]
        cost = dollars(sum(prices) if len(prices) == len(known) else None)
        about = f"about {hours(sum(e.node_hours for e in known))} node-hours, {cost}; "
    limit = sum(need.limit_node_hours for need in submission.needs)
    return f"In all: {about}at most {hours(limit)} node-hours by the time limits"
