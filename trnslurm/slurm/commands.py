"""Calls Slurm's commands and parses their output. No other module calls them.

subprocess is imported late, because a plan or a list of local runs calls no command.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trnslurm.errors import SlurmError
from trnslurm.frozen import Frozen
from trnslurm.slurm.reasons import job_reason
from trnslurm.slurm.states import ALIVE, ENDED, STARTABLE

if TYPE_CHECKING:
    import subprocess

TIMEOUT_S = 30
_PING_S = 10
# These override a script's directives or a command's output format. SLURM_CONF names the cluster.
_OVERRIDES = r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL)_\w+"
_KEPT = {"SLURM_CONF"}

_FIELD = r"(\w[\w/:]*)=(.*?)(?= +\w[\w/:]*=|\s*$)"


class QueueEntry(Frozen, kw_only=False):
    """One job, or one task of an array, as squeue or sacct shows it."""

    job_id: str
    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""
    directory: str = ""
    """The directory that the job was submitted from; empty if not shown."""
    ended_by: str = ""
    """The user who cancelled the job; empty if nobody did or it is unknown."""

    @property
    def startable(self) -> bool:
        """Whether the job is waiting in the queue."""
        return self.state in STARTABLE

    @property
    def alive(self) -> bool:
        """Whether the job has its nodes."""
        return self.state in ALIVE

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def live(self) -> bool:
        """Whether the job has not ended and may still start."""
        return not self.ended and not self.reason.startswith("DependencyNeverSatisfied")

    @property
    def why(self) -> str:
        """The reason in plain words, or Slurm's own word if we have no words for it."""
        return job_reason(self.reason)


def find_job(queue: Mapping[str, QueueEntry], job_id: str, directory: Path) -> QueueEntry | None:
    """Return a job by its id if it was submitted from this run's directory, or from its sweep's.

    A controller that is killed forgets the jobs of its last seconds, and gives their ids to new
    jobs. Only the directory's name is compared, because a directory may be mounted in two places.
    """
    entry = queue.get(job_id)
    if not entry or not entry.directory:
        return entry
    place, name = Path(entry.directory), directory.name
    if "_" in job_id:  # the array is submitted from SWEEP/array-1, the run is SWEEP-7
        place, name = place.parent, name.rpartition("-")[0]
    return entry if place.name == name else None


def without_overrides(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that would override a reviewed script."""
    removed = {*overriding(environment)}
    return {k: v for k, v in environment.items() if k not in removed}


def overriding(environment: Iterable[str]) -> list[str]:
    """Return the variables that Slurm's commands would treat as options."""
    return sorted(k for k in environment if re.fullmatch(_OVERRIDES, k) and k not in _KEPT)


# Another cancel may have been faster.
_HAS_ENDED = ("Invalid job id", "already completing or completed")


def own_words(command: str, stderr: str) -> str:
    """Return a command's error messages as one line that names the command once."""
    lines = [re.sub(rf"\b{command}: (error: )?", "", line) for line in stderr.splitlines()]
    messages = "; ".join(filter(None, (" ".join(line.split()) for line in lines)))
    return f"{command}: {messages}" if messages else ""


class Slurm(Frozen, kw_only=False):
    """Slurm's commands, from one directory or from PATH."""

    bin_dir: str | None = None

    @property
    def vanished(self) -> bool:
        """Check whether the cluster, such as a sandbox, was removed with its parent directory.

        If only the directory is missing, its file system may not be mounted at the moment.
        """
        return bool(self.bin_dir) and not Path(str(self.bin_dir)).parent.exists()

    def find(self, command: str) -> str | None:
        """Return a command's path from `bin_dir` or PATH, or None if neither has it."""
        if self.bin_dir and (Path(self.bin_dir) / command).is_file():
            return str(Path(self.bin_dir) / command)
        # shutil.which does this too, but takes longer to import.
        found = (Path(place) / command for place in os.get_exec_path())
        return next((str(f) for f in found if os.access(f, os.X_OK) and f.is_file()), None)

    def path(self, command: str) -> str:
        """Return a command's path; raise a SlurmError if it is missing."""
        if found := self.find(command):
            return found
        raise SlurmError(
            f"{command} not found: load your site's Slurm module, or set slurm.bin_dir in the "
            "cluster profile"
        )

    def call(self, command: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
        """Run a command and return its output; raise a SlurmError with its message if it fails."""
        done = self._run(command, *arguments, timeout_s=timeout_s)
        if done.returncode:
            words = own_words(command, done.stderr)
            raise SlurmError(words or f"{command}: exit code {done.returncode}")
        return done.stdout

    def knows_option(self, option: str) -> bool:
        """Check whether this host's srun supports an option, such as one from a plugin."""
        return f"{option}=" in self._run("srun", "--help", timeout_s=TIMEOUT_S).stdout

    def _run(
        self, command: str, *arguments: str, timeout_s: float, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        import subprocess

        argv = [self.path(command), *arguments]
        try:
            return subprocess.run(
                argv,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                env=without_overrides(os.environ),
                input=given,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(
                f"{command}: no answer from the controller within {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise SlurmError(f"{argv[0]}: {error.strerror}") from None

    def configuration(self) -> dict[str, str]:
        """Return the controller's configuration."""
        text = self.call("scontrol", "show", "config")
        return dict(re.findall(r"(?m)^(\w+)\s*=\s*(.*?)\s*$", text))

    def show(self, what: str, *names: str) -> list[dict[str, str]]:
        """Return the fields of jobs, nodes or partitions, as `scontrol show` prints them.

        Hidden partitions and their nodes are included, because anyone who knows their names may use
        them.
        """
        lines = self.call("scontrol", "show", what, "-o", "--all", *names).splitlines()
        found = [dict(re.findall(_FIELD, line)) for line in lines if "=" in line]
        if names and not found:
            raise SlurmError(f"scontrol does not list {what} {' '.join(names)}")
        return found

    def try_out(self, script: bytes, tasks: int = 1) -> tuple[bool, str]:
        """Return whether Slurm would accept a script now, with the expected start or the error.

        With more than one task, try an array with that many `tasks`, which may exceed a limit.
        """
        text = script.decode("utf-8", "replace")
        array = [f"--array=1-{tasks}"] if tasks > 1 else []
        done = self._run("sbatch", "--test-only", *array, timeout_s=TIMEOUT_S, given=text)
        return done.returncode == 0, own_words("sbatch", done.stderr).removeprefix("sbatch: ")

    def queue(
        self, users: Sequence[str], *, known: Iterable[str] = (), timeout_s: float = TIMEOUT_S
    ) -> dict[str, QueueEntry]:
        """Return all jobs of these users that the controller knows, by id.

        A task of an array has two ids: ARRAY_TASK, and a number once it has started. The number may
        be that of the array, which means all tasks in other commands (seen on Slurm 22.05). Of the
        `known` ids, those of steps (JOB.STEP) are included while the step is running. A component
        of a heterogeneous job, JOB+N, is not listed as a job: it waits and ends with the first
        component, which gets the most informative reason of all components.
        """
        text = self.call(
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            f"--users={','.join(users)}",
            # https://slurm.schedmd.com/squeue.html#OPT_format: %i is ARRAY_TASK, %A the number
            "--format=%i %A|%T|%r|%S|%N|%Z",
            timeout_s=timeout_s,
        )
        found: dict[str, QueueEntry] = {}
        reasons: dict[str, list[str]] = {}
        for line in text.splitlines():
            ids, *parts = line.strip().split("|", 5)
            if len(parts) < 4:
                continue
            job, component = _component(ids.partition(" ")[0])
            if component:
                reasons.setdefault(job, []).append(parts[1])
            else:
                jobs = dict.fromkeys([job, *ids.split()[1:]])
                found |= {job: QueueEntry(job, *parts) for job in jobs}
        for job, others in reasons.items():
            if job in found:
                every = [found[job].reason, *others]
                found[job] = replace(found[job], reason=max(every, key=_says_much))
        for holder in sorted({job.partition(".")[0] for job in known if "." in job} & found.keys()):
            entry = found[holder]
            found |= {
                step: replace(entry, job_id=step, reason="", directory="")
                for step, _ in self.steps(holder)
            }
        return found

    def steps(self, job_id: str) -> list[tuple[str, str]]:
        """Return the id and name of each step of a running job, or nothing if the job has ended."""
        try:
            text = self.call(
                "squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i|%j"
            )
        except SlurmError as error:
            if _HAS_ENDED[0] in str(error):
                return []
            raise
        rows = (line.strip().partition("|") for line in text.splitlines())
        return [(step, name) for step, _, name in rows]

    def jobs_in(self, directories: Sequence[str], user: str) -> list[str]:
        """Return the jobs submitted from these directories, and the tasks running in them."""
        text = self.call(
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            f"--users={user}",
            "--format=%i|%j|%Z",
        )
        wanted = {*directories, *map(os.path.realpath, directories)}
        rows = [line.split("|", 2) for line in text.splitlines()]
        jobs = (row[0] for row in rows if len(row) == 3 and _works_in(row[0], row[2]) in wanted)
        return [*dict.fromkeys(_component(job)[0] for job in jobs)]

    def accounting(self, job_ids: Sequence[str]) -> dict[str, QueueEntry]:
        """Return the jobs that sacct knows, by id; empty without accounting."""
        if not job_ids or not self.find("sacct"):
            return {}
        try:
            text = self.call(
                "sacct",
                "--allocations",
                "--noheader",
                "--parsable2",
                "--duplicates",
                f"--jobs={','.join(job_ids)}",
                "--format=JobID,State,ExitCode,NodeList",  # JobIDRaw lacks the task of an array
            )
        except SlurmError:
            return {}  # "Slurm accounting storage is disabled": ParallelCluster's default
        found = {}
        for line in text.splitlines():
            job_id, state, exit_code, nodes = (line.split("|") + [""] * 4)[:4]
            job_id, component = _component(job_id)
            if component:
                continue
            word, _, user = state.partition(" by ")  # "CANCELLED by 1000"
            code, _, number = exit_code.partition(":")
            reason = f"exit code {code}" if code.strip("0") else ""
            if number.strip("0"):
                reason = f"killed by signal {number}"  # the batch script itself
            found[job_id] = QueueEntry(job_id, word, reason, nodes=nodes, ended_by=_user(user))
        return found

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs and steps. It is not an error if one has ended or is ending."""
        if jobs := [job for job in job_ids if "." not in job]:
            self._scancel(*_by_array(jobs))
        # KILL, as without --signal, would leave behind what a step has started by srun.
        for step in (job for job in job_ids if "." in job):
            self._scancel("--signal=TERM", step)

    def ask_to_stop(self, job_ids: Sequence[str]) -> None:
        """Signal jobs' batch scripts to save and end. A job may have ended already."""
        if job_ids:
            self._scancel("--batch", "--signal=USR1", *_by_array(job_ids))

    def ask_step_to_stop(self, step: str, host: str, pid: int) -> None:
        """Signal a step's batch script, process `pid` on the node `host`, to save and end.

        scancel would signal srun and the workers as well.
        """
        job = step.partition(".")[0]
        where = (f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}")
        self.call("srun", *where, "--chdir=/", "--quiet", "kill", "-USR1", str(pid))

    def _scancel(self, *arguments: str) -> None:
        try:
            self.call("scancel", *arguments)
        except SlurmError as error:
            if not any(words in str(error) for words in _HAS_ENDED):
                raise

    def release(self, job_id: str) -> None:
        """Release a held job."""
        self.call("scontrol", "release", job_id)


def _says_much(reason: str) -> int:
    """Return how much a component's reason says about why a heterogeneous job is waiting.

    The other components wait for the first one's nodes, with the reason Resources.
    """
    return {"None": 0, "Resources": 1, "Priority": 1}.get(reason, 2)


def _component(job_id: str) -> tuple[str, int]:
    """Return a job's id and its component's number: JOB+N is part of a heterogeneous job."""
    job, _, number = job_id.partition("+")
    return job, int(number) if number.isdecimal() else 0


def _by_array(job_ids: Iterable[str]) -> list[str]:
    """Return ids in the same order, with an array's tasks as one id: ARRAY_[TASK,TASK].

    scancel sends the controller one request per id (seen on Slurm 22.05).
    """
    arrays: dict[str, list[str]] = {}
    for job_id in job_ids:
        array, _, task = job_id.partition("_")
        arrays.setdefault(array, []).append(task)
    return [
        job if "" in tasks else f"{job}_[{','.join(sorted(tasks, key=int))}]"
        for job, tasks in arrays.items()
    ]


def _works_in(job_id: str, submitted_from: str) -> str:
    """Return a job's directory; a task's directory is a link in that of its array."""
    _, array, task = job_id.partition("_")
    return os.path.realpath(f"{submitted_from}/{task}") if array else submitted_from


def _user(uid: str) -> str:
    """Return a user's name, or the uid if this host does not know the user."""
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (ValueError, KeyError):
        return f"uid {uid}" if uid else ""


def slurm_hint(root: Path = Path("/")) -> tuple[str | None, bool]:
    """Return a sign of Slurm on this host, or None, and whether srun is installed."""
    if srun := Slurm().find("srun"):
        try:
            Slurm().call("scontrol", "ping", timeout_s=_PING_S)
        except SlurmError as error:
            # Slurm's commands are installed, for example for the sandbox, but there is no cluster.
            if "Could not establish a configuration source" in str(error):
                return None, False
        return srun, True
    for pattern in ("opt/slurm", "etc/slurm*"):
        if found := next(root.glob(pattern), None):
            return str(found), False
    return None, False
