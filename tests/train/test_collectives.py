"""What a step asks of the network and the host on XLA devices does not grow by accident.

The counts are those of worker 0 of four with two units each.
"""

import json

import pytest

from .conftest import JOBS, REPO, run_workers, strategy_of, tiny_plan
from .make_shards import make_shards

pytestmark = pytest.mark.rest

WORKER = REPO / "tests/train/collectives_worker.py"
WORKERS, UNITS = 4, 2
COUNTED_STEPS = 10  # from one report to the next, as train.log_every
LAYERS = {"gpt2_zero1": "n_layer", "bert_pretrain": "num_hidden_layers",
          "llama3_clm": "num_hidden_layers"}  # fmt: skip
# For a report, each ten steps, one small all-reduce; for ZeRO-1 and FSDP one of each step's norm.
REPORT = 0.1
EXPECTED = {
    "gpt2_zero1": {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1 + REPORT},
    "bert_pretrain": {"all-reduce": 1 + REPORT},
    # Of the one layer and of what is around it: gathered forwards, and the layer backwards again.
    "llama3_clm": {
        "reduce-scatter": 2 * UNITS, "all-gather": 3 * UNITS, "all-reduce": 1 + REPORT
    },
}  # fmt: skip


# Of one layer in a group of two: both norms gather the sequence, both halves add up; the last norm
# gathers, the embedding adds up; backwards the other way round. The loss takes two. ZeRO-1 has
# two kinds of pieces: of matrices, and the norms, which all workers have.
EXPECTED["tensor"] = {
    "reduce-scatter": 6 * UNITS + 2, "all-gather": 6 * UNITS + 2,
    "all-reduce": 2 * UNITS + 1 + REPORT,
}  # fmt: skip


@pytest.mark.parametrize("recipe", EXPECTED)
def test_collectives_graphs_and_transfers_of_a_step(recipe, tmp_path):
    counted = count(tmp_path, recipe)

    collectives = counted.pop("collectives")
    assert {kind: one["number"] for kind, one in collectives.items()} == EXPECTED[recipe]
    assert {each for one in collectives.values() for each in one["types"]} == {"f32"}
    groups, _ = counted.pop("groups"), counted.pop("hlo")
    if recipe == "tensor":
        # Neighbours, those with the same piece, and all.
        assert groups == ["{{0,1,2,3}}", "{{0,1},{2,3}}", "{{0,2},{1,3}}", "{}"]
    assert counted == {
        "compiled": 0,
        # A graph for each unit and one for the update; and one for a report.
        "executions": UNITS + 1 + REPORT,
        "syncs": UNITS + 1 + REPORT,
        # A unit's samples and its seed; the rate; and what a report sums.
        "to_device": 2 * UNITS + 1 + REPORT,
        # All of a report's numbers, and their sums.
        "from_device": 2 * REPORT,
    }


def test_all_workers_have_the_same_graphs_of_a_step(tmp_path):
    # Else each would be compiled 32 times.
    first, last = (count(tmp_path / str(rank), "tensor", rank) for rank in (0, WORKERS - 1))
    assert first == last


def count(directory, name, rank=0):
    """Count what a worker of a training asks for."""
    recipe = "llama3_clm" if name == "tensor" else name
    directory.mkdir(exist_ok=True)
    job = JOBS / recipe
    changes = {
        "batch__micro_batch": 1, "batch__global_batch": WORKERS * UNITS,
        f"model__{LAYERS[recipe]}": 1, "train__log_every": COUNTED_STEPS,
        "train__eval_every": 0, "train__save_every": 0,
    }  # fmt: skip
    if recipe == "llama3_clm":
        changes["train__strategy"] = "tensor" if name == "tensor" else "xla_fsdp"
    group = 2 if name == "tensor" else 1
    if group > 1:
        changes |= {"model__vocab_size": 260, "batch__global_batch": WORKERS // group * UNITS}
    if recipe == "bert_pretrain":
        make_shards(directory / "shards", [64])
        changes["data"] = str(directory / "shards")
    plan = tiny_plan("xla-cpu", 1, WORKERS, job=job, group=group, **changes)
    (directory / "plan.json").write_text(json.dumps(plan))
    (directory / "code").symlink_to(REPO)
    if recipe == "llama3_clm":
        (directory / "strategy.json").write_text(json.dumps(strategy_of(plan, job, {})))

    done = run_workers(
        1, WORKER, directory, directory / "counted.json", rank, cwd=directory, device="xla-cpu"
    )
    assert done.returncode == 0, done.stdout
    return json.loads((directory / "counted.json").read_text())
