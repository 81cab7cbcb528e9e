"""Submits a run again in the same directory, to resume from its newest checkpoint.

None of the run's jobs may be in the queue, and the controller must confirm that. The job finds the
checkpoint. A run without a checkpoint starts at step 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm.cluster.cache import CompileCache
from trnslurm.console import Console
from trnslurm.contract.checkpoints import exported_in, newest, saves_in
from trnslurm.contract.halving import read_halving
from trnslurm.contract.rundir import PREPARE
from trnslurm.contract.states import State
from trnslurm.contract.times import changed_at
from trnslurm.contract.variables import Variable
from trnslurm.errors import ConfigError, NotYetError, RunError
from trnslurm.frozen import Frozen
from trnslurm.node.caps import Caps
from trnslurm.records.foreign import refuse_foreign, refuse_writable_code
from trnslurm.records.run import Record, RunDir
from trnslurm.runs.by_hand import refuse_by_hand, start_by_hand
from trnslurm.runs.pipeline import runs_behind
from trnslurm.runs.status import STOP_AT, RunStatus, run_status, statuses_of
from trnslurm.runs.unreported import unreported
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import WaitsFor
from trnslurm.submission.halving import goes_on, leave_rungs, resume_rungs
from trnslurm.submission.here import check_here, check_notify, refuse_crowded
from trnslurm.submission.job import Job, read_job
from trnslurm.submission.lock import lock_run
from trnslurm.submission.resize import (
    add_arguments,
    adopt_files,
    resize,
    set_keys,
    set_notify,
    set_stop_at,
)
from trnslurm.submission.submission import PlannedRun, Submission
from trnslurm.submission.submit import submit

_SILENT_S = 65  # two missed heartbeats


class Continuation(Frozen):
    """What changes when a run continues."""

    nodes: int | None = None
    least_nodes: int | None = None
    """The smallest number of nodes, if `nodes` is the largest number of a range."""
    stop_at: int | None = None
    """The step after which the run ends, or 0 for its last step.

    None keeps the current step, unless the run has reached it.
    """
    settings: Sequence[str] = ()
    """The values of --set: caps, variables, and how Slurm queues the job."""
    notify: Sequence[str] = ()
    """The values of --notify, also for the runs that wait for this run."""
    arguments: Sequence[str] = ()
    """Arguments that are added to a custom script's arguments from now on."""
    force: bool = False
    """Whether a custom script may start over despite checkpoints that it has not reported."""
    template_dirs: Sequence[Path] = ()

    def check(self) -> None:
        """Reject numbers that no run can have."""
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"--nodes {self.nodes}: a job needs at least one node")
        if self.stop_at is not None and self.stop_at < 0:
            raise ConfigError(
                f"--stop-at {self.stop_at}: must be at least 1, or 0 for the last step"
            )

    def changes(self, nodes: int) -> bool:
        """Check whether anything changes for a run on `nodes` nodes."""
        return (
            self.nodes not in (None, nodes)
            or self.least_nodes is not None
            or self.stop_at is not None
            or any((self.notify, self.settings, self.arguments))
        )

    def job_of(self, run: RunDir) -> Job:
        """Return the job to submit, with the run's own files or those for another node count."""
        job = read_job(run.path)
        now = job.bundle.sha256()
        if changed := [n for n, sha in run.record().sha256.items() if now.get(n) != sha]:
            raise RunError(
                f"{run.path / changed[0]} was changed after the submission: submit the bundle as "
                "a new run"
            )
        check_here(job)
        least = job.profile.slurm.min_nodes
        if self.nodes is None or (self.nodes, self.least_nodes) == (job.nodes, least):
            return job
        resized = resize(run, job, self.nodes, self.least_nodes, self.template_dirs)
        refuse_crowded(resized)
        return resized


class Resumed(Frozen):
    """The outcome of a resume."""

    runs: list[RunDir]
    """The run, and the runs that wait for it."""
    released: tuple[str, ...] = ()
    """Held jobs that were released. Nothing was submitted."""


def resume(run: RunDir, how: Continuation, console: Console) -> Resumed:
    """Submit a run again, along with the runs of its chain that wait for it.

    A run that Slurm only holds after a failed launch is released instead.
    """
    how.check()
    chain = list(_with_waiting(run))
    with contextlib.ExitStack() as locks:
        for each in chain:
            locks.enter_context(lock_run(each))
        statuses = [_refuse_unfit(each, waiting=each != run) for each in chain]
        record = run.record()
        if statuses[0].state is State.COMPLETED and statuses[0].reason.startswith(STOP_AT):
            how = replace(how, stop_at=how.stop_at or 0)
        held = not how.changes(record.nodes) and statuses[0].state is State.HELD
        scheduler = scheduler_of(record)
        released = scheduler.releasable(run, record, statuses[0].phases) if held else []
        if released:
            for released_job in released:
                scheduler.release(released_job)
            return Resumed(runs=[run], released=tuple(released))
        jobs = [how.job_of(each) for each in chain]
        if how.arguments:
            jobs[0] = add_arguments(run, jobs[0], how.arguments, how.template_dirs)
        takes = _takes_checkpoint(run, jobs[0])
        if not how.force:
            _refuse_start_over(run, takes=takes)
        if how.stop_at is not None:
            jobs[0] = set_stop_at(run, jobs[0], how.stop_at)
        run.enough_file.unlink(missing_ok=True)
        leave_rungs(run, record, own_step=how.stop_at is not None)
        if how.settings:
            jobs[0] = set_keys(run, jobs[0], how.settings, how.template_dirs)
        _refuse_capped(run, jobs[0])
        if how.notify:
            jobs = [set_notify(r, job, how.notify) for r, job in zip(chain, jobs, strict=True)]
            for warning in check_notify(jobs[0]):
                console.warn(warning)
        names = [each.name for each in chain]
        waits_for = [_waits_for(each, each.record(), names) for each in chain]
        # Last run first: Slurm drops a job that waits for a cancelled job.
        for each in reversed(chain):
            scheduler.end_leftovers(each, each.record())
        planned = [
            PlannedRun(job=job, waits_for=awaited, resumes=each, ended=status)
            for job, awaited, each, status in zip(jobs, waits_for, chain, statuses, strict=True)
        ]
        console.say(_where_it_continues(run, takes=takes))
        submit(Submission(runs=planned, cache=CompileCache(jobs[0].profile)), (), console)
    return Resumed(runs=chain)


def resume_sweep(runs: Sequence[RunDir], how: Continuation, console: Console) -> list[RunDir]:
    """Resume and return the runs of a sweep or a pipeline that ended without completing."""
    statuses, broken = statuses_of(runs)
    if broken:
        raise broken[0]
    ended = [
        run
        for run, status in zip(runs, statuses, strict=True)
        if (status.final and status.state is not State.COMPLETED) or _can_go_on(status)
    ]
    group = statuses[0].group
    if group and read_halving(runs[0].path.with_name(group)):
        if how.nodes is not None:
            raise ConfigError(
                f"--nodes: the later rungs of {group} are arrays with the same number of nodes"
            )
        return resume_rungs(runs, statuses, lambda run: resume(run, how, console), console)
    if not ended:
        raise RunError(
            f"{group}: none of the runs ended without completing: see trnslurm status {group}"
        )
    done: list[RunDir] = []
    for run in ended:
        if run not in done:  # it waited for another one
            done += resume(run, how, console).runs
    return done


def _can_go_on(status: RunStatus) -> bool:
    """Check whether a run needs a resume to continue. A run that Slurm holds has not ended."""
    return status.mend == f"trnslurm resume {status.run}"


def _with_waiting(run: RunDir) -> Iterator[RunDir]:
    """Yield a run, and the waiting runs behind it that may start when it completes."""
    chosen: list[str] = []
    for each in (run, *runs_behind(run)):
        record = each.record()
        if each != run and not _may_wait(each, record, chosen):
            continue
        refuse_foreign(each.path, "resume")
        refuse_writable_code(each.path)
        refuse_by_hand(each, record, f"run `{start_by_hand(each, record)}` to start it again")
        chosen.append(each.name)
        yield each


def _may_wait(run: RunDir, record: Record, chosen: Sequence[str]) -> bool:
    """Check whether a run has not begun, and every run that it waits for may still complete."""
    if any(run.attempts_since(record, phase) for phase in record.phases):
        return False  # it started from an earlier result
    others = [run.sibling(name) for name in record.awaited if name not in chosen]
    ended = (run_status(other) for other in others)
    return all(status.state is State.COMPLETED or not status.final for status in ended)


def _refuse_unfit(run: RunDir, *, waiting: bool) -> RunStatus:
    """Refuse a run that has completed or may still be running, and return its status."""
    adopt_files(run)  # an earlier resume may have been interrupted
    record, name = run.record(), run.name
    if PREPARE in record.phases:
        raise RunError(f"{name} prepares data: submit it again to continue where it stopped")
    status = run_status(run)
    more = status.mend or goes_on(run) or run.enough_file.exists()
    if status.state is State.COMPLETED and not more:
        stopped = status.reason.startswith(STOP_AT)
        why = f" ({status.reason}) and has no checkpoint" if stopped else ""
        raise RunError(f"{name} is COMPLETED{why}, so there is nothing to resume")
    if status.state is State.COMPLETED:
        return status  # with steps left
    # A run that waits for an ended run never starts, though Slurm may not have noticed yet.
    if waiting and status.state is State.PENDING:
        return status
    scheduler = scheduler_of(record)
    scheduler.refuse_elsewhere(run, record, "resume it there")
    if not status.final and run.cancelled_file.exists():
        raise NotYetError(f"{name} is being cancelled: resume it once it has ended")
    held = status.state is State.HELD and any(map(scheduler.holds, status.phases))
    if not status.final and not held:
        reason = f" ({status.reason})" if status.reason else ""
        raise NotYetError(
            f"{name} is {status.state}{reason}: let it run, or run `trnslurm cancel {name}` first"
        )
    # Slurm has no record of the job, but its script has a heartbeat: its node may be cut off.
    last = [a for phase in record.phases for a in run.attempts_since(record, phase)][-1:]
    age_s = run.heartbeat_age_s()
    lost = status.state is State.LOST and not scheduler.is_here
    running = bool(last) and last[0].state is State.RUNNING
    if lost and running and age_s is not None and age_s < _SILENT_S:
        raise NotYetError(
            f"{name} is LOST, but its last heartbeat was {age_s:.0f} s ago: if no other heartbeat "
            f"follows, resume it in {_SILENT_S - age_s:.0f} s"
        )
    return status


def _takes_checkpoint(run: RunDir, job: Job) -> bool:
    """Check whether a custom script will load a checkpoint, or looks for its own."""
    script = job.bundle.files.get(run.script("train").name, b"").decode(errors="replace")
    return exported_in(script, Variable.RESUMES) != ""


def _refuse_start_over(run: RunDir, *, takes: bool) -> None:
    """Refuse a script that would start at step 0 despite checkpoints that it has not reported."""
    left = unreported(run, takes=takes)
    if left and left.option:
        raise RunError(
            f"{run.name} was submitted without a checkpoint option, so it would start at step 0 "
            f"and might overwrite {left} in its directory. To pass these files to the script with "
            f"its own option, run trnslurm resume {run.name} {left.words}. If the script finds "
            f"them itself, run trnslurm resume {run.name} --force"
        )
    if left:
        raise RunError(
            f"{run.name} has not reported a checkpoint, so it would start at step 0 and might "
            f"overwrite {left} in its directory. If the script finds these files itself, run "
            f"trnslurm resume {run.name} --force. If not, submit the script again, and pass "
            f"{run.path}/{left.newest} with its own option"
        )


def _refuse_capped(run: RunDir, job: Job) -> None:
    """Refuse a run that may not have another attempt."""
    caps = Caps(run, job.caps)
    if key := caps.reached("train", 1 + max(run.attempt_numbers("train"), default=0)):
        raise RunError(
            f"{run.name} cannot continue: {caps.words(key)}: run trnslurm resume {run.name} --set "
            f"{key}=MORE"
        )


def _where_it_continues(run: RunDir, *, takes: bool) -> str:
    if one := newest(run, takes=takes):
        after = f" after step {one.step}" if one.step else ""
        form = f" ({one.form})" if one.form else ""
        return f"{run.name} continues{after} from {one.path}{form}"
    left = unreported(run, takes=takes)
    if left or (run.project_file.exists() and changed_at(saves_in(run))):
        place = run.path / left.newest if left else saves_in(run)
        return f"{run.name} starts again, and its script may continue from {place}"
    if copied_from := run.record().copied_from:
        return f"{run.name} starts from the newest checkpoint of {copied_from}"
    return f"{run.name} has no checkpoint, so it starts from the beginning"


def _waits_for(run: RunDir, record: Record, resumed: Sequence[str]) -> WaitsFor:
    """Return the runs that a run still waits for. Those resumed along with it start again."""
    success: list[str] = []
    for previous in map(run.sibling, record.awaited):
        if previous.name in resumed:
            success.append(previous.name)
            continue
        status = run_status(previous)
        if status.state is not State.COMPLETED:
            if status.final or not scheduler_of(record).has_queue:
                raise RunError(
                    f"{run.name} continues {previous.name}, which is {status.state}: run trnslurm "
                    f"resume {previous.name} to continue both"
                )
            success.append(previous.name)
    try:
        ended = not record.behind or run_status(run.sibling(record.behind)).final
    except RunError:  # removed meanwhile
        ended = True
    return WaitsFor(success=tuple(success), end="" if ended else record.behind)
