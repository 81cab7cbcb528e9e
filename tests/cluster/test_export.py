"""export: which script is started, with which Python, where, and what becomes of its words."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trnslurm.records.run import RunDir

from ..toy_site import TOY

# In the place of a job's export script: it says with what it was started.
SCRIPT = """
import json, os, sys
open("written", "w").close()
print(json.dumps({
    "options": sys.argv[2:], "plan": sys.argv[1], "cwd": os.getcwd(), "python": sys.executable,
    "path": os.environ["PYTHONPATH"], "said": os.environ.get("SAID"), "mark": os.environ["MARK"],
}))
"""
CLUSTER: dict[str, Any] = {"scheduler": "local", "env": {"MARK": "it's $HOME"}}


@pytest.fixture
def exportable(make_run) -> Callable[..., RunDir]:
    """Make a run in a directory with a weird name, as a submission would have left it."""

    def make(script: str | None = SCRIPT, **changes: Any) -> RunDir:
        run: RunDir = make_run("""it's "a" $(run) of 目录""", scheduler="local")
        tree = {"recipe_name": "gpt2_zero1", "config": CLUSTER | changes}
        run.config_file.write_text(yaml.safe_dump(tree))
        job = run.code / "jobs" / "gpt2_zero1"
        job.mkdir(parents=True)
        if script is not None:
            (job / "export.py").write_text(script)
        return run

    return make


def test_the_script_of_the_run_with_the_python_that_runs_us(exportable, run_cli) -> None:
    run = exportable()
    done = run_cli("export", run.path)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {
        "options": ["--format=hf", "--dtype=float32"],
        "plan": str(run.plan_file),
        "cwd": str(run.path),
        "python": sys.executable,
        "path": run.python_path,
        "said": None,
        "mark": "it's $HOME",
    }


def test_the_python_of_the_runs_cluster(exportable, run_cli, weird_path: Path) -> None:
    python = weird_path / "python"
    python.write_text(f'#!/bin/sh\nSAID="$FIRST" exec \'{sys.executable}\' "$@"\n')
    python.chmod(0o755)
    run = exportable(python=str(python), activate=["export FIRST='of the activation'"])
    done = run_cli("export", "last")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["said"] == "of the activation"
    assert json.loads(done.out)["cwd"] == str(run.path)


def test_options_reach_the_script(exportable, run_cli, weird_path: Path, monkeypatch) -> None:
    run = exportable()
    monkeypatch.chdir(weird_path)
    words = ("--step", "20", "-o", "to $x", "--dtype", "bfloat16", "--force", "--json")
    done = run_cli("export", run.path, *words, "--tokenizer", "a b", "--format", "hf")
    assert json.loads(done.out)["options"] == [
        "--format=hf", "--dtype=bfloat16", "--step=20", f"--output={weird_path / 'to $x'}",
        f"--tokenizer={weird_path / 'a b'}", "--force", "--json",
    ]  # fmt: skip


def test_the_best(exportable, run_cli) -> None:
    run = exportable()
    done = run_cli("export", run.path, "--step", "best")
    assert json.loads(done.out)["options"] == ["--format=hf", "--dtype=float32", "--step=best"]


def test_a_file_of_no_run(site, run_cli, weird_path: Path, monkeypatch) -> None:
    """The script of the recipe, with a plan of its model, and no place of its own that stays."""
    site.recipe("model: {width: 3}\n" + TOY)
    site.write(
        "jobs/toy/export.py",
        SCRIPT.replace('"plan": sys', '"model": PLAN, "plan": sys').replace(
            "\nprint", '\nPLAN = json.load(open(sys.argv[1]))["model"]\nprint'
        ),
    )
    site.profile("here", **CLUSTER, python=sys.executable, slurm={})
    monkeypatch.chdir(weird_path)
    Path("ckpt_1.pt").touch()
    words = ("--recipe", "toy", "--cluster", "here", "-o", "out")
    done = run_cli("export", "ckpt_1.pt", *words)
    assert (done.code, done.err) == (0, "")
    said = json.loads(done.out)
    assert said["model"] == {"width": 3}
    assert said["options"] == [
        f"--from={weird_path / 'ckpt_1.pt'}", "--format=hf", "--dtype=float32",
        f"--output={weird_path / 'out'}",
    ]  # fmt: skip
    assert not Path(said["cwd"]).exists()
    assert run_cli("export", "ckpt_2.pt", *words).error == "ckpt_2.pt: no such file"
    Path("rows.csv").touch()
    error = run_cli("export", "rows.csv", *words).error
    assert error == "rows.csv: with --recipe, RUN must be a .pt file"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("a.pt",), "a.pt is a file: pass the recipe of its model with --recipe"),
        (
            ("last", "--preset", "tiny"),
            "--preset and --cluster require a checkpoint file: pass --rec",
        ),
        (("a.pt", "--recipe", "toy"), "omit --step and pass --output"),
        (("a.pt", "--recipe", "toy", "-o", "a", "--step", "3"), "omit --step and pass"),
    ],
)
def test_a_file_and_a_run_have_options_of_their_own(exportable, cli, words, error: str) -> None:
    exportable()
    done = cli("export", *words)
    assert done.code == 2
    assert error in done.error


@pytest.mark.parametrize(("group_readable", "mode"), [(False, 0o600), (True, 0o640)])
def test_as_private_as_the_run(exportable, run_cli, group_readable: bool, mode: int) -> None:
    run = exportable(group_readable=group_readable)
    before = os.umask(0)
    try:
        assert run_cli("export", run.path).code == 0
    finally:
        os.umask(before)
    assert (run.path / "written").stat().st_mode & 0o777 == mode


def test_its_error_is_the_only_line(exportable, run_cli) -> None:
    exportable("import sys; sys.exit('error: no checkpoint is whole')")
    done = run_cli("export", "last")
    assert (done.code, done.error) == (1, "no checkpoint is whole")


def test_a_python_without_the_stack(exportable, run_cli, tmp_path: Path) -> None:
    python = tmp_path / "python"
    # -S: without its site-packages.
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -S \"$@\"\n")
    python.chmod(0o755)
    exportable(python=str(python))
    done = run_cli("export", "last")
    assert done.code == 1
    assert "has no torch, transformers, safetensors: install trnslurm there" in done.error


def test_a_job_that_exports_nothing(exportable, cli) -> None:
    run = exportable(None)
    done = cli("export", "last")
    assert done.code == 1
    assert done.error == f"{run.name} cannot be exported, because gpt2_zero1 has no export.py"


def test_what_a_custom_script_saved_is_named(exportable, cli) -> None:
    """As it is, if it is what Hugging Face's Trainer saves, and whole."""
    run = exportable()
    run.project_file.parent.mkdir(exist_ok=True)
    run.project_file.write_text("{}")
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    unknown = f"{run.name}: export converts only checkpoints of recipes: {run.checkpoints}"
    error = cli("export", run.name).error
    assert error.startswith(f"{unknown} is in the custom script's own format")
    for step in (90, 100):
        saved = run.checkpoints / f"checkpoint-{step}"
        saved.mkdir(parents=True)
        (saved / "config.json").write_text("{}")
        (saved / "model.safetensors").touch()
    found = (
        f"{run.name}: there is nothing to export: {{}} is already a Hugging Face "
        "model for from_pretrained"
    )
    assert cli("export", run.name).error == found.format(saved)
    (saved / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-2.safetensors"}}'
    )
    before = run.checkpoints / "checkpoint-90"
    assert cli("export", run.name).error == found.format(before), "one that lacks a part"


def test_a_run_that_is_damaged(exportable, cli) -> None:
    run = exportable()
    run.config_file.write_text("recipe_name: gpt2_zero1\n")
    assert cli("export", "last").error == f"{run.config_file} is damaged: it has no config"
    run.config_file.write_text(yaml.safe_dump({"config": {"scheduler": "none"}}))
    assert cli("export", "last").error.startswith(f"{run.config_file}: scheduler")
    run.config_file.unlink()
    assert cli("export", "last").error == f"{run.config_file}: no such file"


@pytest.mark.parametrize("words", [("--step", "0"), ("--dtype", "int4"), ("--step", "newest")])
def test_wrong_usage(exportable, cli, words: tuple[str, str]) -> None:
    exportable()
    done = cli("export", "last", *words)
    assert done.code == 2
    assert words[0] in done.error


def test_no_such_run(site, cli) -> None:
    assert cli("export", "last").code == 1
    assert "no run 'last'" in cli("export", "last").error
