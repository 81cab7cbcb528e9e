"""What was where an attempt failed: the node's devices and limits, and its packages' versions.

They decide between causes that have the same line.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.node.triage.evidence import Suspect
from trnslurm.node.triage.mend import RESUME, SUBMIT
from trnslurm.node.triage.words import frames_in, of_others
from trnslurm.rundir import RunFiles, last_line, read_file, read_json

_MOST_PACKAGES = 4
_LONGEST_SCRIPT = 1 << 20
_PACKAGE = re.compile(r"(.*[/\\](?:site|dist)-packages)[/\\](\w+)")
_STARTERS = {"torchrun", "accelerate", "deepspeed", "click", "hydra", "fire", "typer"}
"""Packages that begin a traceback, and do nothing in it."""
_NAMED = re.compile(
    r"from (?:partially initialized module )?'([A-Za-z_]\w*)[\w.]*'|No module named '(\w+)\."
    r"|module '([A-Za-z_]\w*)[\w.]*' has no attribute"
    r"|\b([A-Za-z][\w-]*)[<>=!~]=?\d[\w.,<>=!~*]* is required"
)
"""Matches the module that an exception's line names."""
_OBJECT = re.compile(
    r"'(\w+)' object has no attribute|type object '(\w+)' has no attribute"
    r"|\b([A-Za-z_]\w*)\.\w+\(\) (?:got|missing)|\b([A-Za-z_]\w*)\(\) (?:got|missing)"
)
_OF_VERSIONS = re.compile(r"(?i)\b(versions?|older|newer|too (old|new)|releases?|upgrade|update)\b")
_KINDS = re.compile(r"(?:\w+\.)*(ImportError|ModuleNotFoundError|AttributeError|TypeError)\b")
_IMPORTED = re.compile(
    r"^\s*from\s+([A-Za-z_]\w*)[\w.]*\s+import\s+(\([^)]*\)|[^\n]+)", re.MULTILINE
)
_SAID = {
    "shm_gib": re.compile(r"/dev/shm|shared memory"),
    "memlock_kib": re.compile(r"memlock|locked memory"),
    "open_files": re.compile(r"open files|ulimit -n"),
    "run_left_gib": re.compile(r"\bdisks?\b.*\bfull|\bfull disk|\bquota"),
    "efa_devices": re.compile(r"\bEFA\b"),
    "neuron_devices": re.compile(r"Neuron devices?\b|/dev/neuron|NeuronCores"),
    "driver": re.compile(r"\bdriver\b|\bno GPU|GPU is (visible|seen)|without CUDA|for CPUs"),
}
"""What is told of the node where a cause or fix names it."""
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
"""Causes of errors that arise where PyTorch can use no GPU."""
# docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1
_DRIVERS = {11: 450, 12: 525, 13: 580}


def modules_of(suspect: Suspect) -> tuple[str, ...]:
    """Return the modules whose versions an exception may be about, the likeliest first."""
    lines = [suspect.telling, *reversed(suspect.lines), *suspect.more]
    ends = [line for line in lines if line and not line.startswith("  ")]
    named = [next(filter(None, m.groups())) for line in ends if (m := _NAMED.search(line))]
    files = [file for file, _ in reversed(frames_in(suspect.lines))]
    owners = [m[2] for file in files if (m := _PACKAGE.match(file))]
    objects = [next(filter(None, m.groups())) for line in ends if (m := _OBJECT.search(line))]
    callers = [file for file in files if not of_others(file) or file == files[0]]
    imported = [
        module
        for file in (callers if objects else ())
        for module, names in _IMPORTED.findall(_text_of(file))
        if any(re.search(rf"\b{re.escape(name)}\b", names) for name in objects)
    ]
    others = [name for name in owners[1:] if name not in _STARTERS]
    return tuple(dict.fromkeys((*named, *owners[:1], *imported, *others)))


def _text_of(file: str) -> str:
    try:
        return read_file(Path(file), _LONGEST_SCRIPT).decode(errors="replace")
    except OSError:
        return ""


class Asked(NamedTuple):
    """What a package asks of another one."""

    package: str
    other: str
    requirement: str
    fits: bool
    """Whether the installed version is such."""


class There:
    """What a node of an attempt had; other users may have written the files."""

    def __init__(self, run: Path, phase: str, attempt: int, suspect: Suspect) -> None:
        files, node = RunFiles(run), suspect.node or 0
        self.modules = modules_of(suspect)
        self._node = f"node {node}"
        self._end = suspect.lines[-1]
        self._has = read_json(files.machine_file(phase, attempt, node))
        used = last_line(files.usage_file(node))
        of_attempt = (used.get("phase"), used.get("attempt")) == (phase, attempt)
        self._has |= used if of_attempt else {}
        self._packages, self._asked = _read(files.packages_file(phase, attempt), suspect)

    def concerns_versions(self, text: str) -> bool:
        """Check whether versions of packages may explain an error, of which a text tells more."""
        return bool(_KINDS.match(self._end) or _OF_VERSIONS.search(text))

    def unsuited(self) -> tuple[str, str, str] | None:
        """Return cause, fix and mend if a package asks for another version of the failed one."""
        names = [self._packages[m][0] for m in self.modules[:2] if m in self._packages]
        versions = dict(self._packages.values())
        for package, other, requirement, fits in self._asked:
            if fits or not (other in names[:1] or {package, other} <= {*names}):
                continue
            own, installed = (f"{name} {versions.get(name, '')}" for name in (package, other))
            return (
                f"{own} asks for {requirement}, and {installed} is installed",
                f"pip install '{requirement}' with that Python, or take the {package} that goes "
                f"with {installed}; then trnslurm resume",
                RESUME,
            )
        return None

    def no_gpu(self) -> tuple[str, str, str] | None:
        """Return cause, fix and mend if PyTorch cannot use a GPU here, and it is clear why."""
        torch, driver = self._torch(), self._text("driver")
        if torch.get("__version__") and not torch["cuda"] and not torch["hip"]:
            return (
                f"torch {torch['__version__']} of this Python is built for CPUs",
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
                f"the job may use none of this node's {there:.0f} GPUs: it asked Slurm for none",
                "set slurm.gpus_per_node in the profile, and submit again",
                SUBMIT,
            )
        return None

    def told(self, text: str) -> str:
        """Return what decides between the causes that a text names; empty: nothing is known."""
        found = [self._of(topic) for topic, words in _SAID.items() if words.search(text)]
        node = ", ".join(filter(None, found))
        installed = ", ".join(self._installed()) if self.concerns_versions(text) else ""
        parts = (
            f"on {self._node}: {node}" if node else "",
            installed and f"installed: {installed}",
        )
        return "; ".join(filter(None, parts))

    def _installed(self) -> Iterator[str]:
        """Yield the packages, with what they ask of each other."""
        known = dict.fromkeys(self._packages[m] for m in self.modules if m in self._packages)
        for name, version in [*known][:_MOST_PACKAGES]:
            asks = next((a.requirement for a in self._asked if a.package == name), "")
            yield f"{name} {version}" + (f" (asks for {asks})" if asks else "")

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
        known = found if isinstance(found, dict) and _word(found.get("__version__")) else {}
        return {key: _word(known.get(key)) for key in ("__version__", "cuda", "hip") if known}

    def _number(self, key: str) -> float | None:
        value = self._has.get(key)
        return float(value) if isinstance(value, int | float) else None

    def _text(self, key: str) -> str:
        return _word(self._has.get(key))


def _read(file: Path, suspect: Suspect) -> tuple[dict[str, tuple[str, str]], list[Asked]]:
    """Return name and version of each module's package, and what they ask of each other."""
    facts = read_json(file)
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        if _are_of(suspect, facts["places"]):
            found = {m: (_word(n), _word(v)) for m, (n, v) in facts["packages"].items()}
            asks = [Asked(_word(p), _word(o), _word(r), fits) for p, o, r, fits in facts["asks"]]
            return found, asks
    return {}, []


def _are_of(suspect: Suspect, places: list[str]) -> bool:
    """Check whether a traceback's packages are in these directories; none: they are anywhere."""
    own = {m[1] for file, _ in frames_in(suspect.lines) if (m := _PACKAGE.match(file))}
    return not own or not places or bool({os.path.realpath(each) for each in own} & {*places})


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _word(value: Any) -> str:
    """Return a name, version or requirement as it is; empty if it is anything else."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w.+!<>=~*,-]{1,80}", value) else ""
