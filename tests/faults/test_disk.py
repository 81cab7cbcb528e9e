"""Rows about the disk: full, and checkpoints that are damaged while nobody looks."""

from __future__ import annotations

import re
import shutil

import pytest

from ..json_lines import read_lines
from ..waiting import eventually
from . import invariants
from .trainings import INTERVAL, Training, submit

pytestmark = pytest.mark.rest


@pytest.mark.faults
@pytest.mark.row(18, "temporarily no space left for checkpoints")
def test_full_disk(user, control, row, tmp_path) -> None:
    """Saves fail, training goes on; a rank is killed meanwhile, and there is room again."""
    run = submit(user, more=("--sbatch", "--hold"))
    directory = run.path / "checkpoints"
    directory.mkdir()
    sandbox = run.sandbox
    sandbox.fault("disk", directory, "2M")
    try:
        run.control("release")
        run.reach(25)
        node = run.hosts()[0]
        had_room = max(run.steps(1))
        sandbox.on_node(node, "sh", "-c", f"cat /dev/zero > '{directory}/filler'")
        log = run.path / "logs/train-1-node0.log"
        eventually(lambda: "no checkpoint of step " in log.read_text())
        run.reach(max(run.steps(1)) + 5)

        def kill() -> None:
            run.kill(1)
            eventually(lambda: run.said(1)["state"] != "RUNNING")
            sandbox.on_node(node, "rm", f"{directory}/filler")

        recovery = run.recover(kill)
        run.finish()
        sandbox.on_node(node, "cp", "-r", str(directory), str(tmp_path / "saved"))
    finally:
        eventually(lambda: not invariants.queued(run))
        sandbox.fault("disk", directory, "off")
    shutil.copytree(tmp_path / "saved", directory, dirs_exist_ok=True)
    # What was trained without room, one interval as ever, and a save that was under way.
    lost = max(run.steps(1)) - had_room + 2 * INTERVAL
    invariants.check(run, control(), row, recovery, lost_at_most=lost)


def damage_three(run: Training) -> None:
    """Stop it, damage its newest three checkpoints, each in another way, and let it go on."""
    run.reach(55)
    eventually(lambda: 50 in invariants.whole_checkpoints(run.path))
    run.keep_logs()
    run.control("requeuehold")
    eventually(lambda: run.state == "HELD")
    newest = sorted(run.path.glob("checkpoints/step-????????"), reverse=True)[:3]
    flipped, truncated, missing = (path / "rank-00001-of-00002.safetensors" for path in newest)
    content = bytearray(flipped.read_bytes())
    content[-100] ^= 1
    flipped.write_bytes(content)
    truncated.write_bytes(truncated.read_bytes()[:-1])
    missing.unlink()
    (run.path / "checkpoints/latest").symlink_to(newest[1].name)
    run.control("release")
    run.finish()
    expected = int(newest[2].name[5:]) - INTERVAL + 1
    assert min(run.steps(2)) in (expected, expected // INTERVAL * INTERVAL + 1), "a damaged one"
    aside = {path.name.split(".")[0] for path in run.path.glob("checkpoints/*.damaged-2")}
    assert aside == {path.name for path in newest}


@pytest.mark.faults
@pytest.mark.row(
    20, "a bit-flipped shard, a truncated shard, a missing shard, and a stale `latest`"
)
def test_damaged_checkpoints(user, control, row) -> None:
    run = submit(user, "train.keep_last=6")
    damage_three(run)
    lost = max(run.steps(1)) - (min(run.steps(2)) - 1)
    invariants.check_end(run, control(), row, lost=lost, bound=4 * INTERVAL)


def written_durably(run: Training) -> None:
    """Whether all of a checkpoint was on the disk before its name, and then the name.

    Each file was fsynced after it was opened for writing, their directory after the last of them,
    both before the renaming; and the directory above after it, before anything else is renamed.
    """
    events = [e for f in run.path.glob("drill/disk-*.jsonl") for e in read_lines(f)]
    events.sort(key=lambda event: event["time"])
    renames = [e for e in events if e["what"] == "rename"]
    commits = [e for e in renames if re.search(r"/step-\d{8}$", e["to"])]
    assert len(commits) >= 10

    def fsynced(path: str, begin: float, end: float) -> bool:
        return any(
            e["what"] == "fsync" and e["path"] == path and begin < e["time"] < end for e in events
        )

    for commit in commits:
        writes = {
            e["path"]: e["time"]
            for e in events
            if e["what"] == "write" and e["path"].startswith(commit["path"] + "/")
        }
        names = sorted(path.rpartition("/")[2] for path in writes)
        assert names == ["manifest.json", *(f"rank-{r:05d}-of-00002.safetensors" for r in (0, 1))]
        for path, time in writes.items():
            assert fsynced(path, time, commit["time"]), f"{path} is not on the disk"
        last = max(writes.values())
        assert fsynced(commit["path"], last, commit["time"]), f"names in {commit['path']}"
        later = (e["time"] for e in renames if e["time"] > commit["time"])
        root = commit["to"].rpartition("/")[0]
        assert fsynced(root, commit["time"], next(later, float("inf"))), f"name {commit['to']}"


@pytest.mark.faults
def test_everything_is_fsynced(control) -> None:
    written_durably(control("train.note_disk=true"))
