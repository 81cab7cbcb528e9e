"""Turns a JobSpec into a bundle. Pure: the same inputs give the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from trnslurm import __version__
from trnslurm.bundle import Bundle, kept_directories, snapshot
from trnslurm.config import Config
from trnslurm.errors import RenderError
from trnslurm.spec import JobSpec
from trnslurm.template import fill, open_templates

# Options that the template, or a key of the configuration, already decides.
_OWN_OPTIONS = {
    "--job-name": "--name", "--nodes": "--nodes", "--time": "--time",
    "--partition": "--set slurm.partition", "--account": "--set slurm.account",
    "--qos": "--set slurm.qos", "--constraint": "--set slurm.constraint",
    "--reservation": "--set slurm.reservation", "--exclusive": "--set slurm.exclusive",
    "--requeue": "--set slurm.requeue", "--no-requeue": "--set slurm.requeue",
    "--cpus-per-task": "--set slurm.cpus_per_task",
    "--gpus-per-node": "--set slurm.gpus_per_node",
    "--ntasks-per-node": "", "--ntasks": "", "--output": "", "--error": "", "--open-mode": "",
    "--export": "", "--export-file": "", "--get-user-env": "", "--propagate": "",
    "--wait-all-nodes": "", "--chdir": "", "--dependency": "", "--array": "", "--wrap": "",
    "--clusters": "", "--uid": "", "--gid": "", "--nodefile": "", "--parsable": "",
    "--quiet": "", "--help": "", "--usage": "", "--version": "",
    "--test-only": "", "--kill-on-invalid-dep": "", "--signal": "",
}  # fmt: skip
_TIME_REASONS = {
    "precompile": "compiling large models takes up to an hour or two",
    "train": "the plan's estimate plus a quarter and 15 minutes, or as asked",
}
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[^\n\r\0]+)?")


def render(spec: JobSpec, template_dirs: Sequence[Path]) -> Bundle:
    """Return the bundle of a job."""
    environment = open_templates(template_dirs)
    files: dict[str, bytes] = {}
    for phase in spec.phases:
        values = _values(spec, phase)
        text = fill(environment, "batch.sbatch.j2", values)
        files[script_name(phase, spec.config.cluster.scheduler)] = text.encode()
    files["node.sh"] = fill(environment, "node.sh.j2", _values(spec, "train")).encode()
    files["plan.json"] = (json.dumps(plan_data(spec), indent=2) + "\n").encode()
    files["config.yaml"] = _config_yaml(spec).encode()
    recipe = spec.config.recipe
    files |= snapshot(spec.config.recipe_name, Path(spec.config.recipe_dir), recipe.entry)
    files |= kept_directories()
    return Bundle(files=dict(sorted(files.items())))


def script_name(phase: str, scheduler: str) -> str:
    """Return the batch script's file name: what sbatch runs, or bash on the local cluster."""
    return f"{phase}.sbatch" if scheduler == "slurm" else f"{phase}.sh"


def plan_data(spec: JobSpec) -> dict[str, Any]:
    """Return the numbers that the job reads, and checks against the process group it has."""
    config, batch = spec.config, spec.batch
    recipe = config.recipe
    return {
        "format": 1,
        "recipe": config.recipe_name,
        "preset": config.preset or "",
        "cluster": config.cluster_name,
        "instance_type": spec.instance.name,
        "peak_tflops": spec.instance.bf16_tflops * batch.nodes,
        "device": spec.device,
        "nodes": batch.nodes,
        "workers_per_node": batch.workers_per_node,
        "workers": batch.workers,
        "batch": {
            "mode": batch.mode,
            "global_batch": batch.global_batch,
            "micro_batch": batch.micro_batch,
            "units": batch.units,
            "accumulation": batch.accumulation,
            "padding_units": batch.padding_units,
        },
        "seq_len": recipe.seq_len,
        "steps": recipe.steps,
        "precision": recipe.precision,
        "seed": recipe.seed,
        "data": data_path(config),
        "model": dict(recipe.model),
        "train": dict(recipe.train),
    }


def data_path(config: Config) -> str:
    """Return where the job finds its data; empty: it brings its own. A leading ~ is the job's."""
    path = config.recipe.data.path
    return str(PurePosixPath(config.cluster.data_root) / path) if path else ""


def slurm_time(minutes: int) -> str:
    """Return minutes as Slurm writes them: D-HH:MM:SS or HH:MM:SS."""
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def _values(spec: JobSpec, phase: str) -> dict[str, Any]:
    config, cluster = spec.config, spec.config.cluster
    return {
        "version": __version__,
        "title": f"{_title(spec)}: {phase}",
        "node_title": f"{_title(spec)}: one node's part",
        "phase": phase,
        "job_name": f"{spec.name}-{phase}",
        "on_slurm": spec.on_slurm,
        "device": spec.device,
        "nodes": spec.nodes,
        "batch": spec.batch,
        "steps": spec.steps,
        "padding_percent": f"{100 * spec.batch.padding:.1f}",
        "by_hand": _by_hand(spec),
        "cpus_per_task": cluster.slurm.cpus_per_task or spec.instance.vcpus,
        "time_reason": _TIME_REASONS[phase],
        "time_limit": slurm_time(spec.time_min[phase]) if phase in spec.time_min else "",
        "directives": _directives(spec) if spec.on_slurm else [],
        "umask": "027" if cluster.group_readable else "077",
        "path": search_path(cluster.python, cluster.slurm.bin_dir),
        "activate": cluster.activate,
        "python": cluster.python,
        "neuron_cc_flags": config.recipe.neuron.cc_flags,
        "compile_cache": cluster.compile_cache,
        "efa": spec.instance.efa > 0 and spec.nodes > 1,
        "env": sorted(_job_environment(spec).items()),
        "local_hosts": ",".join(f"local-{n}" for n in range(spec.nodes)),
        "srun_wait_s": cluster.slurm.srun_wait_s,
        "entry": f"code/jobs/{config.recipe_name}/{config.recipe.entry}",
    }


def _job_environment(spec: JobSpec) -> dict[str, str]:
    neuron = spec.config.recipe.neuron.env if spec.device == "neuron" else {}
    return {**neuron, **spec.config.cluster.env}


def _title(spec: JobSpec) -> str:
    preset = f" ({spec.config.preset})" if spec.config.preset else ""
    return (
        f"{spec.config.recipe_name}{preset} on {spec.nodes} x {spec.instance.name}, "
        f"cluster {spec.config.cluster_name}"
    )


def _by_hand(spec: JobSpec) -> list[str]:
    if not spec.on_slurm:
        return [" && ".join(f"bash {script_name(p, 'local')}" for p in spec.phases)]
    if spec.phases == ("train",):
        return ["sbatch train.sbatch"]
    return [
        "id=$(sbatch --parsable precompile.sbatch)",
        'sbatch --dependency=afterok:"${id%%;*}" --kill-on-invalid-dep=yes train.sbatch',
    ]


def _directives(spec: JobSpec) -> list[tuple[str, str]]:
    """The #SBATCH options that depend on the site, each with its reason."""
    slurm = spec.config.cluster.slurm
    named = ("partition", "account", "qos", "constraint", "reservation")
    site = f"as {spec.config.cluster_name}'s profile, or an option, says"
    options = [(f"--{n}={v}", site) for n in named if (v := getattr(slurm, n)) is not None]
    gpus = slurm.gpus_per_node
    if gpus is None and spec.instance.device == "cuda":
        gpus = spec.instance.accelerators
    if gpus:
        options.append((f"--gpus-per-node={gpus}", "a GRES, unlike Neuron devices"))
    if slurm.exclusive:
        options.append(("--exclusive", "devices and network are not shared: take nodes whole"))
    if slurm.requeue:
        options.append(("--requeue", "start again after a node failure; for now from step 0"))
    else:
        options.append(("--no-requeue", "do not start again after a node failure"))
    return options + [(_passed_through(option), site) for option in slurm.sbatch]


def _passed_through(option: str) -> str:
    if not _OPTION.fullmatch(option):
        raise RenderError(
            f"--sbatch {option!r}: expected one long option, as in --sbatch=--mail-type=FAIL"
        )
    name = option.partition("=")[0]
    for own, instead in _OWN_OPTIONS.items():
        if own.startswith(name):  # sbatch takes --parti for --partition
            what = f"use {instead}" if instead else "it would change what the template relies on"
            raise RenderError(f"--sbatch {option}: {what}")
    return option


def search_path(python: str, bin_dir: str | None) -> str:
    """Return the PATH of everything that runs on a node."""
    # neuron_parallel_compile and neuronx-cc are installed beside the interpreter.
    beside = str(Path(python).parent) if python.startswith("/") else ""
    standard = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # Where ParallelCluster, Neuron's and EFA's installers put their commands.
    sites = "/opt/slurm/bin:/opt/aws/neuron/bin:/opt/amazon/efa/bin:/opt/amazon/openmpi/bin"
    words = [beside, bin_dir or "", *sites.split(":"), *standard.split(":")]
    return ":".join(word for word in dict.fromkeys(words) if word)


def _config_yaml(spec: JobSpec) -> str:
    config = spec.config
    head = {
        "trnslurm": __version__,
        "recipe_name": config.recipe_name,
        "preset": config.preset,
        "cluster_name": config.cluster_name,
        "name": spec.name,
        "nodes": spec.nodes,
        "phases": list(spec.phases),
        "time_min": dict(spec.time_min),
    }
    note = "# The resolved configuration; `trnslurm show` tells where each value is from.\n"
    return note + yaml.safe_dump(head | {"config": dict(config.tree)}, sort_keys=True)
