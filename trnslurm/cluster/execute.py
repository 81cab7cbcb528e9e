"""Runs commands on the nodes of a running job, or on a node allocated for a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trnslurm.cluster.python import interpreter, probe_answer, probe_script
from trnslurm.config.schema import Cluster
from trnslurm.config.software import NEURON_SDKS, matches, packages_for
from trnslurm.contract.files import umask_of
from trnslurm.contract.states import State
from trnslurm.devices import DeviceType
from trnslurm.errors import RunError, SlurmError, TrnslurmError
from trnslurm.node.stacks import joined
from trnslurm.records.foreign import refuse_foreign, refuse_writable_code
from trnslurm.records.run import Record, RunDir
from trnslurm.render.container import container_words
from trnslurm.render.directives import passed_through
from trnslurm.render.search_path import search_path
from trnslurm.runs.status import run_status
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import PhaseStatus
from trnslurm.slurm.commands import without_overrides

# Packages to import too, because libraries that they load can be missing despite the right version.
_IMPORTED = {"torch-neuronx": "torch_neuronx"}

# A shell with the environment of a process that srun started on the node, which has what the
# profile activates and sets. bashrc is left out, because it may change PATH.
_SHELL = r"""
for process in /proc/[0-9]*; do
  [ -O "$process" ] || continue             # root can also read what other users have made up
  { mapfile -d "" -t variables < "$process/environ"; } 2> /dev/null || continue
  ours= node=
  for variable in "${variables[@]}"; do
    case $variable in
      TRNSLURM_RUN_DIR=*) if [ "${variable#*=}" -ef "$1" ]; then ours=yes; fi ;;
      SLURM_NODEID=*) node=${variable#*=} ;;
    esac
  done
  [ "$ours" ] && [ "$node" ] || continue
  if [ -d "$1/work" ]; then cd -- "$1/work"; fi
  term=${TERM:-dumb} name=$2
  for each in $(compgen -e); do export -n "${each?}"; done 2> /dev/null
  export -- "${variables[@]}" 2> /dev/null  # not as arguments of env, which others could read
  export -n RANK LOCAL_RANK WORLD_SIZE
  export TERM=$term PS1="[$name node $node] \\w\\$ "
  exec bash --norc
done
echo "error: $(uname -n) has no process of $2 yet: try again" >&2
exit 1
"""


# The run's own Python and code, as a process of the run on this node has them.
_ASK_STACKS = r"""
for process in /proc/[0-9]*; do
  [ -O "$process" ] || continue
  { mapfile -d "" -t variables < "$process/environ"; } 2> /dev/null || continue
  ours= python=
  for variable in "${variables[@]}"; do
    case $variable in
      TRNSLURM_RUN_DIR=*) if [ "${variable#*=}" -ef "$1" ]; then ours=${variable#*=}; fi ;;
      TRNSLURM_PYTHON=*) python=${variable#*=} ;;
    esac
  done
  [ "$ours" ] && command -v -- "$python" > /dev/null || continue
  export PYTHONPATH="$ours/code/trnslurm.zip:$ours/code"
  exec "$python" -m trnslurm.node.stacks "$ours" "$2" "$3"
done
echo "error: $(uname -n) has no process of the run whose Python can be started here" >&2
exit 1
"""
_STACKS_S = 90.0


def exec_in_run(run: RunDir, node: int, command: Sequence[str]) -> int:
    """Run a command on one node of a running job, in our terminal; return its exit code.

    Without a command, start a shell in the run's environment and working directory.
    """
    command = command or ("/bin/bash", "-c", _SHELL, "bash", str(run.path), run.name)
    refuse_foreign(run.path, "run a command in")
    refuse_writable_code(run.path)
    record, phase = _running(run, "exec")
    if not 0 <= node < record.nodes:
        raise RunError(f"{run.name} has only nodes 0 to {record.nodes - 1}, not node {node}")
    step = scheduler_of(record).step(run, phase, node)
    if not step:
        return _attached(run, command)
    step += ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    # The node's commands, such as neuron-top, come before this shell's.
    return _attached(run, [*step, *command], search_path("", record.bin_dir))


def stacks_in_run(run: RunDir) -> list[dict[str, Any]]:
    """Return what each worker of a running job is doing, in rank order."""
    refuse_foreign(run.path, "ask the workers of")
    refuse_writable_code(run.path)
    record, phase = _running(run, "stacks")
    argv = ["/bin/bash", "-c", _ASK_STACKS, "bash", str(run.path), phase.phase, str(phase.attempt)]
    try:
        done = subprocess.run(
            [*scheduler_of(record).step(run, phase), *argv],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_STACKS_S,
            check=False,
            umask=umask_of(run.path),
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{run.name}: its nodes did not answer within {_STACKS_S:g} s") from None
    workers = [json.loads(text) for text in joined(done.stdout.splitlines())]
    if not workers:
        said = " ".join(done.stderr.split()[-40:]) or "there is no worker yet"
        raise RunError(f"{run.name}: {said}")
    return sorted(workers, key=lambda w: (w["rank"] is None, w["rank"], w["host"]))


def _running(run: RunDir, command: str) -> tuple[Record, PhaseStatus]:
    """Return the record and phase of a run that has processes on this host or on nodes."""
    record, status = run.record(), run_status(run)
    if not status.state.alive:
        raise RunError(f"{run.name} is {status.state}: {command} requires a running job")
    scheduler_of(record).refuse_elsewhere(run, record, f"use {command} there")
    return record, next(p for p in status.phases if p.state is State.RUNNING)


def _environment() -> dict[str, str]:
    """Return the environment of a process in a run, in which imports never write into code/."""
    return without_overrides(os.environ) | {"PYTHONDONTWRITEBYTECODE": "1"}


def _attached(run: RunDir, argv: Sequence[str], path: str = "") -> int:
    environment = _environment()
    if path:
        environment["PATH"] = f"{path}:{environment.get('PATH', '')}"
    try:
        done = subprocess.run(
            list(argv), cwd=run.path, env=environment, umask=umask_of(run.path), check=False
        )
        return done.returncode
    except OSError as error:
        raise RunError(f"{argv[0]}: {error.strerror}") from None


def check_environment(cluster: Cluster, device: DeviceType, timeout_s: float) -> dict[str, Any]:
    """Return the package versions of a node's Python, started as in the batch script."""
    pins = packages_for(device, cluster.neuron_sdk)
    report = _probe(cluster, list(pins), device.commands, timeout_s)
    packages: Mapping[str, str | None] = report["packages"]
    report["neuron_sdk"] = cluster.neuron_sdk if device.sdks else None
    report["problems"] = [
        *_of_another_sdk(cluster, device, packages),
        *(
            f"{name} is {packages.get(name) or 'missing'}, but jobs need {pin}"
            for name, pin in pins.items()
            if not matches(packages.get(name), pin)
        ),
        *(f"{command} is not on PATH" for command, path in report["commands"].items() if not path),
        *_not_imported(report.get("imports", {}), packages, same=device.module_has_version),
    ]
    major, minor = map(int, report["python"].split(".")[:2])
    if (major, minor) < (3, 11):
        report["problems"].append(
            f"Python is {report['python']}, but recipes need 3.11 and custom scripts 3.9"
        )
    elif device.sdks and (sdk := NEURON_SDKS.get(cluster.neuron_sdk)):
        lowest, highest = sdk.pythons
        if not lowest <= minor <= highest:
            report["problems"].append(
                f"Python is {report['python']}, but Neuron SDK {cluster.neuron_sdk} has packages "
                "for "
                f"3.{lowest} to 3.{highest}"
            )
    return report


def _of_another_sdk(
    cluster: Cluster, device: DeviceType, packages: Mapping[str, str | None]
) -> Iterator[str]:
    """Yield what to do if the packages belong to another release of the Neuron SDK."""
    for version, sdk in NEURON_SDKS.items():
        own = not device.sdks or version == cluster.neuron_sdk
        # An unknown release can have packages of a known one.
        own |= cluster.neuron_sdk not in NEURON_SDKS
        if not own and all(matches(packages.get(name), pin) for name, pin in sdk.pip.items()):
            yield (
                f"its packages belong to Neuron SDK {version}, but the profile says "
                f"{cluster.neuron_sdk}: set neuron_sdk: {version}, or install the packages of "
                f"{cluster.neuron_sdk}"
            )


def _not_imported(
    imports: Mapping[str, Mapping[str, Any]], packages: Mapping[str, str | None], *, same: bool
) -> Iterator[str]:
    """Yield the problems of imported packages. `same` says that a module has its version too."""
    for name, module in _IMPORTED.items():
        if found := imports.get(module):
            if not found["imported"]:
                yield f"import {module} fails: {found['said']}"
            elif same and found["said"] != packages.get(name):
                yield (
                    f"{module} has version {found['said']}, but its package "
                    f"{packages.get(name)}: two installations are mixed"
                )


def _probe(
    cluster: Cluster, names: Sequence[str], commands: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    script = probe_script(cluster, names, commands, _IMPORTED)
    argv = ["/bin/bash", "-s"]
    container = cluster.container
    python = container.python if container.image else interpreter(cluster)
    options = [*srun_options(cluster), *map(passed_through, cluster.slurm.sbatch)]
    argv = [*scheduler_of(cluster).allocate("trnslurm-env-check", options), *argv]
    if container.image and container.runtime == "pyxis":  # options of srun, as words of bash
        words = " ".join(container_words(container, ["/tmp"]))
        argv = ["/bin/bash", "-c", f'exec "${{@:1:$#-2}}" {words} "${{@: -2}}"', "bash", *argv]
    try:
        done = subprocess.run(
            argv,
            input=script,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=without_overrides(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"no node answered within {timeout_s:g} s. A node may still be booting: "
            "try again, or pass --timeout"
        ) from None
    if done.returncode:
        words = " ".join(done.stderr.split()[-40:]) or f"exit code {done.returncode}"
        raise TrnslurmError(f"the node's Python ({python}) failed: {words}")
    if answer := probe_answer(done.stdout):
        return answer
    words = " ".join(done.stderr.split()[-40:])  # srun can fail and return 0
    raise TrnslurmError(f"{python} on the node did not print an answer{': ' * bool(words)}{words}")


def srun_options(cluster: Cluster) -> list[str]:
    """Return srun's options that select the cluster's nodes: partition, account and others."""
    named = ("partition", "account", "qos", "constraint", "reservation")
    return [f"--{n}={v}" for n in named if (v := getattr(cluster.slurm, n)) is not None]
