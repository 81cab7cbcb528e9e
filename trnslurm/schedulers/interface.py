"""The interface of a scheduler to the rest of the launcher: starting jobs and asking about them.

Nothing else checks which scheduler a run has: every difference is a method or an attribute here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from trnslurm.config.schema import Cluster
from trnslurm.console import Console
from trnslurm.contract.attempt import Attempt
from trnslurm.contract.roles import Role
from trnslurm.contract.states import State
from trnslurm.errors import SubmitError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.records.run import Record, RunDir

if TYPE_CHECKING:
    from trnslurm.schedulers.waiting import Diagnosis


class PhaseStatus(Frozen):
    """The state of one phase of a run, and why."""

    phase: str
    state: State
    reason: str = ""
    job_id: str = ""
    attempt: int = 0
    hosts: str = ""
    started: str = ""
    ended: str = ""

    @property
    def final(self) -> bool:
        return self.state.final


class Wait(Frozen, kw_only=False):
    """What a phase waits for before its first attempt."""

    what: str
    """The precompile job, or another run; empty if the phase waits for nothing."""
    never: str
    """Why the phase will never start; empty if it may still start."""
    dropped: str = ""
    """Why Slurm may have cancelled the job before it started: it waits for another run's job."""


class WaitsFor(Frozen):
    """The runs in the same run root that a run waits for. Empty fields name no runs."""

    success: tuple[str, ...] = ()
    """Runs that must succeed: the previous run of its chain, or the stages that it needs."""
    end: str = ""
    """The run of its sweep that must end, in any state, to make room for it."""
    graphs: str = ""
    """The run of the same submission that compiles its graphs."""
    jobs: str = ""
    """sbatch's dependency on arbitrary jobs (`submit --after`)."""


class HeldJob(Frozen):
    """A running job of the user, and the nodes in it that the run uses."""

    job_id: str
    nodes: int
    """The number of nodes in the job."""
    hosts: tuple[str, ...]
    """The run's nodes: the first of the job's nodes."""
    restarts: str
    ends: str
    """When the job's time limit ends it, as Slurm prints it."""


class BatchScript(Frozen):
    """A batch script, and where its values were set."""

    script: bytes
    origins: Mapping[str, str]
    """Dotted key -> where its value was set, unless it is the default."""
    instance_type: str


class Wanted(Protocol):
    """A run's job that is to start inside a job that the user holds."""

    @property
    def cluster(self) -> str: ...
    @property
    def profile(self) -> Cluster: ...
    @property
    def nodes(self) -> int: ...
    @property
    def spare_nodes(self) -> int: ...
    @property
    def nodes_beside(self) -> int: ...
    @property
    def roles(self) -> list[Role]: ...
    @property
    def instance_type(self) -> str: ...
    @property
    def phases(self) -> tuple[str, ...]: ...
    def script(self, phase: str) -> bytes: ...


def by_command(command: str, user: str = "") -> str:
    """Return the reason for a run that a user ended with a command; the user may be unknown."""
    return f"by {command}{f' ({user})' if user else ''}, not by trnslurm cancel"


class Seen(ABC):
    """A scheduler's answer about the jobs of some runs at one time."""

    @abstractmethod
    def state(
        self, run: RunDir, record: Record, phase: str, last: Attempt | None, wait: Wait
    ) -> tuple[State, str]:
        """Return the state of a phase and why, based on its job and its newest attempt."""

    @abstractmethod
    def may_run(self, job: str | None) -> bool:
        """Check whether a job has not ended, as far as the scheduler knows."""


class Scheduler(Frozen, ABC):
    """Starts the jobs of runs."""

    name: ClassVar[str]
    """The name that profiles and run.json use."""
    words: ClassVar[str]
    """What the cluster is, in words that follow `CLUSTER is`."""
    has_queue: ClassVar[bool]
    """Whether jobs wait for nodes, have time limits, and continue without us."""
    is_here: ClassVar[bool]
    """Whether this host has the nodes, so that anything missing here is missing for jobs too."""
    requeues: ClassVar[bool]
    """Whether the scheduler restarts jobs and supports spare nodes."""
    has_sbatch_lines: ClassVar[bool]
    """Whether batch scripts begin with #SBATCH lines and have Slurm's variables."""
    suffix: ClassVar[str]
    """The suffix of a batch script's name."""
    template: ClassVar[str]
    """The template of a batch script."""
    starts_with: ClassVar[str]
    """The command that starts a batch script by hand."""
    cancels_with: ClassVar[str]
    """The command that ends a job without us."""
    phase_word: ClassVar[str]
    """What a phase of a run is called."""
    poll_s: ClassVar[float]
    """How often to check on a run."""

    def script_name(self, phase: str) -> str:
        """Return the name of a phase's batch script."""
        return f"{phase}{self.suffix}"

    @abstractmethod
    def by_hand(self, phases: Sequence[str]) -> list[str]:
        """Return the commands that start a bundle by hand."""

    def home(self) -> str:
        """Return what ~ means in the profile's paths."""
        return "~"

    def expand(self, path: str) -> str:
        """Return a path with ~ expanded as the cluster's jobs expand it."""
        known = path.replace("~", self.home(), 1) if path.startswith("~/") else path
        return os.path.expanduser(known)  # noqa: PTH111

    def sees(self, directory: Path) -> bool:
        """Check whether a file that this host cannot find in a directory is missing for jobs."""
        return self.is_here or (directory.is_dir() and os.access(directory, os.X_OK))

    def spare_nodes(self, cluster: Cluster) -> int:
        """Return how many nodes of a run wait to replace a node that fails."""
        return cluster.slurm.spares if self.requeues and cluster.slurm.requeue else 0

    def import_ahead(self) -> None:
        """Import what `start` needs ahead of time, if the import is slow."""

    def check_container(self, runtime: str) -> Iterable[str]:
        """Refuse a container runtime that is missing; return warnings."""
        return ()

    def most_tasks(self) -> int:
        """Return how many tasks a job array can have, or 0 if there are no arrays."""
        return 0

    def try_out(self, scripts: Sequence[BatchScript], tasks: int, console: Console) -> None:
        """Refuse scripts that would be rejected or never start, as an array if `tasks` > 1."""

    @abstractmethod
    def start(self, runs: Mapping[RunDir, WaitsFor], *, python: str, detach: bool) -> None:
        """Start all runs or none, each after the runs that it waits for, and record the jobs.

        `python` starts the batch scripts that do not set a Python interpreter. Runs on this machine
        end with this process, unless `detach` is set.
        """

    def start_array(self, place: Path, runs: Sequence[RunDir], jobs: str) -> None:
        """Start runs as the array in `place`; `jobs` is the dependency on other jobs."""
        raise NotImplementedError

    def start_rung(self, place: Path, run: RunDir, after: Sequence[str], tasks: str) -> str:
        """Start the array of a rung in `place` after jobs have ended in any state; return its id.

        `run` is any run of the sweep. `tasks` lists the tasks to start; empty means all in the
        script.
        """
        raise NotImplementedError

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """Cancel jobs. It is not an error if one has ended."""

    def find_held(self, word: str, job: Wanted) -> HeldJob:
        """Return the job that `submit --in` names, or refuse it."""
        raise SubmitError(f"--in {word}: {job.cluster} is {self.words}: choose another --cluster")

    def start_inside(self, run: RunDir, held: HeldJob) -> None:
        """Start a run in a job that the user holds."""
        raise NotImplementedError

    def job_states(self, job_id: str) -> list[str]:
        """Return the state of a job, or of each task of an array; empty if there is no such job."""
        return []

    @abstractmethod
    def look(self, records: Sequence[tuple[RunDir, Record]]) -> Seen:
        """Ask once about the jobs of runs that have not completed."""

    def left_over(self, records: Sequence[tuple[RunDir, Record]]) -> list[RunDir]:
        """Return the runs that still have a job waiting to start, such as after a requeue."""
        return []

    def may_start(self, job: str, user: str, directory: Path) -> bool:
        """Check whether a user's job from a run directory has not ended and may still start."""
        return False

    def job_ids(self, user: str) -> list[str]:
        """Return a user's jobs."""
        return []

    def jobs_from(self, directory: Path, user: str) -> list[str]:
        """Return the jobs that a user has submitted from a directory."""
        return []

    def why_waiting(self, directory: Path, user: str) -> str:
        """Return why the jobs from a directory are waiting; empty if unknown."""
        return ""

    def by_others(self, user: str = "") -> str:
        """Return the reason for a run that a user ended without us; the user may be unknown."""
        return by_command(self.cancels_with, user)

    def ended_by_others(self, reason: str) -> bool:
        """Check whether a reason is the one that `by_others` returns."""
        return reason.startswith(f"by {self.cancels_with}")

    def canceller(self, jobs: Sequence[str]) -> str:
        """Return the user who cancelled one of the jobs; empty if nobody did or it is unknown."""
        return ""

    def diagnose(self, found: Diagnosis, script: Path) -> None:
        """Add why a phase with this batch script is waiting, and which nodes can be used."""

    def refuse_elsewhere(self, run: RunDir, record: Record, what: str) -> None:
        """Refuse an operation that must run on another host, where the run's processes are."""

    @abstractmethod
    def cancel(self, records: Mapping[RunDir, Record], *, now: bool) -> set[RunDir]:
        """Cancel the jobs of runs so that none of them starts; return the runs that save first."""

    @abstractmethod
    def take_back(self, runs: Sequence[RunDir], error: TrnslurmError) -> None:
        """Cancel the runs of a submission that was partly rejected, and record why."""

    @abstractmethod
    def end_leftovers(self, run: RunDir, record: Record) -> None:
        """Remove what is left of an ended run; refuse if a part of it is still running."""

    def lingers(self, record: Record) -> bool:
        """Check whether an ended run still has a process here, which will end in a moment."""
        return False

    def holds(self, phase: PhaseStatus) -> bool:
        """Check whether the scheduler itself holds a phase, so that only a command can start it."""
        return False

    def releasable(self, run: RunDir, record: Record, phases: Sequence[PhaseStatus]) -> list[str]:
        """Return a run's held jobs, if releasing them is enough to continue the run."""
        return []

    def release(self, job_id: str) -> None:
        """Release a held job."""

    @abstractmethod
    def step(self, run: RunDir, phase: PhaseStatus, node: int | None = None) -> list[str]:
        """Return the prefix that runs a command next to a running phase, on one or all nodes.

        It is empty if this host is the node.
        """

    @abstractmethod
    def allocate(self, name: str, options: Sequence[str], nodes: int | None = None) -> list[str]:
        """Return the prefix that runs a command on nodes allocated for a moment.

        With `nodes`, the command runs on that many nodes, as in a job step; without, it runs once.
        `name` is the job's name, and `options` are srun's.
        """

    @abstractmethod
    def rendezvous(self, nodes: int, python: str) -> str:
        """Return the bash lines that set the hosts, and the master's address and port.

        They may use `python` to run a program on the nodes.
        """
