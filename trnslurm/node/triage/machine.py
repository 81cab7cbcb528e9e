"""Devices and limits of a failed attempt's node, which help to choose between causes of a line."""

from __future__ import annotations

import re
from pathlib import Path

from trnslurm.contract.files import last_line, read_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.node.triage.mend import RESUME, SUBMIT
from trnslurm.node.triage.versions import plain_word

_SAID = {
    "shm_gib": re.compile(r"/dev/shm(?!/)|shared memory"),
    "memlock_kib": re.compile(r"memlock|locked memory"),
    "open_files": re.compile(r"open files|ulimit -n"),
    "run_left_gib": re.compile(r"\bdisks?\b.*\bfull|\bfull disk|\bquota"),
    "efa_devices": re.compile(r"\bEFA\b"),
    "neuron_devices": re.compile(r"Neuron devices?\b|/dev/neuron|NeuronCores"),
    "driver": re.compile(r"\bdriver\b|\bno GPU|GPU is (visible|seen)|without CUDA|for CPUs"),
}
"""The facts about a node that are printed if a cause or a fix mentions them."""
_NUMBERED = {
    "open_files": "open files {:.0f}",
    "efa_devices": "EFA devices {:.0f}",
    "neuron_devices": "Neuron devices {:.0f}",
}
NO_GPU = {
    *("accelerate-precision", "fp16-no-gpu", "fsdp-cpu-only", "gpu-driver-insufficient"),
    *("gpu-driver-old", "gpu-none", "gpu-not-built", "lightning-accelerator", "lightning-no-gpu"),
    *("precision-device", "quantization-no-gpu", "torch-without-cuda", "trainer-bf16"),
}
"""Causes of errors that occur if PyTorch cannot use a GPU."""
# docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1
_DRIVERS = {11: 450, 12: 525, 13: 580}


class Machine:
    """The facts about one node in an attempt. Other users may have written the files."""

    def __init__(self, run: Path, phase: str, attempt: int, node: int) -> None:
        files = RunFiles(run)
        self._node = f"node {node}"
        self._has = read_json(files.machine_file(phase, attempt, node))
        used = last_line(files.usage_file(node))
        of_attempt = (used.get("phase"), used.get("attempt")) == (phase, attempt)
        self._has |= used if of_attempt else {}

    def no_gpu(self) -> tuple[str, str, str] | None:
        """Return cause, fix and mend if PyTorch cannot use a GPU here and the reason is clear."""
        torch, driver = self._torch(), self._text("driver")
        if torch.get("__version__") and not torch["cuda"] and not torch["hip"]:
            return (
                f"torch {torch['__version__']} in this Python is built for CPUs",
                "install the build for the nodes' CUDA there (pytorch.org/get-started)",
                RESUME,
            )
        least = _DRIVERS.get(_major(torch.get("cuda", "")), 0)
        if 0 < _major(driver) < least:
            return (
                f"the NVIDIA driver {driver} of this node is too old for torch "
                f"{torch['__version__']}: CUDA {torch['cuda']} needs {least} or newer",
                "install a torch for an older CUDA, or have the driver updated",
                RESUME,
            )
        there = self._number("gpus_there")
        if there and self._number("gpus") == 0:
            return (
                "the job asked Slurm for no GPUs, so it may use none of this node's "
                f"{there:.0f} GPUs",
                "set slurm.gpus_per_node in the profile, and submit again",
                SUBMIT,
            )
        return None

    def told(self, text: str) -> str:
        """Return the facts that decide between the causes in a text."""
        found = [self._of(topic) for topic, words in _SAID.items() if words.search(text)]
        told = ", ".join(filter(None, found))
        return told and f"on {self._node}: {told}"

    def _of(self, topic: str) -> str:
        number = self._number(topic)
        if topic == "memlock_kib" and topic in self._has:
            return f"memlock {'unlimited' if number is None else f'{number:.0f} KiB'}"
        if topic == "driver":
            return self._gpus()
        if number is None:
            return ""
        if topic == "run_left_gib":
            left = self._number("tmp_left_gib")
            temporary = "" if left is None else f", temporary directory {left:.1f}"
            return f"GiB free: run directory {number:.1f}{temporary}"
        if topic == "shm_gib":
            left = self._number("shm_left_gib")
            return f"/dev/shm {number:.1f} GiB" + ("" if left is None else f" ({left:.1f} free)")
        return _NUMBERED[topic].format(number)

    def _gpus(self) -> str:
        torch, found = self._torch(), []
        number, there = self._number("gpus"), self._number("gpus_there")
        if number is not None and there is not None and not torch.get("hip"):
            of = f" of {there:.0f}" if there > number else ""
            found = [f"GPUs {number:.0f}{of}", f"driver {self._text('driver') or 'none'}"]
        if torch:
            built = "ROCm" if torch["hip"] else f"CUDA {torch['cuda']}" if torch["cuda"] else "CPUs"
            found.append(f"torch {torch['__version__']} for {built}")
        return ", ".join(found)

    def _torch(self) -> dict[str, str]:
        found = self._has.get("torch")
        known = found if isinstance(found, dict) and plain_word(found.get("__version__")) else {}
        return {key: plain_word(known.get(key)) for key in ("__version__", "cuda", "hip") if known}

    def _number(self, key: str) -> float | None:
        value = self._has.get(key)
        return float(value) if isinstance(value, (int, float)) else None

    def _text(self, key: str) -> str:
        return plain_word(self._has.get(key))


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0
