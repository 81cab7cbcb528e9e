"""What is installed on this host, and what a cluster's jobs use; nothing is imported."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from trnslurm import __version__
from trnslurm.cluster.python import interpreter, versions_here
from trnslurm.config.catalog import catalog, find
from trnslurm.config.plugins import Plugin, all_plugins
from trnslurm.config.schema import Cluster
from trnslurm.config.software import device_of, packages_for
from trnslurm.errors import TrnslurmError
from trnslurm.frozen import Frozen

PACKAGES = (
    *("click", "jinja2", "pathspec", "pyyaml", "submitit"),
    *("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "nki", "libneuronxla", "torchvision"),
    *("transformers", "accelerate", "deepspeed", "tokenizers", "safetensors", "numpy", "timm"),
    *("datasets", "pyarrow", "h5py", "tiktoken", "deflate", "tensorboard", "matplotlib"),
    *("textual", "boto3", "aiohttp", "fsspec", "gcsfs", "wandb", "mlflow-skinny"),
)


class Jobs(Frozen):
    """What the jobs of a cluster use."""

    cluster: str
    python: str
    image: str | None
    """The container's image, if jobs run in one."""
    device: str
    neuron_sdk: str
    """The release of the AWS Neuron SDK; empty on other devices."""
    needs: Mapping[str, str]
    """Package -> the version that jobs need."""
    packages: Mapping[str, str]
    """Package -> its version in that Python, as far as this host can query it."""
    problem: str
    """Why this host cannot query it; empty if the query succeeded."""


class Installed(Frozen):
    """This trnslurm, its Python, and the packages installed with it."""

    trnslurm: str
    directory: str
    python: str
    executable: str
    packages: Mapping[str, str]
    plugins: Sequence[Plugin]
    """The plug-ins that these packages add to trnslurm."""
    jobs: Jobs | None
    """What the jobs of the selected cluster use, if there is one."""


def installed(cluster: str | None, profile: Cluster | None) -> Installed:
    """Return what is installed here, and what the jobs of a cluster use."""
    return Installed(
        trnslurm=__version__,
        directory=str(Path(__file__).resolve().parents[1]),
        python=platform.python_version(),
        executable=sys.executable,
        packages=_packages(),
        plugins=all_plugins(),
        jobs=_jobs(cluster, profile) if cluster and profile else None,
    )


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _jobs(cluster: str, profile: Cluster) -> Jobs:
    instance = find(catalog(profile.instance_types), profile.instance_type)
    device = device_of(profile, instance)
    packages, problem, image = {}, "", profile.container.image
    if image:
        problem = f"the packages are in the image {image}"
    else:
        try:
            packages = versions_here(profile, PACKAGES)
        except TrnslurmError as error:
            problem = str(error)
    return Jobs(
        cluster=cluster,
        python=profile.container.python if image else interpreter(profile),
        image=image,
        device=device.name,
        neuron_sdk=profile.neuron_sdk if device.sdks else "",
        needs=packages_for(device, profile.neuron_sdk),
        packages=packages,
        problem=problem,
    )
