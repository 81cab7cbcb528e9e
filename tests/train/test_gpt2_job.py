"""The GPT-2 job as torchrun starts it, in a world that is not the plan's."""

import re

from .conftest import run_tiny


def test_a_world_other_than_the_planned_is_refused_in_one_line(tmp_path):
    run = run_tiny(tmp_path / "a run's dir", planned=3, started=2)

    assert run.exit_code == 1
    # Gloo prints pieces of lines into the same pipe, so the error need not begin its line. On a
    # busy machine torchrun may end the second worker only after it has said the same.
    assert set(re.findall("error: .*", run.output)) == {
        "error: plan.json is for 3 workers (1 nodes x 3 workers), but 2 run here, 2 on this node: "
        "start torchrun with --nnodes 1 --nproc_per_node 3, or render a plan for this size"
    }, run.output
    assert "[rank" not in run.output, "a worker's traceback"
    assert run.metrics == []
