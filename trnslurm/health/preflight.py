"""Runs the preflight outside a job: allocates nodes for a moment and checks them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import trnslurm
from trnslurm.cluster.execute import srun_options
from trnslurm.cluster.python import interpreter, preamble
from trnslurm.config.catalog import InstanceType, catalog, find
from trnslurm.config.schema import Cluster
from trnslurm.config.software import device_of
from trnslurm.contract.files import make_private
from trnslurm.contract.rundir import PACKAGE
from trnslurm.errors import RunError, SlurmError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.node.graphs.manifest import cache_root
from trnslurm.records.run import NodeFitness, RunDir
from trnslurm.render.bundle import Bundle
from trnslurm.render.directives import gpu_option, memory_option
from trnslurm.render.package import package_files
from trnslurm.runs.root import check_run_root
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import Scheduler
from trnslurm.slurm.commands import without_overrides

_PHASE, _ATTEMPT = "doctor", 1
_END_S = 10


class PreflightByHand(Frozen):
    """A preflight outside a job: the cluster, its nodes and a directory."""

    cluster: Cluster
    instance: InstanceType
    nodes: int
    directory: Path
    """A temporary directory in the run root, instead of a run directory."""

    @property
    def scheduler(self) -> Scheduler:
        return scheduler_of(self.cluster)


def check_nodes(cluster: Cluster, nodes: int, timeout_s: float) -> list[NodeFitness]:
    """Run the preflight on this many nodes, and return the result for each node."""
    instance = find(catalog(cluster.instance_types), cluster.instance_type)
    root = check_run_root(Path(cluster.run_root))
    try:
        make_private(root)
        directory = Path(tempfile.mkdtemp(dir=root, prefix=".doctor-"))
    except OSError as error:
        raise RunError(f"run root {root}: {error.strerror}") from None
    run = RunDir(directory)
    job = PreflightByHand(cluster=cluster, instance=instance, nodes=nodes, directory=directory)
    try:
        # The preflight's code and start script, as a bundle would contain them.
        Bundle(files=package_files(("node",))).write(directory)
        run.state.mkdir()
        (directory / "doctor.sh").write_text(_script(job), encoding="utf-8")
        output = _run(job, timeout_s)
        found = run.preflight(_PHASE, _ATTEMPT)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not found:
        raise TrnslurmError(f"the nodes did not write a preflight result: {output}")
    return found


def _script(job: PreflightByHand) -> str:
    cluster, instance, nodes = job.cluster, job.instance, job.nodes
    directory = shlex.quote(str(job.directory))
    cache = cache_root(cluster.compile_cache, cluster.run_root)
    device = device_of(cluster, instance)
    command = [
        interpreter(cluster),
        "-m",
        "trnslurm.node.preflight",
        f"--device={device}",
        f"--devices={instance.neuron_devices(device)}",
        f"--workers={cluster.workers_per_node or instance.default_workers(nodes)}",
        f"--efa={instance.efa_for(device, nodes)}",
    ]
    return "\n".join(
        [
            *preamble(cluster),
            f"cd {directory}",
            f"export PYTHONPATH=$PWD/{PACKAGE} PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1",
            f"export TRNSLURM_RUN_DIR={directory} TRNSLURM_PHASE={_PHASE}",
            f"export TRNSLURM_ATTEMPT={_ATTEMPT} TRNSLURM_CACHE={shlex.quote(cache)}",
            job.scheduler.rendezvous(nodes, interpreter(cluster)),
            'ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"',
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def _command(job: PreflightByHand) -> list[str]:
    slurm = job.cluster.slurm
    # As in a job, because the job's memory and GPUs are checked, not the node's.
    resources = [memory_option(slurm), gpu_option(slurm, job.instance)]
    resources += ["--exclusive"] if slurm.exclusive else []
    options = [*srun_options(job.cluster), *filter(None, resources)]
    options = [f"--chdir={job.directory}", *options, *slurm.sbatch]
    words = job.scheduler.allocate("trnslurm-doctor", options, job.nodes)
    return [*words, "/bin/bash", str(job.directory / "doctor.sh")]


def _run(job: PreflightByHand, timeout_s: float) -> str:
    """Run the preflight until it ends; return the end of its stderr."""
    path = str(Path(trnslurm.__file__).parent.parent)
    environ = without_overrides(os.environ) | {"PYTHONPATH": path}  # for srun's stand-in
    process = subprocess.Popen(
        _command(job),
        cwd=job.directory,
        env=environ,
        stdin=subprocess.DEVNULL,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        errors="replace",
    )
    try:
        _, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        waits = job.scheduler.why_waiting(job.directory, str(os.getuid()))
        why = (
            f"the check did not get {job.nodes} nodes within {timeout_s:g} "
            f"s{f': {waits}' if waits else ''}"
        )
        raise SlurmError(f"{why}; try again, or pass --timeout") from None
    finally:
        if process.poll() is None:  # let srun release the allocation, also on Ctrl-C
            process.terminate()
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    return " ".join(errors.split()[-40:]) or f"exit code {process.returncode}"
