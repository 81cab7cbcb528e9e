"""Renders a job into a bundle: the same inputs always give the same bytes."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trnslurm import __version__
from trnslurm.config.catalog import ON_GPUS, ON_TRAINIUM, WITH_EFA, InstanceType, catalog
from trnslurm.config.schema import Cluster, Config, Notify, Recipe
from trnslurm.config.tree import plain
from trnslurm.contract.options import BY_SHELL, AttemptOptions
from trnslurm.contract.plan import JobPlan
from trnslurm.contract.plan import to_json as plan_to_json
from trnslurm.errors import RenderError
from trnslurm.node.graphs.manifest import cache_root
from trnslurm.plan.data import DataJob, data_path, first_parameters
from trnslurm.plan.sharding import named_in_plan
from trnslurm.plan.spec import COMPILING, JobSpec, fewer_nodes, has_own_batch, has_own_steps
from trnslurm.render.arguments import argument_words
from trnslurm.render.bundle import MIRRORING, ON_NODES, Bundle, kept_directories, snapshot
from trnslurm.render.code import sha256_of
from trnslurm.render.container import container_values
from trnslurm.render.directives import data_options, training_options
from trnslurm.render.ingredients import ingredients
from trnslurm.render.project import PROJECT_CODE, PROJECT_FACTS, module_of
from trnslurm.render.search_path import search_path
from trnslurm.render.template import fill, open_templates
from trnslurm.rundir import (
    CAPS,
    CONFIG,
    INGREDIENTS,
    MIRROR,
    NODE_SCRIPT,
    NOTIFY,
    OF_COUNT,
    PLAN,
    PREPARE,
    STRATEGY,
)

if TYPE_CHECKING:
    from jinja2 import Environment

# With this host memory, as on trn1.2xlarge, the compiler may be killed.
SMALL_GIB = 32
# Enough for 16,320 workers: a job needs 256 files, and four for each worker.
_OPEN_FILES = 65536
_CHOSEN = '--nodelist="$TRNSLURM_HOSTS" '
# `submit --in`: the job may have more nodes.
_OF_A_STEP = '${TRNSLURM_STEP:+--nodelist="$TRNSLURM_HOSTS"} '
# Neuron's cache remembers graphs whose compilation failed or was interrupted, and skips them
# forever without this option of the compiler's wrapper. The option is not part of the graph key.
_RETRY = "--retry_failed_compilation"
_TIME_REASONS = {
    "precompile": "compiling large models takes up to an hour or two",
    "train": "the plan's estimate plus a quarter and 15 minutes, unless set",
}


def render_job(
    spec: JobSpec, template_dirs: Sequence[Path], *, code: Mapping[str, bytes] | None = None
) -> Bundle:
    """Return the bundle of a training job, with a snapshot of its code or the given `code`."""
    environment = open_templates(template_dirs)
    files: dict[str, bytes] = {}
    mirrors = [MIRRORING] if spec.config.cluster.mirror else []
    code = code or snapshot(spec.config, parts=(*ON_NODES, *mirrors))
    for phase in spec.phases:
        values = _values(spec, phase, code)
        text = fill(environment, "batch.sbatch.j2", values)
        files[script_name(phase, spec.config.cluster.scheduler)] = text.encode()
    files[NODE_SCRIPT] = fill(environment, "node.sh.j2", _values(spec, "train", code)).encode()
    files[PLAN] = to_json(plan_data(spec))
    if spec.strategy is not None:
        files[STRATEGY] = to_json(spec.strategy)
    fewer = fewer_nodes(spec)
    for each in fewer:
        files |= _files_of_count(each, environment, code)
    files[CONFIG] = _config_yaml(
        spec.config, name=spec.name, nodes=spec.nodes, phases=spec.phases, time_min=spec.time_min
    )
    files |= code
    known = sha256_of(code)
    for each in [spec, *fewer]:
        place = "" if each is spec else f"{OF_COUNT.format(each.nodes)}/"
        script = files[place + script_name(spec.phases[-1], spec.config.cluster.scheduler)].decode()
        shapes = ingredients(each, files, script, known)
        files[place + INGREDIENTS] = to_json(shapes)
    files |= notify_file(spec.config.cluster.notify) | caps_file(spec.caps)
    files |= mirror_file(spec.config.cluster)
    files |= kept_directories()
    return Bundle(files=dict(sorted(files.items())), known=known)


def _files_of_count(
    spec: JobSpec, environment: Environment, code: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return what a smaller node count of a range needs of its own."""
    place = f"{OF_COUNT.format(spec.nodes)}/"
    values = _values(spec, "train", code, place)
    files = {
        script_name("train", "slurm"): fill(environment, "batch.sbatch.j2", values).encode(),
        NODE_SCRIPT: fill(environment, "node.sh.j2", values).encode(),
        PLAN: to_json(plan_data(spec)),
    }
    if spec.strategy is not None:
        files[STRATEGY] = to_json(spec.strategy)
    return {place + name: text for name, text in files.items()}


def render_data_job(job: DataJob, template_dirs: Sequence[Path]) -> Bundle:
    """Return the bundle of a job that prepares data."""
    environment = open_templates(template_dirs)
    values = _data_values(job)
    config = job.config
    files = {
        script_name(PREPARE, "slurm"): fill(environment, "batch.sbatch.j2", values).encode(),
        NODE_SCRIPT: fill(environment, "prepare.sh.j2", values).encode(),
        CONFIG: _config_yaml(
            config, name=job.name, nodes=1, phases=[PREPARE], time_min={PREPARE: job.time_min}
        ),
    }
    files |= snapshot(config, parts=("prepare", "node"))
    files |= notify_file(config.cluster.notify)
    files |= kept_directories()
    return Bundle(files=dict(sorted(files.items())))


def notify_file(notify: Notify) -> dict[str, bytes]:
    """Return notify.json for a bundle; empty without notifications."""
    if notify.command is None and notify.webhook is None:
        return {}
    return {NOTIFY: to_json(plain(asdict(notify)))}


def caps_file(caps: Mapping[str, Any]) -> dict[str, bytes]:
    """Return caps.json for a bundle; empty without a cap."""
    return {CAPS: to_json(caps)} if caps else {}


def mirror_file(cluster: Cluster) -> dict[str, bytes]:
    """Return mirror.json for a bundle; empty without a mirror."""
    if not cluster.mirror:
        return {}
    bounds = {"mib_per_s": cluster.mirror_mib_per_s, "wait_min": cluster.mirror_wait_min}
    return {MIRROR: to_json({"place": cluster.mirror.rstrip("/"), **bounds})}


def script_name(phase: str, scheduler: str) -> str:
    """Return the name of the batch script: .sbatch for Slurm, .sh for the local cluster."""
    return f"{phase}.sbatch" if scheduler == "slurm" else f"{phase}.sh"


def plan_data(spec: JobSpec) -> dict[str, Any]:
    """Return plan.json: the numbers that the job reads and checks against its process group."""
    config, batch = spec.config, spec.batch
    recipe = config.recipe
    train = {**recipe.train, **named_in_plan(recipe)}
    if "init_from" in train:
        train["init_from"] = first_parameters(config)
    plan = JobPlan(
        recipe=config.recipe_name,
        preset=config.preset or "",
        cluster=config.cluster_name,
        instance_type=spec.instance.name,
        peak_tflops=spec.instance.bf16_tflops * batch.nodes,
        device=spec.device,
        batch=batch,
        seq_len=recipe.seq_len,
        steps=recipe.steps,
        precision=recipe.precision,
        seed=recipe.seed,
        data=data_path(config),
        model=dict(recipe.model),
        train=train,
    )
    return plan_to_json(plan, own_batch=has_own_batch(recipe), own_steps=has_own_steps(recipe))


def slurm_time(minutes: int) -> str:
    """Return minutes in Slurm's format: D-HH:MM:SS or HH:MM:SS."""
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def to_json(values: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file in a bundle."""
    return f"{json.dumps(values, indent=2)}\n".encode()


def _values(
    spec: JobSpec, phase: str, code: Mapping[str, bytes], place: str = ""
) -> dict[str, Any]:
    """Return the templates' values; `place` is the directory of a smaller node count."""
    config, cluster = spec.config, spec.config.cluster
    title = f"{config.title} on {spec.nodes} x {spec.instance.name}, cluster {config.cluster_name}"
    standby = phase == "train" and _has_standby(spec)
    neuron_env = config.recipe.neuron.env if spec.device == "neuron" else {}
    size = spec.batch.workers // spec.batch.groups
    return _common_values(config) | {
        "title": f"{title}: {phase}",
        "node_title": f"{title}: one node's part",
        "phase": phase,
        "attempt_options": _attempt_options(spec, phase, place),
        "job_name": f"{spec.name}-{phase}",
        "on_slurm": spec.on_slurm,
        "device": spec.device,
        "on_gpus": spec.device in ON_GPUS,
        "nodes": spec.nodes,
        **_range_values(spec, phase, place),
        "batch": spec.batch,
        "unit_of": "worker" if size == 1 else f"group of {size} workers",
        "steps": spec.steps,
        "padding_percent": f"{100 * spec.batch.padding:.1f}",
        "by_hand": _by_hand(spec),
        **_task_values(spec),
        "time_reason": _TIME_REASONS[phase],
        "time_limit": slurm_time(spec.time_min[phase]) if phase in spec.time_min else "",
        "directives": training_options(spec, phase) if spec.on_slurm else [],
        "neuron_cc_flags": _cc_flags(config.recipe.neuron.cc_flags, spec.instance, spec.device),
        "lnc": spec.instance.lnc,
        "stochastic_rounding": _rounds_stochastically(config.recipe),
        "srun_wait_s": 0 if phase == "precompile" else cluster.slurm.srun_wait_s,
        **_graph_values(spec, phase),
        "efa": spec.instance.efa > 0 and spec.nodes > 1,
        "open_files": max(_OPEN_FILES, 256 + 4 * spec.batch.workers),  # as the preflight
        "preflight": cluster.preflight,
        "usage_seconds": f"{cluster.usage_seconds:g}" if cluster.usage_seconds else "",
        "profile": config.recipe.profile,
        "hang_minutes": f"{config.recipe.hang_minutes:g}" if config.recipe.hang_minutes else "",
        "standby": standby,
        "expedite": spec.on_slurm and cluster.slurm.requeue and cluster.slurm.expedite,
        "no_kill": spec.no_kill or bool(place),
        "standby_prefix": "${TRNSLURM_STANDBY:+standby-}" if standby else "",
        "stage_python": cluster.stage_python,
        "run_root": cluster.run_root,
        "num_devices": spec.instance.accelerators if spec.device in ON_TRAINIUM else 0,
        "num_efa": spec.instance.efa if spec.nodes > 1 and spec.device in WITH_EFA else 0,
        "data": data_path(config),
        "compiles_once": _compiles_once(spec, phase),
        "env": sorted({**neuron_env, **cluster.env}.items()),
        "local_hosts": ",".join(f"local-{n}" for n in range(spec.nodes)),
        **_script_values(spec, code, place),
        **container_values(cluster, there=_paths(spec, code), spec=spec),
    }


def _paths(spec: JobSpec, code: Mapping[str, bytes]) -> list[str]:
    """Return the paths outside the run directory that the job reads on its nodes."""
    first = first_parameters(spec.config)
    links = json.loads(code[PROJECT_FACTS])["links"] if spec.config.recipe.project else {}
    return [data_path(spec.config), first if first.startswith(("/", "~/")) else "", *links.values()]


def _task_values(spec: JobSpec) -> dict[str, Any]:
    """Return the number of Slurm tasks per node: one launcher, or one per worker."""
    cpus = spec.config.cluster.slurm.cpus_per_task or spec.instance.vcpus
    tasks = spec.batch.workers_per_node if spec.config.recipe.launcher == "srun" else 1
    reason = "one launcher per node; torchrun starts the workers"
    if tasks > 1 or spec.config.recipe.launcher == "srun":
        reason = "the workers of a node, each of which srun starts"
    return {
        "tasks": tasks,
        "task_reason": reason,
        "cpus_per_task": max(1, cpus // tasks),
        "workers_per_task": spec.batch.workers_per_node // tasks,
        "cpus_reason": "every CPU of the node, for its workers",
    }


def _world_info(spec: JobSpec) -> str:
    """Return the nodes and their devices in the format of DeepSpeed's node launcher."""
    devices = list(range(spec.batch.workers_per_node))
    world = {f"node-{node}": devices for node in range(spec.nodes)}
    return base64.urlsafe_b64encode(json.dumps(world).encode()).decode()


def _range_values(spec: JobSpec, phase: str, place: str) -> dict[str, Any]:
    """Return how many nodes the job asks for, and from which count on it can do with fewer."""
    least, spares = spec.least_nodes, spec.spares if phase == "train" else 0
    has_range = phase == "train" and (bool(place) or least < spec.nodes)
    most = spec.nodes + spares
    # Graphs are surely compiled for the whole number only.
    starts_on_fewer = has_range and not _compiles_ahead(spec)
    return {
        "files": place,
        # With --ntasks-per-node, Slurm gives no more than the least number (22.05).
        "has_range": starts_on_fewer,
        "asked_nodes": f"{least}-{most}" if starts_on_fewer else most,
        "fewest": least if starts_on_fewer and not place else 0,
        "chooses": has_range or spares > 0,
        "spares": spares,
        "chosen_nodes": _CHOSEN if has_range or spares else _OF_A_STEP,
    }


def _script_values(spec: JobSpec, code: Mapping[str, bytes], place: str) -> dict[str, Any]:
    """Return the values for the script on each node: `script` and `resuming` are shell words."""
    config, recipe = spec.config, spec.config.recipe
    if not recipe.project:
        entry = shlex.quote(f"code/{config.code_name}/{recipe.entry}")
        return {"launcher": "torchrun", "script": f"{entry} {place}{PLAN}"}
    every, resuming = argument_words(spec)
    facts = json.loads(code[PROJECT_FACTS])
    return {
        "project": True,
        "links": sorted(facts["links"].items()),
        "saves_in": recipe.checkpoints,
        "launcher": recipe.launcher,
        "world_info": _world_info(spec),
        "once_per_node": recipe.launcher in ("python", "script"),
        "script": " ".join([*_launched(recipe, module_of(code, recipe.entry)), *every]),
        "src": any(re.match(rf"{PROJECT_CODE}src/.*\.py$", name) for name in code),
        "resuming": " ".join(resuming),
        "steps": "its own" if has_own_steps(recipe) else spec.steps,
        "knows_batch": not has_own_batch(recipe),
    }


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
        entry = f"{'-m' if python else '--module'} {shlex.quote(module)}"
    words = [*map(shlex.quote, options), entry]
    return ['"$TRNSLURM_PYTHON"', *words] if python else words


def _cc_flags(flags: str, instance: InstanceType, device: str) -> str:
    """Return the compiler's flags, with those that every job has on this instance type."""
    if instance.lnc and (found := re.search(r"(?<!\S)(--logical-nc-config|--?lnc)\b", flags)):
        raise RenderError(
            f"neuron.cc_flags has {found[0]}, which changes the number of cores: set lnc, workers "
            f"and multi_node_workers under instance_types.{instance.name} of the profile instead"
        )
    # An option of libneuronxla, without which TorchNeuron does.
    own = [_RETRY] if device == "neuron" and _RETRY not in flags.split() else []
    if instance.lnc:
        own.append(f"--lnc={instance.lnc}")
    return " ".join([*own, flags] if flags else own)


def _rounds_stochastically(recipe: Recipe) -> bool:
    """Check whether bf16 parameters have no fp32 copy, so that rounding must be stochastic.

    AWS's BERT script does the same: with an fp32 copy or autocast it rounds to the nearest.
    """
    precision = recipe.train.get("optimizer_precision", "fp32_copy")
    return recipe.precision == "bf16" and precision != "fp32_copy"


def _compiles_once(spec: JobSpec, phase: str) -> bool:
    """Check whether to give up a graph after one failure to compile: on the smallest instance."""
    return phase == "precompile" and spec.device == "neuron" and spec.instance.host_gib <= SMALL_GIB


def _attempt_options(spec: JobSpec, phase: str, place: str) -> str:
    """Return the options of trnslurm.node.attempt.

    Only a training may requeue its job: only a training can tell whether it got any further.
    """
    slurm, trains = spec.config.cluster.slurm, phase == "train"
    returns = trains and slurm.requeue and spec.on_slurm
    return AttemptOptions(
        nodes=spec.nodes if spec.on_slurm else 0,
        graphs=_compiles_ahead(spec),
        max_crashes=slurm.max_crashes if trains else 1,
        requeue=returns,
        script=BY_SHELL if returns else "",
        exclude_hours=slurm.exclude_hours if returns else 0.0,
        leave_out_slow=returns and slurm.leave_out_slow,
        spares=spec.spares if returns else 0,
        fewer=returns and (bool(place) or spec.least_nodes < spec.nodes),
        standby=returns and _has_standby(spec),
        expedite=slurm.requeue and slurm.expedite and spec.on_slurm,
        hang_minutes=spec.config.recipe.hang_minutes or 0.0,
    ).words()


def _has_standby(spec: JobSpec) -> bool:
    """Check whether the next attempt can be started ahead: its workers run Python files."""
    recipe = spec.config.recipe
    by_rank = not recipe.project or recipe.launcher not in ("python", "script")
    python = not recipe.project or recipe.entry.endswith(".py")
    return (
        recipe.standby
        and spec.on_slurm
        and spec.config.cluster.slurm.requeue
        and by_rank
        and python
    )


def _compiles_ahead(spec: JobSpec) -> bool:
    return spec.device in COMPILING and "precompile" in spec.phases


def _graph_values(spec: JobSpec, phase: str) -> dict[str, Any]:
    """Return the templates' values for the compile cache."""
    cluster = spec.config.cluster
    cache = cache_root(cluster.compile_cache, cluster.run_root)
    ahead = _compiles_ahead(spec)
    return {
        "compiles": ahead,
        "verifies_nothing": spec.device in COMPILING and not ahead and phase == "train",
        "compile_cache": cluster.compile_cache,
        "cache": cache,
        "cache_below_home": cache[2:] if cache.startswith("~/") else "",
        "compile_layout": cluster.compile_layout,
        "compile_trust": " ".join(cluster.compile_trust),
        "per_host": cluster.compile_layout == "per-host" and spec.device == "neuron",
    }


def _data_values(job: DataJob) -> dict[str, Any]:
    config = job.config
    return _common_values(config) | {
        "title": f"Data of {config.title}, cluster {config.cluster_name}",
        "phase": PREPARE,
        "attempt_options": "--nodes=1",
        "job_name": f"{job.name}-{PREPARE}",
        "on_slurm": True,
        "device": "",
        "on_gpus": False,
        "compiles": False,
        "files": "",
        "has_range": False,
        "asked_nodes": 1,
        "fewest": 0,
        "chooses": False,
        "spares": 0,
        "chosen_nodes": _OF_A_STEP,
        "standby": False,
        "standby_prefix": "",
        "expedite": False,
        "stage_python": None,
        "verifies_nothing": False,
        "nodes": 1,
        "by_hand": [f"sbatch {script_name(PREPARE, 'slurm')}"],
        "tasks": 1,
        "task_reason": "one program; it starts the others",
        "cpus_per_task": config.cluster.slurm.data_cpus,
        "cpus_reason": "slurm.data_cpus: a process on each",
        "time_reason": "slurm.data_time_min; what is finished by then is kept",
        "time_limit": slurm_time(job.time_min),
        "directives": data_options(job),
        "efa": False,
        "env": sorted(config.cluster.env.items()),
        "arguments": job.arguments,
        **container_values(
            config.cluster,
            made=[config.cluster.data_root, str(Path(data_path(config)).parent)],
            there=[word for word in job.arguments if word.startswith(("/", "~/"))],
        ),
    }


def _common_values(config: Config) -> dict[str, Any]:
    cluster = config.cluster
    known = catalog(cluster.instance_types).get(cluster.instance_type)
    neuron = known is None or known.device in ON_TRAINIUM
    return {
        "version": __version__,
        "umask": f"{cluster.umask:03o}",
        "path": search_path(cluster.python, cluster.slurm.bin_dir, neuron=neuron),
        "activate": cluster.activate,
        "python": cluster.python,
        "srun_wait_s": cluster.slurm.srun_wait_s,
        # For custom scripts only.
        "project": False,
        "links": [],
        "once_per_node": False,
        "resuming": "",
        "knows_batch": True,
    }


def _by_hand(spec: JobSpec) -> list[str]:
    if not spec.on_slurm:
        return [" && ".join(f"bash {script_name(p, 'local')}" for p in spec.phases)]
    if len(spec.phases) == 1:
        return [f"sbatch {script_name(spec.phases[0], 'slurm')}"]
    return [
        "id=$(sbatch --parsable precompile.sbatch)",
        'sbatch --dependency=afterok:"${id%%;*}" --kill-on-invalid-dep=yes train.sbatch',
    ]


def _config_yaml(
    config: Config, *, name: str, nodes: int, phases: Sequence[str], time_min: Mapping[str, int]
) -> bytes:
    head = {
        "trnslurm": __version__,
        "recipe_name": config.recipe_name,
        "preset": config.preset,
        "cluster_name": config.cluster_name,
        "name": name,
        "nodes": nodes,
        "phases": list(phases),
        "time_min": dict(time_min),
    }
    return to_config_yaml(head | {"config": dict(config.tree)})


def to_config_yaml(head: Mapping[str, Any]) -> bytes:
    """Return config.yaml."""
    note = "# The resolved configuration; `trnslurm show` tells where each value is from.\n"
    return (note + yaml.safe_dump(dict(head), sort_keys=True)).encode()
