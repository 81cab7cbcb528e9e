"""The GPT-2 job as torchrun starts it, in a world that is not the plan's."""

import re

from .attempts import Run


def test_a_world_other_than_the_planned_is_refused_in_one_line(tmp_path):
    run = Run(tmp_path / "a run's dir", workers=3)
    run.workers = 2
    output = run.undisturbed(code=1)
    # Gloo prints pieces of lines into the same pipe, so the error need not begin its line. On a
    # busy machine torchrun may end the second worker only after it has said the same.
    assert set(re.findall("error: .*", output)) == {
        "error: plan.json is for 3 workers (1 nodes x 3 workers), but 2 are running, 2 on this "
        "node: start torchrun with --nnodes 1 --nproc_per_node 3, or render a plan for this size"
    }, output
    assert "[rank" not in output, "a worker's traceback"
    assert run.lines() == []
