"""The cluster profile of a sandbox: a Slurm cluster whose nodes compute on this machine's CPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml

from trnslurm.sandbox.layout import Layout
from trnslurm.sandbox.settings import PARTITION, SandboxSettings, split_settings

_WORKERS = range(1, 9)


def profile_text(layout: Layout, settings: SandboxSettings) -> str:
    """Return the profile as YAML."""
    name = f"sandbox-{settings.like}"
    tree: dict[str, Any] = {
        "description": f"Sandbox of this machine: {settings.nodes} nodes in the guise of "
        f"{settings.like}, jobs on its CPU",
        "scheduler": "slurm",
        "instance_type": name,
        "prefer_preset": "tiny",
        "workers_per_node": 1,
        "python": settings.python,
        # The second line is for `doctor --run` with device neuron, and for nothing else.
        "activate": [
            f'export PATH="{layout.neuron_bin}:$PATH"',
            "export TRNSLURM_STAND_IN_DEVICE=xla-cpu",
        ]
        if settings.neuron_stand_ins
        else [],
        "slurm": {
            "partition": PARTITION,
            "max_nodes": settings.nodes,
            "bin_dir": str(layout.bin),
        },
        "instance_types": {name: _instance(settings)},
    }
    if settings.instance.device == "cuda":
        tree["slurm"]["gpus_per_node"] = settings.instance.accelerators
    header = "# Written by `trnslurm sandbox up`, gone with `trnslurm sandbox down`.\n"
    return header + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100)


def _instance(settings: SandboxSettings) -> dict[str, Any]:
    """Return the claimed type with this machine's CPU as its device, and no price."""
    facts = asdict(settings.instance)
    del facts["name"]
    _, words = split_settings(settings.set)
    if words.get("CPUs", "").isdecimal():
        facts["vcpus"] = int(words["CPUs"])
    facts |= {"device": "xla-cpu", "workers": [*_WORKERS], "multi_node_workers": [*_WORKERS]}
    return facts | {"efa": 0, "bf16_tflops": 0.0, "device_gib": 0, "price_per_hour": None}
