"""What a training's step consists of, before and after a change, as a picture.

    git worktree add /tmp/before d019db8
    .venv/bin/python benchmarks/step.py --before /tmp/before -o benchmarks/step.png

Trains gpt2_zero1 at sizes for a CPU with the code of both trees in turn, and notes what worker 0
does: read samples, the forward and the backward pass, wait for the sum of gradients (after the last
backward pass), the optimizer, save, and all else. Of each phase the median over the steps counts,
of saving the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reporting
import training

PHASES = ("data", "forward", "backward", "collectives", "optimizer", "save", "other")
COLOURS = ("#8da0cb", "#66c2a5", "#2f8f6f", "#fc8d62", "#e5c494", "#e78ac3", "#b3b3b3")
# Neither evaluation nor reports between the first steps and the last; a few saves.
COMMON = {"train.eval_every": 0, "train.log_every": 10, "train.save_every": 5}
WARM_UP = 5
CASES: dict[str, dict[str, Any]] = {
    "4 layers of 256": {
        "seq_len": training.SEQ_LEN,
        "batch.global_batch": training.GLOBAL_BATCH,
        "batch.micro_batch": 2,
        **{f"model.{key}": value for key, value in training.MODEL.items()},
    },
    "tiny": {},
}


def main() -> None:
    """Run all cases with both trees in turn; print a table and draw it."""
    parser = reporting.make_parser("Show what a training's step consists of.", rounds=3)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of older code")
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--steps", type=int, default=30, help="(30)")
    parser.add_argument("-o", "--output", type=Path, help="write the picture to this file")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}")
    reporting.require("torch", "transformers", "matplotlib")
    trees = {"before": options.before.resolve(), "after": training.REPO}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, (case, settings) in enumerate(CASES.items()):
            measured: dict[str, list[dict[str, float]]] = {when: [] for when in trees}
            for turn in range(options.rounds):
                for when, tree in trees.items():
                    bundle = Path(name) / f"{number}-{when}-{turn}"
                    measured[when].append(run(tree, settings, bundle, options))
            for when, rounds in measured.items():
                phases = {p: statistics.median(one[p] for one in rounds) for p in PHASES}
                rows.append({"name": case, "when": when, "ms": sum(phases.values()), **phases})
    columns = {"name": ("", ""), "when": ("", ""), "ms": ("ms", ".1f")}
    columns |= {phase: (phase, ".1f") for phase in PHASES}
    title = f"ms of a step, {options.workers} workers, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)
    if options.output:
        draw(rows, title, options.output)


def run(
    tree: Path, settings: dict[str, Any], bundle: Path, options: argparse.Namespace
) -> dict[str, float]:
    """Train once with the code of a tree; return the milliseconds of a step by phase."""
    command = [sys.executable, "-m", "trnslurm", "render", "gpt2_zero1", "--cluster", "local"]
    command += ["--preset", "tiny", "--nodes", "1", "--workers", str(options.workers)]
    command += ["--path", str(tree), "--output", str(bundle)]
    for key, value in {"device": "cpu", "steps": options.steps, **COMMON, **settings}.items():
        command += ["--set", f"{key}={value}"]
    training.call(command, cwd=tree, environ={"PYTHONPATH": str(tree)})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={options.workers}", __file__, "--worker"]
    command += [str(bundle / "code" / training.JOB / "train.py"), str(bundle / "plan.json")]
    environ = {"PYTHONPATH": str(bundle / "code"), "OMP_NUM_THREADS": "1"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "USE_TORCH_XLA": "0"}
    training.call(command, cwd=bundle, environ=environ)
    steps = json.loads((bundle / "phases.json").read_text())[WARM_UP:]
    phases = {p: 1e3 * statistics.median(step.get(p, 0.0) for step in steps) for p in PHASES}
    return phases | {"save": 1e3 * statistics.mean(step.get("save", 0.0) for step in steps)}


class Phases:
    """Notes the time of a worker by phase: each moment belongs to the innermost one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = {}
        self._within = ["other"]
        self._since = time.perf_counter()

    def _note(self) -> None:
        now, phase = time.perf_counter(), self._within[-1]
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def __call__(self, phase: str, *, then: str = "") -> Iterator[None]:
        """Be in a phase for a block, and in another one after it."""
        self._note()
        self._within.append(phase)
        try:
            yield
        finally:
            self._note()
            self._within.pop()
            if then:
                self._within[-1] = then

    def end_step(self) -> None:
        """Begin to count the next step."""
        self._note()
        self.steps.append(self._spent)
        self._spent = {}


def work(script: str, *arguments: str) -> None:
    """Run a job as torchrun would, with phases around what it calls."""
    import torch

    from trnslurm.train.devices.timer import Timer
    from trnslurm.train.loop.run import Run
    from trnslurm.train.optim.data_parallel import DataParallel

    phases = Phases()
    names = {"checkpoint": "save"}
    timed, end = Timer.__call__, Run.end

    @contextlib.contextmanager
    def count(self: Timer, name: str) -> Iterator[None]:
        # After a unit's samples comes its forward pass, until the backward pass begins.
        then = "forward" if name == "data" else ""
        with phases(names.get(name, name), then=then), timed(self, name):
            yield

    def within(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with phases(phase, then="other"):
                return function(*args, **kwargs)

        return wrapped

    def ended(*args: Any, **kwargs: Any) -> None:
        end(*args, **kwargs)
        phases.end_step()

    Timer.__call__ = count
    torch.Tensor.backward = within("backward", torch.Tensor.backward)
    DataParallel.step = within("optimizer", DataParallel.step)
    Run.end = ended
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    if os.environ["RANK"] == "0":
        Path("phases.json").write_text(json.dumps(phases.steps))


def draw(rows: list[dict[str, Any]], title: str, output: Path) -> None:
    """Draw a bar for each row: its phases, as shares of its step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(rows) + 1.3), layout="constrained")
    labels = []
    for number, row in enumerate(rows):
        place = number + 0.4 * (number // 2)
        left = 0.0
        for phase, colour in zip(PHASES, COLOURS, strict=True):
            share = 100 * row[phase] / row["ms"]
            label = phase if number == 0 else None
            axes.barh(place, share, left=left, color=colour, label=label, height=0.85)
            if share >= 4:
                axes.text(left + share / 2, place, f"{share:.0f}", ha="center", va="center", size=8)
            left += share
        labels.append((place, f"{row['name']}, {row['when']}: {row['ms']:.0f} ms"))
    axes.set_yticks([place for place, _ in labels], [text for _, text in labels], size=8)
    axes.invert_yaxis()
    axes.set_xlabel("% of the step", size=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, size=9)
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize=8, frameon=False)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main()
