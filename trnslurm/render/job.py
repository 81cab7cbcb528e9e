"""Renders a job into a bundle. The same inputs always give the same bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trnslurm import __version__
from trnslurm.config.schema import Cluster, Config, Notify
from trnslurm.config.tree import plain
from trnslurm.contract.plan import JobPlan
from trnslurm.contract.plan import to_json as plan_to_json
from trnslurm.contract.rundir import (
    CAPS,
    CONFIG,
    INGREDIENTS,
    INPUTS,
    MIRROR,
    NODE_SCRIPT,
    NOTIFY,
    OF_COUNT,
    PLAN,
    PREPARE,
    ROLE_SCRIPT,
    ROLES,
    STRATEGY,
)
from trnslurm.plan.data import DataJob, data_path, first_parameters
from trnslurm.plan.inputs import inputs_json
from trnslurm.plan.sharding import named_in_plan
from trnslurm.plan.spec import JobSpec, fewer_nodes, has_own_batch, has_own_steps
from trnslurm.render.bundle import Bundle, kept_directories, snapshot
from trnslurm.render.code import sha256_of
from trnslurm.render.directives import set_by
from trnslurm.render.ingredients import ingredients
from trnslurm.render.plugins import plugin_files
from trnslurm.render.roles import roles_json, server_spec
from trnslurm.render.template import fill, open_templates
from trnslurm.render.values import data_values, training_values
from trnslurm.schedulers.choice import scheduler_of

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_SECTIONS = 1_000


def render_job(
    spec: JobSpec,
    template_dirs: Sequence[Path],
    *,
    code: Mapping[str, bytes] | None = None,
    known: Mapping[str, str] | None = None,
) -> Bundle:
    """Return the bundle of a training job, with a snapshot of its code or the given `code`.

    `known` contains checksums of the given code, because computing them takes longer than
    everything else for a large project.
    """
    environment = open_templates(template_dirs)
    cluster = spec.config.cluster
    code = code or snapshot(spec.config) | plugin_files(cluster)
    files = _files_of_count(spec, environment, code)
    fewer = fewer_nodes(spec)
    for each in fewer:
        files |= _files_of_count(each, environment, code, f"{OF_COUNT.format(each.nodes)}/")
    files[CONFIG] = _config_yaml(
        spec.config, name=spec.name, nodes=spec.nodes, phases=spec.phases, time_min=spec.time_min
    )
    files |= code
    known = known or sha256_of(code)
    for each in [spec, *fewer]:
        place = "" if each is spec else f"{OF_COUNT.format(each.nodes)}/"
        script = files[place + spec.scheduler.script_name(spec.phases[-1])].decode()
        shapes = ingredients(each, files, script, known)
        files[place + INGREDIENTS] = to_json(shapes)
    files |= notify_file(cluster.notify) | caps_file(spec.caps) | mirror_file(cluster)
    files |= kept_directories()
    return Bundle(files=dict(sorted(files.items())), known=known)


def _files_of_count(
    spec: JobSpec, environment: Environment, code: Mapping[str, bytes], place: str = ""
) -> dict[str, bytes]:
    """Return the files specific to a node count. A smaller count, in `place`, only trains."""
    scheduler = spec.scheduler
    files: dict[str, bytes] = {}
    for phase in ["train"] if place else spec.phases:
        values = training_values(spec, phase, code, place)
        text = fill(environment, scheduler.template, values)
        files[scheduler.script_name(phase)] = text.encode()
    values = training_values(spec, "train", code, place)
    files[NODE_SCRIPT] = fill(environment, "node.sh.j2", values).encode()
    files[PLAN] = to_json(plan_data(spec))
    if spec.strategy is not None:
        files[STRATEGY] = to_json(spec.strategy)
    if told := inputs_json(spec.config.recipe):
        files[INPUTS] = to_json(told)
    if spec.roles:
        files[ROLES] = to_json(roles_json(spec))
    for role in spec.roles:
        server = server_spec(spec, role, code)
        own = training_values(server, "train", code)
        files[ROLE_SCRIPT.format(role.name)] = fill(environment, "node.sh.j2", own).encode()
    return {place + name: text for name, text in files.items()}


def render_data_job(job: DataJob, template_dirs: Sequence[Path]) -> Bundle:
    """Return the bundle of a job that prepares data."""
    environment = open_templates(template_dirs)
    config, values = job.config, data_values(job)
    script = scheduler_of(config.cluster).script_name(PREPARE)
    files = {
        script: fill(environment, "prepare.sbatch.j2", values).encode(),
        NODE_SCRIPT: fill(environment, "prepare.sh.j2", values).encode(),
        CONFIG: _config_yaml(
            config, name=job.name, nodes=1, phases=[PREPARE], time_min={PREPARE: job.time_min}
        ),
    }
    files |= snapshot(config, parts=("prepare", "node"))
    files |= plugin_files(config.cluster) | notify_file(config.cluster.notify)
    files |= kept_directories()
    return Bundle(files=dict(sorted(files.items())))


def notify_file(notify: Notify) -> dict[str, bytes]:
    """Return notify.json for a bundle, or nothing without notifications."""
    if notify.command is None and notify.webhook is None and notify.plugin is None:
        return {}
    return {NOTIFY: to_json(plain(asdict(notify)))}


def caps_file(caps: Mapping[str, Any]) -> dict[str, bytes]:
    """Return caps.json for a bundle, or nothing without a cap."""
    return {CAPS: to_json(caps)} if caps else {}


def mirror_file(cluster: Cluster) -> dict[str, bytes]:
    """Return mirror.json for a bundle, or nothing without a mirror."""
    if not cluster.mirror:
        return {}
    bounds = {"mib_per_s": cluster.mirror_mib_per_s, "wait_min": cluster.mirror_wait_min}
    return {MIRROR: to_json({"place": cluster.mirror.rstrip("/"), **bounds})}


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
        device=spec.device.name,
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


def to_json(values: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file in a bundle."""
    return f"{json.dumps(values, indent=2)}\n".encode()


def _config_yaml(
    config: Config, *, name: str, nodes: int, phases: Sequence[str], time_min: Mapping[str, int]
) -> bytes:
    head: dict[str, Any] = {
        "trnslurm": __version__,
        "recipe_name": config.recipe_name,
        "preset": config.preset,
        "cluster_name": config.cluster_name,
        "name": name,
        "nodes": nodes,
        "phases": list(phases),
        "time_min": dict(time_min),
    }
    if whose := set_by(config):
        head["set_by"] = whose
    return to_config_yaml(head | {"config": dict(config.tree)})


def to_config_yaml(head: Mapping[str, Any]) -> bytes:
    """Return config.yaml."""
    note = "# The resolved configuration; `trnslurm show` prints where each value comes from.\n"
    config = head.get("config") or {}
    inside = "".join(_section(("config",), key, config[key]) for key in sorted(config))
    parts = {key: _section((), key, value) for key, value in head.items() if key != "config"}
    parts |= {"config": f"config:\n{inside}"} if inside else {}
    return (note + "".join(parts[key] for key in sorted(parts))).encode()


@functools.lru_cache(maxsize=1)
def _sections() -> dict[tuple[str, ...], str]:
    """Return the sections of config.yaml written so far; runs of a sweep share most of them."""
    return {}


def _section(above: tuple[str, ...], key: str, value: Any) -> str:
    """Return the lines for a key nested under others."""
    written = _sections()
    if (which := (*above, key, repr(value))) not in written:
        if len(written) >= _MOST_SECTIONS:
            written.clear()
        tree: dict[str, Any] = {key: value}
        for each in above:
            tree = {each: tree}
        text = yaml.safe_dump(tree, sort_keys=True)
        written[which] = text.split("\n", len(above))[-1]
    return written[which]
