"""The ingredients of a job's graph key: everything that shapes the job's graphs, nothing else.

All runs with the same key share their compiled graphs. Steps, learning rate, accumulation, seeds,
paths and names are not ingredients, because they are inputs of the graphs or do not affect them.
Environment variables are read from the rendered script, because a user's template can export other
variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from trnslurm.config.schema import Recipe
from trnslurm.declared import FREE, ON_OFF, read_declaration
from trnslurm.plan.spec import JobSpec
from trnslurm.render import code as source
from trnslurm.render.arguments import every_argument
from trnslurm.render.package import sources

# Variables that tracing and the compiler read. Variables for the runtime (NEURON_RT_), cache paths
# and rendezvous do not shape graphs.
_SHAPING = (
    r"(?!NEURON_RT_|NEURON_COMPILE_CACHE_URL$|XLA_PERSISTENT_CACHE_PATH$|XLA_COORDINATOR_PORT$"
    r"|TORCH_NEURONX_NEFF_|TORCH_NEURONX_DEBUG_DIR$)"
    r"((NEURON|XLA|PT_XLA|ALLREDUCE|TORCH_NEURONX)_\w+|DISABLE_NUMERIC_CC_TOKEN)$"
)
_COMPILER_FLAGS = "NEURON_CC_FLAGS"
# Options of the wrapper around neuronx-cc, which the compiler never sees.
_WRAPPER_FLAGS = r"--(retry_failed_compilation|no_cache|cache_dir(=\S+|\s+\S+))(?=\s|$)"


def ingredients(
    spec: JobSpec, files: Mapping[str, bytes], script: str, known: Mapping[str, str]
) -> dict[str, Any]:
    """Return everything that shapes the graphs of a rendered job, except package versions.

    `known` contains the checksums of the job's code files.
    """
    recipe, batch = spec.config.recipe, spec.batch
    environment = {name: text for name, text in _exports(script) if re.match(_SHAPING, name)}
    flags = re.sub(_WRAPPER_FLAGS, "", environment.pop(_COMPILER_FLAGS, ""))
    strategy = recipe.strategy.name
    entry = f"{spec.config.code_name}/{recipe.entry}"
    sharding = {"strategy": {strategy: getattr(recipe.strategy, strategy)}} if strategy else {}
    return {
        "device": spec.device.name,
        "instance_type": spec.instance.name,
        "nodes": batch.nodes,
        "workers_per_node": batch.workers_per_node,
        "micro_batch": batch.micro_batch,
        "seq_len": recipe.seq_len,
        "precision": recipe.precision,
        "model": dict(recipe.model),
        "train": _shaping_settings(recipe, files, entry),
        **_layers_compiled(spec),
        **sharding,
        **_script(recipe),
        "compiler_flags": " ".join(flags.split()),
        "environment": environment,
        "source": source.checksums(files, None if recipe.project else entry, known),
    }


def _layers_compiled(spec: JobSpec) -> dict[str, Any]:
    """Return train.compile if it affects the graphs that are stored under a key."""
    compiles = spec.config.recipe.train.get("compile", False)
    return {"compile": compiles} if spec.device.compile_shapes_graphs else {}


def _script(recipe: Recipe) -> dict[str, Any]:
    """Return a custom script's arguments. All can shape graphs, unless marked as free.

    Placeholders stay unfilled, because values from the plan that shape graphs are already
    ingredients.
    """
    if not recipe.project:
        return {}
    places = {name: v for name, v in recipe.places.items() if name not in recipe.graphs.free}
    arguments = [*every_argument(recipe)]
    return {"script": {"entry": recipe.entry, "arguments": arguments, "places": places}}


def _shaping_settings(recipe: Recipe, files: Mapping[str, bytes], entry: str) -> dict[str, Any]:
    """Return the settings that shape graphs: no free ones, and on_off ones as true or false."""
    code = sources(files)
    declared = read_declaration(lambda path: code.get(f"code/{path}"), entry, "Settings")
    free, on_off = {*recipe.graphs.free}, {*recipe.graphs.on_off}
    if declared:
        free |= declared.marked(FREE)
        on_off |= declared.marked(ON_OFF)
    return {k: bool(v) if k in on_off else v for k, v in recipe.train.items() if k not in free}


def _exports(script: str) -> Iterator[tuple[str, str]]:
    """Yield the variables that a rendered script exports, as bash reads them."""
    statement = ""
    for line in script.splitlines():
        if not (statement or line.startswith("export ")):
            continue
        statement += f"{line}\n"
        try:
            words = shlex.split(statement, comments=True)
        except ValueError:  # a quoted value continues on the next line
            continue
        statement = ""
        for word in words[1:]:
            name, equals, text = word.partition("=")
            if equals:
                yield name, text
