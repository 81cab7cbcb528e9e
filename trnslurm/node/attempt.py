"""Runs one attempt of a phase: the last line of a batch script becomes this program.

    exec python -m trnslurm.node.attempt --max-crashes=3 --requeue -- srun … bash node.sh train

The program owns the attempt's state file and the heartbeat. It receives Slurm's signals, asks the
workers to save, waits for them, and decides with ending.py whether the job is requeued; events.py
sends messages to people. Its input is the environment (TRNSLURM_*) and the state file that the
script has begun.
"""

import argparse
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property

from trnslurm.node import left_out, processes
from trnslurm.node.controller import Controller
from trnslurm.node.ending import earlier_attempts, how_it_ended, read_facts, reason_to_give_up
from trnslurm.node.events import Messages
from trnslurm.node.graphs import program as graphs
from trnslurm.node.graphs.compile import read_place
from trnslurm.node.graphs.manifest import CacheError
from trnslurm.node.hang import HangWatch
from trnslurm.node.hosts import brief
from trnslurm.node.state import CRASH, ERROR, RUN, read_state, saved_by_now, start_heartbeat
from trnslurm.node.triage.finding import Finding, find_cause, nothing_found
from trnslurm.rundir import utc_time, write_json

TERMINATED = 128 + signal.SIGTERM
# This program ends within this share of the time between TERM and KILL.
_LAST_SHARE = 0.9
_STDOUT = 1
_REASONS = {
    "REQUEUED": "requeued",
    "TIMEOUT": "time limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "",
    "FAILED": "Slurm had forgotten the job, and ended it",
}


class RefusedError(Exception):
    """The attempt ends before anything was started: exit code and message, or no message."""


class Terminated(BaseException):
    """TERM arrived during work in this process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code of the batch script."""
    signals = processes.SignalQueue()  # first: before this TERM would kill without a record
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        attempt = AttemptProgram(options, signals)
    except KeyError as error:
        processes.say(f"error: {error.args[0]} is not set: a batch script starts this program")
        return 2
    code = 1
    try:
        code = attempt.run()
    except RefusedError as refused:
        code, message = refused.args
        if message:
            processes.say(f"error: {message}")
    except Terminated:
        code = attempt.end_by_term()
    except OSError as error:
        processes.say(f"error: {error.filename or attempt.doing}: {error.strerror}")
    except Exception:
        processes.say(traceback.format_exc())
    return attempt.finish(code)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, and the command that follows them."""
    parser = argparse.ArgumentParser(
        prog="attempt", usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]", allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, default=0, help="refuse an allocation of another size")
    parser.add_argument("--graphs", action="store_true", help="the phase needs compiled graphs")
    parser.add_argument("--max-crashes", type=int, default=1, help="in a row, then give up")
    parser.add_argument("--requeue", action="store_true", help="the job may be requeued")
    parser.add_argument("--exclude-hours", type=float, default=0.0, help="0: leave no node out")
    parser.add_argument("--hang-minutes", type=float, default=0.0, help="0: never look for one")
    parser.add_argument(
        "--retry-s",
        type=float,
        nargs="*",
        default=[10.0, 30.0],
        metavar="SECONDS",
        help="pauses before Slurm's controller is asked again",
    )
    at = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:at])
    options.command = list(argv[at + 1 :])
    if not options.command:
        parser.error("no command")
    return options


class AttemptProgram:
    """One attempt of a phase."""

    def __init__(self, options: argparse.Namespace, signals: processes.SignalQueue) -> None:
        phase, number = os.environ["TRNSLURM_PHASE"], int(os.environ["TRNSLURM_ATTEMPT"])
        self.state = read_state(phase, number)
        self.state.host, self.state.pid = os.uname().nodename, os.getpid()
        self.trains = phase == "train"
        self.doing = "starting"
        """The current activity, for the reason of a failure."""
        self.controller = Controller(self.state.job_id, self.state.restarts, options.retry_s)
        self.on_slurm = self.controller.on_slurm
        self._options, self._signals = options, signals
        self._stop_file = RUN.stop_file(phase, number)
        self._launched = False
        """Whether the nodes have run, so that their logs may explain a failure."""
        self._step = 0
        """The pid of srun, or of its stand-in."""
        self._deadline: float | None = None
        """When the step must have ended, after Slurm began to end the job."""
        self._ended_by_term = False
        self._last_moment = math.inf
        """When this program must have ended, because KILL follows."""
        self._hang: HangWatch | None = None
        self._events = Messages(self.state)

    def run(self) -> int:
        """Run all of it; return the exit code."""
        self._begin()
        if self._options.graphs and self._graphs_are_warm():
            return 0
        self._mark_running()
        code = self._run_step()
        if self._ended_by_term and not self.trains:
            return TERMINATED
        self._launched = True
        if code == 0 and self._options.graphs and self.state.phase == "precompile":
            with self._graph_work("verifying the graphs"):
                graphs.commit(read_place())
        if self.trains and self.on_slurm and not self._ended_by_term:
            code = self._end_by_slurm(code)
        if self.trains and (code or self._stop_file.exists()):
            code = self._conclude(code)
        return code

    def _end_by_slurm(self, code: int) -> int:
        """Ask whether Slurm ended the step without TERM to this process; return the exit code.

        srun returns 0 when Slurm gives up one of its nodes, even if workers failed. At a preemption
        with a GraceTime, Slurm sends TERM to the step only, or with send_user_signal the signal
        that precedes a time limit (_job_check_grace_internal in src/interfaces/preempt.c).
        """
        ended_by = self.controller.what_ends_job()
        if code == 0 and ended_by in ("REQUEUED", "CANCELLED"):
            self.state.note(ended_by, ended_by.lower())
            return TERMINATED
        if ended_by == "PREEMPTED":
            self.state.note(ended_by, "preempted")
        return code

    def _begin(self) -> None:
        """Refuse a cancelled run, a wrong node count, and a run that crashed too often."""
        state = self.state
        if self.trains:
            state.checkpoint, state.changed = saved_by_now()
        if RUN.cancelled_file.exists():  # nothing brings a cancelled run back
            state.state, state.reason = "CANCELLED", "cancelled before it started"
            message = "this run was cancelled; remove state/cancelled.json to run it anyway"
            raise RefusedError(1, message)
        state.write()
        planned, nodes = self._options.nodes, int(os.environ.get("SLURM_JOB_NUM_NODES", 0))
        if planned and nodes != planned:  # the plan's exact arithmetic is for one node count
            self.doing = "checking the allocation"
            message = f"this script is for {planned} nodes, the allocation has {nodes}"
            raise RefusedError(2, f"{message}: render it again with --nodes {nodes}")
        if not self.on_slurm:
            return
        self.controller.learn_patience()
        # A crash counts even if the attempt could not record it, as when its node died.
        if self.trains and (given_up := reason_to_give_up(state, self._options.max_crashes)):
            state.state, state.reason = "FAILED", given_up
            raise RefusedError(1, given_up)

    def _mark_running(self) -> None:
        """Record that the step runs, and start the heartbeat, which dies with this process."""
        self._take_signals(0)
        if self._ended_by_term:
            raise RefusedError(TERMINATED, "")
        self.state.hosts = os.environ["TRNSLURM_HOSTS"]
        newest = RUN.newest_checkpoint()
        os.environ["TRNSLURM_RESUME"] = str(newest.absolute()) if newest else ""
        self.doing = f"running on {brief(self.state.hosts.split(','))}"
        self.state.state = "RUNNING"
        self.state.write()
        start_heartbeat()
        if self.trains and self._options.hang_minutes:
            self._hang = HangWatch(self.state, self._options.hang_minutes)
        self._events.begun(earlier_attempts(self.state))

    def finish(self, code: int) -> int:
        """Write the final state of this attempt; return its exit code."""
        state = self.state
        if state.under_way:
            state.state = "COMPLETED" if code == 0 else "FAILED"
            if code:
                why = self._found.brief if self._launched and self._found else ""
                state.reason = why or f"exit code {code} while {self.doing}"
        state.exit_code = code
        self.state.note()
        if self._launched and (state.state == "FAILED" or state.cause == CRASH):
            self._say_why()
        reason = f" ({state.reason})" if state.reason else ""
        text = f"{utc_time()} {state.phase} attempt {state.attempt}: {state.state}{reason}"
        processes.say(text, _STDOUT)
        self._events.ended(self._last_moment - time.monotonic())
        return code

    def _run_step(self) -> int:
        """Run the command, again if srun has given up on a busy controller; return its code."""
        pauses_s = [*self._options.retry_s, None] if self.on_slurm else [None]
        code = 0
        for pause_s in pauses_s:
            # Slurm finds the processes of a job by their session.
            self._step = processes.spawn(self._options.command, own_session=not self.on_slurm)
            code = self._wait_for_step()
            self._step = 0
            # Once anything was started a node's log is there, and the exit code is the job's own.
            logs = RUN.node_logs(self.state.phase, self.state.attempt)
            if pause_s is None or code == 0 or self._asked_to_end() or logs:
                break
            until = time.monotonic() + pause_s
            while not self._asked_to_end() and (left_s := until - time.monotonic()) > 0:
                self._take_signals(left_s)
            if self._asked_to_end():
                break
        return code

    def _asked_to_end(self) -> bool:
        return self._ended_by_term or (self.trains and self._stop_file.exists())

    def _wait_for_step(self) -> int:
        """Wait for the step to end, and act on signals; return its exit code."""
        while True:
            pid, status = os.waitpid(self._step, os.WNOHANG)
            if pid:
                return processes.exit_code(status)
            left_s = None if self._deadline is None else self._deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                processes.send(self._step, signal.SIGKILL)
                _, status = os.waitpid(self._step, 0)
                return processes.exit_code(status)
            if self._hang is None or self._deadline is not None:
                self._take_signals(left_s)
                continue
            self._take_signals(self._hang.period_s)
            if not self._ended_by_term and self._hangs(self._hang):
                processes.send(self._step, signal.SIGKILL)

    def _hangs(self, watch: HangWatch) -> bool:
        """Check whether the step hangs, and its nodes do not end it; an error is only logged."""
        try:
            return watch.look()
        except Exception:
            processes.say(traceback.format_exc())
            self._hang = None
            return False

    def _take_signals(self, within_s: float | None) -> None:
        """Wait for signals, and act on them; after the first TERM they have no effect."""
        arrived, _ = self._signals.wait(within_s)
        if self._ended_by_term:
            return
        if arrived & processes.END_SIGNALS:
            self.end_by_term()
        elif signal.SIGUSR1 in arrived and self.trains:
            # The time limit is near, or trnslurm cancel asks.
            cancelled = RUN.cancelled_file.exists()
            self._ask_to_stop("cancelled" if cancelled else "time limit")

    def _ask_to_stop(self, cause: str) -> None:
        """Ask the workers to save and to end together: worker 0 looks for this file."""
        with suppress(OSError):
            write_json(self._stop_file, {"cause": cause, "time": int(time.time())})

    def end_by_term(self) -> int:
        """Record what ends the attempt: scancel, the time limit, preemption or a requeue."""
        self._ended_by_term = True
        self._expect_kill()
        if self.trains:
            self._ask_to_stop("terminated")
        self.state.note("CANCELLED", "")  # at once: KILL may come before the controller answers
        if self.on_slurm:
            deadline = time.monotonic() + self.controller.patience_s
            ended_by = self.controller.what_ends_job()
            word = {"FORGOTTEN": "FAILED", "RUNNING": "CANCELLED"}.get(ended_by, ended_by)
            self.state.note(word, _REASONS[word])
            if self.trains:
                self._deadline = deadline
        # Slurm has sent TERM to srun and the workers of a training as well; a second TERM makes
        # torchrun leave its workers.
        if self._step and not (self.on_slurm and self.trains):
            processes.send(self._step, signal.SIGTERM)
        return TERMINATED

    def _expect_kill(self) -> None:
        """Set when this program must have ended, after TERM or just before it."""
        within_s = _LAST_SHARE * self.controller.kill_wait_s
        self._last_moment = min(self._last_moment, time.monotonic() + within_s)

    def _conclude(self, code: int) -> int:
        """Decide how a training ended and whether it starts again; return the exit code."""
        try:
            bad_nodes, trouble = left_out.update(
                self.state.attempt,
                self.state.hosts.split(","),
                hours=self._options.exclude_hours,
                now=time.time(),
            )
            # Not once Slurm is ending the job, which leaves no time to read logs.
            found = self._found if code and self.state.state == "RUNNING" else None
            ending = how_it_ended(
                read_facts(
                    self.state,
                    code,
                    trouble,
                    found,
                    max_crashes=self._options.max_crashes,
                    requeue=self._options.requeue,
                )
            )
        except Exception:  # then the exit code and Slurm's state decide
            processes.say(traceback.format_exc())
            self.doing = "deciding how it ended" if code == 0 else self.doing
            return code or 1
        self.state.state, self.state.reason = ending.state, ending.reason
        self.state.cause = ending.cause
        if ending.state == "REQUEUED":
            self._requeue(ending.refused, bad_nodes)
        if self.state.state != "COMPLETED" and ending.cause not in (CRASH, ERROR):
            return TERMINATED  # even after exit code 0: runs that wait for its success must wait
        return code

    def _requeue(self, refused: str, bad_nodes: left_out.Change) -> None:
        """Have Slurm start the job again, unless it is being cancelled."""
        self._ended_by_term = True  # scontrol requeue sends TERM to this process as well
        state = self.state
        ended_by = self.controller.what_ends_job()
        if ended_by == "CANCELLED":  # Slurm would start it again anyway
            state.state, state.reason = "CANCELLED", "cancelled as it ended"
            return
        why_not = "Slurm has forgotten the job" if ended_by == "FORGOTTEN" else ""
        if not why_not:
            self.state.note()  # before Slurm is asked: KILL may follow
            self._expect_kill()
            why_not = "" if ended_by == "REQUEUED" else self.controller.requeue()
        if why_not:
            state.state = refused
            state.reason += f"; it could not be requeued: {why_not}"
            return
        # The job is pending now, so its next start leaves these nodes out.
        nodes = bad_nodes.applied_to(self.controller.excluded_nodes())
        if nodes is not None and not self.controller.exclude(nodes):
            processes.say(f"warning: {nodes} will not be left out of the next attempt")

    @cached_property
    def _found(self) -> Finding | None:
        """The cause of a failure according to the logs; errors of this search are only logged."""
        try:
            return find_cause(RUN.path, self.state.phase, self.state.attempt)
        except Exception:
            processes.say(traceback.format_exc())
            return None

    def _say_why(self) -> None:
        """Print the cause of a failure; errors here are only logged."""
        try:
            state, found = self.state, self._found
            lines = found.report() if found else nothing_found(RUN.path, state.phase, state.attempt)
            processes.say("\n".join(lines), _STDOUT)
        except Exception:
            processes.say(traceback.format_exc())

    def _graphs_are_warm(self) -> bool:
        """Find the key of the job's graphs; return whether there is nothing to precompile."""
        with self._graph_work("reading the key of the graphs"):
            os.environ["TRNSLURM_GRAPH_KEY"] = graphs.own_key(RUN.path)
            return self.state.phase == "precompile" and graphs.is_warm(read_place())

    @contextmanager
    def _graph_work(self, doing: str) -> Iterator[None]:
        """Let TERM interrupt work on graphs in this process, which may take minutes."""

        def interrupt(_signum: int, _frame: object) -> None:
            raise Terminated

        self.doing = doing
        with processes.handling(processes.heard_end_signals(), interrupt):
            # After the handler is set: a signal between the two would otherwise be missed.
            arrived, _ = self._signals.wait(0)
            if arrived & processes.END_SIGNALS:
                raise Terminated
            try:
                yield
            except CacheError as error:
                raise RefusedError(1, str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
