"""What a job asks of each node: a part of it, and less on more nodes where a job is limited."""

from __future__ import annotations

from typing import Any

import pytest

from trnslurm.errors import ConfigError

BOX = {
    "device": "cuda", "accelerators": 4, "workers": [1, 2, 4], "multi_node_workers": [1, 2, 4],
    "vcpus": 64, "host_gib": 256,
}  # fmt: skip
PROFILE = {"partition": "gpu", "cpus_per_task": 64, "mem_per_node_mib": 256000}


@pytest.fixture
def options(site, cli) -> Any:
    """Return the lines for CPUs, memory and GPUs of a rendered job; raise its refusal."""
    site.recipe("steps: 3\nbatch: {global_batch: 64}\nslurm: {time_min: 5}\n")

    def lines(slurm: dict[str, Any], *words: str) -> list[str]:
        site.profile(
            instance_type="box", instance_types={"box": BOX}, slurm=PROFILE | slurm
        )  # fmt: skip
        done = cli("render", "toy", "--cluster", "pc", *words)
        if done.code:
            raise ConfigError(done.error)
        found = [line.split()[1] for line in done.out.splitlines() if line.startswith("#SBATCH")]
        keys = ("--cpus-per-task", "--mem", "--gpus-per-node")
        return [word for key in keys for word in found if word.startswith(f"{key}=")]

    return lines


@pytest.mark.parametrize(
    ("slurm", "words", "expected"),
    [
        ({}, ("--nodes", "2"), ["--cpus-per-task=64", "--mem=256000", "--gpus-per-node=4"]),
        # As large a part of the rest as of the GPUs; what the command line says stays.
        ({}, ("--nodes", "2", "--gpus", "1"),
         ["--cpus-per-task=16", "--mem=64000", "--gpus-per-node=1"]),
        ({}, ("--nodes", "2", "--gpus", "1", "--cpus", "20", "--mem", "90G"),
         ["--cpus-per-task=20", "--mem=92160", "--gpus-per-node=1"]),
        ({"mem_per_node_mib": 0}, ("--nodes", "1", "--gpus", "2"),
         ["--cpus-per-task=32", "--gpus-per-node=2"]),
        ({"cpus_per_task": 0}, ("--nodes", "1", "--gpus", "2"),
         ["--mem=128000", "--gpus-per-node=2"]),
        # A job may have 28 CPUs: on two nodes, 14 of each.
        ({"job_cpus": 28, "cpus_per_task": 28, "exclusive": False}, ("--nodes", "1"),
         ["--cpus-per-task=28", "--mem=256000", "--gpus-per-node=4"]),
        ({"job_cpus": 28, "cpus_per_task": 28, "exclusive": False}, ("--nodes", "2"),
         ["--cpus-per-task=14", "--mem=128000", "--gpus-per-node=4"]),
        ({"job_gpus": 4}, ("--nodes", "2", "--gpus", "2"),
         ["--cpus-per-task=32", "--mem=128000", "--gpus-per-node=2"]),
    ],
)  # fmt: skip
def test_the_part_of_a_node(options, slurm, words, expected) -> None:
    assert options(slurm, *words) == expected


@pytest.mark.parametrize(
    ("slurm", "nodes", "says"),
    [
        ({"job_gpus": 4}, 2, "--nodes 2 with 4 GPUs each is more than slurm.job_gpus (4): "
         "use at most --nodes 1, or pass --gpus 2, or change it in "),
        ({"job_gpus": 3}, 4, "--nodes 4 with 4 GPUs each is more than slurm.job_gpus (3): "
         "change it in "),
        ({"job_cpus": 100}, 2, "--nodes 2 with 64 CPUs each is more than slurm.job_cpus (100): "
         "use at most --nodes 1, or pass --cpus 50, or change it in "),
        ({"job_cpus": 6, "exclusive": False}, 2, "--nodes 2 with 4 CPUs each is more than "
         "slurm.job_cpus (6): use at most --nodes 1, or pass --gpus 3, or "),
    ],
)  # fmt: skip
def test_more_than_a_job_may_have(options, slurm, nodes, says) -> None:
    with pytest.raises(ConfigError) as refused:
        options(slurm, "--nodes", str(nodes))
    assert str(refused.value).startswith(says)
