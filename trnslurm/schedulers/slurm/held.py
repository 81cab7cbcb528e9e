"""`submit --in JOB`: a run as a step of a job that the user holds, without the queue.

One task on the job's first node runs the batch scripts one after another. Each script starts its
workers with srun, as it does in its own job. The step's id, JOB.STEP, is the run's job id.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping

from trnslurm.config.catalog import catalog, find
from trnslurm.config.software import device_of
from trnslurm.contract.variables import Variable
from trnslurm.devices import CPU, CUDA, DeviceType
from trnslurm.errors import NoAnswerError, SlurmError, SubmitError
from trnslurm.records.run import RunDir
from trnslurm.schedulers.interface import HeldJob, Wanted
from trnslurm.slurm.commands import Slurm, own_words, without_overrides
from trnslurm.slurm.detect import find_partition

_START_S = 60
_POLL_S = 0.1
# A task gets Slurm's variables for its step, but the scripts read those of a job. The
# program that a script becomes takes TERM; this shell must outlast it, or Slurm ends its task.
_SCRIPTS = f"""\
trap : HUP INT TERM USR1
export SLURM_JOB_NUM_NODES=$1 SLURM_JOB_NODELIST=$2 SLURM_RESTART_COUNT=$3
export SLURM_SUBMIT_DIR=$PWD {Variable.STEP}=$SLURM_STEP_ID
shift 3
while [ "$#" -gt 1 ]; do
  bash -- "$1.sbatch" > "logs/$1-$SLURM_JOB_ID.$SLURM_STEP_ID.log" 2>&1 || exit
  shift
done
bash -- "$1.sbatch"
"""


def find_held(word: str, job: Wanted, slurm: Slurm) -> HeldJob:
    """Return the job that --in names, or refuse it."""
    if not re.fullmatch(r"\d+([_+]\d+)?", word):
        raise SubmitError(f"--in {word!r}: expected the id of a Slurm job: squeue --me lists yours")
    if apart := next((role for role in job.roles if role.component), None):
        raise SubmitError(
            f"--in {word}: the run uses the nodes of that job, but role {apart.name} needs nodes "
            f"in partition {apart.partition}: pass --set roles.{apart.name}.partition=null"
        )
    try:
        found = slurm.show("job", word)[0]
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        raise SubmitError(f"--in {word}: no such job in Slurm: squeue --me lists yours") from None
    job_id, state = found["JobId"], found["JobState"]
    owner = re.fullmatch(r"(.*)\((\d+)\)", found.get("UserId", ""))
    if not owner or int(owner[2]) != os.getuid():
        raise SubmitError(
            f"--in {word}: job {job_id} belongs to {owner[1] if owner else 'another user'}"
        )
    if state != "RUNNING":
        raise SubmitError(f"--in {word}: job {job_id} is {state}: it must be running")
    hosts = slurm.call("scontrol", "show", "hostnames", found["NodeList"]).split()
    wanted = _refuse_small(job, found, len(hosts))
    _refuse_other_device(job, found["Partition"], slurm, f"--in {word}: job {job_id}")
    for phase in job.phases:
        if Variable.STEP.encode() not in job.script(phase):
            raise SubmitError(
                f"--in {word}: {phase}.sbatch was rendered from a template that does not use "
                f"{Variable.STEP}: render it again"
            )
    return HeldJob(
        job_id=job_id,
        nodes=len(hosts),
        hosts=tuple(hosts[:wanted]),
        restarts=found.get("Restarts", "0"),
        ends=found.get("EndTime", "Unknown"),
    )


def _refuse_small(job: Wanted, found: Mapping[str, str], nodes: int) -> int:
    """Return how many nodes the run uses; refuse a job with too few nodes or CPUs."""
    spares, least = job.spare_nodes, job.profile.slurm.min_nodes or job.nodes
    most = job.nodes + job.nodes_beside
    job_id, partition = found["JobId"], found["Partition"]
    roles = job.nodes_beside - spares
    if nodes < (most if job.nodes_beside else least):
        also = (f" and {spares} spare" if spares else "") + (
            f" and {roles} for roles" if roles else ""
        )
        options = f"--nodes {nodes}" + (" --spares 0" if spares else "")
        raise SubmitError(
            f"job {job_id} has {nodes} node{'' if nodes == 1 else 's'}, but the run needs "
            f"{job.nodes}{also}: pass {options}, or hold more nodes: "
            f"salloc --partition={partition} --nodes={most} --exclusive"
        )
    for phase in job.phases:
        text = job.script(phase).decode()
        numbers = dict(re.findall(r"(?m)^#SBATCH --(ntasks-per-node|cpus-per-task)=(\d+)", text))
        needed = int(numbers.get("ntasks-per-node", 1)) * int(numbers.get("cpus-per-task", 1))
        there = int(found.get("NumCPUs", needed * nodes)) // nodes
        if there < needed:
            raise SubmitError(
                f"job {job_id} has {there} of each node's CPUs, but {phase} needs {needed}: pass "
                f"--set slurm.cpus_per_task={there}, or hold whole nodes: "
                f"salloc --partition={partition} --nodes={most} --exclusive"
            )
    return min(nodes, most)


def _refuse_other_device(job: Wanted, partition: str, slurm: Slurm, what: str) -> None:
    """Refuse a job in a partition whose nodes do not have the device that the run needs."""
    if partition == job.profile.slurm.partition:
        return
    types = catalog(job.profile.instance_types)
    device = device_of(job.profile, find(types, job.instance_type))
    nodes = find_partition(slurm, partition, types)
    there: DeviceType = CUDA if nodes.gpus else CPU
    if nodes.instance_type:
        there = types[nodes.instance_type].device
    if not (device.on_host or device is there or device.name == there.also):
        raise SubmitError(
            f"{what} is in partition {partition}, whose nodes have {there}, but {job.cluster} is "
            f"for {device}: hold a job on such nodes, or choose another --cluster"
        )


def start_inside(run: RunDir, held: HeldJob, slurm: Slurm) -> None:
    """Start a run as a step of a job, and record the step's id."""
    record = run.record()
    argv = [
        slurm.path("srun"),
        f"--jobid={held.job_id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={held.hosts[0]}",
        f"--job-name={run.name}",
        f"--chdir={run.path}",
        "--export=NONE",
        "--propagate=NONE",
        "--cpu-bind=none",
        "--input=none",
        "--open-mode=append",
        f"--output=logs/{record.phases[-1]}-%J.log",
        *("/bin/bash", "-c", _SCRIPTS, "bash"),
        *(str(len(held.hosts)), ",".join(held.hosts), held.restarts, *record.phases),
    ]
    with tempfile.TemporaryFile() as errors:
        # In another session, so that Ctrl-C reaches only trnslurm, which ends the run in order.
        process = subprocess.Popen(
            argv,
            cwd=run.path,
            env=without_overrides(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_S
        while not (step := _step_of(run, held, slurm)):
            ended = process.poll() is not None
            if not ended and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            if step := _step_of(run, held, slurm):  # it was short
                break
            process.kill()
            errors.seek(0)
            words = own_words("srun", errors.read().decode(errors="replace"))
            why = words or f"srun: no step started within {_START_S} s"
            raise SubmitError(why) if ended else NoAnswerError(why)
    for phase in record.phases:
        run.add_job(phase, step)


def _step_of(run: RunDir, held: HeldJob, slurm: Slurm) -> str:
    """Return the id of the run's step; empty if the step has not started."""
    attempts = (attempt for phase in run.record().phases for attempt in run.attempts(phase))
    if known := next((a.job_id for a in attempts if a.job_id), ""):
        return known
    return next((step for step, name in slurm.steps(held.job_id) if name == run.name), "")
