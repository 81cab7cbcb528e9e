"""What a sweep will take, before it is submitted."""

from __future__ import annotations

from collections.abc import Iterator

from trnslurm.api.sweep import SweepProposal
from trnslurm.api.tables import count, dollars, hours, text_table
from trnslurm.cli.graphs import graphs_line
from trnslurm.submit.precompile import graphs_of

_IN_WORDS = {"warm": "compiled", "elsewhere": "being compiled"}


def proposal_lines(proposal: SweepProposal) -> Iterator[str]:
    """Yield what each run of a sweep has and takes, and what all of them take."""
    jobs = [link.job for link in proposal.links]
    job = jobs[0]
    name = job.recipe + (f" ({job.preset})" if job.preset else "")
    where = f"on {job.nodes} x {job.instance_type}"
    if job.local:
        where = f"on this machine, as {count(job.nodes, 'node')} ({job.instance_type})"
    turns = f", {proposal.at_most} at a time" if proposal.at_most else ""
    yield from (f"{count(len(jobs), 'run')} of {name} {where}{turns}:", "")
    yield from text_table(*_costs(proposal), right="run,hours,node-hours,cost")
    yield ""
    needs = [need for need in proposal.needs if need.decision != "before"]
    yield from dict.fromkeys(filter(None, (graphs_line(n, proposal.cache) for n in needs)))
    if not job.local:
        yield _in_all(proposal)


def _costs(proposal: SweepProposal) -> tuple[list[str], list[list[str]]]:
    keys = list(dict.fromkeys(key for point in proposal.points for key in point))
    header = ["run", *keys]
    rows = [
        [str(number), *(point.get(key, "-") for key in keys)]
        for number, point in enumerate(proposal.points, 1)
    ]
    expected = [link.job.estimate for link in proposal.links]
    if any(expected):
        header += ["hours", "node-hours", "cost"]
        for row, known in zip(rows, expected, strict=True):
            row += (
                [hours(known.hours), hours(known.node_hours), dollars(known.cost)]
                if known
                else ["-"] * 3
            )
    if any(need.decision not in ("none", "never") for need in proposal.needs):
        header.append("graphs")
        compiled = [graphs_of(need.job) for need in proposal.needs]
        for row, need, own in zip(rows, proposal.needs, compiled, strict=True):
            same = f"those of {compiled.index(own) + 1}"
            row.append(
                same if need.decision == "before" else _IN_WORDS.get(need.decision, "precompile")
            )
    return header, rows


def _in_all(proposal: SweepProposal) -> str:
    expected = [link.job.estimate for link in proposal.links]
    known = [estimate for estimate in expected if estimate]
    about = ""
    if len(known) == len(expected):
        prices = [estimate.cost for estimate in known if estimate.cost is not None]
        cost = dollars(sum(prices) if len(prices) == len(known) else None)
        about = f"about {hours(sum(e.node_hours for e in known))} node-hours, {cost}; "
    limit = sum(need.limit_node_hours for need in proposal.needs)
    return f"In all: {about}at most {hours(limit)} node-hours by the time limits"
