"""Draw the diagrams of docs/concepts.md, in docs/pictures/: boxes, arrows and words, as SVG.

python docs/make/diagrams.py
"""

from __future__ import annotations

import html
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
_STYLE = (
    'text{font:14px ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif;fill:#22262e;'
    "text-anchor:middle}.h{font-weight:600}.s{font-size:12.5px;fill:#5a6372}.l{text-anchor:start}"
    '.m{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}'
)
# Fill and border of a box.
_COLORS = {
    "plain": ("#f6f7f9", "#8a94a6"), "blue": ("#eef2fb", "#4668b5"),
    "green": ("#e6f2ea", "#2f7d4f"),
    "red": ("#fdecea", "#b3382c"), "amber": ("#fdf4e3", "#9a6b12"), "none": ("#ffffff", "#c3cad6"),
}  # fmt: skip


class Drawing:
    """An SVG of boxes and arrows on a white page."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self._parts = [
            f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" '
            f'aria-label="{html.escape(label)}">',
            f"<style>{_STYLE}</style>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" '
            'fill="#5a6372"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self, x: int, y: int, width: int, height: int, *lines: str,
        color: str = "plain", kind: str = "h", top: bool = False,
    ) -> None:  # fmt: skip
        """Add a box: its first line in bold, or as code; the others small below it."""
        fill, border = _COLORS[color]
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" '
            f'stroke="{border}" stroke-width="1.5"/>'
        )
        first = y + 20 if top else y + height // 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width // 2, first + 18 * number, line, "s" if number else kind)

    def text(self, x: int, y: int, words: str, kind: str = "s") -> None:
        """Add a line of text, centered unless its kind contains l."""
        self._parts.append(f'<text class="{kind}" x="{x}" y="{y}">{html.escape(words)}</text>')

    def arrow(self, *points: tuple[int, int], both: bool = False) -> None:
        """Add an arrow along these points."""
        path = " L".join(f"{x} {y}" for x, y in points)
        start = ' marker-start="url(#a)"' if both else ""
        self._parts.append(
            f'<path d="M{path}" fill="none" stroke="#5a6372" stroke-width="1.5" '
            f'marker-end="url(#a)"{start}/>'
        )

    def save(self, name: str) -> None:
        """Write the file."""
        (PICTURES / name).write_text("\n".join([*self._parts, "</svg>", ""]), encoding="utf-8")


def submit_path() -> None:
    """Draw how a submit becomes steps on nodes."""
    d = Drawing(960, 430, "How a submit becomes steps on nodes")
    d.text(150, 28, "Where you type", "h")
    d.text(480, 28, "Slurm", "h")
    d.text(790, 28, "The job's nodes", "h")
    d.box(16, 44, 268, 46, "trnslurm submit … --nodes 2", color="blue", kind="m")
    d.arrow((150, 90), (150, 118))
    d.box(
        16, 120, 268, 62, "plan", "batch, workers, time limit", "the same input gives the same plan"
    )
    d.arrow((150, 182), (150, 210))
    d.box(
        16, 212, 268, 62, "bundle", "precompile.sbatch, train.sbatch,", "node.sh, plan.json, code/"
    )
    d.arrow((150, 274), (150, 302))
    d.box(16, 304, 268, 62, "run directory", "the bundle, state/, logs/, metrics,", "checkpoints/")
    d.arrow((284, 320), (356, 320), (356, 100), (378, 100))
    d.text(322, 312, "sbatch", "m")
    d.box(
        380,
        64,
        200,
        72,
        "job 4711: precompile",
        "compiles the graphs;",
        "Trainium only",
        color="amber",
    )
    d.arrow((480, 136), (480, 172))
    d.text(536, 158, "afterok")
    d.box(
        380,
        174,
        200,
        72,
        "job 4712: train",
        "waits for the precompile job,",
        "then for free nodes",
        color="amber",
    )
    d.arrow((580, 210), (636, 210))
    d.box(638, 44, 306, 322, "node 0", color="none", top=True)
    d.box(652, 76, 278, 40, "train.sbatch", color="green", kind="m")
    d.arrow((791, 116), (791, 132))
    d.box(
        652, 134, 278, 56, "attempt program", "starts, watches and restarts attempts", color="green"
    )
    d.arrow((791, 190), (791, 206))
    d.text(830, 203, "srun", "m")
    d.box(652, 208, 278, 56, "node.sh", "preflight, then the launcher", color="green", kind="m")
    d.arrow((791, 264), (791, 280))
    d.box(
        652,
        282,
        278,
        70,
        "workers",
        "python -u train.py plan.json",
        "one process per device",
        color="green",
    )
    d.box(638, 376, 306, 40, "node 1: node.sh, then workers", color="none")
    d.text(480, 290, "Each worker runs the steps,")
    d.text(480, 308, "writes metrics and checkpoints")
    d.text(480, 326, "into the run directory.")
    d.arrow((652, 345), (286, 345))
    d.save("submit-path.svg")


def parts_of_a_run() -> None:
    """Draw how recipe, preset and profile become a plan, a run, phases and attempts."""
    d = Drawing(960, 330, "Recipe, preset and profile become a plan, a run, phases and attempts")
    for y, name, what in (
        (16, "recipe", "what to train"), (84, "preset", "a named variant of it"),
        (152, "profile", "the cluster to train on"),
        (220, "command line", "--nodes, --set, --time"),
    ):  # fmt: skip
        d.box(16, y, 190, 52, name, what, color="blue")
        d.arrow((206, y + 26), (236, y + 26), (236, 143), (256, 143))
    d.box(258, 110, 150, 66, "plan", "the arithmetic of", "one job")
    d.arrow((408, 143), (436, 143))
    d.box(
        438,
        16,
        506,
        298,
        "run",
        "one submission, one directory; resume continues it",
        top=True,
        color="none",
    )
    d.box(454, 66, 150, 66, "phase", "precompile", "one Slurm job", color="amber")
    d.arrow((604, 99), (630, 99))
    d.box(632, 66, 296, 232, "phase", "train: one Slurm job", top=True, color="amber")
    d.box(646, 116, 268, 40, "attempt 1: a node died", color="red", kind="t")
    d.arrow((780, 156), (780, 176))
    d.box(646, 178, 268, 40, "attempt 2: the time limit came near", color="plain", kind="t")
    d.arrow((780, 218), (780, 238))
    d.box(646, 240, 268, 44, "attempt 3: step 6250 of 6250", color="green", kind="t")
    d.text(529, 190, "An attempt resumes")
    d.text(529, 208, "from the newest")
    d.text(529, 226, "checkpoint.")
    d.save("parts-of-a-run.svg")


def states() -> None:
    """Draw every state of a run that `trnslurm status` prints."""
    d = Drawing(960, 452, "The states of a run")
    d.text(148, 28, "Waiting", "h")
    for y, name, what in (
        (44, "PENDING", "in the queue"), (116, "HELD", "held in the queue"),
        (188, "CONFIGURING", "its nodes are booting"),
    ):  # fmt: skip
        d.box(36, y, 224, 52, name, what, color="amber")
    d.arrow((148, 96), (148, 114), both=True)
    d.arrow((72, 96), (72, 104), (20, 104), (20, 214), (34, 214))
    d.text(480, 28, "Working", "h")
    d.arrow((260, 214), (312, 214), (312, 70), (366, 70))
    d.arrow((312, 214), (312, 142), (366, 142))
    d.box(368, 44, 224, 52, "PRECOMPILING", "the first of two phases runs", color="green")
    d.arrow((480, 96), (480, 114))
    d.box(368, 116, 224, 52, "RUNNING", "the last phase runs", color="green")
    d.arrow((420, 168), (420, 186))
    d.box(368, 188, 224, 52, "REQUEUED", "the next attempt is in the queue", color="amber")
    d.arrow((540, 188), (540, 170))
    d.box(368, 268, 224, 52, "RESTARTED", "the run itself stays RUNNING", color="plain")
    d.arrow((592, 142), (618, 142), (618, 294), (594, 294))
    d.text(480, 344, "The next attempt starts in the same job.")
    d.arrow((592, 124), (660, 124))
    d.text(800, 28, "Ended", "h")
    for y, name, what, color in (
        (44, "COMPLETED", "exit code 0", "green"), (92, "STOPPED", "saved, then ended", "green"),
        (140, "CANCELLED", "by a user", "plain"), (188, "TIMEOUT", "at the time limit", "red"),
        (236, "PREEMPTED", "for another job", "red"), (284, "NODE_FAIL", "a node died", "red"),
        (332, "FAILED", "an error or crashes", "red"),
        (380, "LOST", "no report of its end", "red"),
    ):  # fmt: skip
        d.box(662, y, 282, 42, color=color)
        d.text(678, y + 26, name, "h l")
        d.text(782, y + 26, what, "s l")
    d.box(
        36,
        380,
        556,
        42,
        "trnslurm resume: an ended run that has steps left returns to the queue",
        color="none",
        kind="s",
    )
    d.arrow((662, 401), (594, 401))
    d.arrow((36, 401), (10, 401), (10, 70), (34, 70))
    d.save("states.svg")


def main() -> None:
    """Draw all of them."""
    submit_path()
    parts_of_a_run()
    states()


if __name__ == "__main__":
    main()
