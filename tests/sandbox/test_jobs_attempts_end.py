"""What the end of an attempt leads to: saved and started again, counted, or a node left out."""

from __future__ import annotations

import json
import time

import pytest

from ..waiting import eventually

pytestmark = pytest.mark.rest


def ends(run) -> list[str]:
    """What each attempt of a training says of its end."""
    files = sorted(run.path.glob("state/train-*.json"))
    return [f"{said['state']}: {said['reason']}" for said in map(read, files)]


def read(file) -> dict:
    return json.loads(file.read_text())


def test_time_limits(user) -> None:
    """Saved early; saved once the limit is reached; hung by then, but saved some time before."""
    late = ("slurm.stop_before_s=0", "train.deaf=true")
    cases = [
        (("train.stop=true",), "time limit", "saved step 10"),
        (("train.stop=true", *late), "terminated", "saved step 10"),
        (("train.save=[1]", *late), "terminated", "step 1 was saved before"),
    ]
    runs = [user.submit("slurm.time_min=1", "train.wait=true", *sets) for sets, _, _ in cases]
    for run in runs:
        run.go(attempt=2)  # before it starts: it would wait into its own time limit
    for run, (_, asked, saved) in zip(runs, cases, strict=True):
        run.until("COMPLETED")
        assert read(run.path / "state/stop-train-1.json")["cause"] == asked
        assert ends(run) == [f"REQUEUED: time limit; {saved}", "COMPLETED: "]


def test_a_bad_node_is_left_out_for_a_while(user) -> None:
    """And the nodes that the user leaves out stay left out."""
    bad, never = user.sandbox.node_name(2), user.sandbox.node_name(4)
    run = user.submit(
        "train.bad_node=1", "train.fail_attempts=[1,2]", "train.wait=true",
        "slurm.exclude_hours=0.003", nodes=2, more=("--sbatch", f"--exclude={never}"),
    )  # fmt: skip
    run.go(attempt=1)
    second = run.until_there(2, attempt=2)
    assert ends(run)[0] == (
        "REQUEUED: crash 1 of 3 without a new checkpoint: "
        f"{bad}: preflight failed; a device is missing"
    )
    ((host, entry),) = read(run.path / "state/excluded.json")["nodes"].items()
    assert host == bad
    assert {f["host"] for f in second.values()} == {user.sandbox.node_name(n) for n in (1, 3)}
    eventually(lambda: time.time() > entry["until"])
    run.go(attempt=2)
    third = run.until_there(2, attempt=3)
    assert run.job()["ExcNodeList"] == never
    run.go(attempt=3)
    run.until("COMPLETED")
    assert {f["host"] for f in third.values()} == {user.sandbox.node_name(n) for n in (1, 2)}
    assert read(run.path / "state/excluded.json")["nodes"] == {}
