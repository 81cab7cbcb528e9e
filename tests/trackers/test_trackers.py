"""metrics --to: each step once, at Weights & Biases (offline) and MLflow (files); --plot."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.files import write_json
from trnslurm.records.run import RunDir
from trnslurm.trackers import send as trackers

from ..toy_site import write_attempt

TOY = ("submit", "toy", "--cluster", "pc", "--nodes", "2")


@pytest.fixture
def run(graphs, site, fake_slurm, cli) -> RunDir:
    """A run that has begun."""
    graphs.fill(graphs.facts(cli, "toy", "--nodes", "2"))
    assert cli(*TOY, "--notify", "mail ada").code == 0
    run = site.run()
    assert cli("note", "last", "a warmer start").code == 0
    write_attempt(run, "train", 1, state="RUNNING", job_id="1001")
    fake_slurm.queue("1001|RUNNING|None|N/A|")
    return run


def tell(run: RunDir, attempt: int, *steps: int, **numbers: Any) -> None:
    with run.metrics_file.open("a") as file:
        for step in steps:
            line = {"attempt": attempt, "step": step, "steps": 9, "loss": step + attempt / 10,
                    "lr": None, "time": 1000.0 + step, **numbers}  # fmt: skip
            file.write(json.dumps(line) + "\n")


def end(run: RunDir, fake_slurm, attempt: int) -> None:
    write_attempt(run, "train", attempt, state="COMPLETED", job_id="1001")
    fake_slurm.queue()


# -- MLflow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of files, which MLflow calls on to read back what was sent."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/ml")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return MlflowClient(tracking_uri=f"file://{tmp_path}/ml")


def stored(store: Any, experiment: str = "toy") -> Any:
    (found,) = store.search_runs([store.get_experiment_by_name(experiment).experiment_id])
    return found


def losses(store: Any, name: str = "loss") -> list[tuple[int, float, int]]:
    history = store.get_metric_history(stored(store).info.run_id, name)
    return [(metric.step, metric.value, metric.timestamp) for metric in history]


def test_mlflow(run, store, fake_slurm, cli) -> None:
    """A call sends what is new; the newest step of a run that goes on waits, as it may grow."""
    tell(run, 1, 1, 2, 3)
    done = cli("metrics", "last", "--to", "mlflow")
    assert (done.code, done.err) == (0, "")
    where = f"file://{Path(os.environ['MLFLOW_TRACKING_URI'][7:])}, experiment toy"
    assert done.out == f"{run.name}: steps 1 to 2 sent to {where}\n"
    assert stored(store).info.status == "RUNNING"
    tell(run, 1, 3, eval_loss=7.5)
    tell(run, 1, 4)
    tell(run, 2, 4, 5)  # resumed from step 3: what was not sent yet is the newer attempt's
    end(run, fake_slurm, 2)
    assert cli("metrics", "last", "--to", "mlflow").out.startswith(f"{run.name}: steps 3 to 5 ")
    assert cli("metrics", "last", "--to", "mlflow").out == (
        f"{run.name}: no new steps sent to {where}\n"
    )
    assert losses(store) == [
        (1, 1.1, 1001000), (2, 2.1, 1002000), (3, 3.1, 1003000), (3, 3.1, 1003000),
        (4, 4.2, 1004000), (5, 5.2, 1005000),
    ]  # fmt: skip
    assert losses(store, "eval_loss") == [(3, 7.5, 1003000)]
    kept = stored(store)
    assert (kept.info.run_name, kept.info.status) == (run.name, "FINISHED")
    assert kept.data.params["batch.global_batch"] == "64" and "notify.command" not in (
        kept.data.params
    )
    assert "lr" not in kept.data.metrics and kept.data.metrics["attempt"] == 2
    tags = {key: tag for key, tag in kept.data.tags.items() if key != "mlflow.runName"}
    assert tags == {
        "trnslurm.run": run.name, "trnslurm.step": "5", "trnslurm.recipe": "toy",
        "trnslurm.cluster": "pc", "trnslurm.nodes": "2", "trnslurm.state": "COMPLETED",
        "mlflow.note.content": "a warmer start",
    }  # fmt: skip


def test_steps_that_were_undone_stay_as_they_were_sent(run, store, fake_slurm, cli) -> None:
    tell(run, 1, 1, 2, 3, 4)
    assert cli("metrics", "last", "--to", "mlflow").code == 0
    tell(run, 2, 2, 3, 4, 5)
    end(run, fake_slurm, 2)
    assert cli("metrics", "last", "--to", "mlflow").code == 0
    assert [(step, loss) for step, loss, _ in losses(store)] == [
        (1, 1.1), (2, 2.1), (3, 3.1), (4, 4.2), (5, 5.2),
    ]  # fmt: skip


def test_followed_until_it_ends(run, store, fake_slurm, cli, monkeypatch) -> None:
    """More steps than a call takes, and more that come while it is followed."""
    monkeypatch.setattr(trackers, "EVERY_S", 0.01)
    tell(run, 1, *range(1, 401), extra=1.0)
    looks = iter([*range(401, 404), None])
    steps = RunDir.steps

    def look(self: RunDir) -> list[dict[str, Any]]:
        step = next(looks, None)
        if step is None:
            end(run, fake_slurm, 1)
        else:
            tell(run, 1, step)
        return steps(self)

    monkeypatch.setattr(RunDir, "steps", look)
    done = cli("metrics", "last", "--to", "mlflow", "--follow", "--project", "other")
    assert (done.code, done.err) == (0, "")
    assert "steps 1 to 403 sent" in done.out
    history = store.get_metric_history(stored(store, "other").info.run_id, "loss")
    assert [metric.step for metric in history] == [*range(1, 404)]


def evaluated(run: RunDir, step: int, **numbers: float) -> None:
    """Write what a job that follows the run reports for a checkpoint."""
    job = RunDir(run.path.with_name(f"{run.name}.eval-{step}"))
    write_json(run.mark_file("eval", step), {"run": job.name})
    job.path.mkdir(exist_ok=True)
    line = {"attempt": 1, "step": step, "steps": None, **numbers}
    job.metrics_file.write_text(json.dumps(line) + "\n")


def test_late_metrics_in_mlflow(run, store, fake_slurm, cli) -> None:
    """A checkpoint's metrics are sent at its step, and again if its job reports others."""
    (run.follow / "eval").mkdir(parents=True)
    tell(run, 1, 1, 2, 3, 4)
    evaluated(run, 2, score=0.5)
    send = ("metrics", "last", "--to", "mlflow")
    assert cli(*send).code == 0
    evaluated(run, 1, score=0.25)
    evaluated(run, 2, score=0.75)
    tell(run, 1, 5)
    assert cli(*send).code == 0
    evaluated(run, 5, score=1.0)
    end(run, fake_slurm, 1)
    assert ": steps 5 to 5, with late metrics of 1 checkpoint, sent to" in cli(*send).out
    assert ": no new steps sent to" in cli(*send).out
    assert [(step, score) for step, score, _ in losses(store, "eval/score")] == [
        (2, 0.5), (1, 0.25), (5, 1.0), (2, 0.75),
    ]  # fmt: skip
    assert [step for step, *_ in losses(store)] == [1, 2, 3, 4, 5]


# -- Weights & Biases


def records(directory: Path) -> list[Any]:
    """What W&B's own classes make of its file, a log of LevelDB in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("*.wandb")
    data, found, parts, at = file.read_bytes(), [], b"", 7
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history_of(directory: Path) -> list[dict[str, Any]]:
    rows = [r.history.item for r in records(directory) if r.WhichOneof("record_type") == "history"]
    return [
        {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in row
            if not (item.key or item.nested_key[0]).startswith("_")
        }
        for row in rows
    ]


def test_wandb(run, fake_slurm, run_cli) -> None:
    """Offline it writes a directory, and a second call another one with what is new."""
    offline = {"WANDB_MODE": "offline", "WANDB_PROJECT": ""}
    tell(run, 1, 1, 2, 3)
    done = run_cli("metrics", "last", "--to", "wandb", environ=offline)
    (first,) = run.path.glob("wandb/offline-run-*")
    assert (done.code, done.out) == (0, f"{run.name}: steps 1 to 2 sent to {first}\n"), done
    tell(run, 2, 3, 4, eval_loss=2.5)
    end(run, fake_slurm, 2)
    assert run_cli("metrics", "last", "--to", "wandb", environ=offline).out.startswith(
        f"{run.name}: steps 3 to 4 sent to "
    )
    done = run_cli("metrics", "last", "--to", "wandb", environ=offline)
    assert done.out == f"{run.name}: no new steps sent to project toy\n"
    (_, second) = sorted(run.path.glob("wandb/offline-run-*"), key=lambda d: d.stat().st_mtime_ns)
    assert history_of(first) == [{"attempt": 1, "loss": 1.1}, {"attempt": 1, "loss": 2.1}]
    assert history_of(second) == [
        {"attempt": 2, "loss": 3.2, "eval_loss": 2.5}, {"attempt": 2, "loss": 4.2, "eval_loss": 2.5}
    ]  # fmt: skip
    for directory in (first, second):
        (about,) = [r.run for r in records(directory) if r.WhichOneof("record_type") == "run"][:1]
        assert (about.run_id, about.display_name, about.project) == (run.name, run.name, "toy")
        assert (about.notes, [*about.tags]) == ("a warmer start", ["toy", "pc"])
        config = {item.key: item.value_json for item in about.config.update}
        assert config["batch.global_batch"] == "64" and "notify.command" not in config
        assert not about.git.remote_url
        assert {f.name for f in (directory / "files").iterdir()} <= {"config.yaml"}


def test_late_metrics_in_wandb(run, fake_slurm, run_cli) -> None:
    """They go with later steps, as W&B accepts no earlier ones, and have a step of their own."""
    (run.follow / "eval").mkdir(parents=True)

    def send() -> list[dict[str, Any]]:
        known = {*run.path.glob("wandb/offline-run-*")}
        done = run_cli("metrics", "last", "--to", "wandb", environ={"WANDB_MODE": "offline"})
        assert done.code == 0, done
        new = {*run.path.glob("wandb/offline-run-*")} - known
        return [row for each in new for row in history_of(each)]

    tell(run, 1, 1, 2, 3)
    evaluated(run, 2, score=0.5)
    assert send() == [
        {"attempt": 1, "loss": 1.1},
        {"attempt": 1, "loss": 2.1, "eval/score": 0.5, "eval/step": 2},
    ]
    evaluated(run, 1, score=0.25)
    assert not send()  # they wait for the next step
    tell(run, 1, 4)
    assert send() == [{"attempt": 1, "loss": 3.1, "eval/score": 0.25, "eval/step": 1}]
    end(run, fake_slurm, 1)
    assert send() == [{"attempt": 1, "loss": 4.1}]
    evaluated(run, 3, score=0.75)
    evaluated(run, 4, score=1.0)
    rows = [{"eval/score": 0.75, "eval/step": 3}, {"eval/score": 1.0, "eval/step": 4}]
    assert send() == rows and not send()


# -- refused


@pytest.mark.parametrize("to", ["wandb", "mlflow"])
def test_a_missing_package(run, cli, monkeypatch, to: str) -> None:
    for name in [to, *(name for name in sys.modules if name.startswith(f"{to}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"trnslurm.trackers.{to}", raising=False)
    assert cli("metrics", "last", "--to", to).error == (
        f"--to {to} needs a package that is not installed here: run pip install '.[{to}]' in a "
        "clone of trnslurm"
    )


def test_refused(run, cli, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli("metrics", "last", "--to", "mlflow").error == (
        "--to mlflow: set MLFLOW_TRACKING_URI to the address of the server, for example "
        "http://host:5000"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///proc/no/such")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert cli("metrics", "last", "--to", "mlflow").error.startswith("--to mlflow: ")
    for options, why in (
        (("--follow",), "--follow requires --to"),
        (("--project", "x"), "--project requires --to"),
        (("--to", "wandb", "--json"), "--json does not work with --to: omit one of them"),
        (("--plot", "--to", "wandb"), "--to does not work with --plot: omit one of them"),
    ):
        done = cli("metrics", "last", *options)
        assert done.code == 2 and why in done.err


# -- a plot


def test_plot(run, cli, monkeypatch) -> None:
    """In 80 columns; where an attempt resumed is marked."""
    monkeypatch.setenv("COLUMNS", "80")
    tell(run, 1, *range(1, 60))
    tell(run, 2, *range(41, 101), eval_loss=1.5)
    done = cli("metrics", "last", "--plot")
    lines = done.out.splitlines()
    assert (done.code, lines[0]) == (0, f"loss of {run.name}, last 100.2")
    assert max(map(len, lines)) <= 80 and lines[1].startswith("100.2 ┤")
    assert lines[16].startswith("  1.1 ┤⡠")  # it begins at the bottom, and ends at the top
    assert lines[1].rstrip()[-1] in "⠉⠊⠁⡠⠔⠒⠋"
    assert lines[17].startswith("      └─") and lines[17].count("┼") == 1
    at = (lines[17].index("┼") - 7) / 72
    assert abs(at - 40 / 99) < 0.02
    assert lines[18].split() == ["1", "step", "50", "100"] and lines[19].endswith("┼ resumed")
    held_out = cli("metrics", "last", "--plot", "eval_loss", "-n", "10").out.splitlines()
    assert held_out[0] == f"eval_loss of {run.name}, last 1.5"
    assert held_out[18].split() == ["91", "step", "96", "100"]
    assert cli("metrics", "last", "--plot", "los").error == (
        f'{run.name} has no metric los (did you mean "loss"?)'
    )


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [1e9, -1e-9], [float("nan"), 3.0]])
def test_plot_of_little(run, cli, values: list[float]) -> None:
    for step, value in enumerate(values, 1):
        tell(run, 1, step, loss=value)
    done = cli("metrics", "last", "--plot")
    assert done.code == 0 and sum("┤" in line for line in done.out.splitlines()) == 3


def test_nothing_to_plot(run, cli) -> None:
    assert cli("metrics", "last", "--plot").error == cli("metrics", "last").error
