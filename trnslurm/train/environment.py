"""What the launcher and node.sh pass to a worker through its environment."""

import os
from dataclasses import dataclass
from pathlib import Path

from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.train.errors import TrainError

PHASES = ("precompile", "train")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One worker's place in the run."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int = 0
    phase: str
    """`train`, or `precompile`: a few steps to compile every graph, without valid losses."""
    attempt: int
    run_dir: Path
    device: str
    """The device that node.sh prepared for; empty if the job was started by hand."""
    compile_cache: Path | None = None
    """The graphs of xla-cpu, one directory per worker: a precompile fills it, training reads it."""

    @property
    def files(self) -> RunFiles:
        """The files of the run directory."""
        return RunFiles(self.run_dir)


def read_environment() -> Environment:
    """Read the environment of this worker, with defaults if there is no launcher."""
    phase = os.environ.get(Variable.PHASE, "train")
    if phase not in PHASES:
        raise TrainError(f"{Variable.PHASE} is {phase!r}: it must be {' or '.join(PHASES)}")
    cache = os.environ.get(Variable.COMPILE_CACHE)
    return Environment(
        rank=_read_int("RANK"),
        world=_read_int("WORLD_SIZE"),
        local_rank=_read_int("LOCAL_RANK"),
        local_world=_read_int("LOCAL_WORLD_SIZE"),
        node=_read_int("GROUP_RANK", default="0"),
        phase=phase,
        attempt=_read_int(Variable.ATTEMPT, default="1"),
        run_dir=Path(os.environ.get(Variable.RUN_DIR, ".")),
        device=os.environ.get(Variable.DEVICE, ""),
        compile_cache=Path(cache).expanduser() if cache else None,
    )


def _read_int(name: str, default: str = "") -> int:
    value = os.environ.get(name, default)
    if not value:
        raise TrainError(f"{name} is not set: start with python -m torch.distributed.run")
    if not value.isdecimal():
        raise TrainError(f"{name} is {value!r}: it must be a whole number")
    return int(value)
