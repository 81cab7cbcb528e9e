"""What a scheduler is to the rest of the launcher: where jobs run, and what became of them.

Nobody else asks which scheduler a run has: what differs is a method or an attribute here.
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
    """Why Slurm may have cancelled the job before its start: it waits for another run's job."""


class WaitsFor(Frozen):
    """The runs in the same run root for which a run waits; empty: none."""

    success: tuple[str, ...] = ()
    """Those that must succeed: the previous run of its chain, the stages that it needs."""
    end: str = ""
    """The run of its sweep whose end, in any state, makes room for it."""
    graphs: str = ""
    """The run of the same submission that compiles its graphs."""
    jobs: str = ""
    """sbatch's dependency on a job of any kind (`submit --after`)."""


class HeldJob(Frozen):
    """A running job of the user, and the nodes on which the run starts in it."""

    job_id: str
    nodes: int
    """Of the job."""
    hosts: tuple[str, ...]
    """Of the run: the first of the job's nodes."""
    restarts: str
    ends: str
    """When its time limit ends it, as Slurm prints it."""


class BatchScript(Frozen):
    """A batch script, and where its values were set."""

    script: bytes
    origins: Mapping[str, str]
    """Dotted key -> where its value was set, unless by default."""
    instance_type: str


class Wanted(Protocol):
    """A job that is to run in one that the user holds."""

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
    """Return the reason of a run that a user ended by a command; the user may be unknown."""
    return f"by {command}{f' of {user}' if user else ''}, not by trnslurm cancel"


class Seen(ABC):
    """What a scheduler said about the jobs of some runs, at one time."""

    @abstractmethod
    def state(
        self, run: RunDir, record: Record, phase: str, last: Attempt | None, wait: Wait
    ) -> tuple[State, str]:
        """Return the state of a phase and why, by its job and by its newest attempt."""

    @abstractmethod
    def may_run(self, job: str | None) -> bool:
        """Check whether a job has not ended, as far as the scheduler knows."""


class Scheduler(Frozen, ABC):
    """What starts the jobs of runs."""

    name: ClassVar[str]
    """As in a profile, and in run.json."""
    words: ClassVar[str]
    """What it is, after `CLUSTER is`."""
    has_queue: ClassVar[bool]
    """Whether jobs wait for nodes of a cluster, up to time limits, and go on without us."""
    is_here: ClassVar[bool]
    """Whether this host has the nodes, so that a job lacks what is missing here."""
    requeues: ClassVar[bool]
    """Whether it starts a job again, and knows spare nodes."""
    has_sbatch_lines: ClassVar[bool]
    """Whether batch scripts begin with #SBATCH lines, and have Slurm's variables."""
    suffix: ClassVar[str]
    """Of a batch script's name."""
    template: ClassVar[str]
    """Of a batch script."""
    starts_with: ClassVar[str]
    """The command that starts a batch script by hand."""
    cancels_with: ClassVar[str]
    """The command that ends a job without us."""
    phase_word: ClassVar[str]
    """What a phase of a run is there."""
    poll_s: ClassVar[float]
    """How often to look after a run."""

    def script_name(self, phase: str) -> str:
        """Return the name of a phase's batch script."""
        return f"{phase}{self.suffix}"

    @abstractmethod
    def by_hand(self, phases: Sequence[str]) -> list[str]:
        """Return the commands that start a bundle by hand."""

    def home(self) -> str:
        """Return what ~ is in paths of the profile."""
        return "~"

    def expand(self, path: str) -> str:
        """Return a path with ~ expanded as jobs of the cluster expand it."""
        known = path.replace("~", self.home(), 1) if path.startswith("~/") else path
        return os.path.expanduser(known)  # noqa: PTH111

    def sees(self, directory: Path) -> bool:
        """Check whether jobs lack what this host does not find in a directory."""
        return self.is_here or (directory.is_dir() and os.access(directory, os.X_OK))

    def spare_nodes(self, cluster: Cluster) -> int:
        """Return how many nodes of a training wait to take the place of one that fails."""
        return cluster.slurm.spares if self.requeues and cluster.slurm.requeue else 0

    def import_ahead(self) -> None:
        """Import what `start` needs, where that takes long."""

    def check_container(self, runtime: str) -> Iterable[str]:
        """Refuse the runtime of containers if it is missing; return warnings."""
        return ()

    def most_tasks(self) -> int:
        """Return how many tasks a job array may have; 0: there are none."""
        return 0

    def try_out(self, scripts: Sequence[BatchScript], tasks: int, console: Console) -> None:
        """Refuse scripts that it would refuse, or never start; `tasks`: as an array of so many."""

    @abstractmethod
    def start(self, runs: Mapping[RunDir, WaitsFor], *, python: str, detach: bool) -> None:
        """Start runs, each after those for which it waits, or none, and record the jobs.

        The batch scripts are started with `python` where they do not set it. Runs on this machine
        end with us, unless `detach`.
        """

    def start_array(self, place: Path, runs: Sequence[RunDir], jobs: str) -> None:
        """Start runs as the array in `place`; `jobs` is the dependency on other jobs."""
        raise NotImplementedError

    def start_rung(self, place: Path, run: RunDir, after: Sequence[str], tasks: str) -> str:
        """Start the array of a rung in `place` once jobs have ended in any way; return its id.

        `run` is one of the sweep's. `tasks` are those to start; empty: all of the script.
        """
        raise NotImplementedError

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """End jobs; one that has ended is no error."""

    def find_held(self, word: str, job: Wanted) -> HeldJob:
        """Return the job that `submit --in` names, or refuse it."""
        raise SubmitError(f"--in {word}: {job.cluster} is {self.words}: choose another --cluster")

    def start_inside(self, run: RunDir, held: HeldJob) -> None:
        """Start a run in a job that the user holds."""
        raise NotImplementedError

    def job_states(self, job_id: str) -> list[str]:
        """Return the state of a job, or of each task of an array; none: there is no such job."""
        return []

    @abstractmethod
    def look(self, records: Sequence[tuple[RunDir, Record]]) -> Seen:
        """Ask once about the jobs of runs that have not completed."""

    def left_over(self, records: Sequence[tuple[RunDir, Record]]) -> list[RunDir]:
        """Return the runs of which a job waits to start, such as after a restart by Slurm."""
        return []

    def may_start(self, job: str, user: str, directory: Path) -> bool:
        """Check whether a job of a user, from a run directory, has not ended and may start."""
        return False

    def job_ids(self, user: str) -> list[str]:
        """Return the jobs of a user."""
        return []

    def jobs_from(self, directory: Path, user: str) -> list[str]:
        """Return the jobs that a user has submitted from a directory."""
        return []

    def why_waiting(self, directory: Path, user: str) -> str:
        """Return why the jobs from a directory wait; empty if that is unknown."""
        return ""

    def by_others(self, user: str = "") -> str:
        """Return the reason of a run that a user ended without us; the user may be unknown."""
        return by_command(self.cancels_with, user)

    def ended_by_others(self, reason: str) -> bool:
        """Check whether a reason is that."""
        return reason.startswith(f"by {self.cancels_with}")

    def canceller(self, jobs: Sequence[str]) -> str:
        """Return the user who cancelled one of the jobs; empty: nobody, or not known."""
        return ""

    def diagnose(self, found: Diagnosis, script: Path) -> None:
        """Add why a phase with this batch script waits, and which nodes can be used."""

    def refuse_elsewhere(self, run: RunDir, record: Record, what: str) -> None:
        """Refuse what can be done only on another host, where the run's processes are."""

    @abstractmethod
    def cancel(self, records: Mapping[RunDir, Record], *, now: bool) -> set[RunDir]:
        """End the jobs of runs, so that none of them starts; return the runs that save first."""

    @abstractmethod
    def take_back(self, runs: Sequence[RunDir], error: TrnslurmError) -> None:
        """Cancel the runs of a submission of which a part was refused, and record why."""

    @abstractmethod
    def end_leftovers(self, run: RunDir, record: Record) -> None:
        """See that nothing of an ended run is left; refuse if something of it still runs."""

    def lingers(self, record: Record) -> bool:
        """Check whether a run that has ended has a process here, which ends in a moment."""
        return False

    def holds(self, phase: PhaseStatus) -> bool:
        """Check whether the scheduler itself holds a phase, so that it starts only by command."""
        return False

    def releasable(self, run: RunDir, record: Record, phases: Sequence[PhaseStatus]) -> list[str]:
        """Return the held jobs of a run, if releasing them is enough to continue it."""
        return []

    def release(self, job_id: str) -> None:
        """Release a held job."""

    @abstractmethod
    def step(self, run: RunDir, phase: PhaseStatus, node: int | None = None) -> list[str]:
        """Return words that run a command beside a running phase, on one node or on each node.

        No words: this host is the node.
        """

    @abstractmethod
    def allocate(self, name: str, options: Sequence[str], nodes: int | None = None) -> list[str]:
        """Return words that run a command on nodes that are allocated for a moment.

        With `nodes`, it runs on each of so many, as in a job's step; without, it runs once.
        `name` is that of the job; `options` are srun's.
        """

    @abstractmethod
    def rendezvous(self, nodes: int, python: str) -> str:
        """Return the bash lines that set the hosts, and the master's address and port.

        They may ask a program of the nodes, by `python`.
        """
