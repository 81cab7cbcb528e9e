"""Has the vendor's own tool report, again and again, what this node's devices do.

The tool is one process that runs beside this one for the whole phase. A tool that is missing, ends,
hangs or prints something else costs figures, and nothing more.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

Errors = dict[str, int]

_MIB = 1 << 20
_GIB = 1 << 30
_PART_BYTES, _MOST_PARTS = 1 << 16, 16
_MOST_BYTES = _PART_BYTES * _MOST_PARTS
_PAUSES_S = (0.0, 30.0, 300.0)
"""Before each start of a tool that has ended."""
# NVML's reasons for a lower clock (nvml.h, nvmlClocksEventReasons). A cap on power, 0x4, is how a
# busy GPU usually runs.
_BY_HEAT, _BY_POWER = 0x20 | 0x40, 0x8 | 0x80


class DeviceUse(NamedTuple):
    """What a GPU or a NeuronCore did; None where its tool does not say."""

    use: float | None = None
    """The share of time in which it computed."""
    memory_gib: float | None = None
    power_w: float | None = None
    mhz: float | None = None
    slowed_by: str = ""
    """What lowers its clock: heat, or its power supply."""


class DeviceReport(NamedTuple):
    """One report of a tool."""

    kind: str
    """The devices' name: GPU, or NeuronCore."""
    devices: Mapping[int, DeviceUse]
    errors: Errors
    """Counters of errors, by what they count."""


Parse = Callable[[list[str]], DeviceReport | None]


class Tool(NamedTuple):
    """A command that reports again and again, and what reads its output."""

    command: Sequence[str]
    parse: Parse


def tools_for(device: str, seconds: float) -> list[Tool]:
    """Return the commands that report about a device, the best first."""
    if device in ("neuron", "torchneuron"):
        return [Tool(["neuron-monitor", "-c", _neuron_config(seconds)], read_neuron_monitor)]
    if device in ("cuda", "xla-cuda"):
        own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        which = [f"--id={own}"] if re.fullmatch(r"[\w,-]+", own) else []
        # The first name is of drivers since 535; both are in `nvidia-smi --help-query-gpu`.
        fields = ["clocks_event_reasons.active", "clocks_throttle_reasons.active", ""]
        return [
            Tool(
                [
                    *("nvidia-smi", f"--loop={max(1, round(seconds))}", *which),
                    f"--query-gpu={','.join(filter(None, [*_NVIDIA_FIELDS, field]))}",
                    "--format=csv,noheader,nounits",
                ],
                read_nvidia_smi,
            )
            for field in fields
        ]
    return []


_NVIDIA_FIELDS = (
    *("index", "utilization.gpu", "memory.used", "power.draw", "clocks.sm"),
    "ecc.errors.uncorrected.volatile.total",
)


def _neuron_config(seconds: float) -> str:
    """Return a file with neuron-monitor's configuration: what, and how often."""
    fd = os.memfd_create("neuron-monitor", 0)
    metrics = ("neuroncore_counters", "memory_used", "execution_stats")
    config = {
        "period": f"{max(1, round(seconds))}s",
        "neuron_runtimes": [{"tag_filter": ".*", "metrics": [{"type": name} for name in metrics]}],
        "system_metrics": [{"type": "neuron_hw_counters"}],
    }
    os.write(fd, json.dumps(config).encode())
    return f"/proc/{os.getpid()}/fd/{fd}"


def read_nvidia_smi(lines: list[str]) -> DeviceReport | None:
    """Read the last line of each GPU. A part of a GPU (MIG) has no utilization: [N/A]."""
    devices: dict[int, DeviceUse] = {}
    errors: Errors = {}
    for line in lines:
        words = [word.strip() for word in line.split(",")]
        if len(words) < len(_NVIDIA_FIELDS) or not words[0].isdigit():
            continue
        index = int(words[0])
        use, memory, power, clock, wrong = map(_number, words[1:6])
        reasons = int(words[6], 16) if re.fullmatch(r"0x[0-9a-fA-F]+", words[-1]) else 0
        slowed = "heat" if reasons & _BY_HEAT else "its power supply" if reasons & _BY_POWER else ""
        devices[index] = DeviceUse(
            use=None if use is None else use / 100,
            memory_gib=None if memory is None else memory * _MIB / _GIB,
            power_w=power,
            mhz=clock,
            slowed_by=slowed,
        )
        if wrong is not None:
            errors[f"GPU {index}: uncorrected memory errors"] = int(wrong)
    return DeviceReport("GPU", devices, errors) if devices else None


def read_neuron_monitor(lines: list[str]) -> DeviceReport | None:
    """Read the last whole report; each is a line of JSON (neuron-monitor-user-guide of AWS)."""
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
            if core.isdigit() and isinstance(share, int | float):
                use[int(core)] = use.get(int(core), 0.0) + share / 100
        used = _at(
            runtime,
            *("report", "memory_used", "neuron_runtime_used_bytes", "usage_breakdown"),
            "neuroncore_memory_usage",
        )
        for core, parts in used.items():
            sizes = [n for n in _at({"": parts}, "").values() if isinstance(n, int | float)]
            if core.isdigit():
                memory[int(core)] = memory.get(int(core), 0.0) + sum(sizes) / _GIB
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
    """Return an object inside others; empty if it is not there."""
    for name in names:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def _listed(data: Any) -> Iterable[Mapping[str, Any]]:
    return [item for item in data if isinstance(item, Mapping)] if isinstance(data, list) else []


def _number(word: str) -> float | None:
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None


class Devices:
    """The newest report of the first tool that works."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = list(tools)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._start_at = 0, time.monotonic()
        self._text = b""
        self._reported = False

    def report(self) -> DeviceReport | None:
        """Return what the tool has reported since the last call; None: nothing."""
        if self._process is None and self._tools and time.monotonic() >= self._start_at:
            self._start()
        if self._process is None:
            return None
        ended = self._read(self._process)
        lines, _, rest = self._text.rpartition(b"\n")
        self._text = rest[-_MOST_BYTES:]
        found = self._tools[0].parse(lines.decode(errors="replace").splitlines()) if lines else None
        self._reported = self._reported or found is not None
        if ended:
            self._give_up()
        return found

    def close(self) -> None:
        """End the tool."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdout:
                self._process.stdout.close()
            self._process = None

    def _start(self) -> None:
        try:
            # In a group of its own: neuron-monitor starts further processes.
            self._process = subprocess.Popen(
                self._tools[0].command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError:
            self._tools = []
            return
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        self._starts += 1

    def _read(self, process: subprocess.Popen[bytes]) -> bool:
        """Read what is there; return whether the tool has ended."""
        assert process.stdout
        for _ in range(_MOST_PARTS):
            try:
                part = os.read(process.stdout.fileno(), _PART_BYTES)
            except BlockingIOError:
                return False
            if not part:
                return True
            self._text = (self._text + part)[-_MOST_BYTES:]
        return False

    def _give_up(self) -> None:
        """Take the next tool if this one never worked, or start it again after a while."""
        self.close()
        self._text = b""
        if not self._reported:
            self._tools, self._starts = self._tools[1:], 0
        elif self._starts >= len(_PAUSES_S):
            self._tools = []
        else:
            self._start_at = time.monotonic() + _PAUSES_S[self._starts]
