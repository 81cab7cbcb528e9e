"""The figures of a report, drawn with matplotlib: as SVG in the page's colors, and as PNG."""

from __future__ import annotations

import collections
import io
import itertools
import math
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trnslurm.contract.roles import Stand
from trnslurm.errors import TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.report.history import (
    COMPILING,
    ENDING,
    PREPARING,
    STARTING,
    TRAIN,
    TRAINING,
    UNDONE,
    History,
    Point,
    Stay,
    is_number,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
# PNGs have these light colours. On the page each is a variable, which the dark theme replaces.
_INK, _GRID, _GREY = "#3c4149", "#dfe2e7", "#7f7f7f"
# The palette of Okabe and Ito, for all kinds of colour vision; without its yellow, which is pale.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", _GREY, "#8c564b")
DARK: Mapping[str, str] = {
    _INK: "#c9ced6",
    _GRID: "#363b43",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#ff8a3d",
    "#009e73": "#2cc797",
    "#cc79a7": "#e59ac3",
    "#56b4e9": "#7cc7f2",
    "#e69f00": "#f2b632",
    _GREY: "#9aa0a8",
    "#8c564b": "#c08a7e",
}
"""The colors of the dark theme."""
PARTS = {
    COMPILING: "#cc79a7",
    PREPARING: "#cc79a7",
    STARTING: "#e69f00",
    TRAINING: "#009e73",
    UNDONE: "#d55e00",
    ENDING: _GREY,
}
_STANDS: Mapping[str, tuple[str, str]] = {
    Stand.STARTING: ("#e69f00", "a server that starts"),
    Stand.READY: ("#56b4e9", "a server that is ready"),
    Stand.UNWELL: ("#d55e00", "a server that does not answer"),
    Stand.ENDING: (_GREY, "a server that ends"),
}
_PART_KEYS = {
    STARTING: "starting, until the first step",
    TRAINING: "training",
    UNDONE: "training lost and repeated",
    ENDING: "after the last step",
}
# Figures of the nodes' use: the key in their lines, the title, and the axis.
_USE = (
    ("device_use", "Device use", "share of time spent computing"),
    ("cpu", "Processor use", "share of time"),
    ("memory_left_gib", "Memory left", "GiB"),
    ("net_in_mb_s", "Network", "MB/s received"),
    ("fabric_in_mb_s", "EFA or InfiniBand", "MB/s received"),
)
_MOST_POINTS = 2000
_SIZE = (5.4, 2.7)
_RESTART = (_INK, "¦ a restart")
_STEP_PARTS = {
    "compute_s": "compute",
    "collectives_s": "collectives",
    "data_s": "data",
    "eval_s": "evaluation",
    "checkpoint_s": "saving",
}
_TITLES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_s": "Tokens per second",
    "samples_per_s": "Samples per second",
}
# Metrics of ours that have a figure, are part of a figure, or never change.
_TOLD = {
    *_TITLES,
    *_STEP_PARTS,
    "attempt",
    "step",
    "steps",
    "time",
    "samples",
    "eval_loss",
    "step_s",
    "tokens_per_s_per_device",
    "padding",
    "graphs",
    "late_graphs",
    "host_memory_mb",
    "perplexity",
    "device_memory_mb",
    "mfu",
}
_MOST_OWN = 6
_MOST_KEYS = 12


class Drawing(Frozen, kw_only=False):
    """A figure, its name in file names, and its caption."""

    name: str
    title: str
    about: str
    draw: Callable[[Figure], None]
    keys: Sequence[tuple[str, str]] = ()
    """The color and label of each element. The page shows them below the figure."""


def drawings(runs: Sequence[History]) -> list[Drawing]:
    """Return the figures for these runs. A single run also has a timeline and its step time."""
    found = [_curves(runs, "loss")]
    if any(run.series("loss") for run in runs):
        found.append(_curves(runs, "loss", over_time=True))
    speed = "tokens_per_s" if any(run.series("tokens_per_s") for run in runs) else "samples_per_s"
    found += [_curves(runs, name) for name in ("grad_norm", "lr", speed, *own_numbers(runs))]
    if len(runs) == 1:
        found += [_step_time(runs[0]), _timeline(runs[0])]
        found += [_use(runs[0], *what) for what in _USE]
    return [each for each in found if each.keys]


def own_numbers(runs: Sequence[History]) -> list[str]:
    """Return the metrics that only these runs have, such as scores of a task or a script."""
    names = [name for run in runs for name in run.last if name not in _TOLD]
    return list(dict.fromkeys(names))[:_MOST_OWN]


def colour_of(number: int) -> str:
    """Return a run's color in figures that show several runs."""
    return SERIES[number % len(SERIES)]


def _curves(runs: Sequence[History], name: str, *, over_time: bool = False) -> Drawing:
    """Return a metric of each run over steps or time. A single run's loss includes undone steps."""
    several = len(runs) > 1
    alone_over_steps = not several and not over_time
    series = [_thinned(run.series(name)) for run in runs]
    held_out = [run.series("eval_loss") if name == "loss" else [] for run in runs]
    undone = _undone(runs[0]) if name == "loss" and alone_over_steps else []
    keys = [(colour_of(n), run.label) for n, run in enumerate(runs) if series[n]]
    if not several and keys:
        keys = [(SERIES[0], "training")] if held_out[0] or undone else [(SERIES[0], "")]
        keys += [(SERIES[1], "held out")] if held_out[0] else []
        keys += [(_GREY, "undone and repeated")] if undone else []
    if several and any(held_out):
        keys = _ranked(keys, [points for n, points in enumerate(held_out) if series[n]])
    resumed = _resumed(runs[0]) if alone_over_steps and keys else []
    keys += [_RESTART] if resumed else []

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _mark(axes, resumed)
        factor, unit = _unit(_longest(runs)) if over_time else (1.0, "step")
        unit += " since the first start" if over_time else ""

        def plot(number: int, points: Sequence[Point], colour: str, **how: Any) -> None:
            zero = runs[number].stays[0].began if over_time and runs[number].stays else 0.0
            for _, each in itertools.groupby(points, lambda p: p[3] if over_time else 0):
                stretch = [*each]  # between two attempts there are no points
                x = [(p[1] - zero) * factor if over_time else p[0] for p in stretch]
                axes.plot(x, [p[2] for p in stretch], color=colour, ms=3, **how)

        for line in undone:
            plot(0, line, _GREY, lw=1, ls=":")
        for number, points in enumerate(series):
            marker = "o" if len(points) == 1 else None
            plot(number, points, colour_of(number), lw=1.4, marker=marker)
            colour = colour_of(number) if several else SERIES[1]
            plot(number, held_out[number], colour, lw=0.8, ls="--", marker="o")
        axes.set_xlabel(unit)
        _tidy(axes)

    title = _TITLES.get(name, name)
    return Drawing(
        name=re.sub(r"\W+", "-", f"{name}-over-time" if over_time else name).strip("-"),
        title=f"{title} over time" if over_time else title,
        about="dashed: held out; runs with the lowest final value first"
        if several and any(held_out)
        else "",
        draw=draw,
        keys=keys,
    )


def _ranked(
    keys: Sequence[tuple[str, str]], held_out: Sequence[Sequence[Point]]
) -> list[tuple[str, str]]:
    """Return the keys of runs with their last held-out losses, lowest first."""
    last = [points[-1][2] if points else math.inf for points in held_out]
    ranked = sorted(zip(last, keys, strict=True), key=lambda pair: pair[0])
    return [
        (colour, f"{text}: {loss:.4f}" if loss < math.inf else text)
        for loss, (colour, text) in ranked
    ]


def _step_time(run: History) -> Drawing:
    """Return the breakdown of each step's time."""
    lines = _thinned([line for line in run.steps if "compute_s" in line])

    def seconds(line: Mapping[str, Any], name: str) -> float:
        return float(line[name]) if is_number(line.get(name)) else 0.0

    names = [name for name in _STEP_PARTS if any(seconds(line, name) for line in lines)]
    values = [[seconds(line, name) for line in lines] for name in names]
    whole = [*map(sum, zip(*values, strict=True))]
    # The first step compiles or fills caches, and would make all others tiny.
    top = 1.2 * sorted(whole)[int(0.95 * (len(whole) - 1))] if whole else 0.0
    about = "on worker 0"
    if whole and max(whole) > top > 0:
        highest = lines[whole.index(max(whole))]["step"]
        about += f"; truncated: step {highest} took {max(whole):.1f} s"
    resumed = _resumed(run) if names else []

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.stackplot(
            [line["step"] for line in lines], *values, colors=SERIES[: len(names)], lw=0, alpha=0.85
        )
        axes.set_ylim(0, top or None)
        axes.set_xlabel("step")
        axes.set_ylabel("seconds")
        _mark(axes, resumed)
        _tidy(axes)

    keys = [(SERIES[n], _STEP_PARTS[name]) for n, name in enumerate(names)]
    keys += [_RESTART] if resumed else []
    return Drawing("step-time", "Breakdown of step time", about, draw, keys)


def _timeline(run: History) -> Drawing:
    """Return every attempt as a bar of its activities, with its checkpoints."""
    stays = run.stays
    kinds = [kind for kind in PARTS if any(kind == part[0] for s in stays for part in s.parts)]
    saves = any(line.get("checkpoint_s") for line in run.lines)
    servers = [server for server in run.servers if server.parts]
    stands = [stand for stand in _STANDS if any(s.seconds(stand) for s in servers)]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        zero = stays[0].began
        factor, unit = _unit(max(stay.ended for stay in stays) - zero)
        for row, stay in enumerate(stays):
            for what, start, end in stay.parts:
                axes.barh(
                    row,
                    (end - start) * factor,
                    left=(start - zero) * factor,
                    height=0.62,
                    color=PARTS[what],
                    lw=0,
                )
            times = [line.get("time") for line in stay.lines if line.get("checkpoint_s")]
            marks = [(t - zero) * factor for t in times if t is not None and is_number(t)]
            axes.plot(marks, [row] * len(marks), ls="", marker="|", ms=9, mew=1.2, color=_INK)
        for row, server in enumerate(servers, len(stays)):
            for stand, start, end in server.parts:
                colour, _ = _STANDS[stand]
                left, width = (start - zero) * factor, (end - start) * factor
                axes.barh(row, width, left=left, height=0.62, color=colour, lw=0)
        rows = [*map(_label, stays), *(server.name for server in servers)]
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} since the first start")
        figure.set_size_inches(_SIZE[0] * 2, 0.9 + 0.32 * min(len(rows), 40))
        _tidy(axes)

    keys = [(PARTS[kind], _PART_KEYS.get(kind, kind)) for kind in dict.fromkeys(kinds)]
    keys += [_STANDS[stand] for stand in stands]
    keys += [(_INK, "| a checkpoint")] if saves else []
    gaps = "the run had no nodes between bars" if len(stays) > 1 else ""
    return Drawing("timeline", "Node timeline", gaps, draw, keys if stays else ())


def _use(run: History, name: str, title: str, axis: str) -> Drawing:
    """Return a figure of the nodes' use over time: a line per node, or a band for many nodes."""
    zero = run.stays[0].began if run.stays else 0.0
    nodes = {n: points for n, lines in run.use.items() if (points := _points(lines, name, zero))}
    several = 1 < len(nodes) <= len(SERIES)
    ends = [points[-1][0] for points in nodes.values()]
    keys = [(SERIES[0], "")]
    if several:
        keys = [(SERIES[n], f"node {node}") for n, node in enumerate(nodes)]
    elif len(nodes) > 1:
        keys = [(SERIES[0], f"median of {len(nodes)} nodes; the band spans all nodes")]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        factor, unit = _unit(max(ends))
        if several or len(nodes) == 1:
            for number, points in enumerate(nodes.values()):
                shown = _thinned(points)
                x, y = [at * factor for at, _ in shown], [value for _, value in shown]
                axes.plot(x, y, color=SERIES[number], lw=1.2, marker="o" if len(x) == 1 else None)
        else:
            minutes = collections.defaultdict(list)
            for at, value in itertools.chain.from_iterable(nodes.values()):
                minutes[at // 60].append(value)
            shown_minutes = sorted(minutes)
            x = [60 * minute * factor for minute in shown_minutes]
            low, middle, high = (
                [choose(minutes[minute]) for minute in shown_minutes]
                for choose in (min, statistics.median, max)
            )
            axes.fill_between(x, low, high, color=SERIES[0], alpha=0.25, lw=0)
            axes.plot(x, middle, color=SERIES[0], lw=1.4)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{unit} since the first start")
        axes.set_ylabel(axis)
        _tidy(axes)

    drawn = keys if nodes and (len(nodes) > 1 or name != "net_in_mb_s") else ()
    return Drawing(name.replace("_", "-"), title, "one-minute means", draw, drawn)


def _points(
    lines: Sequence[Mapping[str, Any]], name: str, zero: float
) -> list[tuple[float, float]]:
    """Return the time and value of each line, averaging over several devices."""
    found = []
    for line in lines:
        value: Any = line.get(name)
        values = [v for v in value if is_number(v)] if isinstance(value, list) else [value]
        if values and all(map(is_number, values)):
            found.append((max(0.0, line["time"] - zero), statistics.fmean(values)))
    return found


def svg(drawing: Drawing) -> str:
    """Return a figure as SVG for a page, with real text and the page's variables as colors."""
    text = _saved(drawing, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour in DARK:
        text = text.replace(colour, f"var(--c{colour[1:]})")
    return text


def png(drawing: Drawing, file: Path) -> None:
    """Write a figure as a PNG file."""
    file.write_bytes(_saved(drawing, "png"))


def _saved(drawing: Drawing, kind: str) -> bytes:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise TrnslurmError(
            "reports need matplotlib: run pip install '.[report]' in a clone of trnslurm"
        ) from None
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": drawing.name,
        "font.size": 9,
        "font.family": "sans-serif",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _GRID,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _GRID,
        "text.parse_math": False,
        "path.simplify": True,
    }
    written = io.BytesIO()
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that matplotlib's font lacks
        figure = Figure(figsize=_SIZE, layout="constrained")
        drawing.draw(figure)
        if kind == "png":
            about = f" ({drawing.about})" if drawing.about else ""
            figure.suptitle(f"{drawing.title}{about}", fontsize=10, fontweight="bold")
            handles = [Patch(color=colour, label=text) for colour, text in drawing.keys if text]
            width, height = figure.get_size_inches()
            if handles := handles[:_MOST_KEYS]:
                columns = _columns([text for _, text in drawing.keys], 15 * width)
                figure.legend(
                    handles=handles,
                    loc="outside lower center",
                    frameon=False,
                    fontsize=8,
                    ncols=columns,
                    handlelength=1,
                    handleheight=1,
                )
                height += 0.2 * -(-len(handles) // columns)
            figure.set_size_inches(width, height + 0.25)  # room for the title and these rows
            figure.savefig(written, format="png", dpi=180, facecolor="white")
        else:
            figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


def _tidy(axes: Axes) -> None:
    axes.grid(visible=True, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def _columns(texts: Sequence[str], letters: float) -> int:
    """Return how many of these labels fit into a row that is `letters` letters wide."""
    return max(1, min(len(texts), int(letters / (6 + max(map(len, texts))))))


def _label(stay: Stay) -> str:
    nodes = "1 node" if stay.nodes == 1 else f"{stay.nodes} nodes"
    what = "attempt" if stay.attempt.phase == TRAIN else stay.attempt.phase
    return f"{what} {stay.attempt.attempt}: {nodes}"


def _resumed(run: History) -> list[int]:
    """Return the first step of each later attempt."""
    first = [stay.lines[0]["step"] for stay in run.stays if stay.lines]
    return [step for step in first[1:] if is_number(step)]


def _mark(axes: Axes, steps: Sequence[int]) -> None:
    for step in steps:
        axes.axvline(step, color=_INK, lw=0.9, ls=(0, (3, 2)))


def _undone(run: History) -> list[list[Point]]:
    """Return the losses of each attempt's steps that a later attempt repeated."""
    found = []
    for stay in run.stays:
        lines = stay.lines[max(0, stay.kept - 1) :] if stay.redone else []
        points = [
            (line["step"], 0.0, line["loss"], 0) for line in lines if is_number(line.get("loss"))
        ]
        found += [points] if points else []
    return found


def _thinned(points: Sequence[T]) -> list[T]:
    """Return at most as many points as a figure shows, always including the last."""
    every = -(-len(points) // _MOST_POINTS) or 1
    return [*points[:-1:every], *points[-1:]]


def _longest(runs: Sequence[History]) -> float:
    """Return the seconds from the first start to the last step of the longest run."""
    ends = [(run.stays, run.series("loss")[-1:]) for run in runs]
    return max((last[0][1] - stays[0].began for stays, last in ends if stays and last), default=1.0)


def _unit(seconds: float) -> tuple[float, str]:
    """Return the factor that converts seconds to a readable unit, and the unit's name."""
    for limit, size, name in ((180, 1, "seconds"), (10800, 60, "minutes"), (259200, 3600, "hours")):
        if seconds < limit:
            return 1 / size, name
    return 1 / 86400, "days"
