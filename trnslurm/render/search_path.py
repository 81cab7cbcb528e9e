"""The PATH for programs on a node."""

from __future__ import annotations

from pathlib import Path


def search_path(python: str, bin_dir: str | None, *, neuron: bool = True) -> str:
    """Return the PATH for every program that runs on a node, with or without Neuron's tools."""
    # neuron_parallel_compile and neuronx-cc are installed next to the interpreter.
    own = str(Path(python).parent) if python.startswith("/") else ""
    standard = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # The installers of ParallelCluster, Neuron and EFA put their commands here.
    sites = ["/opt/slurm/bin", *(["/opt/aws/neuron/bin"] if neuron else [])]
    sites += ["/opt/amazon/efa/bin", "/opt/amazon/openmpi/bin"]
    words = [own, bin_dir or "", *sites, *standard.split(":")]
    return ":".join(word for word in dict.fromkeys(words) if word)
