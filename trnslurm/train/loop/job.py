"""How a job begins, how it ends when something fails, and the record of its failure."""

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Generic, TypeVar

from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment, read_environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.stopping import leave
from trnslurm.train.plan import JobPlan, check_section, parse_plan, read_settings
from trnslurm.train.settings import CommonSettings

# Workers of a node may meet the same error this much later than the first of them.
APART_S = 5

Settings = TypeVar("Settings", bound=CommonSettings)


@dataclass(frozen=True)
class TrainingJob(Generic[Settings]):
    """What one worker starts with."""

    plan: JobPlan
    settings: Settings
    """The plan's section train."""
    environment: Environment
    device: Device


def open_job(
    settings: type[Settings], description: str, *, model: type | None = None
) -> TrainingJob[Settings]:
    """Read the plan that the only argument names, and join the other workers on its device.

    `model` is the class that declares the plan's section model.
    """
    plan = parse_plan(description)
    section = read_settings(settings, plan)
    if model is not None:
        check_section(model, "model", plan)
    environment = read_environment()
    device = open_device(plan.device, environment)
    global _timer
    _timer = device.timer
    device.compiles = section.compile
    check_world(plan, device)
    return TrainingJob(plan, section, environment, device)


def check_world(plan: JobPlan, device: Device) -> None:
    """Refuse to train if the running workers or the batch differ from the plan."""
    layout = f"{plan.nodes} nodes x {plan.workers_per_node} workers"
    if plan.nodes * plan.workers_per_node != plan.workers:
        raise TrainError(f"plan.json: {layout} are not {plan.workers} workers")
    if (device.world, device.local_world) != (plan.workers, plan.workers_per_node):
        raise TrainError(
            f"plan.json is for {plan.workers} workers ({layout}), but {device.world} are running, "
            f"{device.local_world} on this node: start torchrun with --nnodes {plan.nodes} "
            f"--nproc_per_node {plan.workers_per_node}, or render a plan for this size"
        )
    batch = plan.batch
    if batch.units * batch.micro_batch != batch.global_batch:
        raise TrainError(
            f"plan.json: {batch.units} micro-batches of {batch.micro_batch} samples are not the "
            f"global batch of {batch.global_batch}"
        )
    if not 0 < batch.groups <= plan.workers or plan.workers % batch.groups:
        raise TrainError(
            f"plan.json: {plan.workers} workers cannot form {batch.groups} equal groups"
        )
    slots = batch.accumulation * batch.groups
    if not 0 <= batch.padding_units < slots or slots - batch.padding_units != batch.units:
        by = "workers" if batch.groups == plan.workers else "groups"
        raise TrainError(
            f"plan.json: {batch.groups} {by} x {batch.accumulation} micro-batches minus "
            f"{batch.padding_units} of padding are not {batch.units} micro-batches"
        )


def run_job(main: Callable[[], None]) -> None:
    """Run a job's main function; turn a TrainError into one line and exit code 1."""
    try:
        main()
    except TrainError as error:
        note_failure(error, str(error))
        # Nearly always every worker meets the same error. Local rank 0 reports it for its node, and
        # the launcher then ends the others while they sleep; one that fails alone reports it late.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(APART_S)
        # One write: a library of another worker may print into the same pipe at any moment.
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except Exception as error:
        note_failure(error, f"{type(error).__name__}: {error}".strip().partition("\n")[0])
        raise
    if parent_process() is None and _gloo_runs():
        # Such a thread takes Python's lock to free the tensor of the last collective. If Python is
        # being torn down by then, the process aborts (PyTorch 2.14, Python up to 3.13:
        # https://github.com/pytorch/pytorch/issues/190489). So end before that; a child of
        # multiprocessing does so anyway, when it has sent its result.
        threads: Any = threading  # not annotated
        threads._shutdown()
        atexit._run_exitfuncs()
        leave(0)


def _gloo_runs() -> bool:
    """Check for gloo's threads, which outlive a closed device if anything still holds its groups.

    The mesh of FSDP2 does. PyTorch names the threads pt_gloo_runloop and gloo_tcp_loop.
    """
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            if "gloo" in (thread / "comm").read_text():
                return True
    return False


_timer = Timer()
"""The timer of this worker's device, which knows the step, once the device is open."""


def note_failure(error: Exception, line: str) -> None:
    """Record the error that ends this worker; ignore failures to write the record."""
    values = os.environ
    if "RANK" not in values:
        return  # no worker: the launcher tells each its rank
    files = RunFiles(Path(values.get(Variable.RUN_DIR, ".")))
    phase, rank = values.get(Variable.PHASE, "train"), values["RANK"]
    with suppress(OSError, ValueError):
        write_json(
            files.failed_file(phase, int(values.get(Variable.ATTEMPT, "1")), int(rank)),
            {
                "time": time.time(),
                "rank": int(rank),
                "node": int(values.get("GROUP_RANK", "0")),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "step": _timer.step or None,
                "steps_done": _timer.steps,
                "raised": _raised(error),
                "error": line,
                "traceback": "".join(traceback.format_exception(error)),
            },
        )


def _raised(error: BaseException) -> list[str]:
    """Return the types of an exception and of its causes, as a traceback names them.

    Causes that `from None` hides count too, because an OSError may be temporary.
    """
    found: list[BaseException] = [error]
    for each in found:  # grows
        behind = (each.__cause__, each.__context__)
        found += [e for e in behind if e is not None and all(e is not known for known in found)]
    kinds = [(type(each).__module__, type(each).__qualname__) for each in found]
    plain = ("builtins", "__main__")
    return [name if module in plain else f"{module}.{name}" for module, name in kinds]
