"""What a node says of itself beyond the preflight: limits, EFA's domains, versions."""

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

_TOOL_S = 20
# What the kernel's modules, and AWS's installer of EFA, say of themselves.
_FILES = {
    "neuron driver": (Path("/sys/module/neuron/version"), r"(\S+)"),
    "nvidia driver": (Path("/proc/driver/nvidia/version"), r"Kernel Module +(?:for \S+ +)?(\S+)"),
    "efa driver": (Path("/sys/module/efa/version"), r"(\S+)"),
    "EFA installer": (Path("/opt/amazon/efa_installed_packages"), r"version: *(\S+)"),
}
# The runtime, the collectives, the tools and the driver are packages of the system.
_SYSTEM_PACKAGES = (
    ("dpkg-query", "--show", "--showformat=${Package} ${Version}\n", "aws-neuronx-*"),
    ("rpm", "--query", "--all", "--queryformat=%{NAME} %{VERSION}-%{RELEASE}\n", "aws-neuronx-*"),
)


def limits() -> dict[str, int | None]:
    """Return what a worker may lock in memory, in bytes, and open; None: without a limit."""
    found = {"memlock": resource.RLIMIT_MEMLOCK, "files": resource.RLIMIT_NOFILE}
    soft = {name: resource.getrlimit(which)[0] for name, which in found.items()}
    return {name: None if n == resource.RLIM_INFINITY else n for name, n in soft.items()}


def raise_open_files(workers: int) -> None:
    """Raise `ulimit -n` as node.sh does for a job of so many workers."""
    wanted = max(65536, 256 + 4 * workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def efa() -> dict[str, Any]:
    """Return the domains that libfabric finds on EFA, or why there are none.

    An interface has a domain for each endpoint type, named after it; libfabric 2 lists those of
    its fabric efa-direct as well.
    """
    code, said = _tool("fi_info", "-p", "efa")
    if code is None:
        return {"domains": [], "said": "fi_info is not on PATH"}
    domains = set(re.findall(r"^\s*domain: (\S+?)(?:-(?:rdm|dgrm))?\s*$", said, re.MULTILINE))
    return {"domains": sorted(domains), "said": "" if domains else _last_line(said)}


def versions() -> dict[str, str]:
    """Return the versions below Python, which must be the same on all nodes."""
    found = {"kernel": os.uname().release}
    for name, (file, pattern) in _FILES.items():
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(pattern, text):
            found[name] = match[1]
    for command in _SYSTEM_PACKAGES:
        code, said = _tool(*command)
        if code == 0:
            found |= {name: v for name, _, v in (li.partition(" ") for li in said.split("\n")) if v}
            break
    code, said = _tool("fi_info", "--version")
    if code == 0 and (match := re.search(r"^libfabric: *(\S+)", said, re.MULTILINE)):
        found["libfabric"] = match[1]
    return found


def _tool(*command: str) -> tuple[int | None, str]:
    """Return a tool's exit code and what it said; None: there is no such tool."""
    if not shutil.which(command[0]):
        return None, ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            errors="replace", timeout=_TOOL_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {_TOOL_S} s"
    return done.returncode, done.stdout + ("" if done.stdout else done.stderr)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1][:200]
