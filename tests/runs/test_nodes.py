"""What status, watch and the report say of spares, and of a range of nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trnslurm.records.run import RunDir
from trnslurm.runs.nodes import nodes_told, sizes_of, spares_of

TRAINS = "exec python -m trnslurm.node.attempt --nodes=2 --spares=2 --standby -- srun node.sh\n"


@pytest.fixture
def attempts(make_run):
    """Make a run whose attempts had these nodes."""

    def make(*hosts: str, script: str = TRAINS, **more: Any) -> RunDir:
        states = [{"state": "RUNNING", "hosts": each, "job_id": "7"} | more for each in hosts]
        run: RunDir = make_run(states={"train": states}, phases=("train",), jobs={"train": "7"})
        run.script("train").write_text(script)
        return run

    return make


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (("a,b",), "2, none used"),
        (("a,b", "a,b"), "2, none used"),
        (("a,b", "a,c"), "1 of 2 used (c for b), 1 left"),
        (("a,b", "a,c", "a,d"), "2 of 2 used (c,d for b,c), 0 left"),
    ],
)
def test_spares(attempts, hosts: tuple[str, ...], said: str) -> None:
    run = attempts(*hosts)
    assert nodes_told(run, 2, run.attempts("train")) == {"spares": said}


def test_a_requeued_job_has_all_its_spares_again(attempts) -> None:
    run = attempts("a,b", "a,c", "a,d")
    state = json.loads(run.state_file("train", 3).read_text())
    run.state_file("train", 3).write_text(json.dumps(state | {"restarts": 1}))
    assert str(spares_of(run, run.attempts("train"))) == "2, none used"


def test_no_spares(attempts) -> None:
    run = attempts("a,b", script="exec python -m trnslurm.node.attempt --nodes=2 -- srun\n")
    assert spares_of(run, run.attempts("train")) is None
    run.script("train").unlink()
    assert nodes_told(run, 2, run.attempts("train")) == {}


def test_a_range(attempts) -> None:
    run = attempts("a,b,c", "a,b", "a,b", "a,b,c", script="")
    for count in (1, 2):
        (run.path / f"nodes-{count}").mkdir()
        (run.path / f"nodes-{count}/train.sbatch").touch()
    said = "1 to 3 allowed; 3 in attempt 1, 2 in attempts 2 to 3, 3 in attempt 4"
    assert sizes_of(run, 3, run.attempts("train")) == said
    assert sizes_of(run, 3, []) == "1 to 3 allowed"
    assert sizes_of(run, 1, run.attempts("train")) == ""


def test_status_has_them(attempts, fake_slurm, cli) -> None:
    run = attempts("a,b", "a,c")
    fake_slurm.queue("7|RUNNING|None|x|a,c")
    assert "\nspares: 1 of 2 used (c for b), 1 left\n" in cli("status", run.name).out
    data = json.loads(cli("status", run.name, "--json").out)
    assert data["spares"] == {"number": 2, "used": ["c"], "gone": ["b"], "left": 1}
