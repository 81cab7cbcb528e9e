"""report: what a page tells of a run is what the run's files say."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from trnslurm.contract.files import write_json
from trnslurm.contract.times import seconds_of
from trnslurm.records.run import RunDir
from trnslurm.report.figures import SERIES, drawings
from trnslurm.report.history import COMPILING, ENDING, STARTING, TRAINING, UNDONE, History
from trnslurm.report.page import write_report
from trnslurm.report.summary import used_by
from trnslurm.runs import search
from trnslurm.runs.silence import NO_NUMBERS
from trnslurm.runs.status import run_status

from ..browser import browser
from ..processes import run_process

BEGAN = seconds_of("2026-01-01T10:00:00Z") or 0.0
HOUR = 3600
# By the clock, in minutes: 10 to compile, 5 to start, 30 steps of a minute, 3 to end; then, on one
# node, 5 to start and steps 21 to 40, of which the first is a second time the 21st.
STATES = {
    "precompile": [
        {"state": "COMPLETED", "started": "2026-01-01T10:00:00Z", "ended": "2026-01-01T10:10:00Z"}
    ],
    "train": [
        {"state": "NODE_FAIL", "started": "2026-01-01T10:10:00Z", "ended": "2026-01-01T10:48:00Z",
         "reason": "a node <failed>"},
        {"state": "COMPLETED", "started": "2026-01-01T11:00:00Z", "ended": "2026-01-01T11:27:00Z",
         "hosts": "node-1"},
    ],
}  # fmt: skip


def line(attempt: int, step: int, minute: float, **more: float) -> dict[str, float]:
    """What a step says; `minute` is when it ended, after the first start."""
    told = {"loss": 5 - step / 10, "lr": 0.001, "tokens_per_s": 1000.0 + step, "compute_s": 50.0}
    head = {"attempt": attempt, "step": step, "steps": 40, "samples": 8 * step, "step_s": 60.0}
    return {**head, "time": BEGAN + 60 * minute, **told, **more}


@pytest.fixture
def interrupted(make_run: Callable[..., RunDir], cli, tmp_path: Path) -> History:
    """A run that lost a node at step 30, and ended on one node from the checkpoint of step 20."""
    run = make_run(
        states=STATES, nodes=1, origins={"train.lr": "command line: --set"},
        history=({"nodes": 2, "jobs": {}, "state": "NODE_FAIL", "reason": "",
                  "resumed": "2026-01-01T10:55:00Z"},),
    )  # fmt: skip
    first = [line(1, step, 15 + step) for step in range(1, 31)]
    first[19]["checkpoint_s"] = 0.5
    second = [line(2, step, 65 + step - 20) for step in range(21, 41)]
    second[-1]["eval_loss"] = 0.75
    run.metrics_file.write_text("".join(f"{json.dumps(each)}\n" for each in (*first, *second)))
    bundle = tmp_path / "bundle"
    args = ("gpt2_zero1", "--preset", "xl", "--cluster", "pc", "--set", "steps=40")
    assert cli("render", *args, "-o", str(bundle)).code == 0
    for name in ("config.yaml", "plan.json"):
        shutil.copy(bundle / name, run.path)
    return History(run, run.record(), run_status(run))


def test_the_servers_of_roles(interrupted, tmp_path: Path) -> None:
    """A program that was killed wrote no end of its servers: the next one begins with its own."""
    told = [
        *(("rollout", 0, "starting", 10, ""), ("reward", 0, "starting", 10, "")),
        *(("rollout", 0, "ready", 12, ""), ("reward", 0, "ready", 11, "")),
        *(("rollout", 0, "pausing", 30, "<b>killed</b>"), ("rollout", 0, "starting", 31, "")),
        *(("rollout", 0, "ready", 33, ""), ("reward", 0, "unwell", 40, "no answer")),
        *(("rollout", 0, "starting", 60, ""), ("reward", 0, "starting", 60, "")),
        *(("rollout", 0, "ready", 65, ""), ("reward", 0, "down", 70, "")),
    ]
    lines = [
        {"role": role, "number": n, "stand": stand, "since": BEGAN + 60 * minute, "why": why}
        for role, n, stand, minute, why in told
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in lines)
    interrupted.run.server_changes_file.write_text(text + '{"role": 1}\nbroken\n')
    rollout, reward = interrupted.servers
    assert (rollout.name, rollout.starts, rollout.why) == ("rollout 0", 3, "<b>killed</b>")
    assert rollout.seconds("ready") == 60 * (18 + 27 + 22) and rollout.seconds("pausing") == 0
    assert reward.seconds("ready", "unwell") == 60 * (29 + 20) and reward.starts == 2
    write_report([interrupted], tmp_path / "r.html", pictures=False)
    page = (tmp_path / "r.html").read_text()
    assert "a server that does not answer" in page and ">rollout 0<" in page
    assert "&lt;b&gt;killed" in page and "<b>killed" not in page


def test_where_the_time_went(interrupted) -> None:
    compiled, first, second = interrupted.stays
    minutes = [(what, (start - BEGAN) / 60, (end - BEGAN) / 60) for what, start, end in first.parts]
    assert [part[0] for part in compiled.parts] == [COMPILING]
    assert minutes == [
        (STARTING, 10, 15), (TRAINING, 15, 35), (UNDONE, 35, 45), (ENDING, 45, 48),
    ]  # fmt: skip
    assert [part[0] for part in second.parts] == [STARTING, TRAINING, ENDING]
    assert [stay.nodes for stay in interrupted.stays] == [2, 2, 1]
    assert [stay.redone for stay in interrupted.stays] == [0, 10, 0]
    every_tenth = replace(first, lines=first.lines[9::10], kept=2)
    assert every_tenth.redone == 10


def test_what_it_cost(interrupted) -> None:
    assert interrupted.node_hours() == pytest.approx((2 * 10 + 2 * 38 + 27) / 60)
    kinds = [part[0] for stay in interrupted.stays for part in stay.parts]
    assert sum(map(interrupted.node_hours, set(kinds))) == pytest.approx(interrupted.node_hours())
    # Ten minutes of steps and three of its end on two nodes, and five to start again on one.
    assert interrupted.lost_node_hours == pytest.approx((2 * 13 + 5) / 60)
    assert interrupted.price_per_hour == 21.50


def test_a_run_that_lives_ends_now_and_one_that_is_lost_when_it_last_spoke(make_run) -> None:
    begun = {"state": "RUNNING", "started": "2026-01-01T10:10:00Z"}
    run = make_run(states={"train": [begun]}, scheduler="local", jobs={}, phases=("train",))
    run.metrics_file.write_text(json.dumps(line(1, 1, 20)))
    history = History(run, run.record(), run_status(run))
    assert history.status.final
    assert history.stays[0].ended == BEGAN + 20 * 60


def test_a_step_without_a_time_and_numbers_that_are_none_do_no_harm(make_run, tmp_path) -> None:
    run = make_run(states={"train": STATES["train"][:1]}, phases=("train",))
    lines = [
        '{"attempt": 1, "step": 1, "loss": NaN, "time": "soon", "compute_s": null}',
        '{"attempt": 1, "step": 2, "loss": Infinity, "$x^$": 1, "checkpoint_s": 1}',
        '{"attempt": 1, "step": 3, "loss": 2.5, "time": -1e300, "lr": true, "a/../b": 4}',
    ]
    run.metrics_file.write_text("\n".join(lines))
    history = History(run, run.record(), run_status(run))
    files = write_report([history], tmp_path / "page.html", pictures=True)
    assert {f.parent for f in files} == {tmp_path}
    assert {"page-x.png", "page-a-b.png", "page-loss.png"} <= {f.name for f in files}


class Cells(HTMLParser):
    """The tables of a page: title -> rows of texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self._title, self._in = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        if tag in ("h2", "summary"):
            self._title = ""
        elif tag == "tr":
            self.tables.setdefault(self._title.strip(), []).append([])
        elif tag in ("td", "th"):
            self.tables[self._title.strip()][-1].append("")

    def handle_data(self, data: str) -> None:
        if self._in in ("h2", "summary"):
            self._title += data
        elif self._in in ("td", "th"):
            self.tables[self._title.strip()][-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


def test_the_numbers_of_the_page_are_those_of_the_metrics(interrupted, tmp_path) -> None:
    write_report([interrupted], tmp_path / "page.html", pictures=False)
    page = (tmp_path / "page.html").read_text()
    tables = Cells(page).tables
    header, *rows = tables["Steps"]
    told = [dict(zip(header, row, strict=True)) for row in rows]
    counting = interrupted.run.steps()
    assert [(row["step"], row["attempt"]) for row in told] == [
        (str(each["step"]), str(each["attempt"])) for each in counting
    ]
    assert [row["loss"] for row in told] == [f"{each['loss']:.4f}" for each in counting]
    assert told[0]["time (UTC)"] == "2026-01-01 10:16:00"
    assert told[-1]["eval_loss"] == "0.7500" and told[0]["eval_loss"] == "-"
    _, first, second, third = tables["Attempts"]
    assert first[4:] == ["10 min 00 s", "", "", ""]
    assert second[2] == "NODE_FAIL: a node <failed>"
    assert second[4:] == ["38 min 00 s", "1 – 30", "10", "0.517"]
    assert third[4:] == ["27 min 00 s", "21 – 40", "", ""]
    spent = {row[0]: row[1:] for row in tables["Node-hours by activity"]}
    assert spent["steps that count"] == ["1.0", "48.8%", "$22"]
    assert spent["all"] == ["2.0", "100.0%", "$44"]
    ran = {row[0]: row[1:] for row in tables["Batch: plan and actual"]}
    assert ran["nodes"] == ["1", "1, 2"] and ran["steps"] == ["40", "40"]
    assert ["train.lr", "0.00015", "command line: --set"] in tables["Configuration"]
    assert "a node <failed>" not in page  # it is text, and no tag
    assert "<script" not in page and "http:" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)


def test_a_reader_learns_at_once_what_happened(interrupted, tmp_path) -> None:
    write_report([interrupted], tmp_path / "page.html", pictures=False)
    page = (tmp_path / "page.html").read_text()
    story = "Interrupted once, and resumed at step 21, on 1 node (after NODE_FAIL: a node "
    assert f"{story}&lt;failed&gt;). 10 steps were repeated." in page
    loss, timeline = (
        page.partition(f'id="{name}"')[2].partition("</figure>")[0] for name in ("loss", "timeline")
    )
    assert "a restart" in loss
    for text in ("attempt 2: 1 node", "starting, until the first step", "lost and repeated"):
        assert text in timeline


def test_the_same_run_has_the_same_figures(interrupted, tmp_path) -> None:
    texts = []
    for name in ("a.html", "b.html"):
        write_report([interrupted], tmp_path / name, pictures=False)
        texts.append(re.sub("<p class=.soft.>Made .*", "", (tmp_path / name).read_text()))
    assert texts[0] == texts[1]


def test_runs_of_a_figure_are_ranked_by_their_last_held_out_loss(make_run) -> None:
    histories = []
    for name, losses in (("a", [2.0, 3.0]), ("b", [4.0, 2.5]), ("c", [])):
        run = make_run(f"20260101-000000-{name}", states=STATES)
        told = [line(1, step, 20, eval_loss=loss) for step, loss in enumerate(losses, 1)]
        run.metrics_file.write_text(
            "".join(f"{json.dumps(each)}\n" for each in told or [line(1, 1, 20)])
        )
        histories.append(History(run, run.record(), run_status(run)))
    keys = drawings(histories)[0].keys
    assert [text.partition("-000000-")[2] for _, text in keys] == ["b: 2.5000", "a: 3.0000", "c"]
    assert [colour for colour, _ in keys] == [SERIES[1], SERIES[0], SERIES[2]]


def test_a_step_that_is_cut_off_is_told(make_run) -> None:
    run = make_run(states=STATES)
    told = [line(1, step, 20, compute_s=0.1 if step > 1 else 3.0) for step in range(1, 31)]
    run.metrics_file.write_text("".join(f"{json.dumps(each)}\n" for each in told))
    drawing = next(
        each for each in drawings([History(run, run.record(), run_status(run))])
        if each.name == "step-time"
    )  # fmt: skip
    assert drawing.about == "on worker 0; truncated: step 1 took 3.0 s"


def test_runs_beside_each_other(interrupted, make_run, cli, tmp_path: Path) -> None:
    other = make_run("20260102-000000-gpt", states=STATES)
    other.metrics_file.write_text(json.dumps(line(1, 1, 20, f1=0.5)))
    config = (interrupted.run.path / "config.yaml").read_text()
    (other.path / "config.yaml").write_text(config.replace("\n  seed: 1234\n", "\n  seed: 4321\n"))
    page = tmp_path / "both.html"
    names = [interrupted.run.name, other.name]
    done = cli("report", *names, "-o", str(page))
    assert (done.code, done.out) == (0, f"Wrote {page}\n")
    tables = Cells(page.read_text()).tables
    header, *rows = tables["Runs"]
    assert [row[:1] for row in rows] == [[name] for name in names]
    assert [row[header.index("loss")] for row in rows] == ["1.0000", "4.9000"]
    assert [row[header.index("f1")] for row in rows] == ["-", "0.5"]
    assert tables["Differences in configuration"] == [["key", *names], ["seed", "1234", "4321"]]


def test_a_script_that_reports_nothing_is_told_how(make_run, cli, tmp_path, monkeypatch) -> None:
    """A script that failed has no numbers for a reason."""
    monkeypatch.chdir(tmp_path)
    began = "2026-01-01T10:00:00Z"
    ends = ("COMPLETED", "TIMEOUT", "FAILED")
    runs = [
        make_run(f"20260101-000000-{end.lower()}", phases=("train",),
                 states={"train": [{"state": end, "started": began}]})
        for end in ends
    ]  # fmt: skip
    names = [run.name for run in runs]
    assert NO_NUMBERS not in cli("status", names[0]).out  # not a custom script
    for run in runs:
        run.project_file.parent.mkdir()
        write_json(run.project_file, {})
        if run.name.endswith(("completed", "timeout")):
            assert f"\n{NO_NUMBERS}\n" in cli("status", run.name).out
    assert f"{names[0]} and 1 more: {NO_NUMBERS}\n" in cli("compare", *names).out
    done = cli("report", names[0], "-o", "page.html")
    assert done.err == f"{NO_NUMBERS}\n" and f"<p>{NO_NUMBERS}</p>" in Path("page.html").read_text()
    assert cli("metrics", names[0]).error == f"{names[0]}: {NO_NUMBERS}"
    for run in runs:
        run.metrics_file.write_text(json.dumps(line(1, 1, 20)))
        assert NO_NUMBERS not in cli("status", run.name).out


def test_the_page_is_named_after_its_run_and_pictures_after_the_page(
    interrupted, cli, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = interrupted.run.name
    done = cli("report", name, "--png")
    written = [row.removeprefix("Wrote ") for row in done.out.splitlines()]
    assert written[0] == f"{name}.html" and f"{name}-timeline.png" in written
    assert {*written} == {p.name for p in tmp_path.iterdir() if p.is_file()}
    for picture in written[1:]:
        pixels = image.imread(picture)
        assert pixels.shape[0] > 100 and pixels.std() > 0.01


def test_wrong_words(interrupted, cli, tmp_path) -> None:
    assert cli("report").code == 2
    assert "no run 'nobody'" in cli("report", "nobody").error
    missing = tmp_path / "none/page.html"
    done = cli("report", interrupted.run.name, "-o", str(missing))
    assert done.code == 1 and f"there is no directory {missing.parent}" in done.error


def test_a_run_that_has_not_begun(make_run, cli, tmp_path) -> None:
    run = make_run(refused="sbatch: no", jobs={})
    page = tmp_path / "page.html"
    assert cli("report", run.name, "-o", str(page)).code == 0
    text = page.read_text()
    assert "FAILED" in text and "<svg" not in text


def test_without_matplotlib_it_says_what_to_install(interrupted, tmp_path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('none here')")
    done = run_process(
        [sys.executable, "-m", "trnslurm", "report", str(interrupted.run.path), "-o", "page.html"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        cwd=tmp_path,
    )
    assert done.code == 1
    assert (
        done.err
        == "error: reports need matplotlib: run pip install '.[report]' in a clone of trnslurm\n"
    )
    assert not (tmp_path / "page.html").exists()


def has(pixels, colour: str) -> int:
    """How many pixels have a colour."""
    rgb = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((pixels == rgb).all(axis=2).sum())


def test_a_browser_shows_it_in_light_in_dark_and_on_a_phone(interrupted, tmp_path) -> None:
    page = tmp_path / "page.html"
    write_report([interrupted], page, pictures=False)
    told = page.read_text()
    with browser(tmp_path / "chromium") as shown:

        def pixels_of(**how: Any) -> image.np.ndarray:
            shown.open(page.as_uri(), height=2600, **how)
            shown.picture(tmp_path / "page.png")
            return (image.imread(tmp_path / "page.png")[:, :, :3] * 255).round()

        light, dark = pixels_of(width=1200), pixels_of(width=1200, dark=True)
        tables = Cells(shown.run("document.documentElement.outerHTML")).tables
        phone = pixels_of(width=390)
        # Nothing is wider than a phone.
        assert shown.run("document.documentElement.scrollWidth <= 390")
        assert shown.said == []
        page.write_text(f"{told}<script>document.title = 'a script'</script>")
        shown.open(page.as_uri())
        assert "Content Security Policy" in shown.said[0]
    assert tables == Cells(told).tables
    assert light.shape[1] == 1200 and phone.shape[1] == 390
    assert has(light, "#f6f7f9") > 100_000 and has(dark, "#15181c") > 100_000
    assert not has(light, "#15181c") and not has(dark, "#f6f7f9")
    for pixels, training, undone in (
        (light, "#009e73", "#d55e00"), (dark, "#2cc797", "#ff8a3d"), (phone, "#009e73", "#d55e00"),
    ):  # fmt: skip
        # Of the bars of the timeline; on two nodes ten minutes were undone, and forty were not.
        assert has(pixels, training) > 2 * has(pixels, undone) > 200


def test_what_all_runs_used(interrupted: History, cli) -> None:
    (toy, every) = used_by([interrupted], ["recipe", "state"])
    assert toy.what == (interrupted.record.recipe, "COMPLETED") and every.what == ("all", "")
    assert toy.node_hours == pytest.approx(interrupted.node_hours())
    assert toy.trained == pytest.approx(interrupted.node_hours(TRAINING))
    assert toy.lost == pytest.approx(interrupted.lost_node_hours)
    assert toy.goodput == pytest.approx(toy.trained / toy.node_hours)
    twice = used_by([interrupted, interrupted], ["user"])[-1]
    assert (twice.runs, twice.node_hours) == (2, pytest.approx(2 * toy.node_hours))


def test_a_period_is_printed(
    interrupted: History, cli, monkeypatch: pytest.MonkeyPatch, stable
) -> None:
    monkeypatch.setattr(search, "known_roots", lambda: [interrupted.run.path.parent])
    said = cli("report", "--since", "2025-12-31", "--by", "user,recipe").out.splitlines()
    assert said[0].split()[:4] == ["user", "recipe", "runs", "node-hours"]
    assert said[-1].startswith("all") or said[-1].startswith("cost: without")
    (row, every) = json.loads(cli("report", "--since", "2025-12-31", "--json").out)
    stable.json("report", [row, every])
    assert row["recipe"] == interrupted.record.recipe and every["recipe"] == "all"
    assert row["node_hours"] == pytest.approx(interrupted.node_hours())
    assert "No run" in cli("report", "--since", "2026-11-01").err
    assert "use user, recipe" in cli("report", "--since", "1d", "--by", "colour").error
    assert "--since reports on all runs" in cli("report", "last", "--since", "1d").error
    assert "pass a run" in cli("report").error
