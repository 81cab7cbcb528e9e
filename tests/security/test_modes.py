"""The modes of all that commands write: the run's own, whatever the shell's umask is."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trnslurm.cli.profile
from trnslurm.records.run import RunDir
from trnslurm.remote.request import RemoteCommand, keep
from trnslurm.remote.ssh import Place
from trnslurm.render import cached

from ..cli.test_surface import VERBS
from ..slurm import test_detect
from ..toy_site import TOY, write_attempt

RECIPE = f"{TOY}train: {{lr: 1}}\n"
EXPORT = "import pathlib\npathlib.Path('exported').mkdir()\nopen('exported/model', 'w').close()\n"
# A command by hand in a run: it imports the run's code, and writes a file.
BY_HAND = """
import sys
sys.path.insert(0, f"{sys.argv[1]}/code/trnslurm.zip")
import trnslurm.contract.files
open(f"{sys.argv[1]}/by-hand", "w").close()
"""
RECORDED = trnslurm.cli.profile.Recorded(
    rank=0, host="", problem="", steps=1, seconds=1.0, shares={}, trace=None, memory=None
)
SLURM = test_detect.CONFIG.format(accounting="(null)", name="lab") + "MaxArraySize = 1001"
PARTITION = test_detect.PARTITION.format(
    name="compute", default="YES", max_time="UNLIMITED", nodes="compute-dy-cr-1"
)
# They only read, or what they write is the user's own, where the user says.
OTHERS = {
    "adopt", "recipes", "show", "plan", "render", "new", "data fetch", "data verify", "runs",
    "status", "top", "logs", "metrics", "exporter", "report", "compare", "triage", "usage",
    "doctor", "clusters", "env check", "completion", "compile gc", "compile key", "compile status",
    "compile verify", *(name for name in VERBS if name.startswith("sandbox ")),
}  # fmt: skip


@contextmanager
def umask_of_shell(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def process_of(run: RunDir) -> Iterator[None]:
    """A process of the run on this host, by its environment."""
    names = {"RUN_DIR": run.path, "PYTHON": sys.executable, "PHASE": "train", "ATTEMPT": 1}
    environ = {f"TRNSLURM_{name}": str(value) for name, value in names.items()}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=os.environ | environ) as process:
        yield
        process.kill()


def commands(site: Any, fake_slurm: Any) -> Iterator[tuple[Any, ...]]:
    """Yield every command that writes, in an order in which all work, and prepare its success."""
    options = ("toy", "--cluster", "pc", "--precompile", "never", "-y")
    yield "submit", *options, "--name", "one"
    (run,) = site.runs()
    yield "note", run.path, "a note"
    yield "keep", run.path
    yield "keep", run.path, "--undo"
    yield "submit", *options, "--sweep", "train.lr=2,3"
    write_attempt(run, "train", 1, state="RUNNING", job_id="1001")
    fake_slurm.queue("1001|RUNNING|None|x|node-[1-2]")
    yield "exec", run.path, "--", sys.executable, "-c", BY_HAND, run.path
    assert (run.path / "by-hand").exists()
    with process_of(run):
        yield "stacks", run.path
    yield "profile", run.path
    assert run.profile_request.exists()
    fake_slurm.queue("1001|PENDING|Priority|N/A|")
    yield "cancel", run.path
    assert run.cancelled_file.exists()
    fake_slurm.queue()
    yield "resume", run.path
    write_attempt(run, "train", 2, state="COMPLETED", job_id="1004")
    fake_slurm.queue()
    yield "watch", run.path, "--resume"
    yield "export", run.path
    assert (run.path / "exported/model").exists()
    run.checkpoints.mkdir()
    (run.checkpoints / "weights").write_text("1")
    yield "rm", "--checkpoints", "-y", run.path
    yield "data", "prepare", "gpt2_zero1", "--cluster", "pc", "--submit"
    yield "cluster", "detect", "--write"
    yield "reconnect", "--forget"


def wrong(top: Path, most: int, least: int) -> list[str]:
    """What others can do more with than `most`, or their owner and they less than `least`."""
    found = []
    for path in (top, *top.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        needed = least if path.is_dir() else least & 0o666
        if not path.is_symlink() and (mode & 0o077 & ~most or mode & needed != needed):
            found.append(f"{mode:04o} {path.relative_to(top)}")
    return found


@pytest.mark.parametrize("readable", [False, True], ids=["private", "group_readable"])
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids="{:03o}".format)
def test_no_command_opens_a_run(
    site, fake_slurm, cli, home: Path, monkeypatch, umask: int, readable: bool
) -> None:
    site.recipe(RECIPE)
    site.write("jobs/toy/export.py", EXPORT)
    site.profile(group_readable=readable, python=sys.executable)
    fake_slurm.answer("show-config", SLURM)
    fake_slurm.answer("show-node", *test_detect.nodes("compute", 2, "trn1.32xlarge", 128))
    fake_slurm.answer("show-partition", PARTITION)
    monkeypatch.setattr(trnslurm.cli.profile, "recorded", lambda *_: [RECORDED])
    allowed = (0o050, 0o750) if readable else (0, 0o700)
    called, opened = set(), {}
    for words in commands(site, fake_slurm):
        with umask_of_shell(umask):
            if words[0] == "reconnect":
                place = Place("login")
                keep(RemoteCommand(place=place, argv=("runs",), shows=True, parcel=b"files"))
                opened["--on"] = wrong(home / ".local/state/trnslurm", 0o050, 0o600)
            done = cli(*words)
        assert done.code == 0, done
        called |= {words[0], f"{words[0]} {words[1]}"}
        opened[" ".join(map(str, words))] = wrong(site.run_root, *allowed)
    opened["home"] = wrong(home / ".config/trnslurm", 0o055, 0o600)
    assert {command: files for command, files in opened.items() if files} == {}
    assert {*VERBS} <= called | OTHERS


def test_renderings_are_private(home: Path) -> None:
    """They are templates' bytecode; the directories above are made for this user alone, too."""
    spec = importlib.util.spec_from_file_location("again", cached.__file__)
    assert spec and spec.loader
    again = importlib.util.module_from_spec(spec)  # tests have another directory for the first
    spec.loader.exec_module(again)
    with umask_of_shell(0):
        assert again.cached(__file__, ["x"], lambda: b"rendered") == b"rendered"
    assert len([*(home / ".cache").rglob("*")]) == 3
    assert wrong(home / ".cache", 0, 0o700) == []
