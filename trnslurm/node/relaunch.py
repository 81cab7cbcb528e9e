"""Starts the next attempt of a job within its allocation, without a requeue.

The batch script is run again in a child, which does all that comes before the last line: it takes
the next number, sets the environment and chooses the ports. Its last line then only tells this
program the command and the environment of the next attempt.

Once a training has saved something, the next attempt is even started ahead: standby.py keeps its
workers waiting.
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
# Variables that this program has set for the attempt that runs.
_KNOWN_LATE = (Variable.GRAPH_KEY, Variable.BEATS, NO_KILL)
_POLL_S = 0.1


class Launch(NamedTuple):
    """How the next attempt is launched."""

    nodes: int
    command: list[str]
    environ: dict[str, str]


def answer(nodes: int, command: list[str]) -> bool:
    """Tell node count, command and environment, if another program asks; return whether one did."""
    asked = os.environ.pop(Variable.ASKED, "")
    if asked:
        with os.fdopen(int(asked), "w", encoding="ascii") as pipe:
            json.dump(Launch(nodes, command, dict(os.environ))._asdict(), pipe)
    return bool(asked)


def ask(script: str, restarts: int, hosts: Sequence[str] = (), ahead: int = 0) -> Launch | int:
    """Run the batch script for its next launch; return that, or the exit code if it fails.

    Signals that arrive meanwhile are left for the next attempt. Slurm sends TERM to the script too.
    `hosts` are its nodes. `ahead` is the attempt to prepare; without it the next number is taken at
    once.
    """
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    # What the script says beside a training is not about the attempt that runs.
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
    with suppress(BlockingIOError):  # what it told between the last look and its end
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
    """The next attempt, started ahead, as far as it has come."""

    def __init__(self, script: str, state: Attempt) -> None:
        """Take the batch script, and the attempt that runs."""
        self._script, self._state = script, state
        self.attempt = state.attempt + 1
        self._launch: Launch | None = None
        self.step = self._stdin = 0
        """The pid of its step."""
        self._trains = False
        self.relay: threading.Thread | None = None
        """Passes on what srun says, once the step trains."""

    def prepare(self) -> Prepared:
        """Ask the batch script for the command and the environment."""
        hosts = self._state.hosts.split(",")
        launch = ask(self._script, self._state.restarts, hosts, self.attempt)
        if isinstance(launch, int):
            processes.say("warning: no workers are started ahead for the next attempt")
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
        """Check once whether the step has ended: a node cannot, and has said why."""
        if self._trains or not self.step or not os.waitpid(self.step, os.WNOHANG)[0]:
            return False
        self.step = 0
        self.end()
        return True

    def _pass_on(self, said: int) -> None:
        # Before, it would be taken for the end of the attempt that runs.
        while part := os.read(said, _AT_ONCE):
            if self._trains:
                os.write(2, part)
        os.close(said)

    def go(self) -> Launch | None:
        """Let the workers train as the next attempt; return how it was launched.

        None: it has nothing to begin with, or another job has taken its number.
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
        """End the workers that wait, unless they train by now."""
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
