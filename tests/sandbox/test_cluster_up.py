"""What `trnslurm sandbox up` builds, seen from the controller and from every node."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Sandbox, sandbox, sandbox_up

pytestmark = pytest.mark.rest

NAMES = [f"compute-dy-trn1-{n}" for n in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def four() -> Iterator[Sandbox]:
    """Four nodes, which the tests of this file share and leave as they are."""
    with sandbox_up("--nodes", 4) as made:
        yield made


def everywhere(four: Sandbox, script: str) -> dict[str, list[str]]:
    """What a shell script prints on each node, by the name of the node."""
    done = four.slurm("srun", "--nodes=4", "--label", "sh", "-c", f"hostname; {script}")
    rows = [line.split(": ", 1) for line in done.ok.splitlines()]
    lines = {n: [text for label, text in rows if label == str(n)] for n in range(4)}
    return {said[0]: said[1:] for said in lines.values()}


def test_all_nodes_are_idle(four: Sandbox) -> None:
    text = four.slurm("sinfo", "--noheader", "--Node", "--format=%N|%T|%P|%f|%c|%m|%E").ok
    facts = "idle|compute*|dynamic,trn1.32xlarge,trn1,efa|128|498073|none"
    assert text.splitlines() == [f"{name}|{facts}" for name in NAMES]


def test_status(four: Sandbox) -> None:
    state = four.state()
    assert (state["name"], state["cluster"], state["controller"]) == ("sandbox", "sandbox", "")
    assert state["daemons"] == ["munged", "slurmctld"]
    assert state["nodes"] == [
        {"number": n, "name": name, "address": f"10.77.1.{n}", "power": "on", "state": "idle",
         "reason": ""}
        for n, name in enumerate(NAMES, 1)
    ]  # fmt: skip
    shown = four.trnslurm("status")
    assert shown.err == ""
    assert shown.out.startswith("sandbox: cluster sandbox, 4 nodes like trn1.32xlarge, Slurm 2")
    assert all(name in shown.out for name in NAMES)


def test_each_node_sees_its_own_processes_only(four: Sandbox) -> None:
    # srun --label breaks lines of more than 1 KiB in two.
    words = "tr '\\0' '\\n' | grep -xA1 -e {} | tr '\\n' ' '; echo"
    first = "cat /proc/1/cmdline | " + words.format("trnslurm.sandbox.node_init")
    every = "cat /proc/[0-9]*/cmdline | " + words.format("-N")
    for name, (init, named) in everywhere(four, f"{first}; {every}").items():
        assert init.split() == ["trnslurm.sandbox.node_init", name]
        assert set(named.split()) & set(NAMES) == {name}


def test_each_node_has_shared_memory_of_its_own(four: Sandbox) -> None:
    file = f"/dev/shm/{four.base.parent.name}"
    script = f"ls {file} 2> /dev/null; hostname > {file}; cat {file}; rm {file}"
    assert everywhere(four, script) == {name: [name] for name in NAMES}
    assert not Path(file).exists()


def test_each_node_has_an_interface_and_a_name_that_resolves_to_it(four: Sandbox) -> None:
    """As Gloo and torchrun need it: a host's own name must not be 127.0.0.1."""
    script = (
        "ip -o -4 address show | awk '{print $2, $4}'; "
        'getent hosts "$(hostname)" compute-dy-trn1-2 head-node'
    )
    for name, (lo, eth0, itself, other, head) in everywhere(four, script).items():
        number = NAMES.index(name) + 1
        assert lo == "lo 127.0.0.1/8"
        assert eth0 == f"eth0 10.77.1.{number}/16"
        assert itself.split() == [f"10.77.1.{number}", name]
        assert other.split() == ["10.77.1.2", "compute-dy-trn1-2"]
        assert head.split() == ["10.77.0.1", "head-node"]


def test_no_way_out(four: Sandbox) -> None:
    """A cluster of its own: what runs in it reaches no server of this machine, nor beyond."""
    for number, routes in ((1, "10.77.0.0/16 dev eth0"), (None, "10.77.0.0/16 dev cluster")):
        node = [] if number is None else ["--node", number]
        text = four.trnslurm("exec", *node, "--", "ip", "route").ok
        assert [line.startswith(routes) for line in text.splitlines()] == [True]


def test_up_again_is_nothing(four: Sandbox) -> None:
    def times() -> list[int]:
        files = ("entry", "settings.json", "etc/slurm.conf", "bin/sinfo")
        return [(four.path / file).stat().st_mtime_ns for file in files]

    holder, before = four.holder, times()
    done = four.up("--nodes", 4)
    assert done.out.startswith("Sandbox sandbox is up already: 4 nodes like trn1.32xlarge\n")
    assert done.err == ""
    assert four.up("-q", "--nodes", 4).out == ""
    assert (four.holder, times()) == (holder, before)


def test_tasks_use_cpus_that_a_node_only_claims(four: Sandbox) -> None:
    """Tasks are not bound, because the machine lacks those CPUs."""
    tasks = (os.cpu_count() or 1) + 2
    done = four.slurm("srun", "--nodes=1", f"--ntasks={tasks}", "echo", "here")
    assert done.ok == "here\n" * tasks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", 3], "nodes 4"),
        (["--like", "trn1n.32xlarge", "--accounting"], "like 'trn1.32xlarge', accounting False"),
        (["--set", "KillWait=5"], "set ()"),
        (["--nodes", 3, "--neuron-stand-ins"], "nodes 4, neuron_stand_ins False"),
        (["--python", "/bin/sh"], f"python {sys.executable!r}"),
    ],
)
def test_up_with_other_settings_is_refused(four: Sandbox, options, words: str) -> None:
    holder = four.holder
    done = four.trnslurm("up", "--python", sys.executable, *options)
    assert done.error.startswith(f"sandbox sandbox is running with other settings ({words}): stop")
    assert four.holder == holder


def test_two_sandboxes_do_not_see_each_other(four: Sandbox) -> None:
    other = Sandbox(base=four.base, name="other")
    other.up("-q", "--nodes", 2)
    job = other.slurm("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").ok.strip()
    assert other.slurm("squeue", "--noheader", "--format=%A").ok.split() == [job]
    assert four.slurm("squeue", "--noheader").ok == ""
    assert (len(other.nodes()), len(four.nodes())) == (2, 4)
    assert [line.split() for line in four.trnslurm("list").ok.splitlines()] == [
        ["name", "cluster", "state", "nodes", "like"],
        ["other", "sandbox-other", "up", "2", "trn1.32xlarge"],
        ["sandbox", "sandbox", "up", "4", "trn1.32xlarge"],
    ]
    assert other.trnslurm("down").out == "Sandbox other is down\n"
    assert other.processes() == []
    assert everywhere(four, "true") == {name: [] for name in NAMES}


def test_two_at_once_start_one() -> None:
    with sandbox("race") as race:
        argv = race.argv("up", "--nodes", "1", "--python", sys.executable)
        with race.running(argv) as one, race.running(argv) as two:
            said = [process.communicate(timeout=600) for process in (one, two)]
            assert [one.returncode, two.returncode] == [0, 0], said
        words = sorted("already" in out for out, _ in said)
        assert words == [False, True]
        holders = [p for p in race.processes() if "-m trnslurm.sandbox.holder" in p]
        assert len([p for p in holders if "unshare" not in p]) == 1
        assert race.nodes() == {1: "idle"}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_umask_and_ignored_signals_of_the_caller_do_not_matter(umask: int) -> None:
    """Under nohup, or in the background of a script: bash could not trap the signals in a job."""
    numbers = (signal.SIGHUP, signal.SIGINT)
    before = os.umask(umask)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with sandbox_up("--nodes", 1, name="umask") as made:
            status = made.slurm("srun", "cat", "/proc/self/status").ok
            assert made.base.stat().st_mode & 0o777 == 0o700
            assert made.path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    (ignored,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    assert not any(int(ignored, 16) & 1 << number - 1 for number in numbers)
