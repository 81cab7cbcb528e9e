"""Requeues a job that has lost its first node, where its batch script was running.

Such a job has --no-kill: Slurm leaves it its other nodes until the time limit (seen with 22.05 and
26.05). attempt/successor.py takes over the job. If that program is gone as well, the other nodes
requeue the job. For this, their lookouts expect a reply to their heartbeats. node.sh runs this
program when its command has failed, so that the node's part of the job does not end before the
first node has replied:

    python -m trnslurm.node.first
"""

import os
import sys

from trnslurm.contract.attempt import read_attempt
from trnslurm.contract.files import read_file
from trnslurm.contract.states import EndCause, State
from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.beats import PERIOD_S, SILENT_S, Sender
from trnslurm.node.controller import Controller
from trnslurm.node.state import RUN, note

# One node after another, so that the job is not requeued twice.
_TURN_S, _LAST_TURN_S = 5.0, 60.0
# How long the second node's program may take to take over.
_TAKE_OVER_S = 30.0
_RETRY_S = (5.0, 10.0, 30.0)


def main() -> int:
    """Wait for a reply from the first node, or requeue the job."""
    node, attempt = int(os.environ["SLURM_NODEID"]), int(os.environ[Variable.ATTEMPT])
    if Variable.BEATS in os.environ:
        sender = Sender(attempt, node)
        patience = patience_s(node)
        while not sender.hears(PERIOD_S, ended=True):
            if sender.silent_s >= patience:
                if requeue_if_lost(os.environ[Variable.PHASE], attempt):
                    break
                patience += patience_s(node)
        sender.close()
    return 0


def is_missed() -> bool:
    """Check whether the job outlives its first node, because its script uses --no-kill."""
    try:
        return b"#SBATCH --no-kill" in read_file(RUN.script("train"))
    except OSError:
        return False


def patience_s(node: int) -> float:
    """Return how long a node waits for a reply from the first node."""
    return SILENT_S + _TAKE_OVER_S + min(_TURN_S * max(node - 1, 0), _LAST_TURN_S)


def requeue_if_lost(phase: str, attempt: int) -> bool:
    """Requeue the job if its first node is lost; return False if that must be checked again.

    A node that responds may have rebooted. Then Slurm takes it out of the job when its slurmd
    registers. A Slurm that would hold the job gets SlurmdTimeout to take out the node (NO_KILL).
    """
    if max(RUN.attempt_numbers(phase), default=0) > attempt:  # another node has taken over
        return True
    state = read_attempt(RUN, phase, attempt)
    first = os.environ[Variable.ALLOCATION].partition(",")[0]
    controller = Controller(state.job_id, state.restarts, _RETRY_S)
    if controller.what_ends_job() is not State.RUNNING:
        return True
    controller.learn_config()
    if controller.has_node(first) and (controller.holds or controller.answers(first)):
        return False
    processes.say(f"{first}, the first node of the job, does not respond: requeuing the job")
    state.become(State.REQUEUED, f"{first}, the job's first node, failed", EndCause.REQUEUED)
    note(state)
    if why_not := controller.requeue():
        processes.say(f"error: the job could not be requeued: {why_not}")
    return True


if __name__ == "__main__":
    sys.exit(main())
