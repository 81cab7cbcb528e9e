"""Checks ParallelCluster YAML with the aws-parallelcluster package itself, offline.

    .venv-pcluster/bin/python tests/parallelcluster/validate.py FILE...

Run by the Python of an environment with requirements.txt (its pins fit nothing else). First the
schema: names, types and patterns of all fields. Then, for cluster files, those of the package's
own validators that ask AWS nothing. Prints one line per file or problem; exit 1 on a problem.
"""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from marshmallow import ValidationError
from pcluster.config.cluster_config import SlurmClusterConfig, SlurmQueue
from pcluster.config.common import TypeMatchValidatorsSuppressor
from pcluster.schemas.cluster_schema import ClusterSchema
from pcluster.schemas.imagebuilder_schema import ImageBuilderSchema
from pcluster.validators.cluster_validators import (
    ComputeResourceSizeValidator,
    DuplicateNameValidator,
    EfaMultiAzValidator,
    EfaPlacementGroupValidator,
    NameValidator,
)
from pcluster.validators.common import FailureLevel, ValidationResult
from pcluster.validators.slurm_settings_validator import (
    SLURM_SETTINGS_DENY_LIST,
    CustomSlurmSettingLevel,
    CustomSlurmSettingsValidator,
)

ASKS_AWS = {
    "PasswordSecretArnValidator", "KmsKeyValidator", "S3BucketUriValidator",
    "FsxAutoImportValidator",
}  # fmt: skip
CLUSTER_NAME = "trn1"


def go_offline() -> None:
    """Give the package a region, which it demands, and nothing to call AWS with."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["AWS_DEFAULT_REGION"] = "us-west-2"
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["AWS_CONFIG_FILE"] = os.devnull
    os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
    # For a capacity block it looks up the reservation, fails, logs that and continues.
    logging.disable(logging.ERROR)


def queue_results(queue: SlurmQueue) -> Iterator[ValidationResult]:
    """What the package says about one queue, without the validators that ask AWS."""
    yield from NameValidator().execute(name=queue.name)
    yield from CustomSlurmSettingsValidator().execute(
        custom_settings=[queue.custom_slurm_settings],
        deny_list=SLURM_SETTINGS_DENY_LIST["Queue"]["Global"],
        settings_level=CustomSlurmSettingLevel.QUEUE,
    )
    # Only AWS can tell the zones of subnets, so several subnets count as several zones.
    several_zones = len(queue.networking.subnet_ids) > 1
    for resource in queue.compute_resources:
        yield from NameValidator().execute(name=resource.name)
        yield from ComputeResourceSizeValidator().execute(
            min_count=resource.min_count,
            max_count=resource.max_count,
            capacity_type=queue.capacity_type,
        )
        yield from EfaMultiAzValidator().execute(
            queue_name=queue.name,
            multi_az_enabled=several_zones,
            compute_resource_name=resource.name,
            compute_resource_efa_enabled=resource.efa.enabled,
        )
        group = queue.get_placement_group_settings_for_compute_resource(resource)
        chosen = queue.get_chosen_placement_group_setting_for_compute_resource(resource)
        yield from EfaPlacementGroupValidator().execute(
            efa_enabled=resource.efa.enabled,
            placement_group_key=group.get("key"),
            placement_group_disabled=chosen.enabled is False,
            multi_az_enabled=several_zones,
            capacity_type=queue.capacity_type,
            queue_name=queue.name,
        )


def cluster_results(cluster: SlurmClusterConfig) -> Iterator[ValidationResult]:
    """What the package says about a cluster without asking AWS."""
    suppressors = [TypeMatchValidatorsSuppressor(ASKS_AWS)]
    yield from cluster.scheduling.settings.validate(suppressors)
    for storage in cluster.shared_storage or []:
        yield from storage.validate(suppressors)
    queues = cluster.scheduling.queues
    yield from DuplicateNameValidator().execute(
        name_list=[queue.name for queue in queues], resource_name="Queue"
    )
    for queue in queues:
        yield from queue_results(queue)


def node_names(queue: SlurmQueue) -> Iterator[str]:
    """The names that ParallelCluster gives to a queue's nodes."""
    for resource in queue.compute_resources:
        static, dynamic = resource.min_count, resource.max_count - resource.min_count
        for kind, count in (("st", static), ("dy", dynamic)):
            if count:
                yield f"{queue.name}-{kind}-{resource.name}-[1-{count}]"


def check(path: Path) -> list[str]:
    """The problems of one file; a summary is printed when there are none."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        if "Build" in config:
            ImageBuilderSchema().load(config)
            print(f"OK: {path}: image")
            return []
        cluster = ClusterSchema(cluster_name=CLUSTER_NAME).load(config)
    except ValidationError as error:
        return [f"schema: {error.normalized_messages()}"]
    failures = [r for r in cluster_results(cluster) if r.level == FailureLevel.ERROR]
    if failures:
        return [f"{failure.validator_type}: {failure.message}" for failure in failures]
    names = [name for queue in cluster.scheduling.queues for name in node_names(queue)]
    print(f"OK: {path}: nodes {' '.join(names)}")
    return []


def main() -> int:
    go_offline()
    problems = [f"{path}: {text}" for path in sys.argv[1:] for text in check(Path(path))]
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
