"""Starts the next attempt of a job within its allocation, without a requeue.

The batch script runs again in a child process, and does everything that precedes its last line: it
takes the next attempt number, sets the environment and chooses the ports. Its last line then only
reports the next attempt's command and environment to this program.

When training has saved a checkpoint, workers of the next attempt are even started in advance:
standby.py keeps them waiting.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.checkpoints import newest_checkpoint
from trnslurm.contract.files import write_json_once
from trnslurm.contract.times import utc_time
from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.attempt.events import Prepared
from trnslurm.node.controller import NO_KILL
from trnslurm.node.standby import RESUME
from trnslurm.node.state import RUN
from trnslurm.node.steps import kept_of_slurm

_PATH = "/usr/local/bin:/usr/bin:/bin"  # until the script sets its own
_AT_ONCE = 1 << 20
_END_S = 5.0
# Variables that this program has set for the running attempt.
_KNOWN_LATE = (Variable.GRAPH_KEY, Variable.BEATS, NO_KILL)
_POLL_S = 0.1


class Launch(NamedTuple):
    """How the next attempt is launched."""

    nodes: int
    command: list[str]
    environ: dict[str, str]


def answer(nodes: int, command: list[str]) -> bool:
    """Report node count, command and environment if another program asks; return whether it did."""
    asked = os.environ.pop(Variable.ASKED, "")
    if asked:
        with os.fdopen(int(asked), "w", encoding="ascii") as pipe:
            json.dump(Launch(nodes, command, dict(os.environ))._asdict(), pipe)
    return bool(asked)


def ask(script: str, restarts: int, hosts: Sequence[str] = (), ahead: int = 0) -> Launch | int:
    """Run the batch script for its next launch; return the launch, or the exit code on failure.

    Signals that arrive meanwhile are left for the next attempt. Slurm sends SIGTERM to the script
    too. `hosts` are the attempt's nodes. `ahead` is the number of the attempt to prepare. Without
    it, the script takes the next number at once.
    """
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    # The script's output during training is not about the running attempt.
    silent = os.open(os.devnull, os.O_WRONLY) if ahead else None
    child = processes.spawn(
        ["bash", "--", script],
        output_fd=silent,
        environ=_environ(os.environ, restarts)
        | {Variable.ASKED: str(theirs), Variable.CHOSEN: ",".join(hosts)}
        | ({Variable.STANDBY: str(ahead)} if ahead else {}),
        own_session=False,
    )
    for descriptor in filter(None, (theirs, silent)):
        os.close(descriptor)
    told, pid, status, open_ = b"", 0, 0, True
    while not pid:  # a process that the script left behind may keep the pipe open
        ready, _, _ = select.select([ours], [], [], _POLL_S) if open_ else ((), (), ())
        part = os.read(ours, _AT_ONCE) if ready else b""
        told += part
        open_ = open_ and (bool(part) or not ready)
        pid, status = os.waitpid(child, os.WNOHANG if open_ else 0)
    os.set_blocking(ours, False)
    with suppress(BlockingIOError):  # what it reported between the last look and its end
        while open_ and (part := os.read(ours, _AT_ONCE)):
            told += part
    os.close(ours)
    code = processes.exit_code(status)
    return Launch(**json.loads(told)) if told and code == 0 else code or 1


def _environ(environ: Mapping[str, str], restarts: int) -> dict[str, str]:
    """Return what Slurm had given to the batch script, as far as the script reads it."""
    own = {
        "SLURM_SUBMIT_DIR": environ[Variable.RUN_DIR],
        "SLURM_RESTART_COUNT": str(restarts),
        "PATH": _PATH,
    }
    if "TMPDIR" in environ:
        own["TMPDIR"] = environ["TMPDIR"]
    return kept_of_slurm(environ) | own


class Standby:
    """The next attempt on standby, as far as it has been prepared."""

    def __init__(self, script: str, state: Attempt) -> None:
        """Store the batch script, and the running attempt."""
        self._script, self._state = script, state
        self.attempt = state.attempt + 1
        self._launch: Launch | None = None
        self.step = self._stdin = 0
        """The pid of its job step."""
        self._trains = False
        self.relay: threading.Thread | None = None
        """Passes on srun's output when the step trains."""

    def prepare(self) -> Prepared:
        """Get the command and the environment from the batch script."""
        hosts = self._state.hosts.split(",")
        launch = ask(self._script, self._state.restarts, hosts, self.attempt)
        if isinstance(launch, int):
            processes.say("warning: the next attempt has no standby workers")
            return Prepared(possible=False)
        self._launch = launch
        return Prepared(possible=True)

    def start(self) -> None:
        """Start the step, whose workers wait at the gate."""
        assert self._launch
        theirs, self._stdin = os.pipe()
        said, output = os.pipe()
        known = {name: os.environ[name] for name in _KNOWN_LATE if name in os.environ}
        self.step = processes.spawn(
            self._launch.command,
            input_fd=theirs,
            output_fd=output,
            environ=self._launch.environ | known | {Variable.RESUME: RESUME},
            own_session=False,
        )
        os.close(theirs)
        os.close(output)
        self.relay = threading.Thread(target=self._pass_on, args=(said,), daemon=True)
        self.relay.start()

    def has_ended(self) -> bool:
        """Check once whether the step has ended, as it does on a node that cannot stand by."""
        if self._trains or not self.step or not os.waitpid(self.step, os.WNOHANG)[0]:
            return False
        self.step = 0
        self.end()
        return True

    def _pass_on(self, said: int) -> None:
        # Earlier, it would be mistaken for the end of the running attempt.
        while part := os.read(said, _AT_ONCE):
            if self._trains:
                os.write(2, part)
        os.close(said)

    def go(self) -> Launch | None:
        """Let the workers train as the next attempt; return how it was launched.

        Return None if there is no checkpoint to resume from or another job has taken the attempt
        number.
        """
        newest = newest_checkpoint(RUN)
        if not self.step or not self._launch or not newest:
            return None
        begun = {"job_id": self._state.job_id, "restarts": self._state.restarts}
        begun["started"] = utc_time()
        file = RUN.state_file(self._state.phase, self.attempt)
        if not write_json_once(file, begun | {"state": "STARTING"}):
            return None
        for log in RUN.logs.glob(f"standby-{self._state.phase}-{self.attempt}-node*.log"):
            log.rename(log.with_name(log.name.removeprefix("standby-")))
        self._trains = True
        told = {Variable.RESUME: str(newest.absolute())}
        with suppress(BrokenPipeError):  # then the step ends, and is seen to end
            os.write(self._stdin, f"{json.dumps(told)}\n".encode())
        self._launch.environ.pop(Variable.STANDBY, None)
        return self._launch

    def end(self, *, wait: bool = True) -> None:
        """End the waiting workers, unless they are training by now."""
        if self._trains:
            return
        if self._stdin:
            os.close(self._stdin)  # the nodes' programs see the end of their stdin
            self._stdin = 0
        if self.step and not _ends_within(self.step, _END_S if wait else _POLL_S):
            processes.send(self.step, signal.SIGKILL)
            os.waitpid(self.step, 0)
        self.step = 0
        for log in RUN.logs.glob(f"standby-{self._state.phase}-*.log"):
            log.unlink(missing_ok=True)


def _ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
