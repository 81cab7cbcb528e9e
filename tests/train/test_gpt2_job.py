"""The GPT-2 job for real: the same training on any number of workers, or a refusal."""

import pytest

STEPS = 6
SGD = {
    "steps": STEPS,
    "train__optimizer": "sgd",
    "train__lr": 0.3,
    "train__schedule": "constant",
}
NO_DROPOUT = {"model__embd_pdrop": 0.0, "model__attn_pdrop": 0.0, "model__resid_pdrop": 0.0}

# Single precision, summed in another order: up to 4e-7 seen.
TOLERANCE = 2e-6
# XLA's kernels against PyTorch's, amplified by Adam: up to 6e-6 seen.
TOLERANCE_OF_KERNELS = 5e-5


@pytest.fixture(scope="module")
def one_worker(run_tiny):
    return run_tiny("xla-cpu", 1, 1, **SGD)


def assert_trained(run, steps=STEPS):
    assert set(run.exit_codes) == {0}, run.output
    assert run.output.count("ranks agree") == 1
    assert "graphs compiled after step 2: 0\n" in run.output
    assert run.column("step") == list(range(1, steps + 1))


# SGD, and gradient norms beside losses: Adam does not see a wrong scale of the gradients.
@pytest.mark.parametrize(
    ("size", "padding", "changes"),
    [((2, 1), 0, {}), ((1, 3), 1, {"train__gradient_checkpointing": True})],
    ids=["2 nodes", "3 workers that recompute activations"],
)
def test_training_does_not_depend_on_the_worker_count(run_tiny, one_worker, size, padding, changes):
    run = run_tiny("xla-cpu", *size, **SGD, **changes)

    assert_trained(one_worker)
    assert_trained(run)
    assert f"8 units and {padding} of padding" in run.output
    assert run.column("grad_norm")[0] > 1.0, "clipping is not active, so it is not tested"
    for key in ("loss", "grad_norm"):
        assert run.column(key) == pytest.approx(one_worker.column(key), rel=TOLERANCE)


def test_zero1_on_xla_equals_plain_data_parallel_training(run_tiny):
    zero1 = run_tiny("xla-cpu", 1, 1, steps=STEPS, **NO_DROPOUT)
    plain = run_tiny("cpu", 1, 2, steps=STEPS, **NO_DROPOUT)

    assert_trained(zero1)
    assert_trained(plain)
    assert zero1.column("loss")[-1] < zero1.column("loss")[0] - 2.0
    for key in ("loss", "grad_norm"):
        assert zero1.column(key) == pytest.approx(plain.column(key), rel=TOLERANCE_OF_KERNELS)


def test_a_world_other_than_the_planned_is_refused_in_one_line(run_tiny):
    run = run_tiny("cpu", 1, 3, really_per_node=2)

    assert run.exit_codes == [1]
    lines = [line for line in run.output.splitlines() if line.startswith("error:")]
    assert lines == [
        "error: plan.json is for 3 workers (1 nodes x 3 workers), but 2 run here, 2 on this node: "
        "start torchrun with --nnodes 1 --nproc_per_node 3, or render a plan for this size"
    ]
    assert "[rank" not in run.output, "a worker's traceback"
    assert run.metrics == []


def test_precompile_runs_a_few_steps_and_leaves_no_metrics(run_tiny):
    run = run_tiny("cpu", 1, 2, phase="precompile")

    assert run.exit_codes == [0], run.output
    assert "step 3/30" in run.output
    assert "step 4/30" not in run.output
    assert "losses above are invalid" in run.output
    assert run.metrics == []
