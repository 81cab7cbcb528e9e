"""Job arrays: which runs of a sweep are submitted as one array, and the array's directory.

RUNS/SWEEP/array-1/train.sbatch the array's script RUNS/SWEEP/array-1/7 a link to the run of its
task 7
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

from trnslurm.contract.files import read_file
from trnslurm.contract.rundir import ARRAY
from trnslurm.records.foreign import refuse_foreign
from trnslurm.records.run import RunDir
from trnslurm.render.array import can_be_task, render_array, shared_options
from trnslurm.submission.precompile import graphs_of
from trnslurm.submission.submission import Chain, PlannedRun, Submission

_COMPILED = ("none", "never", "warm")


def started_together(submission: Submission, most: int) -> list[list[Chain]]:
    """Return the chains of a submission, grouped into arrays of at most `most` tasks.

    The runs of an array have the same #SBATCH options and wait for the same job. If several arrays
    would have to take turns, each run gets a job of its own.
    """
    chains = [*submission.chains]
    alone = [[chain] for chain in chains]
    if not submission.sweep or most < 2:
        return alone
    alike: dict[Hashable, list[Chain]] = {}
    for number, chain in enumerate(chains):
        alike.setdefault(_kind(chain[0]) or number, []).append(chain)
    arrays = [
        some[start : start + most] for some in alike.values() for start in range(0, len(some), most)
    ]
    takes_turns = any(planned.waits_for.end for planned in submission.runs)
    return alone if takes_turns and len(arrays) > 1 else arrays


def _kind(planned: PlannedRun) -> Hashable:
    """Return what the runs of an array have in common, or None if the run cannot be a task."""
    job, phase = planned.job, planned.job.phases[-1]
    script = job.script(phase)
    if not can_be_task(script, phase):
        return None
    compiled = planned.need is not None and planned.need.decision in _COMPILED
    return phase, shared_options(script), "" if compiled else graphs_of(job)


def write_array(sweep: Path, runs: Sequence[RunDir], submission: Submission) -> Path:
    """Create the directory of an array in the directory of its sweep, and return it."""
    sweep.mkdir(exist_ok=True)  # others may know its name, and write to the run root
    refuse_foreign(sweep, "submit from")
    place = sweep / ARRAY.format(1 + len([*sweep.glob(ARRAY.format("*"))]))
    place.mkdir()
    for task, run in enumerate(runs, 1):
        (place / str(task)).symlink_to(f"../../{run.name}")
    phase = runs[0].record().phases[-1]
    script = runs[0].script(phase)
    text = render_array(
        read_file(script), submission.sweep, phase, tasks=len(runs), at_most=submission.at_most
    )
    (place / script.name).write_bytes(text)
    return place
