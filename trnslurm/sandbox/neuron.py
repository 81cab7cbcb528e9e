"""Writes the stand-ins for the Neuron tools into a sandbox, and sets their behavior."""

from __future__ import annotations

import json
import shlex

from trnslurm.config.catalog import InstanceType
from trnslurm.errors import SandboxError, did_you_mean
from trnslurm.sandbox import neuron_stand_ins
from trnslurm.sandbox.layout import Layout, replace_text
from trnslurm.sandbox.machine import SandboxHost
from trnslurm.sandbox.neuron_stand_ins import BEHAVIORS

EVERY_NODE = "all"


def write(layout: Layout, instance: InstanceType, host: SandboxHost) -> None:
    """Write the tools' wrappers, and the instance type that the tools imitate."""
    layout.neuron_bin.mkdir(parents=True)
    facts = {
        "instance_type": instance.name,
        "devices": instance.accelerators,
        "cores_per_device": max(instance.workers) // instance.accelerators,
        "device_gib": instance.device_gib // instance.accelerators,
        "efa": instance.efa,
    }
    (layout.neuron / "instance.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    program = [host.python, "-I", neuron_stand_ins.__file__, "--home", str(layout.neuron)]
    for tool in BEHAVIORS:
        file = layout.neuron_bin / tool
        file.write_text(f'#!/bin/sh\nexec {shlex.join([*program, tool])} "$@"\n', encoding="utf-8")
        file.chmod(0o755)


def behave(layout: Layout, node: str, tool: str, behaviour: str) -> str:
    """Select a tool's behavior, on one node or on `all`."""
    if not layout.neuron.is_dir():
        raise SandboxError(
            f"sandbox {layout.name} has no Neuron tools: start it with --neuron-stand-ins"
        )
    if tool not in BEHAVIORS:
        raise SandboxError(
            f"there is no stand-in for {tool!r}{did_you_mean(tool, BEHAVIORS)}: "
            f"{', '.join(BEHAVIORS)}"
        )
    known = BEHAVIORS[tool]
    if behaviour not in known:
        hint = did_you_mean(behaviour, known)
        raise SandboxError(f"{tool} has no behavior {behaviour!r}{hint}: {', '.join(known)}")
    if node == EVERY_NODE:
        for file in layout.neuron.glob(f"*/{tool}"):
            if file.parent != layout.neuron_bin:
                file.unlink()
    directory = layout.neuron / node
    directory.mkdir(exist_ok=True)
    replace_text(directory / tool, f"{behaviour}\n")  # a slow compile reads it all the time
    return f"{tool}: {known[behaviour]}"
