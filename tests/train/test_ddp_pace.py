"""Who is slower than the others in a custom script: by what DistributedDataParallel times."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trnslurm.node.usage.read import notices
from trnslurm.rundir import RunFiles, read_json, write_json

from ..waiting import eventually
from .conftest import run_workers

WORKER = Path(__file__).with_name("ddp_worker.py")


@contextmanager
def training(run: RunFiles, workers: int, **options: Any) -> Iterator[None]:
    """Train until the block ends, which is then a stop that the script follows."""
    run.state.mkdir()
    run.checkpoints.mkdir()
    done: list[Any] = []

    def train() -> None:
        words = json.dumps(options)
        more = {"TRNSLURM_CHECKPOINTS": str(run.checkpoints), "ACCELERATE_USE_CPU": "true"}
        done.append(run_workers(workers, WORKER, words, cwd=run.path, **more))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        write_json(run.stop_file("train", 1), {})
        thread.join()
    assert done[0].returncode == 0 and "ended as asked" in done[0].stdout, done[0].stdout


def told(run: RunFiles) -> list[str]:
    return [notice.text for notice in notices(run, "train", 1)]


def looks(run: RunFiles, number: int) -> dict[str, Any]:
    """Wait for so many looks of worker 0; return what it wrote in the last."""
    seen = {0}
    while len(seen) <= number:
        facts = eventually(lambda: found if (found := newest(run))["step"] > max(seen) else None)
        seen.add(facts["step"])
    return facts


def newest(run: RunFiles) -> dict[str, Any]:
    return {"step": 0} | read_json(run.pace_file("train", 1))


@pytest.mark.parametrize(
    ("slow", "loop", "workers", "says"),
    [
        ("computing", "own", 3, "worker 1 (node 0) computes "),
        ("data", "own", 3, "worker 1 (node 0) waits for its data "),
        ("data", "trainer", 2, "worker 1 (node 0) waits for its data "),
        ("computing", "trainer", 2, "worker 1 (node 0) computes "),
        ("data", "lightning", 2, "worker 1 (node 0) waits for its data "),
        ("computing", "lightning", 2, "worker 1 (node 0) computes "),
    ],
)
def test_a_slow_worker_is_named(
    tmp_path: Path, slow: str, loop: str, workers: int, says: str
) -> None:
    run = RunFiles(tmp_path)
    with training(run, workers, slow=slow, loop=loop):
        (text,) = eventually(lambda: told(run))
    assert text.startswith(says) and " since step " in text


@pytest.mark.parametrize("slow", ["data", "saving"])
def test_who_only_waits_inside_of_the_model_is_not_blamed(tmp_path: Path, slow: str) -> None:
    """There the other worker's computing takes long, but nobody waits for it."""
    run = RunFiles(tmp_path)
    with training(run, 2, slow=slow, meets=True):
        facts = looks(run, 6)
    first, second = facts["workers"]
    assert first[1] > 2 * second[1], "worker 0 computes longest, as it waits there"
    assert [text for text in told(run) if "worker 0" in text] == []
    assert bool(told(run)) == (slow == "data")
