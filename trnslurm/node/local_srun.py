"""Replaces `srun --nodes N --ntasks-per-node 1 --kill-on-bad-exit=1` on one machine.

    python -m trnslurm.node.local_srun --nodes 2 --output 'logs/node%n.log' -- bash node.sh train

Each "node" is one process of the command in a separate session, with Slurm's variables for a node.
The first failure ends the other nodes. All nodes end with the script that started this program,
even if that script is killed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence

from trnslurm.node import processes

KILL_INTERVAL_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on every node; return the exit code that srun would return."""
    parent = os.getppid()
    signals = processes.SignalQueue()
    options = parse(argv)
    processes.die_with_parent(parent)
    processes.become_subreaper()
    try:
        nodes = start_nodes(options.command, options.nodes, options.tasks, options.output)
        return wait_for_nodes(nodes, signals, options.kill_wait)
    except OSError as error:
        processes.say(f"error: local_srun: {error}")
        return 1
    finally:
        processes.end_descendants()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="local_srun", usage="%(prog)s --nodes N [options] -- COMMAND [ARGUMENT ...]"
    )
    parser.add_argument("--nodes", type=positive, required=True, help="how many nodes run COMMAND")
    parser.add_argument(
        "--tasks", type=positive, default=1, help="how many times each node runs it"
    )
    parser.add_argument("--output", help="log file to append to; %%n is the node's number")
    parser.add_argument(
        "--kill-wait", type=float, default=30.0, help="seconds between SIGTERM and SIGKILL"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Parse a number of nodes from the command line."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def start_nodes(
    command: Sequence[str], num_nodes: int, tasks: int, output: str | None
) -> dict[int, int]:
    """Start every node; return the nodes' numbers by pid."""
    numbers = range(num_nodes)
    # Open all logs first, so that no node starts if a path is wrong.
    logs = [
        processes.open_log(output.replace("%n", str(node))) if output else None for node in numbers
    ]
    nodes = {}
    for node, task in itertools.product(numbers, range(tasks)):
        environ = os.environ | task_environment(node, num_nodes, task, tasks)
        log_fd = logs[node]
        nodes[processes.spawn(command, output_fd=log_fd, environ=environ)] = node
    return nodes


def task_environment(node: int, num_nodes: int, task: int, tasks: int) -> dict[str, str]:
    """Return Slurm's variables for a task."""
    return {
        "SLURM_NNODES": str(num_nodes),
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node * tasks + task),
        "SLURM_LOCALID": str(task),
        "SLURM_NTASKS": str(num_nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURMD_NODENAME": f"local-{node}",
    }


def wait_for_nodes(
    running: dict[int, int], signals: processes.SignalQueue, kill_wait_s: float
) -> int:
    """Wait for all nodes, and end them at the first failure or signal. Return the exit code.

    The exit code is that of the failure, not of the nodes that were ended because of it.
    """
    result = 0
    deadline: float | None = None
    while running:
        timeout_s = deadline and max(KILL_INTERVAL_S, deadline - time.monotonic())
        arrived, _ = signals.wait(timeout_s)
        ended = {running.pop(pid): code for pid, code in processes.reap() if pid in running}
        asked = arrived & processes.END_SIGNALS
        if deadline is None and (any(ended.values()) or asked):
            result = max(ended.values(), default=0) or 128 + min(asked)
            announce(ended, asked, len(running))
            signal_nodes(running, signal.SIGTERM)
            deadline = time.monotonic() + kill_wait_s
        elif deadline and time.monotonic() >= deadline:
            signal_nodes(running, signal.SIGKILL)
    return result


def announce(ended: dict[int, int], asked: set[int], num_running: int) -> None:
    """Print why the nodes are being ended."""
    tail = "; ending the other nodes" if num_running else ""
    failed = {node: code for node, code in ended.items() if code}
    for node, code in failed.items():
        processes.say(f"local_srun: node {node} exited with code {code}{tail}")
    if not failed:
        processes.say(f"local_srun: {signal.Signals(min(asked)).name}; ending all nodes")


def signal_nodes(running: dict[int, int], signum: int) -> None:
    """Signal the process groups of the nodes that are still running.

    The number of an ended node may already belong to another group. Processes in other sessions,
    such as workers, are ended by their node or by end_descendants.
    """
    for leader in running:
        processes.send(-leader, signum)


if __name__ == "__main__":
    sys.exit(main())
