"""What this machine has for `make test-gpu`, in a few lines; or what it lacks, in one, and exit 1.

python tests/gpu/machine.py cuda
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

NEEDED = (
    "click", "jinja2", "yaml", "torch", "transformers", "accelerate", "tokenizers", "safetensors",
    "h5py", "numpy", "tensorboard", "pytest", "xdist",
)  # fmt: skip
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main() -> None:
    """Say what there is, or end with what is missing."""
    [device] = sys.argv[1:]
    if problem := missing(device):
        sys.exit(f"error: {problem}")
    print(*facts(device), *other_versions(), sep="\n")


def missing(device: str) -> str:
    """Return what keeps the tests from running here; empty: nothing does."""
    if device not in ("cuda", "cpu"):
        return f"DEVICE={device}: it can be cuda or cpu"
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return (
            f"{sys.executable} has no {', '.join(lacking)}: install trnslurm's [train] and [dev] "
            "there, or name another Python (GPU_PYTHON=…)"
        )
    if device == "cpu":
        return ""
    import torch

    if not torch.cuda.is_available():
        return (
            f"no GPU was tested: PyTorch {torch.__version__} finds no CUDA device here "
            "(DRY_RUN=1 lists what waits for one, DEVICE=cpu tries the tests themselves)"
        )
    if not shutil.which("nvidia-smi"):
        return "no GPU was tested: nvidia-smi, which a job's preflight asks, is not on PATH"
    return ""


def facts(device: str) -> list[str]:
    """The hardware and the software, in words."""
    import torch
    import transformers

    software = f"PyTorch {torch.__version__}, transformers {transformers.__version__}"
    if device == "cpu":
        return [f"no GPU: a rehearsal on {os.cpu_count()} CPU cores; {software}"]
    number = torch.cuda.device_count()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    name, memory = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1] / 2**30
    return [f"{number} x {name}, {memory:.0f} GiB; {software}, NCCL {version}"]


def other_versions() -> list[str]:
    """Name what is installed in another version than pyproject.toml pins."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    lines = []
    for requirement in [*extras["train"], *extras["deepspeed"]]:
        if not (pinned := re.fullmatch(r"([\w-]+)==([\w.]+)", requirement)):
            continue
        name, version = pinned.groups()
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found.partition("+")[0] != version and name != "torch-xla":
            lines.append(f"note: {name} {version} is pinned, {found} is here")
    return lines


if __name__ == "__main__":
    main()
