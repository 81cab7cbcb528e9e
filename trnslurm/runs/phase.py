"""Determines the state of one phase of a run from its state files and the scheduler's answer."""

from __future__ import annotations

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import read_json
from trnslurm.contract.states import State
from trnslurm.records.foreign import printable
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.interface import PhaseStatus, Seen, Wait


def phase_status(run: RunDir, record: Record, phase: str, seen: Seen, wait: Wait) -> PhaseStatus:
    """Return the status of a phase, given the scheduler's answer."""
    last = run.newest_attempt(record, phase)
    state, reason = seen.state(run, record, phase, last, wait)
    if state is State.FAILED and last:
        unclear = reason.startswith("exit code")
        unfit = _unfit_node(run, last) if unclear else ""
        problem = _compile_problem(run, last)
        if not unclear:
            problem = problem.replace("its error is above", reason)
        reason = unfit or problem or reason
    return PhaseStatus(
        phase=phase,
        state=state,
        reason=reason,
        job_id=record.jobs.get(phase, ""),
        attempt=last.attempt if last else 0,
        hosts=last.hosts if last else "",
        started=last.started if last else "",
        ended=(last.ended or "") if last else "",
    )


def _unfit_node(run: RunDir, last: Attempt) -> str:
    """Return the first problem that an attempt's preflight found on a node."""
    found = run.preflight(last.phase, last.attempt)
    problems = [f"{node.host}: {node.problems[0]}" for node in found if node.problems]
    if not problems:
        return ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"preflight: {problems[0]}{more}"


def _compile_problem(run: RunDir, last: Attempt) -> str:
    """Return the compile problem of the first node that has one."""
    for file in run.graphs_files(last.attempt) if last.phase == "precompile" else ():
        result = read_json(file)
        if problem := result.get("problem"):
            return printable(f"{result.get('host', 'a node')}: {problem}")
    return ""
