"""JobSpec: one complete training job, made from the configuration, catalog and batch plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trnslurm.config.catalog import InstanceType, catalog, find
from trnslurm.config.recipes import STRATEGY_FILE
from trnslurm.config.schema import Cluster, Config, Recipe, Reference
from trnslurm.config.software import device_of, device_of_sdk
from trnslurm.config.times import LONGEST_MIN
from trnslurm.config.tree import lookup
from trnslurm.contract.plan import BatchPlan
from trnslurm.contract.roles import Role
from trnslurm.devices import DEVICES, DeviceType
from trnslurm.errors import ConfigError, PlanError
from trnslurm.frozen import Frozen
from trnslurm.plan.batch import Estimate, estimate, plan_batch
from trnslurm.plan.roles import beside, nodes_of_roles, roles_of
from trnslurm.plan.sharding import group_size, is_decided, strategy_file, usable_devices
from trnslurm.plan.size import limit_of, sized
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import Scheduler

_JOB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_START_UP_MIN = 15  # nodes boot one by one; a cold start loads data and graphs
_SHOWN_NODES = (1, 2, 3, 4, 8, 16)  # in a script's header
_MOST_NODES = 65_536  # in a Slurm cluster
_OF_OTHERS = 0.5
"""A guess assumes this part of the fraction of peak that another instance type reaches."""
_PRECOMPILE_MIN = 180  # AWS reports 13 to 40 minutes for BERT-large; larger models take longer

# A known speed holds for these settings only.
_DECIDE_SPEED = (
    "seq_len", "precision", "batch.micro_batch", "model", "strategy", "device",
    "train.gradient_checkpointing", "train.optimizer", "train.optimizer_precision", "train.zero1",
    "train.attention", "train.compile",
)  # fmt: skip


class JobSpec(Frozen):
    """One complete job: the script, the cluster, the nodes and the time limits."""

    config: Config
    name: str
    instance: InstanceType
    device: DeviceType
    nodes: int
    batch: BatchPlan
    strategy: Mapping[str, Any] | None
    """The content of strategy.json, if the recipe names a strategy."""
    estimate: Estimate | None
    phases: tuple[str, ...]
    """`precompile`, if there is something to compile, and `train`."""
    time_min: Mapping[str, int]
    """The time limit of each phase. Empty on the local cluster."""
    role: str = ""
    """The role that this job serves, or empty for the training job."""

    @property
    def scheduler(self) -> Scheduler:
        return scheduler_of(self.config.cluster)

    @property
    def has_queue(self) -> bool:
        """Check whether the job waits for a cluster's nodes and has time limits."""
        return self.scheduler.has_queue

    @property
    def requeues(self) -> bool:
        """Check whether the job is started again after one of its nodes fails."""
        return self.scheduler.requeues and self.config.cluster.slurm.requeue

    @property
    def spares(self) -> int:
        """Return the number of spares."""
        return self.scheduler.spare_nodes(self.config.cluster)

    @property
    def roles(self) -> list[Role]:
        """Return the servers of the job, in the order in which they start."""
        return roles_of(self.config)

    @property
    def served(self) -> int:
        """Return the number of nodes that the job has for servers."""
        return nodes_of_roles(self.config)

    @property
    def apart(self) -> int:
        """Return the number of server nodes that are in other partitions."""
        return nodes_of_roles(self.config, apart=True)

    @property
    def all_nodes(self) -> int:
        """Return the number of all nodes of the job: workers, spares and servers."""
        return self.nodes + self.spares + self.served

    @property
    def no_kill(self) -> bool:
        """Check whether the workers may continue in their job without a failed node."""
        spared = self.spares > 0 or any(role.spares for role in self.roles)
        return not self.role and (spared or self.least_nodes < self.nodes)

    @property
    def least_nodes(self) -> int:
        """Return the smallest number of nodes on which the job may train."""
        return self.config.cluster.slurm.min_nodes or self.nodes

    @property
    def caps(self) -> dict[str, Any]:
        """Return the caps on all attempts together, or an empty mapping."""
        return caps_of(self.config.cluster, self.instance, self.roles)

    @property
    def steps(self) -> int:
        """Return the steps of the run: recipe.steps, or fewer if train.epochs ends it sooner."""
        return steps_of(self.config, self.batch)

    @property
    def epochs(self) -> int | None:
        """Return the number of epochs started; the last may be partial. None means unknown."""
        if ends_unknown(self.config) or self.steps < self.config.recipe.steps:
            return _epochs(self.config)
        samples = _samples_per_epoch(self.config)
        return math.ceil(self.steps * self.batch.global_batch / samples) if samples else None

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch * self.config.recipe.seq_len


def caps_of(cluster: Cluster, instance: InstanceType, roles: Sequence[Role]) -> dict[str, Any]:
    """Return the caps on all attempts together, or an empty mapping."""
    slurm, price = cluster.slurm, instance.price_per_hour
    found: dict[str, Any] = {}
    if slurm.max_attempts:
        found["attempts"] = slurm.max_attempts
    hours = {"slurm.max_node_hours": slurm.max_node_hours}
    if slurm.max_cost:
        if any(role.component for role in roles):
            raise PlanError(
                "slurm.max_cost: the price of nodes in a role's own partition is unknown: set "
                "slurm.max_node_hours instead"
            )
        if not price:
            raise PlanError(
                f"slurm.max_cost: the price of {instance.name} is unknown: set "
                f"instance_types.{instance.name}.price_per_hour, or slurm.max_node_hours instead"
            )
        hours["slurm.max_cost"] = round(slurm.max_cost / price, 4)
    known = {key: most for key, most in hours.items() if most}
    if known:
        key = min(known, key=lambda k: known[k])
        found |= {"node_hours": known[key], "key": key, "stop_before_s": slurm.stop_before_s}
    return found


def make_spec(
    config: Config,
    nodes: int,
    *,
    name: str | None = None,
    need_time: bool = True,
    held: bool = False,
) -> JobSpec:
    """Make a job from a configuration and a node count. Reject settings that contradict.

    In a job that the user already holds, an unknown time limit is that of the held job. The job
    names every partition of the profile that allows it.
    """
    specs: list[JobSpec] = []
    refused: list[ConfigError | PlanError] = []
    for each in _by_partition(config, held=held):
        try:
            specs.append(_make_spec(each, nodes, name=name, need_time=need_time, held=held))
        except (ConfigError, PlanError) as error:
            refused.append(error)
    if not specs:
        said = {*map(str, refused)}
        raise refused[0] if len(said) == 1 else ConfigError("; ".join(map(str, refused)))
    return _in_any_partition(specs)


def _by_partition(config: Config, *, held: bool) -> Iterator[Config]:
    """Yield the configuration with only the profile's partition, then with each of its others."""
    slurm = config.cluster.slurm
    others = {} if held else slurm.partitions
    alone = replace(slurm, partitions={})  # all node counts of a range are in one
    for own in (alone, *(replace(alone, partition=n, **vars(a)) for n, a in others.items())):
        yield replace(config, cluster=replace(config.cluster, slurm=own))


def _in_any_partition(specs: Sequence[JobSpec]) -> JobSpec:
    """Return the job for all partitions of the specs.

    Slurm uses the partition that can start the job first, skips one that is down, and chooses again
    when the job is requeued (seen on 22.05 and 24.11; sbatch(1), --partition). `sbatch --test-only`
    would only report the current start time. With several partitions, 22.05 tries only the first.
    """
    first, each = specs[0], [spec.config.cluster.slurm for spec in specs]
    names = [slurm.partition for slurm in each if slurm.partition]
    if len(specs) == 1 or len(names) < len(specs):
        return first
    slurm = replace(
        each[0],
        partition=",".join(names),
        max_time_min=min((s.max_time_min for s in each if s.max_time_min), default=None),
    )
    config = replace(first.config, cluster=replace(first.config.cluster, slurm=slurm))
    time_min = {phase: min(spec.time_min[phase] for spec in specs) for phase in first.time_min}
    return replace(first, config=config, time_min=time_min)


def _make_spec(
    config: Config, nodes: int, *, name: str | None, need_time: bool, held: bool
) -> JobSpec:
    cluster, recipe = config.cluster, config.recipe
    instance = find(catalog(cluster.instance_types), cluster.instance_type)
    device = _device(config, instance)
    job_name = check_job_name(name or config.recipe_name)
    _check_nodes(config, instance, nodes, device)
    _check_roles(config, nodes)
    workers = _workers(cluster, instance, nodes)
    instance.check_workers(workers, nodes)
    batch = _plan_batch(recipe, nodes, workers)
    config = sized(config, instance, nodes + beside(config, apart=False))
    expected = _estimate(config, instance, batch)
    compiles = recipe.precompile == "always" or (
        recipe.precompile == "auto" and device.compiles_ahead
    )
    if compiles and recipe.project and not device.compiles_scripts_ahead:
        raise ConfigError(
            f"a custom script cannot be precompiled on {device}: its graphs are compiled during "
            "training and kept for the run's next attempts: set precompile to never"
        )
    phases = ("precompile", "train") if compiles else ("train",)
    strategy = strategy_file(recipe, batch, config.origins)
    return JobSpec(
        config=config,
        name=job_name,
        instance=instance,
        device=device,
        nodes=nodes,
        batch=batch,
        strategy=strategy,
        estimate=expected,
        phases=phases,
        time_min=_time_limits(config, instance, phases, expected, held=held) if need_time else {},
    )


def _workers(cluster: Cluster, instance: InstanceType, nodes: int) -> int:
    """Return the workers per node. A job with only some of a node's GPUs has one per GPU."""
    gpus = cluster.slurm.gpus_per_node or instance.gpus
    part = gpus if gpus < instance.gpus else 0
    return cluster.workers_per_node or part or instance.default_workers(nodes)


def _plan_batch(recipe: Recipe, nodes: int, workers: int) -> BatchPlan:
    own = has_own_batch(recipe)
    return plan_batch(
        mode="per_worker" if own else recipe.batch.mode,
        global_batch=recipe.batch.global_batch,
        per_worker=recipe.batch.micro_batch if own else recipe.batch.per_worker,
        micro_batch=recipe.batch.micro_batch,
        nodes=nodes,
        workers_per_node=workers,
        group_size=group_size(recipe, workers),
        allow_idle=recipe.batch.allow_idle,
        padding=recipe.batch.padding,
    )


def other_counts(spec: JobSpec) -> list[BatchPlan]:
    """Return the batch for a few node counts on which the job can train, including this one."""
    found, cluster = [], spec.config.cluster
    for nodes in sorted({*_SHOWN_NODES, spec.nodes}):
        workers = _workers(cluster, spec.instance, nodes)
        try:
            _check_nodes(spec.config, spec.instance, nodes, spec.device)
            sized(spec.config, spec.instance, nodes)
            spec.instance.check_workers(workers, nodes)
            found.append(_plan_batch(spec.config.recipe, nodes, workers))
        except (ConfigError, PlanError):
            if nodes == spec.nodes:
                raise
    return found


def fewer_nodes(spec: JobSpec) -> list[JobSpec]:
    """Return the specs for the smaller node counts of a range that the batch allows."""
    least, most = spec.least_nodes, spec.nodes
    if least == most or "train" not in spec.phases:
        return []
    asked = f"--nodes {least}-{most}"
    if least > most:
        raise ConfigError(f"{asked}: the first number must be smaller than the second")
    slurm = spec.config.cluster.slurm
    if not (spec.requeues and slurm.exclusive):
        why = "a range requires Slurm, slurm.requeue and slurm.exclusive"
        raise ConfigError(f"{asked}: {why}: use --nodes {most}")
    found, why = [], ""
    for nodes in range(least, most):
        try:
            fewer = make_spec(spec.config, nodes, name=spec.name)
        except (ConfigError, PlanError) as error:
            why = why or str(error)
            continue
        same = fewer.batch.global_batch == spec.batch.global_batch
        if not same and not has_own_batch(spec.config.recipe):
            raise ConfigError(
                f"{asked}: the global batch grows with the number of nodes (batch.mode "
                "per_worker), so the result would depend on it: pass a single number"
            )
        found.append(replace(fewer, phases=spec.phases, time_min=spec.time_min))
    if not found:
        raise ConfigError(f"{asked}: the job does not fit on fewer nodes: {why}")
    return found


def has_own_batch(recipe: Recipe) -> bool:
    """Check whether a custom script decides its batch, which trnslurm then does not know."""
    return bool(recipe.project) and recipe.batch.mode == "fixed" and not recipe.batch.global_batch


def has_own_steps(recipe: Recipe) -> bool:
    """Check whether a custom script decides its steps, which trnslurm then does not know."""
    return bool(recipe.project) and recipe.steps == Recipe.steps


def check_job_name(name: str) -> str:
    """Return the name if it is safe in scripts, file names and Slurm's listings."""
    if not re.fullmatch(_JOB_NAME, name):
        raise ConfigError(
            f"job name {name!r}: use 1 to 64 letters, digits, '.', '_' and '-', starting with a "
            "letter or digit"
        )
    return name


def _device(config: Config, instance: InstanceType) -> DeviceType:
    """Return the device that the job runs on, or raise an error that lists the supported ones."""
    recipe, asked = config.recipe, config.cluster.device
    usable = usable_devices(recipe)
    device = instance.choose_device(asked, usable)
    if asked == "auto":
        of_sdk = device_of(config.cluster, instance)
        device = of_sdk if of_sdk.name in (usable or DEVICES) else device
    if device is None:
        able = f"{config.title} runs on {', '.join(usable)}"
        has = f"{instance.name} has {instance.device}"
        asks = f"{config.origins['device'].source or 'the default'} requests {asked}"
        if asked == "auto" and instance.own_devices(usable):
            raise ConfigError(
                f"{able}, and PyTorch/XLA has not supported GPUs since 2.8: choose another preset "
                "or cluster, or pass --set device=xla-cuda if the nodes' Python has TorchAcc's "
                "build of it"
            )
        if asked == "auto":
            reasons = (able, has)
        else:
            reasons = (able if usable and asked not in usable else has, asks)
        way = "choose another cluster, preset or device"
        if recipe.project and instance.device.imports:
            way += (
                f"; if the script uses {instance.device.imports[0]}, pass --set "
                f"'devices=[{instance.device}]'"
            )
        raise ConfigError(f"{', and '.join(reasons)}: {way}")
    if device.sdks:
        _check_sdk(config, instance, device)
    return device


def _check_sdk(config: Config, instance: InstanceType, device: DeviceType) -> None:
    """Reject a Neuron SDK release for the other device, and a cache that the device cannot use."""
    cluster = config.cluster
    if (other := device_of_sdk(cluster.neuron_sdk)) is not device:
        usable = instance.own_devices(usable_devices(config.recipe))
        or_device = f", or device to {other}" if other in usable else ""
        raise ConfigError(
            f"neuron_sdk {cluster.neuron_sdk} is for device {other}, but {config.title} on "
            f"{instance.name} uses {device}: set neuron_sdk to "
            f"{' or '.join(device.sdks)}{or_device}"
        )
    if why := device.why_not_cached(cluster.compile_cache or "", cluster.compile_layout):
        raise ConfigError(why)


def _check_nodes(config: Config, instance: InstanceType, nodes: int, device: DeviceType) -> None:
    limit = config.cluster.slurm.max_nodes
    if nodes > _MOST_NODES:
        raise ConfigError(f"--nodes {nodes}: a cluster has at most {_MOST_NODES:,} nodes")
    scheduler = scheduler_of(config.cluster)
    spares = scheduler.spare_nodes(config.cluster)
    if config.cluster.slurm.spares and not spares:
        why = "slurm.requeue is false" if scheduler.requeues else "this machine has no spare nodes"
        raise ConfigError(
            f"--spares {config.cluster.slurm.spares}: {why}, so spares are useless: omit the option"
        )
    if spares and nodes == 1 and config.cluster.slurm.min_nodes is None:
        raise ConfigError(
            f"--spares {spares}: a job ends if its first node is lost, so spares cannot help a run "
            "on one node: omit the option"
        )
    served = nodes_of_roles(config, apart=False)
    if limit is not None and nodes + spares + served > limit:
        asked = f"--nodes {nodes}" + (f" with --spares {spares}" if spares else "")
        asked += f" and {served} for roles" if served else ""
        key, way = limit_of(config, "max_nodes")
        raise ConfigError(f"{asked} is more than {key} ({limit}): use at most {limit}, or {way}")
    # Slurm refuses a range that begins below a partition's MinNodes (seen on 22.05 and 24.11).
    least = min(nodes, config.cluster.slurm.min_nodes or nodes)
    if (fewest := config.cluster.slurm.fewest_nodes) and 0 < least < fewest:
        key, way = limit_of(config, "fewest_nodes")
        raise ConfigError(
            f"--nodes {least} is less than {key} ({fewest}): use at least {fewest}, or {way}"
        )
    emulated = nodes > 1 and scheduler.is_here
    if emulated and (why := device.why_one_node(nodes, instance.name)):
        raise ConfigError(why)


def _check_roles(config: Config, nodes: int) -> None:
    if nodes == 1 and any(role.spares for role in roles_of(config)):
        raise ConfigError(
            "roles with spares: a job ends if its first node is lost, so spares cannot help a run "
            "on one node: remove the roles' spares, or pass --nodes 2"
        )
    if config.recipe.roles and config.cluster.slurm.min_nodes not in (None, nodes):
        raise ConfigError(
            "roles do not work with a range of nodes: pass a single number to --nodes"
        )
    spared = config.cluster.slurm.spares or any(role.spares for role in roles_of(config))
    if spared and nodes_of_roles(config, apart=True):
        # --no-kill holds for all components. When one of these nodes is down, Slurm then requeues
        # its component alone, and holds the whole job (kill_running_job_by_node_name in
        # src/slurmctld/job_mgr.c; seen on 22.05).
        raise ConfigError(
            "roles with a partition: Slurm stops a job that loses a node in that partition, so "
            "spares are useless: omit --spares and the roles' spares"
        )


def steps_of(config: Config, batch: BatchPlan) -> int:
    """Return the number of steps of the whole run, as the runtime counts them from the data."""
    recipe, epochs, samples = config.recipe, _epochs(config), _samples_per_epoch(config)
    if not epochs or not samples:
        return recipe.steps
    return min(recipe.steps, math.ceil(epochs * samples / batch.global_batch))


def _epochs(config: Config) -> int:
    """Return train.epochs, or 0 if only the steps end the run."""
    epochs = config.recipe.train.get("epochs", 0)
    return epochs if isinstance(epochs, int) and epochs > 0 else 0


def _samples_per_epoch(config: Config) -> int | None:
    """Return the samples per epoch, or None if unknown, as for data given on the command line."""
    asked = _asked(config)
    # Other data, or samples of another length, change that number.
    other = "data.samples" not in asked and any(k.startswith(("data.", "seq_len")) for k in asked)
    return None if other else config.recipe.data.samples


def ends_unknown(config: Config) -> bool:
    """Check whether epochs end the run after an unknown number of steps."""
    known = _samples_per_epoch(config) or "steps" in _asked(config)
    return bool(_epochs(config)) and not known


def why_no_hours(config: Config, instance: InstanceType, job: str) -> str:
    """Return why the hours of a job are unknown."""
    said = where_set(config, instance)
    if not said and _known(config, instance) and ends_unknown(config):
        return (
            f"train.epochs ends {job}, but data.samples, the number of samples in its data, is "
            "not set"
        )
    return f"the throughput of {job} on {instance.name}{said} is unknown"


def where_set(config: Config, instance: InstanceType) -> str:
    """Return the part of a message that lists settings whose speed is unknown."""
    known = _known(config, instance)
    compared = {key for reference in known for key in reference.of}
    keys = _changed(config, instance) if config.recipe.reference else []
    if keys := [key for key in keys if key not in compared]:
        return f" with {', '.join(keys)} set"
    if not known:
        return ""
    others = min((_unlike(config, reference) for reference in known), key=len)
    pairs = ", ".join(f"{key}={' or '.join(values)}" for key, values in others.items())
    return f" (published for {pairs})" if pairs else ""


def _changed(config: Config, instance: InstanceType) -> list[str]:
    """Return the command-line settings that differ from the measured job."""
    asked = {key for key in _asked(config) if not is_decided(key)}
    asked -= {"strategy.fsdp_file", "strategy.deepspeed_file", "strategy.xla_fsdp_file"}
    if "reference" in asked:
        return []
    usual = instance.own_devices(usable_devices(config.recipe))[:1]
    if config.cluster.device in map(str, usual):
        asked.discard("device")
    prefixes = tuple(f"{key}." for key in _DECIDE_SPEED)
    return sorted(key for key in asked if f"{key}.".startswith(prefixes))


def _asked(config: Config) -> set[str]:
    """Return the keys whose value is changed by the command line, or by a file that it names."""
    layers = ("command line", STRATEGY_FILE)
    return {
        key
        for key, origin in config.origins.items()
        if origin.layer in layers and not origin.repeats
    }


def _known(config: Config, instance: InstanceType) -> list[Reference]:
    return [r for r in config.recipe.reference if r.instance_type == instance.name]


def _unlike(config: Config, reference: Reference) -> dict[str, list[str]]:
    """Return the settings of a measurement that differ from this job's."""
    measured = {key: v if isinstance(v, list) else [v] for key, v in reference.of.items()}
    return {
        key: [str(value) for value in values]
        for key, values in measured.items()
        if lookup(config.tree, key) not in values
    }


def _estimate(config: Config, instance: InstanceType, batch: BatchPlan) -> Estimate | None:
    references, guess = _known(config, instance), ""
    if not references:
        references, guess = _guessed(config, instance)
    changed = {*_changed(config, instance)}
    known = [r for r in references if not _unlike(config, r) and changed <= r.of.keys()]
    # Published speeds are for whole instances.
    if batch.workers_per_node != instance.default_workers(batch.nodes) or ends_unknown(config):
        known = []
    found = estimate(
        batch,
        steps=steps_of(config, batch),
        known=known,
        price_per_hour=instance.price_per_hour,
        beside=beside(config),
        apart=beside(config, apart=True),
    )
    if found and guess:
        return replace(found, basis=f"{guess}, {found.basis}", guess=True)
    return found


def _guessed(config: Config, instance: InstanceType) -> tuple[list[Reference], str]:
    """Return the throughputs scaled from another instance type by their peaks, and a description.

    A guess that is too slow costs a longer wait in the queue. If the guess is too fast, the time
    limit ends the job before its last step, so it saves and is requeued.
    """
    types = catalog(config.cluster.instance_types)
    measured = [types[r.instance_type] for r in config.recipe.reference if r.instance_type in types]
    other = max(measured, key=lambda t: t.bf16_tflops, default=None)
    if not (other and other.bf16_tflops and instance.bf16_tflops):
        return [], ""
    faster = _OF_OTHERS * instance.bf16_tflops / other.bf16_tflops
    found = [r for r in config.recipe.reference if r.instance_type == other.name]
    guess = f"a guess: {_OF_OTHERS:.0%} of the fraction of peak that {other.name} reaches"
    return [replace(r, samples_per_s=r.samples_per_s * faster, source="") for r in found], guess


def _time_limits(
    config: Config,
    instance: InstanceType,
    phases: tuple[str, ...],
    expected: Estimate | None,
    *,
    held: bool,
) -> dict[str, int]:
    if not scheduler_of(config.cluster).has_queue:
        return {}
    slurm = config.cluster.slurm
    train = slurm.time_min
    if train is None and expected is not None:
        if expected.hours * 60 * 1.25 > LONGEST_MIN - _START_UP_MIN:
            raise PlanError(
                f"{config.title} would take longer than a year, the longest time limit: pass "
                "--time, or use more nodes or fewer steps"
            )
        train = math.ceil(expected.hours * 60 * 1.25) + _START_UP_MIN
    if train is None:
        train = slurm.default_time_min
    if train is None and (held or slurm.directives is not None):
        return {}  # the job's that is held, or as for sbatch the partition's
    if train is None and config.recipe.project:
        raise PlanError(f"the duration of {config.title} is unknown: pass --time")
    if train is None:
        raise PlanError(
            f"{why_no_hours(config, instance, config.title)}, so its time limit cannot be "
            "estimated: pass --time"
        )
    if train < 1:
        raise PlanError(f"time limit of {train} min: must be at least one minute")
    limit = slurm.max_time_min
    if limit is not None and train > limit:
        key, way = limit_of(config, "max_time_min")
        raise PlanError(
            f"time limit of {train} min is more than {key} ({limit}): pass --time {limit}, use "
            f"more nodes or fewer steps, or {way}"
        )
    return {p: train if p == "train" else precompile_min(config) for p in phases}


def precompile_min(config: Config) -> int:
    """Return the time limit of a precompile job in minutes."""
    limit = config.cluster.slurm.max_time_min
    return _PRECOMPILE_MIN if limit is None else min(_PRECOMPILE_MIN, limit)
