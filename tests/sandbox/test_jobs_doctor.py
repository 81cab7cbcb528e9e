"""`trnslurm doctor --run` on a real Slurm: all well on three nodes, then faults, each on its line.

The nodes play trn1.32xlarge: fi_info, neuron-ls and neuron_parallel_compile are stand-ins, and the
workers compute on the CPU. Everything else is what it is on a cluster.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..processes import run_process

pytestmark = pytest.mark.rest

BAD = 3
"""The node that the faults are put on."""


@pytest.fixture
def neuron(user):
    """Write a profile as it would be for real trn1 nodes; return the options that choose it."""
    profile = yaml.safe_load(next(user.sandbox.path.glob("**/cluster-config/*.yaml")).read_text())
    (name,) = profile["instance_types"]

    python(user).parent.mkdir()
    python(user).write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    python(user).chmod(0o755)

    def write(*, efa: int) -> tuple[str, ...]:
        profile["instance_types"][name] |= {"efa": efa, "network_gbps": 100 * efa}
        tree = profile | {
            "device": "neuron",
            "python": str(python(user)),
            "run_root": str(user.run_root),
            "compile_cache": f"{user.home}/cache",
            # torch_xla takes longer to import.
            "activate": [profile["activate"][0], "export TRNSLURM_STAND_IN_DEVICE=cpu"],
        }
        file = user.home / "site/cluster-config/neuron.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(tree))
        return ("--cluster", "neuron", "--path", str(file.parent.parent), "--nodes", "3", "--json")

    return write


@pytest.fixture
def faults(user):
    """Put faults on one of the nodes, and take them away."""
    cache = f"{user.home}/cache"

    def put() -> bool:
        """Return whether this kernel can slow a link down."""
        assert user.sandbox.on_node(BAD, "mount", "-t", "tmpfs", "none", cache).code == 0
        user.sandbox.fault("neuron", str(BAD), "fi_info", "other-version")
        # As if its slurmd had this limit.
        low = f'[ "${{SLURM_NODEID-}}" != {BAD - 1} ] || ulimit -l 64'
        python(user).write_text(f"#!/bin/sh\n{low}\nexec '{sys.executable}' \"$@\"\n")
        slow = f"tc qdisc add dev {link} root tbf rate 40mbit burst 32k latency 50ms"
        return user.sandbox.on_node(BAD, *slow.split()).code == 0

    link = user.sandbox.on_node(BAD, "sh", "-c", "ip -o -4 route show").ok.split(" dev ")[1]
    link = link.split()[0]
    yield put
    user.sandbox.on_node(BAD, *f"tc qdisc del dev {link} root".split())
    user.sandbox.on_node(BAD, "umount", cache)
    user.sandbox.fault("neuron", "all", "fi_info", "ok")


def python(user) -> Path:
    """The nodes' Python: a script, so that a node's may be another."""
    return Path(user.home / "bin/python")


def levels(said: dict[str, Any]) -> dict[str, str]:
    """The worst of each check."""
    found: dict[str, str] = {}
    for line in said["lines"]:
        if found.get(line["check"]) != "problem":
            found[line["check"]] = line["level"]
    return found


def test_all_well_and_then_several_faults_at_once(user, neuron, faults, stable) -> None:
    names, file = user.sandbox.node_name, user.home / "report.json"
    checkup = ("doctor", "--run", "--report", str(file))
    said = json.loads(user.differing(*checkup, *neuron(efa=0)))
    stable.json("doctor (--run)", said, free=["expected"])
    # With EFA in the profile, the memory that a process may lock has to be unlimited.
    assert {check: level for check, level in levels(said).items() if level != "ok"} == {
        "EFA": "problem"
    }, said
    measured = {line["check"]: line["measured"] for line in said["lines"]}
    assert measured["nodes"] == "3 of 3 nodes share the run directory"
    assert "libfabric 2.1.0amzn3.0" in measured["versions"]
    first, _, place = measured["compile"].removeprefix("1 compiled by ").partition(" into ")
    assert first in map(names, range(1, 5)) and place == f"{user.home}/cache"
    assert measured["compile cache"] == "2 of 2 other nodes found it compiled"
    assert measured["world size"] == "3 (on cpu, a stand-in)"
    assert measured["all-reduce"] == "ones add up to 3"
    assert measured["rounding"].endswith("on 3 workers")

    # The report has all of it but the names.
    report = json.loads(file.read_text())
    assert levels(report) == levels(said)
    for name in (names(1), str(user.home), str(Path(said["run"]))):
        assert name not in file.read_text()

    slowed = faults()
    said = json.loads(user.differing("doctor", "--run", *neuron(efa=8)))
    problems = {li["check"]: li["measured"] for li in said["lines"] if li["level"] == "problem"}
    assert (f"({names(BAD)})" in problems.pop("links", "")) == slowed
    assert problems.keys() == {"locked memory", "versions", "compile cache"}, said
    assert f"64 KiB ({names(BAD)})" in problems["locked memory"]
    assert f"1.22.0amzn4.0 ({names(BAD)})" in problems["versions"]
    assert f"No such file or directory ({names(BAD)})" in problems["compile cache"]
    assert levels(said)["EFA"] == levels(said)["rounding"] == "ok"


def test_a_job_that_no_node_fits_is_never_queued(user) -> None:
    """sbatch --test-only says so, in words that are found in our table."""
    for setting, words in (
        ("slurm.constraint=nowhere", "slurm.constraint is nowhere"),
        ("slurm.mem_per_node_mib=900000000", "slurm.mem_per_node_mib is 900000000"),
        ("slurm.cpus_per_task=4000", "slurm.cpus_per_task is 4000"),
    ):
        command = [sys.executable, "-m", "trnslurm", "submit", "probe", *user.options(1, setting)]
        done = run_process(command, env=user.environment)
        assert (done.code, done.out) == (1, ""), done
        assert words in done.err.splitlines()[-1], done
    assert not user.run_root.exists()
