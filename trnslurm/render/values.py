"""Makes the values for the templates of a job: the subjects of its scripts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trnslurm import __version__
from trnslurm.config.catalog import InstanceType, catalog
from trnslurm.config.schema import Config, Recipe
from trnslurm.contract.inputs import EXPORT, STEP, variable_of
from trnslurm.contract.options import BY_SHELL, AttemptOptions
from trnslurm.contract.rundir import PREPARE, RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.devices import DeviceType
from trnslurm.errors import RenderError
from trnslurm.node.graphs.manifest import cache_root
from trnslurm.plan.batch import formulas
from trnslurm.plan.data import DataJob, data_path, first_parameters
from trnslurm.plan.inputs import inputs_of, looks_for_inputs
from trnslurm.plan.spec import JobSpec, has_own_batch, has_own_steps, other_counts
from trnslurm.render.arguments import argument_words, states_checkpoint, uses_export, uses_out
from trnslurm.render.container import container_parts
from trnslurm.render.directives import data_resources, training_resources
from trnslurm.render.launch import ONCE, has_standby, training_launch
from trnslurm.render.project import PROJECT_CODE, PROJECT_FACTS
from trnslurm.render.roles import fields_of, local_hosts
from trnslurm.render.search_path import search_path
from trnslurm.render.subjects import (
    AttemptCall,
    BatchOnNodes,
    CompiledGraphs,
    ExportPart,
    Header,
    Hosts,
    Network,
    NeuronSettings,
    NodeEnvironment,
    NodePart,
    ProjectPart,
)
from trnslurm.schedulers.choice import scheduler_of

# With this much host memory, as on trn1.2xlarge, the compiler can be killed.
SMALL_GIB = 32
# Enough for 16,320 workers: a job needs 256 files plus four for each worker.
_OPEN_FILES = 65536
_CHOSEN = '--nodelist="$TRNSLURM_HOSTS" '


def training_values(
    spec: JobSpec, phase: str, code: Mapping[str, bytes], place: str = ""
) -> dict[str, Any]:
    """Return the values for batch.sbatch.j2, batch.sh.j2 and node.sh.j2.

    `place` is the directory of a smaller node count of a range.
    """
    config, cluster, recipe = spec.config, spec.config.cluster, spec.config.recipe
    title = f"{config.title} on {spec.nodes} x {spec.instance.name}, cluster {config.cluster_name}"
    one_part = "one node's part"
    inside = container_parts(cluster, there=_paths(spec, code), spec=spec)
    has_range = phase == "train" and (bool(place) or spec.least_nodes < spec.nodes)
    spares = spec.spares if phase == "train" else 0
    standby = phase == "train" and has_standby(spec)
    # Only graphs for the full node count are certain to be compiled.
    on_fewer = has_range and not compiles_ahead(spec)
    roles = spec.roles if phase == "train" and not spec.role else []
    fields, *components = fields_of(spec) if roles else [()]
    most = spec.nodes + spares + sum(r.all_nodes for r in roles if not r.component)
    efa = spec.instance.efa > 0 and spec.nodes > 1
    return {
        **_common_values(config),
        "phase": spec.role or phase,
        "role": spec.role,
        "apart": any(r.component for r in spec.roles if r.name == spec.role),
        "nodes": spec.nodes,
        "device": spec.device.name,
        "batch": spec.batch,
        "on_trainium": spec.device.on_trainium,
        "job": Header(
            title=f"{title}: {phase}",
            node_title=f"{title}: {f'a server of role {spec.role}' if spec.role else one_part}",
            by_hand=tuple(spec.scheduler.by_hand(spec.phases)),
            place=place,
        ),
        "plan": _plan(spec),
        "slurm": training_resources(
            spec, phase, f"{spec.least_nodes}-{most}" if on_fewer else str(most)
        ),
        "environment": _environment(
            config,
            {**(recipe.neuron.env if spec.device.sets_neuron_env else {}), **cluster.env},
            one_thread=recipe.launcher not in ONCE or not recipe.project,
        ),
        "network": Network(
            efa=efa,
            finds_plugin=spec.device.on_gpus and not inside.lines,
            emulated=spec.scheduler.is_here,
        ),
        "neuron": _neuron(spec, phase),
        "graphs": _graphs(spec, phase),
        "attempt": AttemptCall(
            options=_attempt_options(spec, phase, place),
            standby=standby,
            expedite=spec.requeues and cluster.slurm.expedite,
        ),
        "hosts": Hosts(
            nodelist=_CHOSEN if has_range or spares or roles else Hosts.nodelist,
            chooses=has_range or spares > 0 or bool(roles),
            roles=fields,
            components=tuple(components),
            trains=spec.nodes + spares,
            local_roles=" ".join(f"{r}={hosts}" for r, hosts in local_hosts(spec).items()),
            fewest=spec.least_nodes if on_fewer and not place else 0,
            spares_fetch=spares > 0 and bool(cluster.stage_python or inside.lines),
            local=",".join(f"local-{n}" for n in range(spec.nodes)),
        ),
        "container": inside,
        "project": _project(spec, code) if recipe.project else None,
        "takes": phase == "train" and looks_for_inputs(recipe),
        "stage_python": cluster.stage_python,
        "node": _node(spec, place),
        "launch": training_launch(spec, code, place),
    }


def data_values(job: DataJob) -> dict[str, Any]:
    """Return the values for prepare.sbatch.j2 and prepare.sh.j2."""
    config = job.config
    made = [config.cluster.data_root, str(Path(data_path(config)).parent)]
    there = [word for word in job.arguments if word.startswith(("/", "~/"))]
    return {
        **_common_values(config),
        "phase": PREPARE,
        "role": "",
        "apart": False,
        "nodes": 1,
        "device": "",
        "job": Header(
            title=f"Data of {config.title}, cluster {config.cluster_name}",
            by_hand=tuple(scheduler_of(config.cluster).by_hand([PREPARE])),
        ),
        "slurm": data_resources(job),
        "environment": _environment(config, config.cluster.env),
        "graphs": CompiledGraphs(),
        "attempt": AttemptCall(options="--nodes=1"),
        "hosts": Hosts(),
        "container": container_parts(config.cluster, made=made, there=there),
        "project": None,
        "takes": False,
        "stage_python": None,
        "arguments": job.arguments,
    }


def compiles_ahead(spec: JobSpec) -> bool:
    """Check whether a precompile job compiles the graphs of a job."""
    return spec.device.compiles_ahead and "precompile" in spec.phases


def _common_values(config: Config) -> dict[str, Any]:
    cluster = config.cluster
    return {"version": __version__, "python": cluster.python, "run_root": cluster.run_root}


def _environment(
    config: Config, variables: Mapping[str, str], *, one_thread: bool = False
) -> NodeEnvironment:
    cluster = config.cluster
    known = catalog(cluster.instance_types).get(cluster.instance_type)
    neuron = known is None or known.device.on_trainium
    return NodeEnvironment(
        umask=f"{cluster.umask:03o}",
        path=search_path(cluster.python, cluster.slurm.bin_dir, neuron=neuron),
        activate=cluster.activate,
        one_thread=one_thread,
        variables=tuple(sorted(variables.items())),
    )


def _plan(spec: JobSpec) -> BatchOnNodes:
    recipe, batch, others = spec.config.recipe, spec.batch, other_counts(spec)
    steps = "its own" if has_own_steps(recipe) else str(spec.steps)
    facts = [("global batch G", str(batch.global_batch)), ("micro-batch m", str(batch.micro_batch))]
    if has_own_batch(recipe):
        facts = [("batch", "the script's own")]
        row_of, row, unit = "W", [plan.workers for plan in others], "workers"
    elif batch.mode == "per_worker":
        row_of, row, unit = "G", [plan.global_batch for plan in others], "samples per step"
    else:
        size = batch.workers // batch.groups
        each = "worker" if size == 1 else f"group of {size} workers"
        row_of, row = "A", [plan.accumulation for plan in others]
        unit = f"micro-batches per {each} and step"
    width = max(len(str(number)) for number in [*row, others[-1].nodes])
    counts, values = (
        " ".join(str(number).rjust(width) for number in numbers)
        for numbers in ([plan.nodes for plan in others], row)
    )
    return BatchOnNodes(
        facts=(*facts, ("steps", steps)),
        formulas=formulas(batch)[: 1 if has_own_batch(recipe) else None],
        counts=counts,
        row_of=row_of,
        row=values,
        row_unit=unit,
    )


def _neuron(spec: JobSpec, phase: str) -> NeuronSettings:
    recipe, instance = spec.config.recipe, spec.instance
    # On the smallest instance.
    small = instance.host_gib <= SMALL_GIB
    once = phase == "precompile" and spec.device.parallel_compile and small
    sdk = spec.device.sdks.get(spec.config.cluster.neuron_sdk)
    return NeuronSettings(
        cc_flags=_cc_flags(recipe.neuron.cc_flags, instance, spec.device),
        lnc=instance.lnc,
        stochastic_rounding=_rounds_stochastically(recipe),
        compiles_once=once,
        graphs_ahead=sdk.graphs_ahead if sdk else 0,
    )


def _cc_flags(flags: str, instance: InstanceType, device: DeviceType) -> str:
    """Return the compiler's flags, including those that every job has on this instance type."""
    if instance.lnc and (found := re.search(r"(?<!\S)(--logical-nc-config|--?lnc)\b", flags)):
        raise RenderError(
            f"neuron.cc_flags contains {found[0]}, which changes the number of cores: set lnc, "
            "workers "
            f"and multi_node_workers under instance_types.{instance.name} in the profile instead"
        )
    own = [flag for flag in device.compiler_flags if flag not in flags.split()]
    if instance.lnc:
        own.append(f"--lnc={instance.lnc}")
    return " ".join([*own, flags] if flags else own)


def _rounds_stochastically(recipe: Recipe) -> bool:
    """Check whether bf16 parameters have no fp32 copy, so that rounding must be stochastic.

    AWS's BERT script does the same: with an fp32 copy or autocast it rounds to the nearest.
    """
    precision = recipe.train.get("optimizer_precision", "fp32_copy")
    return recipe.precision == "bf16" and precision != "fp32_copy"


def _graphs(spec: JobSpec, phase: str) -> CompiledGraphs:
    cluster, ahead = spec.config.cluster, compiles_ahead(spec)
    root = cache_root(cluster.compile_cache, cluster.run_root)
    below_home = root.startswith("~/")
    return CompiledGraphs(
        ahead=ahead,
        unverified=spec.device.compiles_ahead and not ahead and phase == "train",
        root=f'"$HOME/"{shlex.quote(root[2:])}' if below_home else shlex.quote(root),
        url=cluster.compile_cache,
        layout=cluster.compile_layout,
        trust=" ".join(cluster.compile_trust),
        per_host=cluster.compile_layout == "per-host" and spec.device.cache_on_nodes,
    )


def _attempt_options(spec: JobSpec, phase: str, place: str) -> str:
    """Return the options of trnslurm.node.attempt.

    Only a training phase can requeue its job, because only training shows whether it made progress.
    """
    slurm, trains = spec.config.cluster.slurm, phase == "train"
    returns = trains and spec.requeues
    counts = spec.scheduler.has_sbatch_lines  # and Slurm's variables, which describe the allocation
    fewer = returns and (bool(place) or spec.least_nodes < spec.nodes)
    return AttemptOptions(
        nodes=spec.nodes if counts else 0,
        graphs=compiles_ahead(spec),
        max_crashes=slurm.max_crashes if trains else 1,
        requeue=returns,
        script=BY_SHELL if returns else "",
        exclude_hours=slurm.exclude_hours if returns else 0.0,
        leave_out_slow=returns and slurm.leave_out_slow,
        spares=spec.spares if returns else 0,
        served=spec.served if trains else 0,
        fewer=fewer,
        grow_minutes=slurm.grow_minutes if fewer else 0.0,
        standby=returns and has_standby(spec),
        expedite=spec.requeues and slurm.expedite,
        hang_minutes=spec.config.recipe.hang_minutes or 0.0,
    ).words()


def _project(spec: JobSpec, code: Mapping[str, bytes]) -> ProjectPart:
    recipe, facts = spec.config.recipe, json.loads(code[PROJECT_FACTS])
    saves_in = recipe.checkpoints
    has_src = any(re.match(rf"{PROJECT_CODE}src/.*\.py$", name) for name in code)
    words = argument_words(spec)
    return ProjectPart(
        links=tuple(sorted(facts["links"].items())),
        imports=("", "/src") if has_src else ("",),
        checkpoints=f'"$PWD/work/"{shlex.quote(saves_in)}' if saves_in else '"$PWD/checkpoints"',
        checkpoint_glob=recipe.checkpoint_glob,
        keep_last=str(recipe.keep_last or ""),
        out=uses_out(recipe),
        follows=bool(recipe.follows),
        exports_followed=uses_export(recipe),
        exports=tuple(_exports(recipe)),
        resuming=" ".join(words.later),
        beginning=" ".join(words.first),
        resumes=_resumes(recipe, takes=words.takes_checkpoint),
        lightning_cli=any(
            b"LightningCLI" in data for name, data in code.items() if name.startswith(PROJECT_CODE)
        ),
    )


def _resumes(recipe: Recipe, *, takes: bool) -> str:
    """Return how a script continues from a checkpoint, as Variable.RESUMES has it."""
    if takes:
        return "told" if states_checkpoint(recipe) else "added"
    return "looks" if recipe.checkpoints else ""


def _exports(recipe: Recipe) -> Iterator[ExportPart]:
    """Yield the checkpoints of other runs that a script gets as Hugging Face folders."""
    if uses_export(recipe):
        step, target = f"${Variable.FOLLOWED_STEP}", f"${Variable.EXPORT}"
        yield ExportPart(place="followed/run", step=step, target=target)
    for one in inputs_of(recipe):
        if EXPORT in one.wants:
            step, target = (f"${variable_of(one.name, place)}" for place in (STEP, EXPORT))
            there = str(RunFiles(Path()).input(one.name))
            yield ExportPart(place=there, step=step, target=target)


def _node(spec: JobSpec, place: str) -> NodePart:
    cluster, recipe = spec.config.cluster, spec.config.recipe
    return NodePart(
        open_files=max(_OPEN_FILES, 256 + 4 * spec.batch.workers),  # as in the preflight
        preflight=cluster.preflight,
        num_devices=spec.instance.neuron_devices(spec.device),
        num_efa=spec.instance.efa_for(spec.device, spec.nodes),
        data=data_path(spec.config),
        usage_seconds=f"{cluster.usage_seconds:g}" if cluster.usage_seconds else "",
        hang_minutes=f"{recipe.hang_minutes:g}" if recipe.hang_minutes else "",
        profile=recipe.profile,
        no_kill=not spec.role and (spec.no_kill or bool(place)),
    )


def _paths(spec: JobSpec, code: Mapping[str, bytes]) -> Sequence[str]:
    """Return the paths outside the run directory that the job reads on its nodes."""
    first = first_parameters(spec.config)
    links = json.loads(code[PROJECT_FACTS])["links"] if spec.config.recipe.project else {}
    first = first if first.startswith(("/", "~/")) else ""
    return [data_path(spec.config), first, *links.values(), *spec.config.recipe.inputs.values()]
