"""Slurm's implementation of the scheduler interface. Slow imports are deferred."""

from __future__ import annotations

import importlib
import os
import pwd
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trnslurm.console import Console
from trnslurm.contract.roles import read_roles
from trnslurm.contract.states import State
from trnslurm.errors import RunError, SlurmError, TrnslurmError
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.interface import (
    BatchScript,
    HeldJob,
    PhaseStatus,
    Scheduler,
    WaitsFor,
    Wanted,
)
from trnslurm.schedulers.slurm.state import LAUNCH_HELD, NEVER_AGAIN, SlurmSeen
from trnslurm.slurm.commands import Slurm, find_job

if TYPE_CHECKING:
    from trnslurm.schedulers.waiting import Diagnosis

_LEFT_TIMEOUT_S = 5  # short: the run has completed anyway
# As in a job's batch script: the hosts, and the master's address and port. The port is not probed;
# if it is in use, the preflight reports that.
_MEET = """\
TRNSLURM_HOSTS=$({python} -m trnslurm.node.address hosts "$SLURM_JOB_NODELIST")
MASTER_ADDR=$({python} -m trnslurm.node.address of "${{TRNSLURM_HOSTS%%,*}}")
export TRNSLURM_HOSTS MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
"""


class SlurmScheduler(Scheduler, kw_only=False):
    """Slurm, through its commands in one directory or on PATH."""

    name: ClassVar[str] = "slurm"
    words: ClassVar[str] = "a Slurm cluster"
    has_queue: ClassVar[bool] = True
    is_here: ClassVar[bool] = False
    requeues: ClassVar[bool] = True
    has_sbatch_lines: ClassVar[bool] = True
    suffix: ClassVar[str] = ".sbatch"
    template: ClassVar[str] = "batch.sbatch.j2"
    starts_with: ClassVar[str] = "sbatch"
    cancels_with: ClassVar[str] = "scancel"
    phase_word: ClassVar[str] = "job"
    poll_s: ClassVar[float] = 5.0  # each look is one squeue call on the cluster's controller

    bin_dir: str | None = None

    @property
    def slurm(self) -> Slurm:
        """Slurm's commands."""
        return Slurm(self.bin_dir)

    def by_hand(self, phases: Sequence[str]) -> list[str]:
        if len(phases) == 1:
            return [f"sbatch {self.script_name(phases[0])}"]
        first, second = map(self.script_name, phases)
        return [
            f"id=$(sbatch --parsable {first})",
            f'sbatch --dependency=afterok:"${{id%%;*}}" --kill-on-invalid-dep=yes {second}',
        ]

    def home(self) -> str:
        """Return the home directory in the user database, which batch scripts use, not $HOME.

        Jobs must find what this host writes.
        """
        try:
            return pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # in a container, a user without a name
            return "~"

    def import_ahead(self) -> None:
        importlib.import_module("trnslurm.schedulers.slurm.start")  # submitit takes 80 ms

    def check_container(self, runtime: str) -> Iterator[str]:
        slurm = self.slurm
        if not slurm.find("srun"):
            return
        if runtime == "pyxis" and not slurm.knows_option("--container-image"):
            yield "srun on this host has no option --container-image: the nodes need pyxis"
        if runtime != "podman":
            return
        tracking = slurm.configuration().get("ProctrackType", "")
        if "cgroup" not in tracking:  # Podman's containers are not children of the job
            yield (
                f"Slurm uses {tracking or 'an unknown ProctrackType'}, which misses Podman's "
                "containers: a killed job leaves its containers running"
            )

    def most_tasks(self) -> int:
        try:
            config = self.slurm.configuration()
        except SlurmError:  # the submission says it
            return 0
        # https://slurm.schedmd.com/slurm.conf.html#OPT_MaxArraySize: more than the largest index
        limits = [int(config.get("MaxArraySize", "0")) - 1]
        fewer = re.search(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
        return max(0, min([*limits, *([int(fewer[1])] if fewer else [])]))

    def try_out(self, scripts: Sequence[BatchScript], tasks: int, console: Console) -> None:
        from trnslurm.schedulers.slurm.trial import try_out

        self.slurm.path("sbatch")
        try_out(scripts, self.slurm, console, tasks)

    def start(self, runs: Mapping[RunDir, WaitsFor], *, python: str, detach: bool) -> None:
        from trnslurm.schedulers.slurm.start import start

        start(runs, self.slurm)

    def start_array(self, place: Path, runs: Sequence[RunDir], jobs: str) -> None:
        from trnslurm.schedulers.slurm.start import start_array

        start_array(place, runs, self.slurm, jobs)

    def start_rung(self, place: Path, run: RunDir, after: Sequence[str], tasks: str) -> str:
        from trnslurm.schedulers.slurm.start import start_rung

        return start_rung(place, run, self.slurm, after, tasks)

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        if jobs and not self.slurm.vanished:
            self.slurm.cancel(jobs)

    def find_held(self, word: str, job: Wanted) -> HeldJob:
        from trnslurm.schedulers.slurm.held import find_held

        return find_held(word, job, self.slurm)

    def start_inside(self, run: RunDir, held: HeldJob) -> None:
        from trnslurm.schedulers.slurm.held import start_inside

        start_inside(run, held, self.slurm)

    def job_states(self, job_id: str) -> list[str]:
        try:
            return [fields.get("JobState", "") for fields in self.slurm.show("job", job_id)]
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise
        return [entry.state for entry in self.slurm.accounting([job_id]).values()]

    def look(self, records: Sequence[tuple[RunDir, Record]]) -> SlurmSeen:
        slurm = self.slurm
        records = [(run, record) for run, record in records if record.jobs]
        if records and slurm.vanished:
            return SlurmSeen(vanished=f"its cluster is gone: {slurm.bin_dir} does not exist")
        if not records:
            return SlurmSeen()
        try:
            known = [job for _, record in records for job in record.jobs.values()]
            queue = slurm.queue(sorted({record.user for _, record in records}), known=known)
        except SlurmError as error:
            return SlurmSeen(silent=str(error))
        forgotten = []
        for run, record in records:
            for phase, job in record.jobs.items():
                last = run.newest_attempt(record, phase)
                # The final state that an attempt wrote says more than accounting.
                if not find_job(queue, job, run.path) and (last is None or not last.state.written):
                    forgotten.append(job)
        return SlurmSeen(queue, slurm.accounting(forgotten))

    def left_over(self, records: Sequence[tuple[RunDir, Record]]) -> list[RunDir]:
        try:
            users = sorted({record.user for _, record in records})
            queue = self.slurm.queue(users, timeout_s=_LEFT_TIMEOUT_S)
        except SlurmError:
            return []
        left: list[RunDir] = []
        for run, record in records:
            found = (find_job(queue, job, run.path) for job in record.jobs.values())
            if any(entry.startable for entry in found if entry):
                left.append(run)
        return left

    def may_start(self, job: str, user: str, directory: Path) -> bool:
        entry = find_job(self.slurm.queue([user]), job, directory)
        return entry is not None and entry.live

    def job_ids(self, user: str) -> list[str]:
        return [*self.slurm.queue([user])]

    def jobs_from(self, directory: Path, user: str) -> list[str]:
        return self.slurm.jobs_in([str(directory)], user)

    def why_waiting(self, directory: Path, user: str) -> str:
        try:
            ours = self.jobs_from(directory, user)
            queue = self.slurm.queue([user])
        except SlurmError:
            return ""
        reasons = [entry.why for job_id in ours if (entry := queue.get(job_id))]
        return reasons[0] if reasons else ""

    def canceller(self, jobs: Sequence[str]) -> str:
        known = self.slurm.accounting(jobs)
        return next((entry.ended_by for entry in known.values() if entry.ended_by), "")

    def diagnose(self, found: Diagnosis, script: Path) -> None:
        from trnslurm.schedulers.slurm.waiting import diagnose

        diagnose(found, script, self.slurm)

    def cancel(self, records: Mapping[RunDir, Record], *, now: bool) -> set[RunDir]:
        from trnslurm.schedulers.slurm.cancel import cancel

        return set() if self.slurm.vanished else cancel(records, self.slurm, now=now)

    def take_back(self, runs: Sequence[RunDir], error: TrnslurmError) -> None:
        from trnslurm.schedulers.slurm.start import take_back

        take_back(runs, self.slurm, error)

    def end_leftovers(self, run: RunDir, record: Record) -> None:
        from trnslurm.schedulers.slurm.cancel import end_leftovers

        end_leftovers(run, record, self.slurm)

    def holds(self, phase: PhaseStatus) -> bool:
        by_slurm = phase.reason == LAUNCH_HELD or phase.reason.startswith(NEVER_AGAIN)
        return phase.state is State.HELD and by_slurm

    def releasable(self, run: RunDir, record: Record, phases: Sequence[PhaseStatus]) -> list[str]:
        queue = self.slurm.queue([record.user])
        held = [p.job_id for p in phases if (p.state, p.reason) == (State.HELD, LAUNCH_HELD)]
        unfinished = [p.job_id for p in phases if p.state is not State.COMPLETED]
        jobs = [find_job(queue, job, run.path) for job in unfinished]
        return held if all(job and job.live for job in jobs) else []

    def release(self, job_id: str) -> None:
        self.slurm.release(job_id)

    def step(self, run: RunDir, phase: PhaseStatus, node: int | None = None) -> list[str]:
        hosts = phase.hosts.split(",")
        if node is None:
            hosts = [*filter(None, hosts)]
        else:
            hosts = [host for host in hosts[node : node + 1] if host]
        if not hosts:
            raise RunError(f"{run.name} has not recorded its nodes yet: try again")
        job = phase.job_id.partition(".")[0]
        if "_" in job:  # srun takes the number of an array's task only (22.05)
            job = self.slurm.show("job", job)[0]["JobId"]
        # Without it, srun starts nothing in a job with several components (22.05).
        apart = any(role.component for role in read_roles(run.roles_file))
        return [
            self.slurm.path("srun"),
            f"--jobid={job}",
            *(["--het-group=0"] if apart else []),
            "--overlap",
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts)}",
            f"--nodelist={','.join(hosts)}",
            f"--chdir={run.path}",
            "--export=ALL",
            *(["--ntasks-per-node=1"] if node is None else []),
        ]

    def allocate(self, name: str, options: Sequence[str], nodes: int | None = None) -> list[str]:
        return [
            self.slurm.path("srun"),
            f"--nodes={nodes or 1}",
            *(["--ntasks-per-node=1", "--cpu-bind=none"] if nodes else ["--ntasks=1"]),
            "--time=5",
            "--quiet",
            f"--job-name={name}",
            "--export=NONE",
            *options,
        ]

    def rendezvous(self, nodes: int, python: str) -> str:
        return _MEET.format(python=shlex.quote(python))
