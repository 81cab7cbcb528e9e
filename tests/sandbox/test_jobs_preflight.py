"""A node that is not fit for a job is found, and named, before any worker starts."""

from __future__ import annotations

import json


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
    assert f"ends because of another: {what}" in bad.logs("--node", "1")
    assert f"preflight: {what}" in bad.shown()
    found = json.loads((bad.path / "state/preflight-train-1.json").read_text())
    assert [node["ok"] for node in found["nodes"]] == [False, True]
    assert (found["bad"], bad.facts()) == ([names(3)], {})
