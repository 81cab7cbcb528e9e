"""The end of a sandbox in which jobs run: nothing of it is left on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from .cluster import eventually

# Does not end when it is asked to, as a job in a hung collective.
DEAF = "bash -c 'trap : TERM INT HUP; while :; do sleep 600; done'"


def family(pid: int) -> dict[int, str]:
    """A process and all its descendants: pid -> start time and command line."""
    children: dict[int, list[int]] = {}
    facts = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            words = (directory / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue  # it has ended
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(directory.name))
            facts[int(directory.name)] = f"{fields[19]} {words}"
    found, rest = {}, [pid]
    while rest:
        member = rest.pop()
        if member in facts:
            found[member] = facts[member]
            rest += children.get(member, [])
    return found


def alive(members: dict[int, str]) -> list[str]:
    """Those of some processes that still live, whoever their parent is now."""
    return [words for pid, words in members.items() if family(pid).get(pid) == words]


def machine() -> tuple[str, str]:
    """The network links and the mounts that a sandbox could have added to."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return links, Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize("way", ["down", "kill -9 of its first process"])
def test_nothing_is_left_of_a_sandbox(new_sandbox, way: str) -> None:
    before = machine()
    with new_sandbox("--nodes", "2") as sandbox:
        wrap = f"--wrap={sandbox.path}/bin/srun {DEAF}"
        sandbox.slurm("sbatch", "--nodes=2", "--output=/dev/null", wrap)

        def members() -> dict[int, str]:
            """the step runs on both nodes"""
            found = family(sandbox.holder)
            sleeping = [words for words in found.values() if words.split()[1:] == ["sleep", "600"]]
            return found if len(sleeping) == 2 else {}

        found = eventually(members)
        if way != "down":
            os.kill(sandbox.holder, signal.SIGKILL)
            eventually(lambda: not alive(found))
            assert machine() == before
    # `new_sandbox` has taken it down and found no file.
    assert alive(found) == []
    assert machine() == before
    assert not sandbox.base.exists()
