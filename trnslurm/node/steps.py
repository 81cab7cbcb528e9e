"""The job steps that run alongside training."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from trnslurm.contract.variables import Variable
from trnslurm.node import processes

SUCCESSOR = "trnslurm.node.attempt.successor"
# The batch script keeps the same Slurm variables when it clears its environment.
_KEPT = (
    *("SLURM_CONF", "SLURM_JOB", "SLURM_GPUS_PER_NODE", "SLURM_NODE_ALIASES", "SLURM_SPANK_"),
    *("SLURM_HET_SIZE", Variable.STEP, Variable.TASK),
)


def kept_of_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what Slurm had given to the batch script, as far as the script reads it."""
    return {name: value for name, value in environ.items() if name.startswith(_KEPT)}


def as_batch_script(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Slurm's per-step variables, which srun would read."""
    others = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    return others | kept_of_slurm(environ)


def srun_on(hosts: Sequence[str]) -> list[str]:
    """Return an srun that starts a program once on each of these nodes, next to all else."""
    many = len(hosts)
    size = f"--nodes={many} --ntasks={many} --ntasks-per-node=1 --cpus-per-task=1"
    beside = "--cpu-bind=none --overlap --input=none"
    return ["srun", *size.split(), *beside.split(), f"--nodelist={','.join(hosts)}"]


class Successor:
    """The program that waits on another node to take over if the first node is lost."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Store this program's arguments."""
        self._argv = [*argv]
        self._hosts: list[str] = []
        self._pid = 0

    def begin(self, hosts: Sequence[str], log: Path) -> None:
        """Start it on the second of the job's nodes. The first node is this one."""
        if self._pid and self._hosts == [*hosts]:
            return
        self.end()
        if len(hosts) < 2:
            return
        self._hosts = [*hosts]
        python = [os.environ[Variable.PYTHON], "-m", SUCCESSOR, *self._argv]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        self._pid = processes.spawn(
            [*srun_on(hosts[1:2]), f"--output={log}", "--open-mode=append", *python],
            output_fd=nowhere,
            environ=as_batch_script(os.environ) | {Variable.ALLOCATION: ",".join(hosts)},
            own_session=False,
        )
        os.close(nowhere)

    def has_ended(self) -> bool:
        """Check once whether it has ended."""
        if not self._pid or not os.waitpid(self._pid, os.WNOHANG)[0]:
            return False
        self._pid = 0
        return True

    def end(self) -> None:
        """End it. Slurm ends its task, which nothing waits for."""
        if self._pid:
            processes.send(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
