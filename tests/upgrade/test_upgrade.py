"""What earlier versions wrote is read, resumed and built upon; what later ones write is refused.

A directory here is named for the version that wrote it (make.py): a profile, a recipe, prepared
data, a run that ended early with its checkpoint, and the manifest of compiled graphs.
"""

from __future__ import annotations

import json
import shutil
import socket
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.rundir import DATA_FORMAT
from trnslurm.node.graphs.manifest import GraphCache
from trnslurm.prepare import prepared
from trnslurm.records.foreign import this_user
from trnslurm.records.run import RunDir

VERSIONS = sorted(path.name for path in Path(__file__).parent.glob("[0-9]*"))


@dataclass(frozen=True)
class Old:
    """What a user has of an earlier version."""

    kept: Path
    home: Path
    run: RunDir

    @property
    def data(self) -> Path:
        return self.home / "data/mine"

    @property
    def checkpoint(self) -> Path:
        return self.run.checkpoints / "step-00000004"


@pytest.fixture(params=VERSIONS)
def old(request, home: Path, monkeypatch) -> Old:
    """A home as that version has left it."""
    kept = Path(__file__).parent / request.param
    name = json.loads((kept / "run/run.json").read_text())["run"]
    for place in ("site", "data"):
        shutil.copytree(kept / place, home / place)
    run = RunDir(home / "runs" / name)
    shutil.copytree(kept / "run", run.path)
    shutil.copytree(kept / "site/jobs/mine", run.code / "jobs/mine")
    with tarfile.open(kept / "code.tar.xz") as code:
        code.extractall(run.path, filter="data")
    for directory in (run.path, run.logs, run.state, run.checkpoints):
        directory.chmod(0o700)
    change(run.record_file, host=socket.gethostname(), user=this_user())
    monkeypatch.setenv("TRNSLURM_PATH", str(home / "site"))
    monkeypatch.setenv("TRNSLURM_CLUSTER", "here")
    return Old(kept, home, run)


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_every_minor_version_is_kept() -> None:
    from trnslurm import __version__

    assert ".".join(__version__.split(".")[:2]) in VERSIONS, "python -m tests.upgrade.make"


def test_it_is_read(old: Old, cli) -> None:
    """Expects nothing on stderr."""
    status = json.loads(cli("status", "last", "--json").out)
    assert (status["run"], status["state"]) == (old.run.name, "COMPLETED")
    assert status["mend"] == f"trnslurm resume {old.run.name}"
    assert status["metrics"]["step"] == 4 and status["attempts"][0]["exit_code"] == 0
    assert cli("triage", "last").out.endswith("COMPLETED: nothing failed\n")
    for words, said in (
        (("runs",), old.run.name),
        (("metrics", "last"), "  5.5172  "),
        (("logs", "last"), "step 4"),
        (("compare", "last"), "COMPLETED"),
        (("report", "last", "-o", old.home / "page.html"), "Wrote"),
        (("report", "--since", "2020-01-01"), "mine"),
        (("recipes",), "A very small GPT-2"),
        (("clusters",), "Emulated nodes"),
        (("show", "mine"), "GREETING"),
        (("plan", "mine", "--nodes", "1,2"), "mine (short) on local"),
        (("data", "verify", "mine"), "complete"),
        (("rm", "last", "--dry-run"), "would be freed"),
    ):
        done = cli(*words)
        assert (done.code, done.err) == (0, "") and said in done.out, (words, done)


def test_graphs_are_read(old: Old, tmp_path: Path) -> None:
    told = json.loads((old.kept / "graphs/manifest.json").read_text())
    place = tmp_path / "cache/trnslurm" / told["key"]
    place.mkdir(parents=True, mode=0o700)
    shutil.copy(old.kept / "graphs/manifest.json", place)
    manifest = GraphCache(tmp_path / "cache").read(told["key"])
    assert manifest and manifest.files and manifest.versions["torch"]


def test_it_is_resumed_to_its_last_step(old: Old, run_cli) -> None:
    """This version starts the code of that one."""
    done = run_cli("resume", "last")
    assert done.code == 0, done
    assert f"continues after step 4 from {old.checkpoint}" in done.err
    steps = old.run.steps()
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_new_run_begins_with_its_checkpoint(old: Old, run_cli) -> None:
    """The recipe of that version on this one's code: its names are the same."""
    done = run_cli("submit", "mine", "--from", old.run.name, "--name", "new")
    assert done.code == 0, done
    (new,) = (RunDir(path) for path in old.run.path.parent.glob("*-new"))
    before, first = old.run.steps(), new.steps()[0]
    assert abs(first["loss"] - before[-1]["loss"]) < abs(first["loss"] - before[0]["loss"])


def test_newer_files_are_refused_before_anything_is_queued(old: Old, cli, tmp_path: Path) -> None:
    """Each in one line that says what to do."""
    words = "made by a newer trnslurm (format 2, but this one reads 1): update trnslurm"
    assert cli("render", "mine", "-o", tmp_path / "bundle").code == 0
    index, manifest = old.data / "index.json", old.checkpoint / "manifest.json"
    for file, command, where in (
        (index, ("submit", "mine"), "the data at ~/data/mine"),
        (index, ("data", "prepare", "mine"), str(old.data)),
        (index, ("data", "verify", "mine"), str(old.data)),
        (manifest, ("submit", "mine", "--from", old.run.name), str(old.checkpoint)),
        (tmp_path / "bundle/plan.json", ("submit", "--rendered", tmp_path / "bundle"), None),
    ):
        before = file.read_bytes()
        change(file, format=2)
        done = cli(*command)
        file.write_bytes(before)
        where = where or str(tmp_path / "bundle")
        [line] = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert (done.code, line.removeprefix("error: ").removeprefix("data: ")) == (
            1, f"{where} was {words}",
        ), command  # fmt: skip
    change(old.run.record_file, format=2, versions={"trnslurm": "9.0.0"})
    for command in ("status", "resume", "cancel", "export"):
        assert "is a run of trnslurm 9.0.0" in cli(command, old.run.name).error
    assert [path.name for path in old.run.path.parent.iterdir()] == [old.run.name]


def test_both_sides_of_prepared_data_have_its_number() -> None:
    assert prepared.FORMAT == DATA_FORMAT
