"""Sizes a job on its nodes, by its share of their GPUs and by the limits of a single job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trnslurm.config.catalog import InstanceType
from trnslurm.config.schema import Config
from trnslurm.config.search import find_line
from trnslurm.errors import ConfigError


def sized(config: Config, instance: InstanceType, nodes: int) -> Config:
    """Return the configuration with the CPUs and memory of a job on this many nodes.

    Reject more GPUs, or whole nodes with more CPUs, than a job may have.
    """
    if config.cluster.slurm.directives is not None:  # a user's batch script says its own size
        return config
    config = _of_its_part(config, instance)
    slurm = config.cluster.slurm
    gpus = instance.gpus if slurm.gpus_per_node is None else slurm.gpus_per_node
    _refuse(config, "job_gpus", slurm.job_gpus, nodes, gpus, "--gpus")
    cpus = slurm.cpus_per_task or instance.vcpus
    if slurm.exclusive:
        _refuse(config, "job_cpus", slurm.job_cpus, nodes, max(cpus, instance.vcpus), "--cpus")
    each = (slurm.job_cpus or nodes * cpus) // nodes
    if slurm.exclusive or each >= cpus:
        return config
    if each < max(gpus, 1):
        _refuse(config, "job_cpus", slurm.job_cpus, nodes, max(gpus, 1), "--gpus")
    return _with_part(config, each, cpus)


def _of_its_part(config: Config, instance: InstanceType) -> Config:
    """Return the configuration with the profile's values reduced to the job's share of the GPUs."""
    slurm = config.cluster.slurm
    if slurm.exclusive or not 0 < (slurm.gpus_per_node or 0) < instance.gpus:
        return config
    return _with_part(config, slurm.gpus_per_node or 0, instance.gpus, only="cluster profile")


def _with_part(config: Config, part: int, every: int, only: str = "") -> Config:
    """Return the configuration with a share of a node's CPUs and memory, if a layer sets them.

    A share of all memory (0) cannot be expressed, so Slurm's default applies.
    """
    slurm, values = config.cluster.slurm, dict[str, int | None]()
    for key in ("cpus_per_task", "mem_per_node_mib"):
        value: int | None = getattr(slurm, key)
        if value is not None and only in ("", config.origins[f"slurm.{key}"].layer):
            values[key] = max(1, value * part // every) if value else None
    if slurm.cpus_per_task == 0:  # no option
        values.pop("cpus_per_task", None)
    own = replace(slurm, **values)  # type: ignore[arg-type]
    return replace(config, cluster=replace(config.cluster, slurm=own))


def _refuse(
    config: Config, name: str, most: int | None, nodes: int, each: int, option: str
) -> None:
    """Reject this many nodes with this many CPUs or GPUs each if a job may not have all of them."""
    if most is None or nodes * each <= most:
        return
    key, way = limit_of(config, name)
    what = "GPUs" if name == "job_gpus" else "CPUs"
    ways = [f"use at most --nodes {most // each}"] if most >= each else []
    ways += [f"pass {option} {most // nodes}"] if most >= nodes else []
    raise ConfigError(
        f"--nodes {nodes} with {each} {what} each is more than {key} ({most}): "
        f"{', or '.join([*ways, way])}"
    )


def limit_of(config: Config, name: str) -> tuple[str, str]:
    """Return the key of a partition's limit, and how to change it."""
    keys, own = ["slurm", name], config.cluster.slurm.partition
    if own != config.tree["slurm"]["partition"]:  # another that the profile has
        keys = ["slurm", "partitions", str(own), name]
    key = ".".join(keys)
    origin = config.origins.get(key, config.origins[f"slurm.{name}"])
    if origin.layer == "site lock":
        return key, f"ask the admin, who locked it in {origin.source}"
    if origin.layer == "command line":
        return key, f"change {origin.source}"
    if origin.layer != "cluster profile":
        return key, f"pass --set {key}=NUMBER"
    line = find_line(Path(origin.source), *keys)
    return key, f"change it in {origin.source}" + (f", {line}" if line else "")
