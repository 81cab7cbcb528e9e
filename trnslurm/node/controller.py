"""Asks Slurm's controller about the job that this program runs in, or to requeue the job."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from trnslurm.contract.states import State
from trnslurm.contract.variables import Variable
from trnslurm.node.beats import answers

NO_KILL = "SLURM_NO_KILL"
"""srun's --no-kill: Slurm takes a node that is down out of the job, and the step continues."""
# The time between SIGTERM and SIGKILL: Slurm's KillWait, at least five seconds. An attempt must
# have written its last state by then.
_KILL_WAIT_S, _SHORTEST_KILL_WAIT_S = 30.0, 5.0
_LOCAL_KILL_WAIT_S = 10.0  # guard.py's --grace
_SHARE = 0.75
_MOST_THREADS = 64
_LEAVE_WITHIN_S = 600.0
"""Twice Slurm's default SlurmdTimeout."""
_LEAVES_S = 5.0
_AT_ONCE_S = 60.0
_UNUSABLE = re.compile(r"down|drain(ed|ing)|fail(ing)?|inval|maint|unknown")  # by %T of sinfo(1)
# Why jobs are pending that would not take free nodes now; no job is an empty line.
_WAIT_FOR_OTHERS = frozenset(("", "Dependency", "JobHeldUser", "JobHeldAdmin", "BeginTime"))
_SLURMD_PORT = 6818  # scontrol shows the port only if it is not the default
# Slurm sends SIGTERM to every process of a job, scontrol included. Blocked signals are inherited.
_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def is_here(job_id: str) -> bool:
    """Check whether a job runs on this machine without Slurm."""
    return job_id.startswith("local-")


def controller_of(job_id: str, restarts: int, retry_s: Sequence[float]) -> Controller:
    """Return the job's Slurm controller, or the stand-in for it on this machine."""
    return NoController() if is_here(job_id) else Controller(job_id, restarts, retry_s)


class Controller:
    """Slurm's controller, as this job sees it."""

    requeues = True
    """Whether the controller may start the job again."""
    signals_workers = True
    """Whether the workers get the SIGTERM that ends the job, and SIGKILL some time later."""
    ends_step_by = signal.SIGUSR2
    """The signal for ending a server's step: a signal that its srun passes on unchanged.

    srun turns SIGTERM into SIGKILL (src/srun/libsrun/srun_job.c).
    """
    own_session = False
    """Whether a step needs its own session. Slurm finds a job's processes by their session."""

    def __init__(self, job_id: str, restarts: int, retry_s: Sequence[float]) -> None:
        """Store the job, how often Slurm has restarted it, and the pauses between retries."""
        self._job_id, _, step = job_id.partition(".")
        self.in_step = bool(step)
        """Whether the run is a job step of a job that the user holds (`submit --in`)."""
        self._restarts, self.retry_s = restarts, retry_s
        self.kill_wait_s = _KILL_WAIT_S
        self.holds = False
        """Whether Slurm holds a job for good if one of its nodes goes down during a requeue.

        In such versions, kill_running_job_by_node_name in src/slurmctld/job_mgr.c lacks
        batch_requeue_fini.
        """
        self._learned = False
        self._addresses: dict[str, tuple[str, int]] = {}
        """The addresses on which the nodes' slurmds listen."""
        self._run_name = Path(os.environ[Variable.RUN_DIR]).name  # as given to sbatch

    @property
    def patience_s(self) -> float:
        """Return how long after SIGTERM to wait for the step's end or the controller's reply."""
        return _SHARE * self.kill_wait_s

    def what_ends_job(self) -> State:
        """Return what ends the job: REQUEUED, TIMEOUT, PREEMPTED, CANCELLED, LOST or RUNNING.

        LOST means that Slurm has forgotten the job, and RUNNING that nothing ends it or that Slurm
        did not reply. If the run is a job step, a requeue of its job does not start the run again,
        so the result is CANCELLED. JobState is COMPLETING in all these cases, so other fields
        decide.
        """
        job = self._job()
        # A controller that was killed may not know the job, and may give its id to another job.
        if "Invalid job id" in job or not (self.in_step or self._works_here(job)):
            return State.LOST
        restarts = re.search(r" Restarts=(\d+) ", job)
        if restarts and int(restarts[1]) > self._restarts:
            return State.CANCELLED if self.in_step else State.REQUEUED
        if " Reason=TimeLimit " in job:
            return State.TIMEOUT
        if " PreemptTime=2" in job:  # a year; otherwise None
            return State.PREEMPTED
        return State.CANCELLED if " JobState=COMPLETING " in job else State.RUNNING

    def _works_here(self, job: str) -> bool:
        """Check whether a job was submitted from this run's directory, as far as that is known.

        An array's directory has a link for each task.
        """
        _, array, task = self._job_id.partition("_")
        if not array:
            work_dir = job.partition(" WorkDir=")[2]
            return not work_dir or f"/{self._run_name} " in work_dir
        place = re.search(r" WorkDir=(.*?) StdErr=", job)
        return not place or Path(place[1], task).resolve().name == self._run_name

    def learn_config(self) -> None:
        """Ask once for the cluster's KillWait and for the behavior of its Slurm version."""
        if self._learned:
            return
        _, config = _scontrol("show", "config", timeout_s=self.patience_s)
        if found := re.search(r"^KillWait *= *(\d+)", config, re.MULTILINE):
            self.kill_wait_s = max(float(found[1]), _SHORTEST_KILL_WAIT_S)
            self._learned = True
        if found := re.search(r"^SLURM_VERSION *= *(\d+)\.(\d+)\.(\d+)", config, re.MULTILINE):
            version = tuple(map(int, found.groups()))
            self.holds = not (version >= (24, 5, 6) or (23, 11, 11) <= version < (24,))

    def excluded_nodes(self) -> list[str]:
        """Return the nodes that the job already leaves out, including the user's choice."""
        found = re.search(r" ExcNodeList=([^ (]+) ", self._job())
        return self.host_names(found[1]) if found else []

    def can_do_without(self, needed: int, nodes: Collection[str]) -> int:
        """Return how many of these nodes can be left out by a job that needs `nodes` nodes.

        Nodes of its partition that are down or drained may stay so for days.
        """
        partition = re.search(r" Partition=(\S+) ", self._job())
        states = ("-h", "-N", "-p", partition[1], "-o", "%N %T") if partition else ()
        _, said = run_slurm("sinfo", *states) if partition else (1, "")
        found = re.findall(r"^(\S+) ([a-z_]+)\S*$", said, re.MULTILINE)
        usable = {node for node, state in found if node in nodes or not _UNUSABLE.fullmatch(state)}
        return max(0, len(usable) - needed) if found else sys.maxsize

    def has_free(self, nodes: int, script: Path) -> bool:
        """Check whether enough more nodes are free for a job like this one, and no job is waiting.

        sbatch --test-only says when and where a job would start (slurm_job_will_run in
        src/api/allocate.c), but not which jobs are ahead of it in the queue. Nodes that must boot
        first (`idle~` in sinfo) may never come up.
        """
        if self.in_step:
            return False
        within_s = self.patience_s
        wanted = ("--test-only", f"--nodes={nodes}", str(script))
        said = run_slurm("sbatch", *wanted, timeout_s=within_s)[1]
        found = re.search(r"Job \d+ to start at (\S+) .* on (?:nodes )?(\S+)", said)
        partition = re.search(r" Partition=(\S+) ", self._job())
        if not found or not partition or _from_now_s(found[1]) > _AT_ONCE_S:
            return False
        pending = ("-h", "-t", "PENDING", "-p", partition[1], "-o", "%r")
        code, waiting = run_slurm("squeue", *pending, timeout_s=within_s)
        if code or not {*waiting.split("\n")} <= _WAIT_FOR_OTHERS:
            return False
        by_node = ("-h", "-N", "-n", found[2], "-o", "%N %T")
        _, states = run_slurm("sinfo", *by_node, timeout_s=within_s)
        up = {line for line in states.splitlines() if line.endswith((" idle", " mixed"))}
        return len(up) >= nodes

    def host_names(self, nodes: str) -> list[str]:
        """Return the host names in a list in Slurm's notation."""
        return _scontrol("show", "hostnames", nodes)[1].split() if nodes else []

    def answers(self, node: str) -> bool:
        """Check whether a node's slurmd, or at least its host, responds; return True if unknown."""
        return not self.silent([node])

    def silent(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes whose slurmd and host both do not respond.

        This program asks Slurm for the addresses only once, because Slurm may be unavailable later.
        """
        self.learn_addresses(nodes)
        known = [node for node in nodes if node in self._addresses]
        with ThreadPoolExecutor(min(len(known), _MOST_THREADS) or 1) as pool:
            there = pool.map(lambda node: answers(*self._addresses[node]), known)
            return [node for node, answer in zip(known, there) if not answer]

    def learn_addresses(self, nodes: Sequence[str]) -> None:
        """Ask for the nodes' addresses, unless they are known."""
        if not (unknown := [node for node in nodes if node not in self._addresses]):
            return
        _, said = _scontrol("show", "node", "-o", ",".join(unknown), timeout_s=self.patience_s)
        for line in said.splitlines():
            if address := re.search(r" NodeAddr=(\S+) ", line):
                port = re.search(r" Port=(\d+) ", line)
                place = address[1], int(port[1]) if port else _SLURMD_PORT
                self._addresses[line.partition("NodeName=")[2].partition(" ")[0]] = place

    def address_of(self, node: str) -> tuple[str, int] | None:
        """Return the address of a node's slurmd, if it is known."""
        return self._addresses.get(node)

    def drained(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes that an admin or HyperPod has closed to new jobs."""
        _, said = _scontrol("show", "node", "-o", ",".join(nodes), timeout_s=self.patience_s)
        return re.findall(r"^NodeName=(\S+) .* State=\S*(?:DRAIN|\+FAIL)", said, re.MULTILINE)

    def booted(self, nodes: Collection[str]) -> dict[str, float]:
        """Return each node's boot time in seconds since the epoch, as far as Slurm knows it."""
        if not nodes:
            return {}
        _, said = _scontrol("show", "node", "-o", ",".join(nodes), timeout_s=self.patience_s)
        found = re.findall(r"^NodeName=(\S+) .* BootTime=(\d\S+)", said, re.MULTILINE)
        ago = {node: _from_now_s(when) for node, when in found}
        return {node: time.time() + seconds for node, seconds in ago.items() if seconds < 0}

    def has_node(self, node: str) -> bool:
        """Check whether a node is in the job's allocation; return True if unknown."""
        found = re.findall(r" NodeList=([^ (]+) ", self._job())  # of each component
        return not found or node in self.host_names(",".join(found))

    def leave(self, components: Mapping[str, Sequence[str]], gone: Collection[str]) -> None:
        """Release the nodes that are gone, for a requeue without them; the first one must stay.

        `components` maps each component's job id to its nodes. Otherwise Slurm may hold the job.
        The next start may get all nodes again. A job that has lost nodes before cannot be changed
        on a cluster without accounting: its index in the database is never set (22.05). scontrol
        does not change the first of several components (_is_single_job in src/scontrol/update_job.c
        of 22.05), and no component can lose its only node. In these cases Slurm itself takes the
        nodes out of the job, after SlurmdTimeout.
        """
        for job, hosts in components.items():
            kept, lost = ([h for h in hosts if (h in gone) is away] for away in (False, True))
            if self.in_step or not lost:
                continue
            possible = kept and (job != self._job_id or len(components) == 1)
            words = ("update", f"JobId={job}", f"NodeList={','.join(kept)}")
            if possible and _scontrol(*words)[0] == 0:
                continue
            deadline = time.monotonic() + _LEAVE_WITHIN_S
            for node in lost:
                while time.monotonic() < deadline and self.has_node(node):
                    if self.answers(node):
                        break
                    time.sleep(_LEAVES_S)
        for file in Path().glob("slurm_job_*_resize.*"):
            file.unlink(missing_ok=True)  # scontrol writes scripts for the shell of the job

    def is_reached(self) -> bool:
        """Check whether Slurm answers a query about the job, after some retries."""
        for pause_s in (0.0, *self.retry_s):
            time.sleep(pause_s)
            if " JobState=" in self._job():
                return True
        return False

    def requeue(self) -> str:
        """Ask Slurm to start the job again after this program; return why not, or ""."""
        if self.in_step:
            return f"it runs in job {self._job_id}, which continues"
        code, said = self._persist("requeue", self._job_id)
        return "" if code == 0 else (said.splitlines() or ["scontrol failed"])[-1]

    def wait_until_left(self, node: str) -> None:
        """Wait until Slurm has taken a lost node out of the job, if it would otherwise hold it."""
        while self.holds and self.has_node(node) and not self.answers(node):
            time.sleep(_LEAVES_S)

    def end_job(self, first: str, *, completed: bool) -> None:
        """End a job whose batch script is gone with its first node.

        After scancel the job is CANCELLED, and no `afterok` job starts. A restarted job can still
        complete, because attempt/judge.py ends it at once.
        """
        if completed:
            self.wait_until_left(first)
        if not completed or self.requeue():
            subprocess.run(["scancel", self._job_id], stdin=subprocess.DEVNULL, check=False)

    def never_requeue(self) -> None:
        """Let the job end. With --requeue=expedite, Slurm would hold a failing job in the queue.

        Seen with 26.05: JobState=REQUEUE_HOLD, "job_requeued_in_held_state".
        """
        if not self.in_step:
            self._persist("update", f"JobId={self._job_id}", "Requeue=0")

    def exclude(self, nodes: str) -> bool:
        """Leave these nodes out of the job's next start; return whether that worked."""
        return self._persist("update", f"JobId={self._job_id}", f"ExcNodeList={nodes}")[0] == 0

    def _job(self) -> str:
        _, said = _scontrol("show", "job", "-o", self._job_id, timeout_s=self.patience_s)
        return f" {said} ".replace("\n", " ")

    def _persist(self, *words: str) -> tuple[int, str]:
        """Run scontrol, and retry if the controller is too busy, as when many jobs start."""
        code, said = _scontrol(*words)
        for pause_s in self.retry_s:
            if code == 0:
                break
            time.sleep(pause_s)
            code, said = _scontrol(*words)
        return code, said


class NoController(Controller):
    """Stands in for the controller without Slurm: it makes no queries and restarts nothing."""

    requeues, signals_workers, own_session = False, False, True
    ends_step_by = signal.SIGTERM

    def __init__(self) -> None:
        super().__init__("", 0, ())
        self.kill_wait_s = _LOCAL_KILL_WAIT_S

    def what_ends_job(self) -> State:
        return State.RUNNING

    def learn_config(self) -> None:
        pass

    def silent(self, nodes: Sequence[str]) -> list[str]:
        return []

    def can_do_without(self, needed: int, nodes: Collection[str]) -> int:
        return sys.maxsize

    def drained(self, nodes: Sequence[str]) -> list[str]:
        return []

    def booted(self, nodes: Collection[str]) -> dict[str, float]:
        return {}


def _from_now_s(when: str) -> float:
    """Return the seconds until a time in Slurm's notation."""
    try:
        return (datetime.fromisoformat(when) - datetime.now()).total_seconds()
    except ValueError:
        return math.inf


def _scontrol(*words: str, timeout_s: float | None = None) -> tuple[int, str]:
    return run_slurm("scontrol", *words, timeout_s=timeout_s)


def run_slurm(
    *command: str,
    timeout_s: float | None = None,
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a Slurm command; return its exit code and output."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=directory,
            env=environ,
        )
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 1, f"{command[0]} did not answer"
    return process.returncode, said
