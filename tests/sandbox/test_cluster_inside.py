"""The ways into a sandbox: `exec`, and the wrappers that stand for Slurm's commands outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..processes import Done, processes_with
from ..waiting import eventually
from .cluster import AT_ONCE, Sandbox, line_of, sandbox_up

pytestmark = pytest.mark.rest

ODD = """it's a "wëird" $(näme) `x`"""
# Prints that it runs, and what ends it; for `python -c`.
LOOP = """
import os, signal, time
def end(number, frame):
    os.write(1, b"got %d\\n" % number)
    os._exit(1)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, end)
print("ready", flush=True)
for _ in range(6000):
    time.sleep(0.1)  # a signal just before a long sleep would be noticed only after the sleep
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Sandbox]:
    """Two nodes, which the tests of this file share."""
    with sandbox_up("--nodes", 2, "--set", AT_ONCE) as made:
        yield made


@pytest.fixture(params=["head", "node"])
def inside(request: pytest.FixtureRequest) -> list[str]:
    """The options of `exec` for the head node and for a node."""
    return {"head": [], "node": ["--node", "2"]}[request.param]


def shell(two: Sandbox, script: str, **more) -> Done:
    """A script in a shell that evaluated `trnslurm sandbox env`."""
    lines = two.trnslurm("env").ok
    return two.run(["bash", "-euc", lines + script], **more)


def no_job_is_left(two: Sandbox) -> bool:
    """the queue is empty"""
    return not two.slurm("squeue", "--noheader").ok


def test_bridge_keeps_its_address(two: Sandbox) -> None:
    """It takes none of the nodes' addresses, which would change it as they come and go."""
    lines = two.trnslurm("exec", "--", "ip", "-o", "link", "show").ok.splitlines()
    found = {line.split()[1]: line.split("link/ether ")[1].split()[0] for line in lines[1:]}
    assert set(found) == {"cluster:", "node1@if2:", "node2@if2:"}
    assert len(set(found.values())) == 3


# exec


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("exit 3", 3), ("kill -9 $$", -9)])
def test_exit_code(two: Sandbox, inside, script: str, code: int) -> None:
    done = two.trnslurm("exec", *inside, "--", "sh", "-c", script)
    assert (done.code, done.out, done.err) == (code, "", "")


def test_input_output_and_errors(two: Sandbox, inside) -> None:
    text = "".join(f"line {n}\n" for n in range(50_000))
    done = two.trnslurm("exec", *inside, "--", "sh", "-c", "cat; echo bad >&2", feed=text)
    assert (done.code, done.out == text, done.err) == (0, True, "bad\n")


WORDS = [ODD, "", "a\nb", "*", "--", "-x"]
# Prints what reaches it; for `python -c`.
REACHED = """
import json, os, sys
print(json.dumps([os.getcwd(), sys.argv[1:], sys.stdin.read(), dict(os.environ)]))
sys.exit(3)
"""


def reached(two: Sandbox, run, tmp_path: Path, *before: str) -> dict[str, str]:
    """Check that directory, words, input and exit code pass; return the command's environment."""
    directory = tmp_path / ODD
    directory.mkdir()
    wrong = {"SLURM_CONF": "/no/such/slurm.conf", "OWN": ODD}
    command = [*before, sys.executable, "-c", REACHED, *WORDS]
    done = run(*command, cwd=directory, environ=wrong, feed=f"{ODD}\n")
    *found, environ = json.loads(done.out)
    assert (done.code, found) == (3, [str(directory), WORDS, f"{ODD}\n"])
    assert environ["SLURM_CONF"] == str(two.path / "etc" / "slurm.conf")
    return environ


def test_what_reaches_a_command(two: Sandbox, inside, tmp_path: Path) -> None:
    found = reached(two, two.trnslurm, tmp_path, "exec", *inside, "--")
    assert (found["OWN"], found["TRNSLURM_CLUSTER"]) == (ODD, "sandbox")
    assert found["PATH"].startswith(f"{two.path}/bin:")


def test_slurms_commands_are_on_its_path(two: Sandbox, inside) -> None:
    done = two.trnslurm("exec", *inside, "--", "srun", "-N2", "-l", "hostname")
    assert sorted(done.ok.splitlines()) == ["0: compute-dy-trn1-1", "1: compute-dy-trn1-2"]


def test_command_that_is_not_there(two: Sandbox, inside) -> None:
    done = two.trnslurm("exec", *inside, "--", "no-such-command")
    assert (done.code, done.out, "no-such-command" in done.err) == (127, "", True)
    assert len(done.err.splitlines()) == 1


def test_working_directory_that_is_gone(two: Sandbox, tmp_path: Path) -> None:
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    done = two.run(["sh", "-c", script, "sh", *two.argv("exec", "--", "true")], cwd=tmp_path)
    assert (done.code, len(done.err.splitlines())) == (1, 1), done
    assert "Traceback" not in done.err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_ending_exec_ends_the_command(two: Sandbox, inside, signum: int, request) -> None:
    mark = f"mark-{request.node.name}"
    with two.running(two.argv("exec", *inside, "--", sys.executable, "-c", LOOP, mark)) as process:
        assert line_of(process) == "ready\n"
        process.send_signal(signum)
        assert line_of(process) == f"got {signal.SIGTERM}\n"
        assert process.wait(180) != 0
    eventually(lambda: not processes_with(mark))


def test_interrupt_from_the_keyboard_reaches_the_command(two: Sandbox, inside, request) -> None:
    """Ctrl-C goes to the whole process group, and the command is part of it."""
    mark = f"mark-{request.node.name}"
    argv = ["setsid", *two.argv("exec", *inside, "--", sys.executable, "-c", LOOP, mark)]
    with two.running(argv) as process:
        assert line_of(process) == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        assert line_of(process).startswith("got ")
        process.wait(180)
    eventually(lambda: not processes_with(mark))


# wrappers


def test_a_wrapper_for_every_command_of_slurm(two: Sandbox) -> None:
    names = {file.name for file in (two.path / "bin").iterdir()}
    assert {"sbatch", "srun", "salloc", "squeue", "scancel", "scontrol", "sinfo", "sacct"} <= names
    for name in names:
        done = two.slurm(name, "--version")
        assert done.out.startswith("slurm") or "accounting_storage/slurmdbd" in done.err, done


def test_what_reaches_a_command_of_a_wrapper(two: Sandbox, tmp_path: Path) -> None:
    reached(two, two.slurm, tmp_path, "srun", "-N1")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_killing_a_wrapper_kills_the_command(two: Sandbox, signum: int, request) -> None:
    """As a timeout around srun does: no srun and no step may keep running."""
    mark = f"mark-{request.node.name}"
    argv = [str(two.path / "bin" / "srun"), "-N2", sys.executable, "-c", LOOP, mark]
    with two.running(argv) as process:
        assert [line_of(process) for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signum)
        assert process.wait(180) != 0
    eventually(lambda: not processes_with(mark))
    eventually(lambda: no_job_is_left(two))


def test_job_calls_srun_and_scontrol_through_its_path(two: Sandbox, tmp_path: Path) -> None:
    """PATH is inherited from the shell of `sandbox env`, and works inside as well."""
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --output=said\nset -eu\n"
        'command -v srun\nsrun -l hostname | sort\nscontrol show hostnames "$SLURM_NODELIST"\n'
    )
    assert "Submitted batch job" in shell(two, "sbatch job.sh", cwd=tmp_path).ok
    eventually(lambda: no_job_is_left(two))
    srun, *said = (tmp_path / "said").read_text().splitlines()
    assert srun == f"{two.path}/bin/srun"
    names = ["compute-dy-trn1-1", "compute-dy-trn1-2"]
    assert said == [*(f"{n}: {name}" for n, name in enumerate(names)), *names]


def test_sandbox_commands_work_inside(two: Sandbox, stable) -> None:
    """A job, or a shell inside, may use the commands like anyone outside."""
    inner = [sys.executable, "-m", "trnslurm", "sandbox", "status", "--json"]
    state = json.loads(two.trnslurm("exec", "--", *inner).ok)
    stable.json("sandbox status", state)
    assert [node["state"] for node in state["nodes"]] == ["idle", "idle"]


def test_many_at_once(two: Sandbox) -> None:
    """Wrappers do not disturb each other."""
    argv = [str(two.path / "bin" / "squeue"), "--noheader"]
    started = [
        subprocess.Popen(argv, env=two.environment, stdout=subprocess.PIPE) for _ in range(12)
    ]
    assert [p.wait(180) for p in started] == [0] * 12
    for process in started:
        process.communicate()
