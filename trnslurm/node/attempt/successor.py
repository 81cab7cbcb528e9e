"""Takes over a job that has lost its first node, and with it the attempt program.

    srun --nodelist=NODE2 … python -m trnslurm.node.attempt.successor OPTIONS -- COMMAND

With --no-kill, Slurm leaves such a job its other nodes, and ends only the steps that were running
on the lost node (kill_running_job_by_node_name in src/slurmctld/job_mgr.c, _kill_step_on_node in
step_mgr.c). So this program waits on the second node in its own job step. It sends heartbeats to
the first node as all nodes do, and reads the replies. It takes over when no node of the job can
reach the first node any more. The batch script is gone by then, so this program ends the job when
training ends.

    srun … python -m trnslurm.node.attempt.successor --sees ADDRESS PORT
    srun … python -m trnslurm.node.attempt.successor --end

ask each node two questions: can you reach the first node, and later, are the processes of the
attempt gone? Exit code 0 means that they are gone, or that no node reaches the first node.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trnslurm.contract.attempt import Attempt, read_attempt
from trnslurm.contract.options import AttemptOptions, parse
from trnslurm.contract.states import State
from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.address import ipv4
from trnslurm.node.attempt.program import Program
from trnslurm.node.beats import SILENT_S, Sender, answers
from trnslurm.node.controller import Controller
from trnslurm.node.stacks import processes_with
from trnslurm.node.state import RUN
from trnslurm.node.steps import SUCCESSOR, as_batch_script, srun_on

END_S = 15.0
"""How long a node's processes may take to end."""
_ASK_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Wait until the first node is lost, take over, and return the training's exit code."""
    if argv[:1] == ["--sees"]:
        return int(answers(argv[1], int(argv[2])))
    if argv[:1] == ["--end"]:
        return 0 if _orphans_end() else 1
    options = parse(argv)
    first, own, *others = os.environ[Variable.ALLOCATION].split(",")
    state = _newest()
    controller = Controller(state.job_id, state.restarts, options.retry_s)
    controller.learn_addresses([first, own, *others])  # later Slurm itself may be unavailable
    if not controller.answers(first):
        processes.say(f"no node can take over from {first}: its slurmd does not answer other nodes")
        return 0
    sender = Sender(0, 0)
    ask_after_s = SILENT_S
    while True:
        select.select([sender], [], [], sender.send_if_due())
        sender.told_to_end()  # reads the replies
        if sender.silent_s < SILENT_S:
            ask_after_s = SILENT_S
        elif sender.silent_s >= ask_after_s:
            if _is_lost(controller, first, others):
                break
            ask_after_s = sender.silent_s + SILENT_S
    sender.close()
    processes.say(f"{first}, the first node of the job, is lost: {own} takes over")
    os.environ["MASTER_ADDR"] = ipv4((controller.address_of(own) or [own])[0])
    return _take_over(options, argv, controller, first)


def _newest() -> Attempt:
    numbers = RUN.attempt_numbers("train")
    return read_attempt(RUN, "train", max(numbers, default=1))


def _is_lost(controller: Controller, first: str, others: Sequence[str]) -> bool:
    """Check that neither this node nor any other node reaches the first node."""
    if controller.answers(first) or controller.what_ends_job() is not State.RUNNING:
        return False
    if not (address := controller.address_of(first)):
        return False
    there = [host for host in others if host not in controller.silent(others)]
    return not there or _ask(there, "--sees", *map(str, address)) == 0


def _ask(hosts: Sequence[str], *words: str) -> int:
    """Ask these nodes; return 0 if all of them say yes."""
    python = [os.environ[Variable.PYTHON], "-m", SUCCESSOR, *words]
    try:
        return subprocess.run(
            [*srun_on(hosts), *python],
            stdin=subprocess.DEVNULL,
            env=as_batch_script(os.environ),
            timeout=_ASK_S,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


def _orphans_end() -> bool:
    """Kill what the job's attempts have left on this node; return whether all of it has ended."""
    deadline = time.monotonic() + END_S
    while left := [pid for pid in _pids() if _is_orphan(pid)]:
        if time.monotonic() > deadline:
            return False
        for pid in left:
            processes.send(pid, signal.SIGKILL)
        time.sleep(0.05)
    return True


def _pids() -> Iterator[int]:
    wanted = [f"{Variable.RUN_DIR}={os.environ[Variable.RUN_DIR]}".encode()]
    yield from (process.pid for process in processes_with(wanted))


def _is_orphan(pid: int) -> bool:
    """Check whether a process of the run belongs to node.sh or its job step."""
    try:
        command, words = (
            Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ")
        )
    except OSError:
        return False
    variables = dict(word.decode(errors="replace").split("=", 1) for word in words if b"=" in word)
    if Variable.NODE in variables:  # a container may lack Slurm's variables
        return True
    own = variables.get("SLURM_JOB_ID") == os.environ["SLURM_JOB_ID"]
    return own and "SLURM_STEP_ID" in variables and SUCCESSOR.encode() not in command


def _take_over(
    options: AttemptOptions, argv: Sequence[str], controller: Controller, first: str
) -> int:
    """Run the attempts from now on, and end the job after the last one."""
    signals = processes.SignalQueue()
    state = _newest()
    environ = as_batch_script(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    os.environ[Variable.ATTEMPT] = str(state.attempt)
    os.environ[Variable.HOSTS] = state.hosts or os.environ[Variable.HOSTS]
    options.script = str(RUN.script("train"))
    code = 0
    # A first node without a network may have recorded a requeue that Slurm does not know about.
    if state.under_way or state.state in (State.RESTARTED, State.REQUEUED):
        program = Program(options, signals, argv)
        code = program.take_over(first, lambda hosts: _ask(hosts, "--end"))
        state = _newest()
    if state.state is not State.REQUEUED:
        controller.end_job(first, completed=state.state is State.COMPLETED)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
