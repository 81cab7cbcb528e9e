"""What a training's step consists of, before and after a change, as a picture.

    git worktree add /tmp/before d019db8
    .venv/bin/python benchmarks/step.py --before /tmp/before -o benchmarks/step.png

Trains a model of each kind at sizes for a CPU with the code of both trees in turn, and notes what
worker 0 does: read samples, the forward and the backward pass, wait for other workers' tensors, the
optimizer, save, and all else. Of each phase the median over the steps counts, of saving the mean.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reporting
import training

PHASES = ("data", "forward", "backward", "collectives", "optimizer", "save", "other")
COLOURS = ("#8da0cb", "#66c2a5", "#2f8f6f", "#fc8d62", "#e5c494", "#e78ac3", "#b3b3b3")
# Neither evaluation nor reports between the first steps and the last; a few saves.
COMMON = {"device": "cpu", "train.eval_every": 0, "train.log_every": 10, "train.save_every": 5}
WARM_UP = 5
NAMES = {
    "gpt2_zero1": "GPT-2",
    "bert_pretrain": "BERT",
    "bert_mrpc": "classifier",
    "llama3_clm": "Llama",
}
LAYERS = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
LAYERS |= {"max_position_embeddings": training.SEQ_LEN}
MODELS = {
    "gpt2_zero1": training.MODEL,
    "bert_pretrain": LAYERS | {"intermediate_size": 1024},
    "bert_mrpc": LAYERS | {"intermediate_size": 1024},
    "llama3_clm": LAYERS | {"intermediate_size": 704, "num_key_value_heads": 2},
}
SMALL = {
    "seq_len": training.SEQ_LEN,
    "batch.global_batch": training.GLOBAL_BATCH,
    "batch.micro_batch": 2,
}
SIZES = ("4 layers of 256", "tiny")


def main() -> None:
    """Run all with both trees in turn; print a table and draw it."""
    parser = reporting.make_parser("Show what a training's step consists of.", rounds=3)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of older code")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="(1 2 4)")
    parser.add_argument("--recipes", choices=NAMES, nargs="+", default=[*NAMES], help="(all)")
    parser.add_argument("--steps", type=int, default=30, help="(30)")
    parser.add_argument("-o", "--output", type=Path, help="write the picture to this file")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}")
    reporting.require("torch", "transformers", "accelerate", "h5py", "tokenizers", "matplotlib")
    trees = {"before": options.before.resolve(), "after": training.REPO}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for recipe, size in itertools.product(options.recipes, SIZES):
            settings = prepare(recipe, size, Path(name) / f"data-{len(rows)}")
            settings |= {"steps": options.steps, **COMMON}
            for workers in options.workers:
                measured: dict[str, list[dict[str, float]]] = {when: [] for when in trees}
                for turn in range(options.rounds):
                    for when, tree in trees.items():
                        bundle = Path(name) / f"{len(rows)}-{when}-{turn}"
                        measured[when].append(run(tree, recipe, settings, workers, bundle))
                for when, rounds in measured.items():
                    phases = {p: statistics.median(one[p] for one in rounds) for p in PHASES}
                    row = {"name": NAMES[recipe], "size": size, "workers": workers, "when": when}
                    rows.append({**row, "ms": sum(phases.values()), **phases})
    columns = {"name": ("", ""), "size": ("", ""), "workers": ("workers", ""), "when": ("", "")}
    columns |= {"ms": ("ms", ".1f"), **{phase: (phase, ".1f") for phase in PHASES}}
    title = f"ms of a step, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)
    if options.output:
        draw(rows, title, options.output)


def prepare(recipe: str, size: str, data: Path) -> dict[str, Any]:
    """Return what a recipe of this size is set to; make its data, if the job brings none."""
    settings: dict[str, Any] = {}
    if size != "tiny":
        settings = SMALL | {f"model.{key}": value for key, value in MODELS[recipe].items()}
    if recipe == "bert_pretrain" and size != "tiny":
        settings["train.max_pred"] = 20
    if recipe.startswith("bert"):
        trnslurm(training.REPO, "data", "prepare", recipe, settings=settings, output=data)
        settings["data.path"] = data
    return settings


def run(
    tree: Path, recipe: str, settings: dict[str, Any], workers: int, bundle: Path
) -> dict[str, float]:
    """Train once with the code of a tree; return the milliseconds of a step by phase."""
    shape = ("--nodes", "1", "--workers", str(workers))
    trnslurm(tree, "render", recipe, *shape, settings=settings, output=bundle)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={workers}", __file__, "--worker"]
    command += [str(bundle / "code" / "jobs" / recipe / "train.py"), str(bundle / "plan.json")]
    environ = {"PYTHONPATH": str(bundle / "code"), "OMP_NUM_THREADS": "1"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "USE_TORCH_XLA": "0"}
    training.call(command, cwd=bundle, environ=environ)
    steps = json.loads((bundle / "phases.json").read_text())[WARM_UP:]
    phases = {p: 1e3 * statistics.median(step.get(p, 0.0) for step in steps) for p in PHASES}
    return phases | {"save": 1e3 * statistics.mean(step.get("save", 0.0) for step in steps)}


def trnslurm(tree: Path, *words: str, settings: dict[str, Any], output: Path) -> None:
    """Call a command of a tree for a recipe's preset tiny with other settings."""
    command = [sys.executable, "-m", "trnslurm", *words, "--cluster", "local", "--preset", "tiny"]
    command += ["--path", str(tree), "--output", str(output)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    training.call(command, cwd=tree, environ={"PYTHONPATH": str(tree)})


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
    import torch.distributed as dist
    from torch.distributed import _functional_collectives

    from trnslurm.train.data.labelled import Labelled
    from trnslurm.train.devices.timer import Timer
    from trnslurm.train.loop.run import Run
    from trnslurm.train.optim.data_parallel import DataParallel
    from trnslurm.train.sharded.fsdp import Fsdp

    phases = Phases()
    timed, end = Timer.__call__, Run.end

    @contextlib.contextmanager
    def count(self: Timer, name: str) -> Iterator[None]:
        # After a unit's samples comes its forward pass, until the backward pass begins.
        then = "forward" if name == "data" else ""
        with phases(names.get(name, name), then=then), timed(self, name):
            yield

    def within(phase: str, owner: Any, name: str, *, then: str = "") -> None:
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with phases(phase, then=then):
                return function(*args, **kwargs)

        setattr(owner, name, wrapped)

    def ended(*args: Any, **kwargs: Any) -> None:
        end(*args, **kwargs)
        phases.end_step()

    names = {"checkpoint": "save"}
    Timer.__call__ = count
    Run.end = ended
    within("data", Labelled, "samples")
    within("backward", torch.autograd, "backward", then="other")
    for optimizer in (DataParallel, Fsdp):
        within("optimizer", optimizer, "step", then="other")
    # Of sharded models, whose layers are gathered within the passes.
    within("collectives", dist.Work, "wait")
    within("collectives", _functional_collectives, "wait_tensor")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    if os.environ["RANK"] == "0":
        Path("phases.json").write_text(json.dumps(phases.steps))


def draw(rows: list[dict[str, Any]], title: str, output: Path) -> None:
    """Draw a pair of bars for each recipe and worker count: phases, in % of the step before."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = list(dict.fromkeys((row["name"], row["workers"]) for row in rows))
    figure, panels = pyplot.subplots(
        1, len(SIZES), figsize=(13, 0.5 * len(pairs) + 1.2), sharey=True, layout="constrained"
    )
    whole = {
        (row["name"], row["workers"], row["size"]): row["ms"]
        for row in rows
        if row["when"] == "before"
    }
    labels = {}
    for row in rows:
        axes = panels[SIZES.index(row["size"])]
        pair = (row["name"], row["workers"])
        # Some more room between two recipes than between worker counts.
        gap = 0.7 * [*dict.fromkeys(name for name, _ in pairs)].index(row["name"])
        place = 2.4 * pairs.index(pair) + gap + (row["when"] == "after")
        workers = "1 worker" if row["workers"] == 1 else f"{row['workers']} workers"
        labels[place] = f"{row['name']}, {workers}: before" if row["when"] == "before" else "after"
        left = 0.0
        for phase, colour in zip(PHASES, COLOURS, strict=True):
            width = 100 * row[phase] / whole[(*pair, row["size"])]
            label = phase if row is rows[0] else None
            axes.barh(place, width, left=left, color=colour, label=label, height=0.95)
            if width >= 5:
                text = f"{row[phase]:.{0 if row['ms'] >= 100 else 1}f}"
                axes.text(left + width / 2, place, text, ha="center", va="center", size=7)
            left += width
        axes.text(left + 1, place, f"{row['ms']:,.0f} ms", ha="left", va="center", size=7)
    for axes, size in zip(panels, SIZES, strict=True):
        axes.set_title(size, size=9)
        axes.set_xlabel("% of the step before", size=8)
        axes.tick_params(axis="both", labelsize=8, left=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12, y=0.01)
    panels[0].set_yticks(list(labels), labels.values())
    panels[0].invert_yaxis()
    figure.suptitle(title, size=10)
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize=8, frameon=False)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main()
