"""Writes the page of a report as a single HTML file that needs no other files."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from trnslurm import __version__
from trnslurm.contract.files import naming
from trnslurm.report.figures import DARK, colour_of, drawings, png, svg
from trnslurm.report.history import TRAIN, History, Stay, is_number
from trnslurm.report.tables import hours_of, tables_of_many, tables_of_one
from trnslurm.runs.silence import no_numbers
from trnslurm.runs.tables import dollars

_MOST_TOLD = 4
_TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_report(runs: Sequence[History], file: Path, *, pictures: bool) -> list[Path]:
    """Write the report of these runs and return the files. `pictures` also writes PNG figures."""
    import jinja2

    drawn = drawings(runs)
    templates = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = templates.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=_title(runs),
        runs=runs,
        colours=[colour_of(number) for number in range(len(runs))],
        variables={f"c{light[1:]}": (light, dark) for light, dark in DARK.items()},
        figures=[(each, svg(each)) for each in drawn],
        story=_story(runs[0]) or no_numbers([runs[0].status]) if len(runs) == 1 else "",
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        tables=[*(tables_of_one(runs[0]) if len(runs) == 1 else tables_of_many(runs))],
        made=f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())} by trnslurm {__version__}",
    )
    written = [file]
    temporary = file.with_name(f".{file.name}.new")
    try:
        with naming(file):
            temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    for each in drawn if pictures else ():
        picture = file.with_name(f"{file.stem}-{each.name}.png")
        with naming(picture):
            png(each, picture)
        written.append(picture)
    return written


def _title(runs: Sequence[History]) -> str:
    groups = {run.record.group for run in runs}
    if len(runs) == 1:
        return runs[0].run.name
    return groups.pop() if len(groups) == 1 and "" not in groups else f"{len(runs)} runs"


def _first_step(stay: Stay) -> int:
    """Return the first step of an attempt. Some steps have no line."""
    return int(stay.attempt.checkpoint + 1 if stay.attempt.checkpoint else stay.lines[0]["step"])


def _story(run: History) -> str:
    """Return one or two sentences about the interruptions of a run."""
    trains = [stay for stay in run.stays if stay.attempt.phase == TRAIN]
    if len(trains) < 2:
        return ""
    began = []
    for before, stay in itertools.pairwise(trains):
        where = f"at step {_first_step(stay):,}" if stay.lines else "without a step"
        nodes = "1 node" if stay.nodes == 1 else f"{stay.nodes} nodes"
        began.append(f"{where}, on {nodes} (after {before.end})")
    times = "once" if len(began) == 1 else f"{len(began)} times"
    redone = sum(stay.redone for stay in trains)
    again = "1 step was" if redone == 1 else f"{redone:,} steps were"
    shown = "; ".join([*began[:_MOST_TOLD], *(["…"] if len(began) > _MOST_TOLD else [])])
    return f"Interrupted {times}, and resumed {shown}. {again.capitalize()} repeated."


def _tiles(run: History) -> list[tuple[str, str, str]]:
    """Return the most important figures: (name, figure, remark)."""
    last, plan = run.last, run.plan
    found: list[tuple[str, str, str]] = []
    done, steps = (run.steps[-1].get(key) if run.steps else None for key in ("step", "steps"))
    if is_number(done):
        of = f"of {steps:,}" if is_number(steps) and steps else ""
        found.append(("steps", f"{done:,}", of))
    if "loss" in last:
        first = run.series("loss")[0][2]
        found.append(("loss", f"{last['loss']:.4f}", f"from {first:.4f}"))
    if "eval_loss" in last:
        step, _, best, _ = min(run.series("eval_loss"), key=lambda point: point[2])
        remark = f"best {best:.4f} at step {step:,}"
        found.append(("held-out loss", f"{last['eval_loss']:.4f}", remark))
    for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if values := sorted(point[2] for point in run.series(name)):
            found.append((f"{unit}, median", f"{values[len(values) // 2]:,.0f}", ""))
            break
    if mfu := sorted(point[2] for point in run.series("mfu")):
        found.append(("MFU, median", f"{mfu[len(mfu) // 2]:.1%}", ""))
    node_hours = run.node_hours()
    if run.stays:
        price = run.price_per_hour
        cost = f", {dollars(node_hours * price)}" if price is not None else ""
        found.append(("node-hours", hours_of(node_hours), f"{plan.get('instance_type', '')}{cost}"))
        lost = run.lost_node_hours
        cost = f", {dollars(lost * price)}" if price is not None else ""
        remark = f"{lost / node_hours if node_hours else 0.0:.0%} of all{cost}"
        found.append(("node-hours lost to interruptions", hours_of(lost), remark))
    return found
