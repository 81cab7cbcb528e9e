"""Reports a node's devices, drivers and limits, which help to find the cause of a failure."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.node.fabric import efa_interfaces

_GIB = 1 << 30
_DRIVER = re.compile(r"Kernel Module +(?:for \S+ +)?(\S+)")
# torch/version.py, written by PyTorch's setup.py.
_TORCH = re.compile(r"^(__version__|cuda|hip)(?:: [^=]+)? = (?:'([^']*)'|None)", re.MULTILINE)


def machine(root: Path = Path("/")) -> dict[str, Any]:
    """Return this node's devices and limits, without those that cannot be read."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    gpus = _devices(root, "nvidia")
    found: dict[str, Any] = {
        "gpus_there": len(gpus),
        "gpus": sum(map(_opens, gpus)),
        "neuron_devices": len(_devices(root, "neuron")),
        "efa_devices": len(efa_interfaces(root)),
        "memlock_kib": None if locked == resource.RLIM_INFINITY else locked // 1024,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    with suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
        found["driver"] = match[1] if (match := _DRIVER.search(text)) else ""
    with suppress(OSError, ValueError):
        if (spec := importlib.util.find_spec("torch")) and spec.origin:  # imports nothing
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            found["torch"] = dict(_TORCH.findall(text))
    with suppress(OSError):
        there = os.statvfs(root / "dev/shm")
        found["shm_gib"] = round(there.f_blocks * there.f_frsize / _GIB, 3)
    return found


def _devices(root: Path, name: str) -> list[Path]:
    found = (root / "dev").glob(f"{name}[0-9]*")
    return [path for path in found if path.name.removeprefix(name).isdigit()]


def _opens(device: Path) -> bool:
    """Check whether the job may open a GPU: Slurm's cgroup refuses access to others' GPUs."""
    with suppress(OSError):
        os.close(os.open(device, os.O_RDWR | os.O_NONBLOCK))
        return True
    return False
