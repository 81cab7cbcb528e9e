"""The container in which a node's part of a job runs, as parts of the batch script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trnslurm.config.schema import Cluster, Container
from trnslurm.config.values import MOUNTABLE, MOUNTABLE_WORDS
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen
from trnslurm.plan.spec import JobSpec
from trnslurm.schedulers.choice import scheduler_of

_ONE_TASK = "srun --nodes=1 --ntasks=1 --cpu-bind=none "
_HERE, _CACHE = "$PWD", "$TRNSLURM_CACHE"


class Inside(Frozen):
    """The image in which node.sh runs; by default none."""

    lines: tuple[str, ...] = ()
    """Bash lines that start a command in the image."""
    made: tuple[str, ...] = ()
    """Directories to mount, created if they are missing, as shell words."""
    prefix: str = ""
    """Shell words before a command that runs in the image."""
    one_task: str = ""
    runtime: str = ""
    workdir: str | None = None
    python: str = ""
    python_setting: str = "python: in the cluster profile"
    """What to change if there is no Python interpreter."""


def container_parts(
    cluster: Cluster,
    *,
    made: Sequence[str] = (),
    there: Sequence[str] = (),
    spec: JobSpec | None = None,
) -> Inside:
    """Return the templates' values for a job's container.

    The container mounts the run and these paths of the nodes under the same names: directories that
    are `made` if they are missing, and paths that must be `there`.
    """
    container = cluster.container
    if container.image is None:
        return Inside()
    for path in (*made, *there):
        if path.startswith(("/", "~")) and not re.fullmatch(MOUNTABLE, path):
            raise ConfigError(f"{path!r}: a container can mount only {MOUNTABLE_WORDS}")
    own = [_HERE, *map(_text, filter(None, made))]
    if spec is not None and spec.device.compiles_ahead and "precompile" in spec.phases:
        if spec.device.cache_on_nodes and cluster.compile_cache is None:
            raise ConfigError(
                "compile_cache is not set, and its default, /var/tmp, is lost with the container: "
                "set it to a directory that all nodes share"
            )
        own.append(_CACHE)
    there_too = [*own, *map(_text, filter(None, there))]
    return Inside(
        lines=tuple(container_words(container, there_too, spec)),
        made=tuple(f'"{path}"' for path in own[1:]),
        prefix='\\\n  "${TRNSLURM_INSIDE[@]}" ',
        one_task="" if scheduler_of(cluster).is_here else _ONE_TASK,
        runtime=container.runtime,
        workdir=container.workdir,
        python=container.python,
        python_setting="container.python, or use an image that has one",
    )


def container_words(
    container: Container, paths: Sequence[str], spec: JobSpec | None = None
) -> list[str]:
    """Return bash lines that start a command in the image. For pyxis these are options of srun.

    `paths` are escaped for double quotes. The first path is the command's working directory.
    """
    mounts = [f"{path}:{path}" for path in paths]
    for mount in container.mounts:
        host, colon, inside = mount.partition(":")
        mounts.append(f"{_text(host)}:{_text(inside) if colon else _text(host)}")
    words = {"pyxis": _pyxis, "apptainer": _apptainer, "podman": _podman}[container.runtime]
    return [*words(_text(container.image or ""), paths[0], mounts, spec)]


def _text(path: str) -> str:
    """Return a path escaped for double quotes in bash; a leading ~ becomes $HOME."""
    if path.startswith("~/"):
        return f"$HOME/{_text(path[2:])}"
    return re.sub(r'([\\"$`])', r"\\\1", path)


def _pyxis(image: str, begin: str, mounts: Sequence[str], _spec: JobSpec | None) -> Iterator[str]:
    # srun passes only the last value of a plugin's option to the nodes, so all mounts are one word.
    yield f'--container-image="{image}" --container-workdir="{begin}"'
    yield f'--container-mounts="{",".join(mounts)}"'


def _apptainer(
    image: str, begin: str, mounts: Sequence[str], spec: JobSpec | None
) -> Iterator[str]:
    yield f'apptainer exec --pwd "{begin}"'
    for mount in mounts:
        yield f'--bind "{mount}"'
    yield from _device_options("apptainer", spec)
    yield f'"{image}"'


def _podman(image: str, begin: str, mounts: Sequence[str], spec: JobSpec | None) -> Iterator[str]:
    # Workers share the node's network, /dev/shm and host name. In a control group of Podman, the
    # container would leave the job's group, which Slurm uses to end and limit the job. Without
    # one, Podman requires its own process ids, and --init forwards signals to the command.
    # https://docs.podman.io/en/v4.3/markdown/podman-run.1.html
    yield "podman run --rm --init --cgroups=disabled --network=host --ipc=host --uts=host"
    yield "--log-driver=none --security-opt=label=disable"  # SELinux would deny the mounts
    yield "--env='SLURM_*' --env='TRNSLURM_*'"  # the rank, and values known only at the start
    for mount in mounts:
        yield f'--volume="{mount}"'
    yield from _device_options("podman", spec)
    if spec and spec.nodes > 1 and spec.instance.efa:
        yield "--device=/dev/infiniband"  # EFA
    yield f'--workdir="{begin}" "{image}"'


def _device_options(runtime: str, spec: JobSpec | None) -> Sequence[str]:
    accelerators = spec.instance.accelerators if spec else 0
    return spec.device.container_options(runtime, accelerators) if spec else ()
