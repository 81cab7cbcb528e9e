"""Runs commands on nodes: those of a running job, or one taken for a minute."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm.cluster.python import interpreter, probe_answer, probe_script
from trnslurm.config import Cluster
from trnslurm.errors import RunError, SlurmError, TrnslurmError
from trnslurm.render.directives import passed_through
from trnslurm.render.job import search_path
from trnslurm.runs.foreign import refuse_foreign
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import run_status
from trnslurm.slurm.commands import Slurm, without_overrides

_PINS = {"torch": "2.9", "transformers": "4.57", "accelerate": "1.15"}
_PINS_OF_DEVICE = {
    "neuron": {"torch-xla": "2.9", "torch-neuronx": "2.9.0.2.15.32035", "neuronx-cc": "2.26.6360"},
    "xla-cpu": {"torch-xla": "2.9"},
}
_COMMANDS_OF_DEVICE = {"neuron": ("neuron_parallel_compile", "neuronx-cc")}


def exec_in_run(run: RunDir, node: int, command: Sequence[str]) -> int:
    """Run a command on one node of a running job, with our terminal; return its exit code."""
    refuse_foreign(run.path, "run a command in")
    record, status = run.record(), run_status(run)
    if status.state not in ("RUNNING", "PRECOMPILING"):
        raise RunError(f"{run.name} is {status.state}: exec needs a running job")
    if not 0 <= node < record.nodes:
        raise RunError(f"{run.name} has nodes 0 to {record.nodes - 1}, there is no node {node}")
    if record.scheduler == "local":
        if record.host != socket.gethostname():
            raise RunError(f"{run.name} runs on {record.host}: use exec there")
        return _attached(command, cwd=str(run.path))
    phase = next(p for p in status.phases if p.state == "RUNNING")
    hosts = phase.hosts.split(",")
    if node >= len(hosts) or not hosts[node]:
        raise RunError(f"{run.name} has not said yet which nodes it runs on: try again")
    argv = [
        Slurm(record.bin_dir).path("srun"), f"--jobid={phase.job_id}", "--overlap", "--nodes=1",
        "--ntasks=1", f"--nodelist={hosts[node]}", f"--chdir={run.path}", "--export=ALL",
    ]  # fmt: skip
    argv += ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    return _attached([*argv, *command], path=search_path("", record.bin_dir))


def _attached(argv: Sequence[str], cwd: str | None = None, path: str = "") -> int:
    environment = without_overrides(os.environ)
    if path:  # the node's commands, such as neuron-top, before this shell's
        environment["PATH"] = f"{path}:{environment.get('PATH', '')}"
    try:
        return subprocess.run(list(argv), cwd=cwd, env=environment, check=False).returncode
    except OSError as error:
        raise RunError(f"{argv[0]}: {error.strerror}") from None


def check_environment(cluster: Cluster, device: str, timeout_s: float) -> dict[str, Any]:
    """Ask a node's Python for its versions, as the batch script would start it."""
    pins = _PINS | _PINS_OF_DEVICE.get(device, {})
    commands = _COMMANDS_OF_DEVICE.get(device, ())
    report = _probe(cluster, list(pins), commands, timeout_s)
    packages: Mapping[str, str | None] = report["packages"]
    report["problems"] = [
        f"{name} is {packages.get(name) or 'missing'}, the jobs are made for {pin}"
        for name, pin in pins.items()
        if not matches(packages.get(name), pin)
    ]
    report["problems"] += [
        f"{command} is not on PATH" for command, path in report["commands"].items() if not path
    ]
    if tuple(map(int, report["python"].split(".")[:2])) < (3, 11):
        report["problems"].append(f"Python is {report['python']}, the jobs need 3.11")
    return report


def matches(version: str | None, pin: str) -> bool:
    """Check whether a version is of a pin: 2.9.1+cpu is of 2.9."""
    return version is not None and (version.split("+")[0] + ".").startswith(pin + ".")


def _probe(
    cluster: Cluster, names: Sequence[str], commands: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    script = probe_script(cluster, names, commands)
    argv = ["/bin/bash", "-s"]
    if cluster.scheduler == "slurm":
        slurm = cluster.slurm
        argv = [
            Slurm(slurm.bin_dir).path("srun"), "--nodes=1", "--ntasks=1", "--time=5", "--quiet",
            "--job-name=trnslurm-env-check", "--export=NONE", *srun_options(cluster),
            *map(passed_through, slurm.sbatch), *argv,
        ]  # fmt: skip
    try:
        done = subprocess.run(
            argv, input=script, capture_output=True, text=True, timeout=timeout_s, check=False,
            env=without_overrides(os.environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"no node answered in {timeout_s:g} s: one may still be booting; "
            "try again, or pass --timeout"
        ) from None
    if done.returncode:
        words = " ".join(done.stderr.split()[-40:]) or f"exit code {done.returncode}"
        raise TrnslurmError(f"the node's Python did not run ({interpreter(cluster)}): {words}")
    if answer := probe_answer(done.stdout):
        return answer
    raise TrnslurmError(f"{interpreter(cluster)} on the node printed no answer")


def srun_options(cluster: Cluster) -> list[str]:
    """Return srun's options for where the cluster's jobs run."""
    named = ("partition", "account", "qos", "constraint", "reservation")
    return [f"--{n}={v}" for n in named if (v := getattr(cluster.slurm, n)) is not None]
