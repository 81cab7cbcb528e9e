"""How node.sh starts the workers: the launcher, and the command it starts."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping

from trnslurm.config.entry import Entry
from trnslurm.config.schema import Recipe
from trnslurm.config.script import OWN_LAUNCHER
from trnslurm.contract.rundir import PLAN
from trnslurm.devices import CPU
from trnslurm.frozen import Frozen
from trnslurm.plan.spec import JobSpec
from trnslurm.render.arguments import argument_words, uses_local_rank
from trnslurm.render.project import module_of

ONCE = ("python", "script", "job", "ray")
"""The launchers that start a script once per node, or once per job."""
GIVEN = "--given"
"""The launcher's option that gives a batch script the environment of the submitting shell."""
_NO_PYTHON = {"torchrun": "--no-python", "accelerate": "--no_python", "deepspeed": "--no_python"}
_KINDS = {
    *("__config_file", "__use_deepspeed", "__use_fsdp", "__use_megatron_lm"),
    *("__multi_gpu", "__cpu", "__tpu"),
}
"""The options that determine which kind of workers accelerate starts."""


class WorkerLaunch(Frozen):
    """The launcher and its arguments."""

    launcher: str
    """The name of a file in templates/launcher/."""
    script: str
    """Shell words: the script and its arguments."""
    world_info: str
    """All nodes and their devices, for DeepSpeed's launcher."""
    once: str
    """A prefix for commands that run once per node, for when node.sh runs once per worker."""
    workers_per_task: int
    here: bool
    """Whether the nodes are emulated, without Slurm's own job variables."""
    program: bool
    """Whether the script is a program that is not Python."""
    options: str
    """Shell words for trnslurm's own launcher, after a leading blank."""


def training_launch(spec: JobSpec, code: Mapping[str, bytes], place: str) -> WorkerLaunch:
    """Return how the workers of a node start. `place` is the directory of their plan."""
    recipe = spec.config.recipe
    launcher = recipe.launcher
    on_cpu = launcher == "accelerate" and spec.device is CPU
    if recipe.project:
        every = argument_words(spec).every
        module = module_of(code, recipe.entry)
        words = [*_launched(recipe, module, spec.batch.workers, on_cpu=on_cpu), *every]
    else:
        entry = f"code/{spec.config.code_name}/{recipe.entry}"
        words = [shlex.quote(entry), f"{place}{PLAN}"]
    return WorkerLaunch(
        launcher="accelerate-cpu" if on_cpu else launcher,
        script=" ".join(words),
        world_info=_world_info(spec),
        once='[ "$SLURM_LOCALID" != 0 ] ||\n' if launcher == "srun" else "",
        workers_per_task=spec.batch.workers_per_node // tasks_per_node(spec),
        here=spec.scheduler.is_here,
        program=bool(recipe.project) and not Entry(recipe.entry).is_python,
        options="".join(f" {shlex.quote(word)}" for word in _options_of_job(spec)),
    )


def _options_of_job(spec: JobSpec) -> list[str]:
    """Return the options for trnslurm's own launcher and for `job` and `ray`.

    A batch script keeps the variables of the profile.
    """
    if spec.config.recipe.launcher == OWN_LAUNCHER:
        return ["--fill-local-rank"] if uses_local_rank(spec.config.recipe) else []
    words, cluster = [*spec.config.recipe.launcher_arguments], spec.config.cluster
    if spec.config.recipe.launcher == "ray":
        return [f"--ray-option={word}" for word in words]
    if GIVEN in words and cluster.env:
        words.append(f"--keep={','.join(cluster.env)}")
    if cluster.slurm.array_task is not None:
        words.append(f"--task={cluster.slurm.array_task}")
    return words


def tasks_per_node(spec: JobSpec) -> int:
    """Return the number of Slurm tasks per node: one launcher, or one per worker."""
    return spec.batch.workers_per_node if spec.config.recipe.launcher == "srun" else 1


def has_standby(spec: JobSpec) -> bool:
    """Check whether standby workers can be started for the next attempt, which requires Python."""
    recipe = spec.config.recipe
    by_rank = not recipe.project or recipe.launcher not in ONCE
    python = not recipe.project or Entry(recipe.entry).is_python
    # The workers of a standby get the addresses of servers that may have moved since.
    return recipe.standby and spec.requeues and by_rank and python and not recipe.roles


def _launched(recipe: Recipe, module: str, workers: int, *, on_cpu: bool) -> list[str]:
    """Return the script's command: the launcher's options or the interpreter, then the script."""
    entry, launcher = Entry(recipe.entry), recipe.launcher
    by_itself = launcher in ("srun", *ONCE)
    python = launcher == "python" or (by_itself and entry.is_python)
    options = [] if launcher in ("job", "ray") else [*recipe.launcher_arguments]
    if launcher == "accelerate":
        options = [] if on_cpu else _for_accelerate(options, workers)
    words = [*map(shlex.quote, options)]
    if python:
        words.insert(0, '"$TRNSLURM_PYTHON"')
    name = entry.name
    if entry.is_module or (module and launcher != "script"):
        short = python or launcher == OWN_LAUNCHER
        return [*words, "-m" if short else "--module", shlex.quote(module or name)]
    if launcher in _NO_PYTHON and not entry.is_python:
        words.append(_NO_PYTHON[launcher])
    if entry.is_program:
        return [*words, shlex.quote(name)]
    if recipe.container.workdir:
        return [*words, f'"$TRNSLURM_RUN_DIR"/work/{shlex.quote(name)}']
    program = not entry.is_python or name.startswith("-")
    return [*words, shlex.quote(f"./{name}" if program else name)]


def _for_accelerate(options: list[str], workers: int) -> list[str]:
    """Return accelerate's options, plus options that keep it from guessing (commands/launch.py)."""
    if not options:
        return ["--multi_gpu", "--mixed_precision=no", "--dynamo_backend=no"]
    kinds = {word.partition("=")[0].replace("-", "_") for word in options} & _KINDS
    return options if kinds or workers < 2 else ["--multi_gpu", *options]


def _world_info(spec: JobSpec) -> str:
    """Return the nodes and their devices in the format of DeepSpeed's node launcher."""
    devices = list(range(spec.batch.workers_per_node))
    world = {f"node-{node}": devices for node in range(spec.nodes)}
    return base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
