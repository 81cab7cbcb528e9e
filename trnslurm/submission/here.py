"""Checks, on this host, what a job needs: data, initial parameters, Python and its packages.

A login node sees only part of a cluster. If something may exist on the nodes, its absence is only a
warning.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trnslurm.config.plugins import find_plugin
from trnslurm.contract.files import load_json, newer_format
from trnslurm.contract.rundir import CHECKPOINTS, DATA_FORMAT, MIRROR, PLAN
from trnslurm.errors import SubmitError, TrnslurmError
from trnslurm.node.memory import available_gib
from trnslurm.plan.data import CONFIG as MODEL_CONFIG
from trnslurm.plan.data import INDEX, command, none_there
from trnslurm.submission.foreign_data import check_foreign
from trnslurm.submission.job import Job

# Values of train that need a package, and how it is installed.
_PACKAGES = {
    ("optimizer", "lamb"): ("timm", "pip install '.[lamb]' in a clone of trnslurm"),
    ("attention", "flash_attention_2"): ("flash_attn", "pip install flash-attn"),
    ("strategy", "deepspeed"): ("deepspeed", "pip install '.[deepspeed]' in a clone of trnslurm"),
}
_PYTHON_S = 60
# A worker, and a launcher that may import PyTorch too: twice what the preflight asks for.
_GIB_PER_WORKER = 0.5
_WORKERS_PER_CORE, _FEW_WORKERS = 16, 8
# Names of the shards that NVIDIA's preparation makes.
_TRAINING, _TEST = "*_training_*.hdf5", "*_test_*.hdf5"


def check_here(job: Job, say: Callable[[str], None] = lambda text: None) -> list[str]:
    """Reject a job that lacks something on this host. Return warnings about possible problems.

    `say` is called with a description of data that another library wrote.
    """
    plan = _plan_of(job)
    _check_data(job, plan, say)
    found = [*_python(job), *_first_parameters(job, plan)]
    _check_staging(job)
    if MIRROR in job.bundle.files:
        _check_mirror(job)
    if job.profile.container.image:  # the image has its own Python and packages
        return [*found, *_container(job)]
    return [*found, *_packages(job, plan)]


def refuse_crowded(job: Job, *, anyway: str = "") -> None:
    """Reject more workers than this machine can start. `anyway` is the option to override it."""
    if not job.is_here:
        return
    workers, cores = job.nodes * job.workers_per_node, len(os.sched_getaffinity(0))
    left = available_gib()
    most = max(_FEW_WORKERS, int(min(_WORKERS_PER_CORE * cores, left / _GIB_PER_WORKER)))
    if workers > most:
        raise SubmitError(
            f"--nodes {job.nodes} would start {workers:,} workers here, but {cores} cores and "
            f"{left:.0f} GiB of free memory are enough for only about {most}: lower --nodes or "
            f"--workers{f', or pass {anyway}' if anyway else ''}. To only write the scripts, use "
            "trnslurm render"
        )


def check_notify(job: Job) -> list[str]:
    """Reject a webhook file or a command that cannot work, and return warnings."""
    found, notify = [], job.profile.notify
    if notify.webhook is not None:
        from trnslurm.node.notify import NotifyError, read_webhook  # few jobs have one

        file = Path(job.scheduler.expand(notify.webhook))
        try:
            read_webhook(file)
        except NotifyError as error:
            if job.sees(file.parent):
                raise SubmitError(f"notify.webhook: {error}") from None
            found.append(
                f"notify.webhook: {file} does not exist on this host, but the first node needs it"
            )
    program = Path(job.scheduler.expand((notify.command or "").split(" ")[0]))
    if program.is_absolute() and job.sees(program.parent):
        if not os.access(program, os.F_OK):
            raise SubmitError(f"notify.command: {program} does not exist")
        if not os.access(program, os.X_OK):
            raise SubmitError(
                f"notify.command: {program} is not executable: if it contains the URL of a "
                f"webhook, pass --notify @{program}, or set notify.webhook"
            )
    if notify.plugin is not None:
        try:  # a bundle from elsewhere has its code, and this host need not
            if plugin := find_plugin("notifier", notify.plugin.partition(":")[0]):
                plugin.load()
        except TrnslurmError as error:
            found.append(f"notify.plugin: {error} (it may still work with the first node's Python)")
    return found


def python_of(job: Job) -> str:
    """Return the job's interpreter: the profile's, or this one on this machine if it has torch.

    A custom script runs with the active environment's Python. With a container, the Python outside
    the container needs only the standard library.
    """
    configured = job.profile.python
    if configured != "python3" or not job.is_here:
        return configured
    if job.profile.container.image:
        return sys.executable
    if job.project is not None:
        active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
        return (shutil.which("python3") if active else None) or sys.executable
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise SubmitError(
                f"{sys.executable} does not have {module}, which the job needs: install trnslurm "
                "there with its [train] extra, or set python: in a cluster profile"
            )
    return sys.executable


def _plan_of(job: Job) -> Mapping[str, Any]:
    """Return plan.json, or empty if the job does not train."""
    try:
        plan = json.loads(job.bundle.files[PLAN])
    except (KeyError, ValueError):
        return {}
    return plan if isinstance(plan, dict) and isinstance(plan.get("train"), dict) else {}


def _python(job: Job) -> Iterator[str]:
    """Reject a Python that is missing or cannot be run. For Slurm jobs, only warn."""
    python = python_of(job)
    path = Path(python)
    if not path.is_absolute():
        if job.is_here and not job.profile.activate and not shutil.which(python):
            raise SubmitError(f"{python} does not exist: set python: in the profile {job.cluster}")
        return
    try:
        if os.access(path, os.X_OK) and path.is_file():
            return
        there, near = path.exists(), path.parent.is_dir()
    except (OSError, ValueError):  # not a valid name in this locale
        return
    problem = "cannot be run" if there else "does not exist"
    if job.is_here:
        raise SubmitError(f"{python} {problem}: set python: in the profile {job.cluster}")
    if there or near:
        yield f"python: {python} {problem} on this host, but the nodes need it"


def _check_staging(job: Job) -> None:
    """Reject stage_python if the Python is not in an environment."""
    python = Path(python_of(job))
    above = python.parent.parent
    signs = any((above / sign).exists() for sign in ("pyvenv.cfg", "conda-meta"))
    if job.profile.stage_python and python.exists() and not signs:
        raise SubmitError(
            f"stage_python is set, but {python} is not in a venv or conda environment: set "
            "python: to an environment's bin/python, or stage_python to null"
        )


def _check_mirror(job: Job) -> None:
    """Reject an S3 mirror if the Python does not have boto3."""
    python = python_of(job)
    if not _has(python, "boto3") and not _imports(python, "boto3"):
        raise SubmitError(
            f"mirror is set, but {python} does not have boto3: run pip install '.[s3]' in "
            "a clone of trnslurm there, or pass --set mirror=null"
        )


def _imports(python: str, module: str) -> bool:
    """Check whether a Python can import a module, which may be outside its environment."""
    command = [python, "-c", f"import {module}"]
    try:
        return not subprocess.run(command, capture_output=True, timeout=_PYTHON_S).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _container(job: Job) -> Iterator[str]:
    """Reject a missing image or runtime, and warn about what may still exist on the nodes."""
    container = job.profile.container
    image = job.scheduler.expand(container.image or "")
    missing = image.startswith("/") and not Path(image).exists()
    if missing and job.sees(Path(image).parent):
        raise SubmitError(f"container.image: {image} does not exist")
    if missing:
        yield f"container.image: {image} does not exist on this host, but the nodes need it"
    yield from job.scheduler.check_container(container.runtime)


def _check_data(job: Job, plan: Mapping[str, Any], say: Callable[[str], None]) -> None:
    if job.data and (found := check_foreign(job, plan)):
        say(found)
        return
    # Prepared data, published shards, or a text file.
    files = [f"{job.data}/{INDEX}", f"{job.data}/*.hdf5", job.data]
    if any(job.data.startswith(f"{run}/") for run in job.inputs):
        return  # another stage has yet to make it
    if job.data and none_there(job.profile, files):
        prepare = _command(job, plan, "prepare")
        raise SubmitError(f"no prepared data at {job.data}: run {prepare}")
    if job.data and plan:
        index = _index(job)
        if words := newer_format(index, DATA_FORMAT):
            raise SubmitError(f"the data at {job.data} was {words}")
        _refuse_unfit(job, plan, index)
        _refuse_unevaluated(job, plan, index)


def _command(job: Job, plan: Mapping[str, Any], verb: str) -> str:
    """Return the command that prepares or fetches the missing data."""
    return command(verb, job.recipe, job.preset, job.cluster, plan.get("model", {}))


def _index(job: Job) -> Mapping[str, Any]:
    """Return the index of prepared data, or empty if this host cannot read it."""
    try:
        index = load_json(Path(job.scheduler.expand(job.data)) / INDEX)
    except (OSError, RuntimeError, ValueError):
        return {}  # the job will say what is wrong
    return index if isinstance(index, dict) else {}


def _refuse_unfit(job: Job, plan: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Reject data that was prepared for another model or for other samples."""
    numbers = {key: value for key, value in index.items() if isinstance(value, int)}
    has = [numbers.get(key) for key in ("seq_len", "max_pred", "vocab_size")]
    wanted = [plan["seq_len"], plan["train"].get("max_pred"), plan["model"].get("vocab_size")]
    for name, there, asked in zip(("seq_len", "train.max_pred"), has, wanted, strict=False):
        if None not in (there, asked) and there != asked:
            raise SubmitError(
                f"{name} is {asked}, but the data at {job.data} was prepared with {there}: "
                f"prepare other data (--set data.path=NAME), or pass --set {name}={there}"
            )
    if has[2] is not None and wanted[2] is not None and has[2] > wanted[2]:
        raise SubmitError(
            f"model.vocab_size is {wanted[2]}, but the data at {job.data} has {has[2]} tokens: "
            f"pass --set model.vocab_size={has[2]}, or prepare the data with another tokenizer"
        )
    pads, pad_id = plan["model"].get("pad_token_id"), numbers.get("pad_id")
    if None not in (pads, pad_id) and pads != pad_id:
        raise SubmitError(
            f"model.pad_token_id is {pads}, but the data at {job.data} is padded with {pad_id}: "
            "prepare the data with the model's own tokenizer"
        )
    best, scores = plan["train"].get("keep_best"), index.get("metrics")
    if best and isinstance(scores, list) and best not in (known := ["loss", *map(str, scores)]):
        raise SubmitError(
            f"train.keep_best is {best}, but models for the data at {job.data} are evaluated by "
            f"{', '.join(known)}: pass --set train.keep_best={known[-1]}"
        )
    outputs, labels = plan["model"].get("num_labels"), index.get("labels")
    if outputs is None or not isinstance(labels, list):
        return
    if outputs != (count := len(labels) or 1):
        has_what = f"the labels {', '.join(map(str, labels))}" if labels else "numbers on a scale"
        raise SubmitError(
            f"model.num_labels is {outputs}, but the data at {job.data} has {has_what}: pass "
            f"--set model.num_labels={count}"
        )


def _refuse_unevaluated(job: Job, plan: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Reject an evaluation if the data has no held-out samples."""
    every, splits = plan["train"].get("eval_every"), index.get("splits")
    if not every:
        return
    wrong = ""
    if isinstance(splits, dict):
        if {*splits} <= {"train"}:
            wrong = (
                "no held-out samples: pass --set train.eval_every=0, or prepare it with --holdout"
            )
    elif _some(job, _TRAINING) and not _some(job, _TEST):
        wrong = (
            f"no test shards ({_TEST}): pass --set train.eval_every=0, or make test shards from "
            "held-out documents with trnslurm data prepare"
        )
    if wrong:
        raise SubmitError(f"train.eval_every is {every}, but the data at {job.data} has {wrong}")


def _some(job: Job, pattern: str) -> bool:
    try:
        return any(Path(job.scheduler.expand(job.data)).glob(pattern))
    except (OSError, RuntimeError, ValueError):
        return False


def _first_parameters(job: Job, plan: Mapping[str, Any]) -> Iterator[str]:
    model = plan["train"].get("init_from") if plan else ""
    if not isinstance(model, str) or not model:
        return
    root = job.profile.data_root
    if model.startswith(f"{root.rstrip('/')}/hub/"):
        if none_there(job.profile, [f"{model}/{MODEL_CONFIG}"]):
            raise SubmitError(f"no model at {model}: run {_command(job, plan, 'fetch')}")
        return
    is_path = model.startswith(("/", "~", ".")) or model.endswith(".pt") or model.count("/") > 1
    try:
        path = Path(job.scheduler.expand(model))
        there = (path if is_path else _cached(job, model)).exists()
    except (OSError, RuntimeError, ValueError):  # ~user is unknown on this host
        return
    # In a chain, the previous run has yet to write its checkpoints.
    if there or path.name == CHECKPOINTS:
        return
    if is_path and not path.is_absolute():
        raise SubmitError(
            f"train.init_from is {model!r}, which would be looked up in the run directory: use an "
            "absolute path"
        )
    missing = f"train.init_from is {model!r}: there is no such " + (
        "file or directory" if is_path else "model in the Hugging Face cache on this host"
    )
    if job.is_here or (is_path and path.parent.is_dir()):
        raise SubmitError(missing)
    yield missing + (" on this host" if is_path else "")


def _cached(job: Job, model: str) -> Path:
    """Return the path of a Hub model in the Hugging Face cache."""
    home = Path(job.profile.env.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return home / "hub" / f"models--{model.replace('/', '--')}"


def _packages(job: Job, plan: Mapping[str, Any]) -> Iterator[str]:
    """Reject values that need a package which this Python lacks. Warn if it is another Python."""
    train = plan["train"] if plan else {}
    python = python_of(job)
    for (key, value), (module, install) in _PACKAGES.items():
        if train.get(key) != value or _has(python, module):
            continue
        problem = f"train.{key} is {value!r}, but {python} does not have {module}: run {install}"
        if python == sys.executable:
            raise SubmitError(problem)
        yield problem


def _has(python: str, module: str) -> bool:
    """Check whether a Python has a module, without starting it. Return True if that is unknown."""
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    sites = [*Path(python).parent.parent.glob("lib/python3*/site-packages")]
    return not Path(python).is_absolute() or not sites or any((s / module).is_dir() for s in sites)
