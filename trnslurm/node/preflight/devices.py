"""Checks that a node has all its Neuron devices or GPUs, and EFA."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from trnslurm.node.preflight.checks import GIB, Checked, Needs
from trnslurm.node.processes import ask_tool, last_line

GPUS = ("cuda", "xla-cuda")
TRAINIUM = ("neuron", "torchneuron")
INFINIBAND = Path("/sys/class/infiniband")
_TOOL_S = 10.0
NVIDIA_SMI_S = 30.0
"""Without nvidia-persistenced, the first call after a boot or a job takes 1 to 3 s for each GPU:
https://docs.nvidia.com/deploy/driver-persistence/overview.html"""
_BUSY_S = 5.0
"""How long the processes of an earlier job have to leave the devices."""


def devices(needs: Needs) -> Checked:
    """Check that all devices are present, and enough of them free."""
    if needs.device in TRAINIUM:
        return _neuron_devices(needs)
    if needs.device in GPUS:
        return _gpus(needs)
    return Checked()


def _neuron_devices(needs: Needs) -> Checked:
    deadline = time.monotonic() + _BUSY_S
    while True:
        listed = _neuron_ls()
        if isinstance(listed, str):
            return Checked(problem=f"{listed}; look at the driver (modinfo neuron) and the image")
        if len(listed) < needs.devices:
            return Checked(
                fact=str(len(listed)),
                problem=f"neuron-ls shows {len(listed)} of {needs.devices} devices; "
                "replace the instance, or correct instance_type in the cluster profile",
            )
        holders = [p for device in listed for p in device.get("neuron_processes") or ()]
        free = sum(d["nc_count"] for d in listed if not d.get("neuron_processes"))
        if free >= needs.workers:
            return Checked(fact=str(len(listed)))
        if not holders:
            text = f"its devices have {free} NeuronCores, the job needs {needs.workers}; "
            return Checked(problem=f"{text}correct workers_per_node in the cluster profile")
        if time.monotonic() > deadline:
            first = f"pid {holders[0].get('pid')}, {holders[0].get('command')}"
            text = f"{free} of the {needs.workers} NeuronCores it needs are free; end what holds"
            return Checked(fact=str(len(listed)), problem=f"{text} the others ({first})")
        time.sleep(0.5)


def _neuron_ls() -> list[dict[str, Any]] | str:
    """Return the devices, or what is wrong; without the tool, count device files."""
    code, said = ask_tool("neuron-ls", "--json-output", limit_s=_TOOL_S)
    if code is None:
        files = [f for f in Path("/dev").glob("neuron*") if re.fullmatch(r"neuron\d+", f.name)]
        if files:
            return [{"nc_count": GIB} for _ in files]  # the number of cores is unknown
        return "neuron-ls is not on PATH, and there is no /dev/neuron0"
    try:
        return [dict(device) | {"nc_count": int(device["nc_count"])} for device in json.loads(said)]
    except (ValueError, LookupError, TypeError):
        return f"neuron-ls finds no devices ({last_line(said)})"


def _gpus(needs: Needs) -> Checked:
    code, said = ask_tool("nvidia-smi", "-L", limit_s=NVIDIA_SMI_S)
    if code is None:
        return Checked(problem="nvidia-smi is not on PATH; install the NVIDIA driver on the node")
    number = sum(line.startswith("GPU ") for line in said.splitlines())
    if number < needs.workers:
        text = f"nvidia-smi shows {number} GPUs, the job needs {needs.workers} ({last_line(said)})"
        return Checked(fact=str(number), problem=f"{text}; look at dmesg, replace the instance")
    return Checked(fact=str(number))


def efa(needs: Needs, directory: Path = INFINIBAND) -> Checked:
    """Check that the network cards are present, and on GPUs NCCL's plugin for them."""
    if not needs.efa:
        return Checked()
    number = len(list(directory.iterdir())) if directory.is_dir() else 0
    if number >= needs.efa:
        return Checked(fact=str(number), warning=_nccl_plugin(needs))
    return Checked(
        fact=str(number),
        problem=f"{number} of {needs.efa} EFA interfaces in {directory}; enable EFA in its compute "
        "resource, use an image with the driver (modinfo efa), or replace the instance",
    )


def _nccl_plugin(needs: Needs) -> str:
    """Return a warning if NCCL's plugin for EFA is in no directory that the loader searches."""
    if needs.device not in GPUS:
        return ""
    directories = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    _, known = ask_tool("ldconfig", "-p", limit_s=_TOOL_S)
    if "libnccl-net" in known or any([*Path(d).glob("libnccl-net*.so")] for d in directories):
        return ""
    return (
        "no libnccl-net*.so (aws-ofi-nccl) in LD_LIBRARY_PATH or ldconfig -p: NCCL would use TCP; "
        "install it, or name its directory in the profile's activate"
    )
