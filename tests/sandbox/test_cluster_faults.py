"""Every fault and its undoing, as the controller and the nodes see them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..processes import processes_with
from ..waiting import eventually
from .cluster import AT_ONCE, Sandbox, line_of, sandbox_up

pytestmark = pytest.mark.rest

# Slurm's waits, cut short: a node is given up after 6 seconds of silence.
FAST = ("SlurmdTimeout=6", "MessageTimeout=4", "KillWait=2", AT_ONCE)
SETTINGS = [word for setting in FAST for word in ("--set", setting)]
NAME = "compute-dy-trn1-{}"


@pytest.fixture(scope="module")
def four() -> Iterator[Sandbox]:
    """Four nodes, which the tests of this file share."""
    with sandbox_up("--nodes", 4, "--neuron-stand-ins", *SETTINGS) as made:
        yield made


@pytest.fixture(autouse=True)
def whole(four: Sandbox) -> Iterator[None]:
    """Wait until no job is left, and every node is on and idle."""
    yield
    four.slurm("scancel", "--user", str(os.getuid()))
    eventually(lambda: not four.slurm("squeue", "--noheader").ok)
    for number in (1, 2, 3, 4):
        four.until(number, "idle")


@contextlib.contextmanager
def step(four: Sandbox, node: int, mark: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a mark in its command line that Slurm runs on a node."""
    argv = [str(four.path / "bin" / "srun"), f"--nodelist={NAME.format(node)}"]
    program = "import time; print('runs', flush=True); time.sleep(600)"
    with four.running([*argv, sys.executable, "-c", program, mark]) as process:
        assert line_of(process) == "runs\n"
        yield process


def states_of(mark: str) -> list[str]:
    """The kernel's state of each Python process with a mark, without srun and nsenter."""
    found = []
    for line in processes_with(mark):
        pid, _, command = line.partition(": ")
        if command.startswith(f"{sys.executable} -c"):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0])
    return found


def expect_unexpected_reboot(four: Sandbox, number: int) -> None:
    """The controller does not use a node that was rebooted until it is told to."""
    four.until(number, "down")
    node = four.state()["nodes"][number - 1]
    assert (node["power"], node["reason"]) == ("on", "Node unexpectedly rebooted")
    words = ("update", f"nodename={NAME.format(number)}", "state=resume")
    assert four.slurm("scontrol", *words).code == 0
    four.until(number, "idle")


def test_controller_killed_and_started(four: Sandbox) -> None:
    job = four.slurm("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").ok.strip()
    eventually(lambda: four.slurm("squeue", "--noheader", "--format=%T").ok == "RUNNING\n")
    running = time.time()
    saved = four.path / "state" / "slurmctld" / "job_state"
    # It may forget its last seconds; and it saves only what has changed.
    assert four.slurm("scontrol", "update", f"JobId={job}", "Comment=runs").code == 0
    eventually(lambda: saved.exists() and saved.stat().st_mtime > running)
    assert four.fault("ctld", "kill") == "slurmctld killed"
    state = four.state()
    assert state["daemons"] == ["munged"]
    assert [node["state"] for node in state["nodes"]] == ["?"] * 4
    assert state["controller"]
    assert four.trnslurm("fault", "ctld", "kill").error == (
        "sandbox sandbox: slurmctld is not running"
    )
    assert four.fault("ctld", "start") == "slurmctld started"
    assert four.slurm("squeue", "--noheader", "--format=%A %T").ok.split() == [job, "RUNNING"]
    assert four.trnslurm("fault", "ctld", "start").error == (
        "sandbox sandbox: slurmctld is already running"
    )
    assert four.state()["controller"] == ""
    assert four.slurm("srun", "hostname").ok.startswith("compute-dy-trn1-")


def test_silent_in_every_way(four: Sandbox) -> None:
    """slurmd dead, a node frozen, a cable pulled, a node off: the controller gives each up.

    What ran there keeps running, or is stopped: Slurm's TERM and KILL do not reach it. A node that
    is back is used again, unless it was rebooted meanwhile.
    """
    faults = {
        1: ("slurmd-kill", "slurmd killed", "slurmd-start"),
        2: ("freeze", "frozen", "thaw"),
        3: ("link-down", "link down", "link-up"),
        4: ("power-off", "powered off", "power-on"),
    }
    marks = {number: f"mark-{fault}" for number, (fault, _, _) in faults.items()}
    with contextlib.ExitStack() as stack:
        for number, mark in marks.items():
            stack.enter_context(step(four, number, mark))
        for number, (fault, said, _) in faults.items():
            assert four.fault(number, fault) == f"{NAME.format(number)}: {said}"
        after = [["S"], ["T"], ["S"], []]
        eventually(lambda: [states_of(mark) for mark in marks.values()] == after)
        for number in faults:
            four.until(number, "down*")
        nodes = four.state()["nodes"]
        assert [node["power"] for node in nodes] == ["on", "on", "on", "off"]
        assert {node["reason"] for node in nodes} == {"Not responding"}
        assert [states_of(mark) for mark in marks.values()] == after
        for number, (_, _, undo) in faults.items():
            four.fault(number, undo)
        for number in (1, 2, 3):
            four.until(number, "idle", "allocated", "mixed", "completing")
        expect_unexpected_reboot(four, 4)


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 6818), timeout=1).close()"


def reaches(four: Sandbox, node: int, other: int) -> bool:
    """Whether slurmd of one node can be reached from another."""
    done = four.on_node(node, sys.executable, "-c", CONNECT, NAME.format(other))
    assert done.code == 0 or "timed out" in done.err or "No route to host" in done.err, done
    return done.code == 0


def test_cable_pulled_and_plugged_in(four: Sandbox) -> None:
    assert reaches(four, 1, 2) and reaches(four, 2, 1)
    assert four.fault("compute-dy-trn1-2", "link-down") == "compute-dy-trn1-2: link down"
    assert not reaches(four, 1, 2) and not reaches(four, 2, 3) and reaches(four, 1, 3)
    assert reaches(four, 2, 2)  # only the cable: the node itself goes on
    assert four.fault(2, "link-up") == "compute-dy-trn1-2: link up"
    eventually(lambda: reaches(four, 1, 2) and reaches(four, 2, 3))


def test_reboot(four: Sandbox) -> None:
    with step(four, 1, "mark-other"), step(four, 2, "mark-reboot"):
        words = ("sh", "-c", "echo runs; exec sleep 600")
        with four.running(four.argv("exec", "--node", "2", "--", *words)) as inside:
            assert line_of(inside) == "runs\n"
            assert four.fault(2, "reboot") == f"{NAME.format(2)}: rebooted"
            assert inside.wait(180) != 0
        eventually(lambda: not states_of("mark-reboot"))
        expect_unexpected_reboot(four, 2)
        assert states_of("mark-other") == ["S"]
    assert four.slurm("srun", f"--nodelist={NAME.format(2)}", "hostname").code == 0


def test_power_off_and_on(four: Sandbox) -> None:
    assert four.on_node(3, "touch", "/dev/shm/before").code == 0
    assert reaches(four, 1, 3)
    assert four.fault(3, "power-off") == f"{NAME.format(3)}: powered off"
    off = f"{NAME.format(3)} is off: start it with power-on"
    for fault in ("power-off", "freeze", "link-down", "slurmd-kill"):
        assert four.trnslurm("fault", 3, fault).error == f"sandbox sandbox: {off}"
    assert four.on_node(3, "true").error == "sandbox sandbox: node 3 is off"
    eventually(lambda: not [p for p in four.processes() if f"-N {NAME.format(3)}" in p])
    assert four.fault(3, "power-on") == f"{NAME.format(3)}: powered on"
    answered = time.time()
    assert reaches(four, 1, 3)
    words = f"sandbox sandbox: {NAME.format(3)} is already on"
    assert four.trnslurm("fault", 3, "power-on").error == words
    assert four.on_node(3, "ls", "/dev/shm").ok == ""
    four.until(3, "down")
    shown = four.slurm("scontrol", "show", "node", "--oneliner", NAME.format(3)).ok
    started = shown.partition(" SlurmdStartTime=")[2].split()[0]
    # Set to RESUME sooner, it could be down again: slurmctld would see a second reboot.
    assert answered - datetime.datetime.fromisoformat(started).timestamp() >= 1
    expect_unexpected_reboot(four, 3)


def test_faults_that_are_there_already(four: Sandbox) -> None:
    four.fault(1, "slurmd-kill")
    words = f"sandbox sandbox: slurmd on {NAME.format(1)} is not running"
    assert four.trnslurm("fault", 1, "slurmd-kill").error == words
    four.fault(1, "slurmd-start")
    words = f"sandbox sandbox: slurmd on {NAME.format(1)} is already running"
    assert four.trnslurm("fault", 1, "slurmd-start").error == words
    for fault in ("thaw", "link-up", "freeze", "freeze", "thaw"):
        assert four.fault(1, fault)
    for action in ("kill", "start"):
        words = "sandbox sandbox: there is no slurmdbd: start the sandbox with --accounting"
        assert four.trnslurm("fault", "dbd", action).error == words


def test_signal_by_command_line(four: Sandbox) -> None:
    """Only on that node: the same command runs on another node and on the machine, and survives."""
    command = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(600)"]
    here, there = (four.argv("exec", "--node", node, "--") for node in (1, 2))
    mark = f"mark [proc] {four.base}"
    argvs = [*[[*here, *command, mark]] * 2, [*there, *command, mark], [*command, mark]]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(four.running(argv)) for argv in argvs]
        for process in processes:
            assert line_of(process) == "runs\n"
        pattern = r"mark \[proc\] /tmp/\S+$"
        said = four.fault("proc", NAME.format(1), pattern, "kill")
        assert said == f"{NAME.format(1)}: 2 processes signaled"
        assert [process.wait(180) for process in processes[:2]] == [-9, -9]
        words = f"sandbox sandbox: no process on {NAME.format(1)} matches {pattern!r}"
        assert four.trnslurm("fault", "proc", 1, pattern, 9).error == words
        assert states_of(mark) == ["S", "S"]
        assert "1 process signaled" in four.fault("proc", 2, pattern, 15)
        assert processes[2].wait(180) != 0
        assert states_of(mark) == ["S"]


def test_one_process_stopped_and_continued(four: Sandbox) -> None:
    with step(four, 2, "mark-stop"):
        assert "1 process signaled" in four.fault("proc", 2, "mark-stop$", "STOP")
        eventually(lambda: states_of("mark-stop") == ["T"])
        assert "1 process signaled" in four.fault("proc", 2, "mark-stop$", "SIGCONT")
        eventually(lambda: states_of("mark-stop") == ["S"])


def test_signal_to_everything_spares_the_first_process(four: Sandbox) -> None:
    assert "signaled" in four.fault("proc", 1, ".", "CONT")
    four.fault("proc", 1, ".", "KILL")  # slurmd and its munged with it
    eventually(lambda: "no process" in four.trnslurm("fault", "proc", 1, ".", "KILL").err)
    assert four.state()["nodes"][0]["power"] == "on"
    assert four.fault(1, "slurmd-start") == f"{NAME.format(1)}: slurmd started"
    assert four.slurm("srun", f"--nodelist={NAME.format(1)}", "hostname").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("proc 1 [ TERM", "fault proc: pattern '[': unterminated character set"),
        ("proc 1 x NOSUCH", "fault proc: there is no signal 'NOSUCH': use TERM, KILL, USR1"),
        ("proc 1 x 99", "fault proc: there is no signal '99': use TERM, KILL, USR1 or"),
        ("proc 1 x 0", "fault proc: there is no signal '0': use TERM, KILL, USR1 or"),
        ("proc 5 x TERM", "no node '5' in this sandbox: use 1 to 4, "),
        ("neuron 5 neuron-ls ok", "no node '5' in this sandbox: use 1 to 4, "),
        ("neuron 1 neuron-lz ok", "no stand-in for 'neuron-lz' (did you mean \"neuron-ls\"?)"),
        ("neuron 1 neuron-monitor sillent", '(did you mean "silent"?)'),
    ],
)
def test_fault_that_cannot_be(four: Sandbox, words: str, said: str) -> None:
    assert said in four.trnslurm("fault", *words.split()).error


FILL = "with open('file', 'wb', 0) as file:\n    for _ in range(64): file.write(bytes(2**16))"


def test_small_file_system(four: Sandbox, tmp_path: Path) -> None:
    directory = tmp_path / """it's a "small" $(disk) ü"""
    directory.mkdir()
    said = four.fault("disk", directory, "1M")
    assert said == f"{directory} is a file system of 1 MiB inside the sandbox"
    words = f"a file system is already mounted on {directory}: use disk {directory} off"
    assert four.trnslurm("fault", "disk", directory, "2M").error == f"sandbox sandbox: {words}"

    (directory / "outside").touch()  # not seen inside, and the other way round
    argv = [sys.executable, "-c", FILL]
    for node in (["--node", 2], []):
        done = four.trnslurm("exec", *node, "--", *argv, cwd=directory)
        assert (done.code, "No space left on device" in done.err) == (1, True)
        assert four.trnslurm("exec", "--node", 3, "--", "ls", directory).ok == "file\n"
    assert [file.name for file in directory.iterdir()] == ["outside"]
    job = four.slurm("srun", "--nodelist=compute-dy-trn1-3", *argv, cwd=directory)
    assert (job.code, "No space left on device" in job.err) == (1, True)

    assert four.fault("disk", directory, "off") == f"{directory} is restored"
    assert four.trnslurm("exec", "--node", 2, "--", "ls", directory).ok == "outside\n"
    words = f"sandbox sandbox: no sandbox file system is mounted on {directory}"
    assert four.trnslurm("fault", "disk", directory, "off").error == words
    words = f"fault disk: {directory} must be an empty directory that you own"
    assert four.trnslurm("fault", "disk", directory, "1M").error == words


def test_neuron_tool_that_misbehaves_on_one_node(four: Sandbox) -> None:
    def devices(node: int) -> int:
        """How many devices neuron-ls lists on a node; 0 if it fails."""
        done = four.on_node(node, str(four.path / "neuron" / "bin" / "neuron-ls"), "--json-output")
        return len(json.loads(done.out)) if done.code == 0 else 0

    said = four.fault("neuron", 1, "neuron-ls", "missing-device")
    assert said == "neuron-ls: lists one device fewer"
    assert (devices(1), devices(2)) == (15, 16)
    four.fault("neuron", "all", "neuron-ls", "no-devices")
    four.fault("neuron", NAME.format(1), "neuron-ls", "ok")
    assert (devices(1), devices(2)) == (16, 0)
