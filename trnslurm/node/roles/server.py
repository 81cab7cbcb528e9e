"""Runs one server on its node, and ends it with all processes that it has started.

    python -m trnslurm.node.roles.server -- COMMAND …

srun passes SIGUSR2 on to its tasks, but turns SIGTERM into SIGKILL (src/srun/libsrun/srun_job.c).
So SIGUSR2 asks for an end as SIGTERM does: the command gets SIGTERM, and some time later SIGKILL.

Slurm sends the signal to all processes of the step, not only to this one, with proctrack/linuxproc
(kill_tree.c) and with SignalChildrenProcesses in cgroup.conf. SIGUSR2 would kill the command at
once, so the command starts with SIGUSR2 ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from trnslurm.contract.variables import Variable
from trnslurm.node import ports, processes
from trnslurm.node.roles.machine import TAKEN

_KILL_WAIT_S = 15.0
"""Less than the attempt program waits."""


def main(argv: list[str]) -> int:
    """Run the server; return its exit code."""
    signals, parent = processes.SignalQueue(), os.getppid()
    processes.die_with_parent(parent)
    processes.become_subreaper()
    port = int(os.environ[Variable.PORT])
    if not ports.is_free(port, lingers=False):  # the previous server may have had the same port
        holder = ports.who_holds(port)
        processes.say(f"port {port} is taken{f' by {holder}' if holder else ''}")
        return TAKEN
    asks = processes.END_SIGNALS | {signal.SIGUSR2}
    child = processes.spawn(argv[1:], ignored=frozenset({signal.SIGUSR2}))
    code: int | None = None
    kill_at: float | None = None
    try:
        while code is None:
            within_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            arrived, _ = signals.wait(within_s)
            code = next((code for pid, code in processes.reap() if pid == child), None)
            if code is None and kill_at is None and arrived & asks:
                processes.say("trnslurm: ending the server on request")
                processes.send(-child, signal.SIGTERM)
                kill_at = time.monotonic() + _KILL_WAIT_S
            elif code is None and kill_at is not None and time.monotonic() >= kill_at:
                processes.send(-child, signal.SIGKILL)
    finally:
        processes.end_descendants()
    # Its exit code must not look like a taken port.
    return 1 if code == TAKEN else code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
