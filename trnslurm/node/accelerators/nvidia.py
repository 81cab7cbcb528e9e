"""Queries GPUs through nvidia-smi."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trnslurm.node.accelerators.accelerator import Accelerator
from trnslurm.node.preflight.needs import GIB, MIB, Checked, Needs
from trnslurm.node.processes import ask_tool, last_line
from trnslurm.node.usage.devices import DeviceReport, DeviceUse, Errors, Tool

NVIDIA_SMI_S = 30.0
"""Without nvidia-persistenced, the first call after a boot or a job takes 1 to 3 s for each GPU:
https://docs.nvidia.com/deploy/driver-persistence/overview.html"""
_TOOL_S = 10.0
# NVML's reasons for a lower clock (nvml.h, nvmlClocksEventReasons). A busy GPU usually runs at its
# power cap, 0x4.
_BY_HEAT, _BY_POWER = 0x20 | 0x40, 0x8 | 0x80
_NVIDIA_FIELDS = (
    *("index", "utilization.gpu", "memory.used", "power.draw", "clocks.sm"),
    "ecc.errors.uncorrected.volatile.total",
)


class NvidiaGpus(Accelerator):
    """The GPUs of a node."""

    # p5en: awslabs/awsome-distributed-ai, 4.validation_and_observability/2.gpu-cluster-healthcheck
    # (checks/2-efa-enumeration.sh). Not for Trainium, whose checks end after 12 s.
    efa_late_s = 15

    def check(self, needs: Needs) -> Checked:
        """Check that nvidia-smi shows a GPU for each worker."""
        code, said = ask_tool("nvidia-smi", "-L", limit_s=NVIDIA_SMI_S)
        if code is None:
            return Checked(
                problem="nvidia-smi is not on PATH; install the NVIDIA driver on the node"
            )
        number = sum(line.startswith("GPU ") for line in said.splitlines())
        if number < needs.workers:
            text = f"nvidia-smi shows {number} of {needs.workers} needed GPUs ({last_line(said)})"
            return Checked(fact=str(number), problem=f"{text}; check dmesg, replace the instance")
        return Checked(fact=str(number))

    def efa_warning(self) -> str:
        """Return a warning if the loader's search path does not contain NCCL's plugin for EFA."""
        directories = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
        _, known = ask_tool("ldconfig", "-p", limit_s=_TOOL_S)
        if "libnccl-net" in known or any([*Path(d).glob("libnccl-net*.so")] for d in directories):
            return ""
        return (
            "no libnccl-net*.so (aws-ofi-nccl) in LD_LIBRARY_PATH or ldconfig -p: NCCL would use "
            "TCP; install it, or add its directory in the profile's activate"
        )

    def usage_tools(self, seconds: float) -> list[Tool]:
        """Return nvidia-smi commands: with newer drivers' fields, with older ones, with neither."""
        own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        which = [f"--id={own}"] if re.fullmatch(r"[\w,-]+", own) else []
        # Drivers since 535 use the first name; `nvidia-smi --help-query-gpu` lists both.
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

    def works(self) -> bool:
        """Check whether a GPU is computing, or cannot be queried."""
        # A node may be shared with other jobs, which have other GPUs.
        own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        query += [f"--id={own}"] if own else []
        code, said = ask_tool("nvidia-smi", *query)
        # A GPU partition (MIG) has no utilization: "[N/A]".
        return code != 0 or any(word != "0" for word in said.split())


def read_nvidia_smi(lines: list[str]) -> DeviceReport | None:
    """Read the last line for each GPU. A GPU partition (MIG) has no utilization: [N/A]."""
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
            memory_gib=None if memory is None else memory * MIB / GIB,
            power_w=power,
            mhz=clock,
            slowed_by=slowed,
        )
        if wrong is not None:
            errors[f"GPU {index}: uncorrected memory errors"] = int(wrong)
    return DeviceReport("GPU", devices, errors) if devices else None


def _number(word: str) -> float | None:
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None
