"""A node that is not fit for a job is found, and named, before any worker starts."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.rest


def test_a_node_with_a_device_fewer_is_named(user) -> None:
    """Two nodes that fit train; with the other one the workers never start."""
    names = user.sandbox.node_name
    sets = ("device=neuron", "precompile=never", "workers_per_node=1", "slurm.requeue=false")
    user.sandbox.fault("neuron", "3", "neuron-ls", "missing-device")
    try:
        pairs = [f"--nodelist={names(a)},{names(b)}" for a, b in ((1, 2), (3, 4))]
        good, bad = (user.submit(*sets, nodes=2, more=("--sbatch", pair)) for pair in pairs)
        good.until("COMPLETED")
        bad.until("FAILED")
    finally:
        user.sandbox.fault("neuron", "all", "neuron-ls", "ok")

    assert "preflight: 2 nodes fit in " in good.logs()
    found = json.loads((good.path / "state/preflight-train-1.json").read_text())
    assert [(n["host"], n["facts"]["devices"]) for n in found["nodes"]] == [
        (names(1), "16"), (names(2), "16"),
    ]  # fmt: skip

    what = f"{names(3)}: neuron-ls shows 15 of 16 devices"
    assert f"error: preflight: {what}" in bad.logs("--node", "0")
    assert f"ends because of another node: {what}" in bad.logs("--node", "1")
    assert f"preflight: {what}" in bad.shown()
    found = json.loads((bad.path / "state/preflight-train-1.json").read_text())
    assert [node["ok"] for node in found["nodes"]] == [False, True]
    assert (found["bad"], bad.facts()) == ([names(3)], {})


def test_doctor_on_a_real_slurm(user) -> None:
    """The preflight by hand on two nodes; then a run that waits for nodes which are drained."""
    cluster = ("--cluster", user.sandbox.cluster)
    found = json.loads(user.trnslurm("doctor", *cluster, "--nodes", "2", "--json"))
    assert (len(found["nodes"]), found["ok"]) == (2, True)
    assert all(abs(node["clock_s"]) < 1 for node in found["nodes"])
    assert not any((user.home / "trnslurm-runs").iterdir())

    drained = ",".join(user.sandbox.node_name(number) for number in (1, 2))
    why = "Reason=(Code:InsufficientInstanceCapacity)Failure when resuming nodes"
    user.sandbox.slurm("scontrol", "update", f"NodeName={drained}", "State=DRAIN", why)
    run = user.submit(nodes=3)
    said = user.differing("doctor", str(run.path))
    assert f"job {run.jobs['train']}; start expected by Slurm: " in said
    assert "partition compute: 2 drained, 2 idle; it needs 3 nodes" in said
    assert f"{drained.replace(',', ', ')}: drained: AWS has no capacity" in said
    assert (
        "the job needs 3 nodes, but only 2 of the 4 nodes in partition compute can run it" in said
    )
