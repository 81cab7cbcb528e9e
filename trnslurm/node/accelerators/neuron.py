"""Queries AWS's Neuron tools and driver about Neuron devices."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.node.accelerators.accelerator import Accelerator
from trnslurm.node.preflight.needs import GIB, Checked, Needs
from trnslurm.node.processes import ask_tool, last_line
from trnslurm.node.usage.devices import DeviceReport, DeviceUse, Errors, Tool

_COUNTERS = Path("/sys/devices/virtual/neuron_device")
_TOOL_S = 10.0
_BUSY_S = 5.0
"""How long the processes of an earlier job may take to release the devices."""


class NeuronDevices(Accelerator):
    """The Neuron devices of a node."""

    def __init__(self) -> None:
        self._executed = -1

    def check(self, needs: Needs) -> Checked:
        """Check that neuron-ls shows all devices and enough free NeuronCores."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            listed = _neuron_ls()
            if isinstance(listed, str):
                return Checked(problem=f"{listed}; check the driver (modinfo neuron) and the image")
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
                text = f"its devices have {free} NeuronCores, but the job needs {needs.workers}; "
                return Checked(problem=f"{text}correct workers_per_node in the cluster profile")
            if time.monotonic() > deadline:
                first = f"pid {holders[0].get('pid')}, {holders[0].get('command')}"
                text = f"{free} of the {needs.workers} NeuronCores it needs are free; "
                return Checked(
                    fact=str(len(listed)),
                    problem=f"{text}end the process that holds the others ({first})",
                )
            time.sleep(0.5)

    def usage_tools(self, seconds: float) -> list[Tool]:
        """Return neuron-monitor."""
        return [Tool(["neuron-monitor", "-c", _neuron_config(seconds)], read_neuron_monitor)]

    def works(self) -> bool:
        """Check whether a core has executed a graph since the last call."""
        # The driver counts executions per core: see AWS's neuron-sysfs-user-guide.
        before, self._executed = self._executed, executed_graphs()
        return self._executed != before


def _neuron_ls() -> list[dict[str, Any]] | str:
    """Return the devices, or what is wrong. Without neuron-ls, count the device files."""
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


def executed_graphs() -> int:
    """Return the number of graphs that all Neuron cores of this node have executed."""
    total = 0
    for file in _COUNTERS.rglob("success/total"):
        with suppress(OSError, ValueError):
            total += int(file.read_text(encoding="ascii"))
    return total


def _neuron_config(seconds: float) -> str:
    """Return a file with neuron-monitor's configuration: what it reports, and how often."""
    fd = os.memfd_create("neuron-monitor", 0)
    metrics = ("neuroncore_counters", "memory_used", "execution_stats")
    config = {
        "period": f"{max(1, round(seconds))}s",
        "neuron_runtimes": [{"tag_filter": ".*", "metrics": [{"type": name} for name in metrics]}],
        "system_metrics": [{"type": "neuron_hw_counters"}],
    }
    os.write(fd, json.dumps(config).encode())
    return f"/proc/{os.getpid()}/fd/{fd}"


def read_neuron_monitor(lines: list[str]) -> DeviceReport | None:
    """Read the last complete report: one line of JSON (see AWS's neuron-monitor-user-guide)."""
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            if isinstance(report := json.loads(line), dict):
                return _of_neuron(report)
    return None


def _of_neuron(report: Mapping[str, Any]) -> DeviceReport:
    use: dict[int, float] = {}
    memory: dict[int, float] = {}
    errors: Errors = {}
    for runtime in _listed(report.get("neuron_runtime_data")):
        cores = _at(runtime, "report", "neuroncore_counters", "neuroncores_in_use")
        for core, counters in cores.items():
            share = _at({"": counters}, "").get("neuroncore_utilization")
            if core.isdigit() and isinstance(share, (int, float)):
                use[int(core)] = use.get(int(core), 0.0) + share / 100
        used = _at(
            runtime,
            *("report", "memory_used", "neuron_runtime_used_bytes", "usage_breakdown"),
            "neuroncore_memory_usage",
        )
        for core, parts in used.items():
            sizes = [n for n in _at({"": parts}, "").values() if isinstance(n, (int, float))]
            if core.isdigit():
                memory[int(core)] = memory.get(int(core), 0.0) + sum(sizes) / GIB
        for kind, count in _at(runtime, "report", "execution_stats", "error_summary").items():
            if isinstance(count, int) and kind in ("hardware", "runtime"):
                name = f"executions with {kind} errors"
                errors[name] = errors.get(name, 0) + count
    for device in _listed(_at(report, "system_data", "neuron_hw_counters").get("neuron_devices")):
        for name, where in (("mem", "memory"), ("sram", "SRAM")):
            count = device.get(f"{name}_ecc_uncorrected")
            if isinstance(count, int):
                index = device.get("neuron_device_index")
                errors[f"Neuron device {index}: uncorrected {where} errors"] = count
    cores_there = sorted({*use, *memory})
    devices = {n: DeviceUse(use=use.get(n), memory_gib=memory.get(n)) for n in cores_there}
    return DeviceReport("NeuronCore", devices, errors)


def _at(data: Any, *names: str) -> Mapping[str, Any]:
    """Return a nested object, or an empty one if it is missing."""
    for name in names:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def _listed(data: Any) -> Iterable[Mapping[str, Any]]:
    return [item for item in data if isinstance(item, Mapping)] if isinstance(data, list) else []
