"""How node.sh starts the workers: by which launcher, and what it starts."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping

from trnslurm.config.schema import Recipe
from trnslurm.config.script import OWN_LAUNCHER
from trnslurm.contract.rundir import PLAN
from trnslurm.devices import CPU
from trnslurm.frozen import Frozen
from trnslurm.plan.spec import JobSpec
from trnslurm.render.arguments import argument_words
from trnslurm.render.project import module_of


class WorkerLaunch(Frozen):
    """The launcher, and the words for it."""

    launcher: str
    """The name of a file in templates/launcher/."""
    script: str
    """Shell words: the script, and its arguments."""
    world_info: str
    """All nodes and their devices, for DeepSpeed's launcher."""
    once: str
    """Before a command that runs once per node, where node.sh runs once per worker."""
    workers_per_task: int


def training_launch(spec: JobSpec, code: Mapping[str, bytes], place: str) -> WorkerLaunch:
    """Return how the workers of a node start; `place` is the directory of their plan."""
    recipe = spec.config.recipe
    launcher = recipe.launcher
    if recipe.project:
        every, _ = argument_words(spec)
        words = [*_launched(recipe, module_of(code, recipe.entry)), *every]
    else:
        entry = f"code/{spec.config.code_name}/{recipe.entry}"
        words = [shlex.quote(entry), f"{place}{PLAN}"]
    on_cpu = launcher == "accelerate" and spec.device is CPU
    return WorkerLaunch(
        launcher="accelerate-cpu" if on_cpu else launcher,
        script=" ".join(words),
        world_info=_world_info(spec),
        once='[ "$SLURM_LOCALID" != 0 ] ||\n' if launcher == "srun" else "",
        workers_per_task=spec.batch.workers_per_node // tasks_per_node(spec),
    )


def tasks_per_node(spec: JobSpec) -> int:
    """Return the number of Slurm tasks per node: one launcher, or one per worker."""
    return spec.batch.workers_per_node if spec.config.recipe.launcher == "srun" else 1


def has_standby(spec: JobSpec) -> bool:
    """Check whether the next attempt can be started ahead: its workers run Python files."""
    recipe = spec.config.recipe
    by_rank = not recipe.project or recipe.launcher not in ("python", "script")
    python = not recipe.project or recipe.entry.endswith(".py")
    return recipe.standby and spec.requeues and by_rank and python


def _launched(recipe: Recipe, module: str) -> list[str]:
    """Return the script's command: the launcher's options or the interpreter, and the script."""
    by_itself = recipe.launcher in ("srun", "python", "script")
    python = recipe.launcher == "python" or (by_itself and recipe.entry.endswith(".py"))
    options = [*recipe.launcher_arguments]
    if recipe.launcher == "accelerate" and not options:
        options = ["--multi_gpu", "--mixed_precision=no", "--dynamo_backend=no"]
    program = (by_itself and not python) or recipe.entry.startswith("-")
    entry = shlex.quote(f"./{recipe.entry}" if program else recipe.entry)
    if recipe.container.workdir:
        entry = f'"$TRNSLURM_RUN_DIR"/work/{shlex.quote(recipe.entry)}'
    if module and recipe.launcher != "script":
        option = "-m" if python or recipe.launcher == OWN_LAUNCHER else "--module"
        entry = f"{option} {shlex.quote(module)}"
    words = [*map(shlex.quote, options), entry]
    return ['"$TRNSLURM_PYTHON"', *words] if python else words


def _world_info(spec: JobSpec) -> str:
    """Return the nodes and their devices in the format of DeepSpeed's node launcher."""
    devices = list(range(spec.batch.workers_per_node))
    world = {f"node-{node}": devices for node in range(spec.nodes)}
    return base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
