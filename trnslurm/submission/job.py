"""Job: a rendered or reviewed bundle, along with what its submission needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml

from trnslurm.config.entry import Entry
from trnslurm.config.load import read_cluster, refuse_locked
from trnslurm.config.schema import Cluster, Config
from trnslurm.config.search import parse_yaml
from trnslurm.contract.files import newer_format
from trnslurm.contract.inputs import inputs_in
from trnslurm.contract.plan import FORMAT
from trnslurm.contract.roles import Role, roles_in
from trnslurm.contract.rundir import (
    CAPS,
    CONFIG,
    INGREDIENTS,
    INPUTS,
    NODE_SCRIPT,
    PLAN,
    PREPARE,
    ROLES,
)
from trnslurm.errors import SubmitError
from trnslurm.frozen import Frozen
from trnslurm.plan.batch import Estimate
from trnslurm.plan.data import DataJob, data_path
from trnslurm.plan.spec import JobSpec, check_job_name
from trnslurm.plan.values import SECTIONS, check_plan
from trnslurm.records.foreign import refuse_foreign
from trnslurm.render.bundle import Bundle, read_bundle
from trnslurm.render.job import render_data_job, render_job
from trnslurm.render.package import sources
from trnslurm.render.project import PROJECT_FACTS
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import Scheduler


class Job(Frozen):
    """A bundle, and what the submission needs to know about it."""

    bundle: Bundle
    name: str
    recipe: str
    preset: str | None
    cluster: str
    profile: Cluster
    nodes: int
    instance_type: str
    phases: tuple[str, ...]
    time_min: Mapping[str, int]
    """The time limit of each phase. Empty on the local cluster."""
    estimate: Estimate | None
    """The plan's estimate. None if no throughput is known, or for a reviewed bundle."""
    data: str
    """The training data, below the data root. Empty if the job includes its own data."""
    source_dir: str | None
    """The recipe's directory, whose git state is recorded."""
    precompile: str
    """As in the recipe: auto, always or never."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> where its value was set, except defaults. Empty for a reviewed bundle."""
    git: Mapping[str, Any] = field(default_factory=dict)
    """The git state of the recipe on the host that sent the job; None to read it on this host."""
    patch: bytes = b""
    """The uncommitted changes on that host."""

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that will start the job."""
        return scheduler_of(self.profile)

    @property
    def has_queue(self) -> bool:
        """Whether the job waits for a cluster's nodes and has time limits."""
        return self.scheduler.has_queue

    @property
    def is_here(self) -> bool:
        """Whether the job runs on this host, so it lacks anything that is missing here."""
        return self.scheduler.is_here

    @property
    def spare_nodes(self) -> int:
        return self.scheduler.spare_nodes(self.profile)

    @property
    def roles(self) -> list[Role]:
        """The servers that run alongside the training workers."""
        return roles_in(json.loads(self.bundle.files.get(ROLES, b"{}")))

    def limit_node_hours(self, phase: str) -> float:
        """Return the node-hours that a phase uses if it reaches its time limit."""
        beside = self.nodes_beside if phase == "train" else 0
        return (self.nodes + beside) * self.time_min.get(phase, 0) / 60

    @property
    def inputs(self) -> list[str]:
        """The directories of the runs from which the job uses files."""
        return [one.run for one in inputs_in(json.loads(self.bundle.files.get(INPUTS, b"{}")))]

    @property
    def nodes_beside(self) -> int:
        """The number of nodes in addition to the training nodes: spares, and the nodes of roles."""
        return self.spare_nodes + sum(role.all_nodes for role in self.roles)

    def sees(self, directory: Path) -> bool:
        """Check whether the job cannot find what this host does not find in a directory."""
        return self.scheduler.sees(directory)

    def script(self, phase: str) -> bytes:
        """Return the batch script of a phase."""
        return self.bundle.files[self.scheduler.script_name(phase)]

    @property
    def project(self) -> Mapping[str, Any] | None:
        """The facts about a custom script's project, or None if the job has no project."""
        text = self.bundle.files.get(PROJECT_FACTS)
        return json.loads(text) if text is not None else None

    @property
    def workers_per_node(self) -> int:
        """The number of workers per node, or 0 if the job prepares data and has none."""
        found = json.loads(self.bundle.files.get(PLAN, b"{}")).get("workers_per_node")
        return found if isinstance(found, int) else 0

    @property
    def caps(self) -> Mapping[str, Any]:
        """Return how much the run may use over all attempts, or empty if there is no cap."""
        try:
            caps: dict[str, Any] = dict(json.loads(self.bundle.files.get(CAPS, b"{}")))
            for name in caps.keys() - {"key"}:
                caps[name] = float(caps[name])
        except (ValueError, TypeError):
            raise SubmitError(
                f"{self.name}: its {CAPS} is damaged: render the bundle again"
            ) from None
        return caps

    @property
    def ingredients(self) -> Mapping[str, Any] | None:
        """Return everything that affects the job's graphs, or None if the bundle lacks the list."""
        text = self.bundle.files.get(INGREDIENTS)
        return json.loads(text) if text is not None else None


def make_job(
    spec: JobSpec,
    template_dirs: Sequence[Path],
    *,
    code: Mapping[str, bytes] | None = None,
    known: Mapping[str, str] | None = None,
) -> Job:
    """Render a spec into a job.

    `code` holds the code files of an existing bundle, and `known` their checksums.
    """
    config: Config = spec.config
    return Job(
        bundle=render_job(spec, template_dirs, code=code, known=known),
        name=spec.name,
        recipe=config.recipe_name,
        preset=config.preset,
        cluster=config.cluster_name,
        nodes=spec.nodes,
        instance_type=spec.instance.name,
        phases=spec.phases,
        time_min=spec.time_min,
        estimate=spec.estimate,
        data=data_path(config),
        source_dir=str(config.code_dir),
        profile=config.cluster,
        precompile=config.recipe.precompile,
        origins={
            key: f"{origin.layer}: {origin.source}"
            for key, origin in config.origins.items()
            if origin.layer != "default"
        },
    )


def make_prepare_job(data_job: DataJob, template_dirs: Sequence[Path]) -> Job:
    """Render a data preparation into a job."""
    config = data_job.config
    return Job(
        bundle=render_data_job(data_job, template_dirs),
        name=data_job.name,
        recipe=config.recipe_name,
        preset=config.preset,
        cluster=config.cluster_name,
        nodes=1,
        instance_type="",
        phases=(PREPARE,),
        time_min={PREPARE: data_job.time_min},
        estimate=None,
        data="",
        source_dir=str(config.code_dir),
        profile=config.cluster,
        precompile="never",
    )


def read_job(directory: Path) -> Job:
    """Read back the job of a reviewed bundle, byte for byte."""
    bundle = read_bundle(directory)
    places = {place for name in bundle.files for place in (Path(name), *Path(name).parents)}
    for path in filter(Path.exists, (directory / place for place in sorted(places))):
        refuse_foreign(path, "submit")
    try:
        head = parse_yaml(bundle.files[CONFIG])
        plan = json.loads(bundle.files[PLAN])
        if words := newer_format(plan, FORMAT):
            raise SubmitError(f"{directory} was {words}")
        tree, recipe = head["config"], str(head["recipe_name"])
        cluster = read_cluster(tree, f"{directory}/{CONFIG}")
        job = Job(
            bundle=bundle,
            name=check_job_name(str(head["name"])),
            recipe=recipe,
            preset=head["preset"],
            cluster=str(head["cluster_name"]),
            nodes=int(head["nodes"]),
            instance_type=cluster.instance_type,
            phases=tuple(map(str, head["phases"])),
            time_min={str(k): int(v) for k, v in head["time_min"].items()},
            estimate=None,
            data=str(plan["data"]),
            source_dir=None,
            profile=cluster,
            precompile=str(tree["precompile"]),
        )
        planned = plan["nodes"]
        if not all(isinstance(plan[section], dict) for section in SECTIONS):
            raise TypeError
        folder = "project" if tree.get("project") else f"jobs/{recipe}"
        entry = f"{folder}/{tree['entry']}"
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError):
        raise SubmitError(
            f"{directory} is not a rendered bundle: its {CONFIG} or {PLAN} is missing or damaged: "
            "make a bundle with `trnslurm render -o DIR`"
        ) from None
    refuse_locked(tree, str(directory))
    scripts = [*map(job.scheduler.script_name, job.phases)]
    files = [*scripts, NODE_SCRIPT]
    if Entry(str(tree["entry"])).is_file:
        files.append(f"code/{entry}")
    if missing := [name for name in files if name not in bundle.files]:
        raise SubmitError(
            f"{directory}: the bundle is missing {', '.join(missing)}: render it again"
        )
    if entry.endswith(".py"):
        code = sources(bundle.files)
        check_plan(plan, entry, lambda path: code.get(f"code/{path}"), f"{directory}/{PLAN}")
    if planned != job.nodes:
        raise SubmitError(
            f"{directory}: {PLAN} is for {planned} nodes, but {CONFIG} is for {job.nodes}: render "
            "the bundle again"
        )
    return job
