"""The examples: copied by `trnslurm new`, and started by the command in their first lines.

That those which save continue where they were, tests/train/test_other_loops.py tests. Ray's is
tested by `make test-ray`, as Ray is large.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles

from ..json_lines import read_lines
from ..processes import Done, run_process

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    directory.name
    for directory in (ROOT / "trnslurm/examples").iterdir()
    if not (directory / "pipeline.yaml").exists()
)
_WITH_RAY = pytest.param("ray", marks=pytest.mark.ray)
_COMMAND = re.compile(r"^(?:# )? {4}trnslurm submit ((?:\./|pipeline)(?:.*\\\n)*.*)$", re.M)
_LOSS = re.compile(r"^step \d+: loss ([\d.]+)$", re.M)


class Copy:
    """A user's copy of an example."""

    def __init__(self, home: Path, name: str) -> None:
        self._home, self.directory = home, home / "my copy"
        self._call("new", "copy", "--example", name, cwd=home).ok  # noqa: B018  it asserts
        (home / "copy").rename(self.directory)
        pipeline, main = self.directory / "pipeline.yaml", self.directory / "train.py"
        others = [*self.directory.glob("*.sh")] or [*self.directory.glob("*.py")]
        [entry] = [pipeline] if pipeline.exists() else [main] if main.exists() else others
        found = _COMMAND.search(entry.read_text(encoding="utf-8"))
        assert found, f"{entry} does not say how to start it"
        self.words = shlex.split(found[1].replace("\\\n", " "))
        begins = [entry.name] if entry == pipeline else [f"./{entry.name}", "--nodes", "2"]
        assert self.words[: len(begins)] == begins

    def trnslurm(self, *words: str) -> Done:
        return self._call(*words, cwd=self.directory)

    def run_bundle(self, bundle: Path) -> str:
        environment = self._environment() | {"TRNSLURM_PYTHON": sys.executable}
        return run_process(["bash", "train.sh"], cwd=bundle, env=environment).out

    def _call(self, *words: str, cwd: Path) -> Done:
        return run_process(
            [sys.executable, "-m", "trnslurm", *words], cwd=cwd, env=self._environment()
        )

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self._home), "PYTHONPATH": str(ROOT)}


def test_the_pipeline_ends_with_a_model_that_passed_its_test(tmp_path: Path) -> None:
    example = Copy(tmp_path, "pipeline")
    done = example.trnslurm("submit", *example.words, "--cluster", "local")
    assert done.code == 0, done.out + done.err
    assert "/out/model.json is good: accuracy 0.9" in done.out
    assert ": 5 stages: 5 COMPLETED\n" in done.out


@pytest.mark.parametrize("name", [_WITH_RAY if name == "ray" else name for name in NAMES])
def test_it_trains_as_it_says(tmp_path: Path, name: str) -> None:
    """On two workers, which learn together."""
    if name == "lora":
        pytest.importorskip("peft")
    example = Copy(tmp_path, name)
    done = example.trnslurm("submit", *example.words)
    assert done.code == 0, done.out + done.err
    metrics = json.loads(example.trnslurm("metrics", "last", "--json").out)
    losses = [line["loss"] for line in metrics if "loss" in line]
    if not metrics:  # it has no word of ours
        losses = [float(loss) for loss in _LOSS.findall(example.trnslurm("logs", "last").out)]
    assert losses[-1] < losses[0]
    status = json.loads(example.trnslurm("status", "last", "--json").out)
    assert (status["state"], status["reason"]) == ("COMPLETED", "")


@pytest.mark.parametrize("name", ["c", _WITH_RAY])
def test_a_program_stops_when_asked_and_goes_on(tmp_path: Path, name: str) -> None:
    """To the same last loss, to the digit; that in C by the files and variables alone."""
    example = Copy(tmp_path, name)
    losses = {}
    for bundle in (tmp_path / "whole", tmp_path / "stopped"):
        example.trnslurm("render", "--output", str(bundle), *example.words).ok  # noqa: B018
        run = RunFiles(bundle)
        if bundle.name == "stopped":
            run.state.mkdir(exist_ok=True)
            write_json(run.stop_file("train", 1), {"cause": "time limit"})
            assert "STOPPED (time limit; saved step 1)" in example.run_bundle(bundle)
            assert json.loads(run.stopped_file("train", 1).read_text())["saved"]
            assert len([*run.checkpoints.iterdir()]) == 1
        example.run_bundle(bundle)
        lines = read_lines(run.metrics_file)
        assert [line["step"] for line in lines] == [*range(1, lines[-1]["steps"] + 1)]
        losses[bundle.name] = lines[-1]["loss"]
    assert losses["whole"] == losses["stopped"]


def test_the_page_has_them_all() -> None:
    page = (ROOT / "docs/scripts.md").read_text(encoding="utf-8")
    told = {name: int(lines) for name, lines in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.M)}
    assert told == {
        name: sum(
            len(file.read_text(encoding="utf-8").splitlines())
            for file in (ROOT / "trnslurm/examples" / name).iterdir()
            if file.suffix in (".py", ".sh", ".c", ".yaml")
        )
        for name in [*NAMES, "pipeline"]
    }


def test_new_refuses_what_is_there(home: Path, cli, monkeypatch) -> None:
    monkeypatch.chdir(home)
    assert cli("new", "gpt", "--example", "nanogpt").out == (
        "Wrote gpt/. In it, run the command in the first lines of train.py.\n"
    )
    said = cli("new", "gpt", "--example", "nanogpt").error
    assert said == "gpt already exists: choose another NAME, or pass --force"
    (home / "gpt/mine.py").touch()
    assert cli("new", "gpt", "--example", "nanogpt", "--force").code == 0
    for words in ((), ("--example", "c", "--launcher", "srun"), ("--example", "c", "--", "x")):
        assert cli("new", "other", *words).code == 2
    assert [file.name for file in home.iterdir() if not file.name.startswith(".")] == ["gpt"]
