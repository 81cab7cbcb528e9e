"""The #SBATCH options of a job that depend on its cluster, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trnslurm.config.batch_script import contradicted, tasks_of_node
from trnslurm.config.catalog import InstanceType
from trnslurm.config.schema import Config, Slurm
from trnslurm.contract.rundir import PREPARE
from trnslurm.errors import RenderError
from trnslurm.frozen import Frozen
from trnslurm.plan.data import DataJob
from trnslurm.plan.spec import JobSpec
from trnslurm.render.launch import tasks_per_node

# Options that the template or the configuration sets, and what to use instead.
_OWN_OPTIONS = {
    "--job-name": "--name",
    "--nodes": "--nodes",
    "--time": "--time",
    "--partition": "--set slurm.partition",
    "--account": "--set slurm.account",
    "--qos": "--set slurm.qos",
    "--constraint": "--set slurm.constraint",
    "--reservation": "--set slurm.reservation",
    "--exclusive": "--set slurm.exclusive",
    "--requeue": "--set slurm.requeue",
    "--no-requeue": "--set slurm.requeue",
    "--cpus-per-task": "--set slurm.cpus_per_task",
    "--gpus-per-node": "--set slurm.gpus_per_node",
    "--gpus-per-task": "--set slurm.gpus_per_node",
    "--gpus-per-socket": "--set slurm.gpus_per_node",
    "--cpus-per-gpu": "--set slurm.cpus_per_task",
    "--tres-per-task": "",
    "--ntasks-per-gpu": "",
    "--ntasks-per-core": "",
    "--ntasks-per-socket": "",
    "--ntasks-per-node": "",
    "--ntasks": "",
    "--output": "",
    "--error": "",
    "--open-mode": "",
    "--export": "",
    "--export-file": "",
    "--get-user-env": "",
    "--propagate": "",
    "--wait-all-nodes": "",
    "--chdir": "",
    "--dependency": "",
    "--array": "",
    "--wrap": "",
    "--clusters": "",
    "--uid": "",
    "--gid": "",
    "--nodefile": "",
    "--parsable": "",
    "--quiet": "",
    "--help": "",
    "--usage": "",
    "--version": "",
    "--test-only": "",
    "--kill-on-invalid-dep": "",
    "--signal": "--set slurm.stop_before_s",
}
_OF_COMPONENT = (
    *("--account", "--qos", "--constraint", "--reservation", "--exclusive", "--cpus-per-task"),
    *("--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--cpus-per-gpu"),
)
"""Options from that list that a role's own nodes can have, because no key sets them there."""
# The same for srun, to which the template passes each of these options.
_OWN_OF_SRUN = (
    *("--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--cpu-bind", "--nodelist"),
    *("--overlap", "--exact", "--exclusive", "--kill-on-bad-exit", "--wait", "--open-mode"),
    *("--output", "--error", "--input", "--label", "--pty", "--jobid", "--chdir", "--export"),
    *("--multi-prog", "--exclude", "--relative", "--het-group", "--quit-on-interrupt", "--help"),
    *("--usage", "--version", "--test-only", "--no-allocate", "--container-image"),
)
_RESUMES = "--auto-resume"
"""An option of HyperPod's srun plug-in, which replaces faulty nodes and reruns the job step."""
_TIME_REASONS = {
    "precompile": "compiling large models takes up to an hour or two",
    "train": "unless set, the plan's estimate plus 25% and 15 minutes",
}
_OF_THE_SITE = (
    *("slurm.partition", "slurm.account", "slurm.qos", "slurm.constraint", "slurm.reservation"),
    *("slurm.sbatch", "slurm.data_partition"),
)
_OPTION = r"--[a-z][a-z0-9-]*(=[^\n\r\0]+)?"


class Resources(Frozen):
    """The #SBATCH lines that differ between jobs, and the values that srun repeats."""

    job_name: str
    nodes: str
    size: tuple[tuple[str, str], ...]
    """Options for the size of the job, each with its reason."""
    site: tuple[tuple[str, str], ...]
    """Options that depend on the cluster."""
    tasks: int
    """The number of Slurm tasks per node."""
    cpus_per_task: int | None
    """CPUs per task, or None for all CPUs that the job has on the node."""
    srun_wait_s: int
    srun: tuple[str, ...] = ()
    """Other options for srun."""
    environment: str = "NIL"
    """The part of the submitting shell's environment that the job gets."""
    components: tuple[tuple[tuple[str, str], ...], ...] = ()
    """The options of each additional component of a heterogeneous job."""


def training_resources(spec: JobSpec, phase: str, nodes: str) -> Resources:
    """Return the resources of a job that trains, or compiles for training, on this many nodes."""
    slurm, tasks = spec.config.cluster.slurm, tasks_per_node(spec)
    if slurm.directives is not None:
        return _as_directed(spec, phase)
    of_node, whose = _cpus_of_node(slurm, spec.instance)
    cpus = max(1, of_node // tasks)
    each = "one launcher per node, which starts the workers"
    if spec.config.recipe.launcher == "srun":
        each = "the workers of a node, each started by srun"
    # With --ntasks-per-node, Slurm grants only the smallest number of a range (22.05).
    size = [] if "-" in nodes else [(f"--ntasks-per-node={tasks}", each)]
    if slurm.cpus_per_task != 0:
        size.append((f"--cpus-per-task={cpus}", f"{whose}, for its workers"))
    if phase in spec.time_min:
        size.append((f"--time={slurm_time(spec.time_min[phase])}", _TIME_REASONS[phase]))
    has_lines = spec.scheduler.has_sbatch_lines
    return Resources(
        job_name=f"{spec.name}-{phase}",
        nodes=nodes,
        size=tuple(size),
        site=tuple(_training_options(spec, phase)) if has_lines else (),
        tasks=tasks,
        cpus_per_task=None if slurm.cpus_per_task == 0 else cpus,
        srun_wait_s=0 if phase == "precompile" else slurm.srun_wait_s,
        srun=tuple(map(_for_srun, slurm.srun)),
        components=tuple(_components(spec)) if phase == "train" else (),
    )


def _components(spec: JobSpec) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the options for the nodes in each partition that roles have to themselves.

    sbatch copies options that mean the same for all nodes, such as --time and --requeue, from the
    training component, and also --account, --qos and --mem. Each component sets the other options
    itself (reset_each_pass in src/common/slurm_opt.c of 22.05;
    https://slurm.schedmd.com/heterogeneous_jobs.html#submitting).
    """
    slurm = spec.config.cluster.slurm
    roles = [role for role in spec.roles if role.component]
    for number in sorted({role.component for role in roles}):
        of_it = [role for role in roles if role.component == number]
        key = f"roles.{of_it[0].name}"
        told = spec.config.recipe.roles[of_it[0].name]
        options = [_for_component(f"{key}.sbatch", option) for option in told.sbatch]
        nodes = sum(role.all_nodes for role in of_it)
        found = [
            (f"--nodes={nodes}", " and ".join(f"roles.{role.name}.nodes" for role in of_it)),
            ("--ntasks-per-node=1", "one server per node"),
            (f"--partition={told.partition}", f"{key}.partition"),
        ]
        if slurm.exclusive and not _says_its_part(options):
            found.append(("--exclusive", "use whole nodes, as for training"))
            if memory_option(slurm) and not any(o.startswith("--mem") for o in options):
                found.append(("--mem=0", "all memory of a node, not the amount for training"))
        yield (*found, *((option, f"{key}.sbatch") for option in options))


def _says_its_part(options: Sequence[str]) -> bool:
    """Check whether options for a role's nodes set how much of a node the role gets."""
    names = ("--cpus-per-task", "--exclusive", "--oversubscribe")
    return any(option.partition("=")[0] in names for option in options)


def _cpus_of_node(slurm: Slurm, instance: InstanceType) -> tuple[int, str]:
    """Return how many CPUs of a node a job has, and a description of them."""
    if slurm.cpus_per_task:
        return slurm.cpus_per_task, "CPUs of the node"
    every = instance.gpus or instance.accelerators  # a sandbox claims GPUs that it does not have
    gpus = instance.gpus if slurm.gpus_per_node is None else slurm.gpus_per_node
    if 0 < gpus < every and not slurm.exclusive:
        return instance.vcpus * gpus // every, "the same share of CPUs as of GPUs"
    return instance.vcpus, "every CPU of the node"


def _as_directed(spec: JobSpec, phase: str) -> Resources:
    """Return the resources of a user's batch script: its own options, plus the profile's others."""
    slurm, reason = spec.config.cluster.slurm, f"from {spec.config.recipe.entry}"
    every = slurm.directives or ()
    own = [word for word in every if not word.startswith("--export=")]
    given = (slurm.gpus_per_node, slurm.cpus_per_task, slurm.mem_per_node_mib is not None)
    gpus, cpus, memory = map(bool, given)
    left_out = contradicted(own, gpus=gpus, cpus=cpus, memory=memory)
    kept = [word for word in own if word not in left_out]
    size = [(word, reason) for word in kept]
    if slurm.cpus_per_task:
        each = max(1, slurm.cpus_per_task // tasks_of_node(own, spec.nodes))
        size.append((f"--cpus-per-task={each}", "a share of the node's CPUs"))
    if phase in spec.time_min:
        size.append((f"--time={slurm_time(spec.time_min[phase])}", _TIME_REASONS[phase]))
    names = {word.partition("=")[0] for word in kept}
    site = _training_options(spec, phase) if spec.scheduler.has_sbatch_lines else []
    exports = [word.partition("=")[2] for word in every if word not in own]
    return Resources(
        job_name=f"{spec.name}-{phase}",
        nodes=str(spec.nodes),
        size=tuple(size),
        site=tuple(option for option in site if option[0].partition("=")[0] not in names),
        tasks=1,
        cpus_per_task=None,
        srun_wait_s=0,
        environment=exports[-1] if exports else "ALL",
    )


def data_resources(job: DataJob) -> Resources:
    """Return the resources of a job that prepares data, which needs only CPUs."""
    slurm = job.config.cluster.slurm
    return Resources(
        job_name=f"{job.name}-{PREPARE}",
        nodes="1",
        size=(
            ("--ntasks-per-node=1", "one program, which starts the others"),
            (f"--cpus-per-task={slurm.data_cpus}", "slurm.data_cpus: one process per CPU"),
            (
                f"--time={slurm_time(job.time_min)}",
                "slurm.data_time_min; finished files are kept",
            ),
        ),
        site=tuple(_data_options(job)),
        tasks=1,
        cpus_per_task=slurm.data_cpus,
        srun_wait_s=slurm.srun_wait_s,
    )


def slurm_time(minutes: int) -> str:
    """Return minutes in Slurm's format: D-HH:MM:SS or HH:MM:SS."""
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def _training_options(spec: JobSpec, phase: str) -> list[tuple[str, str]]:
    """Return the options of a job that trains, or compiles for training."""
    slurm = spec.config.cluster.slurm
    options = _named(spec.config, "partition", "account", "qos", "constraint", "reservation")
    if memory := memory_option(slurm):
        for name in ("--mem", "--mem-per-cpu", "--mem-per-gpu"):
            instead = "use --set slurm.mem_per_node_mib, or set it to null"
            _refuse(slurm.sbatch, name, "", f"the script has {memory}: {instead}")
        options.append(
            (memory, "memory per node in MiB, which --exclusive does not include; 0: all")
        )
    if gpus := gpu_option(slurm, spec.instance):
        _refuse(
            slurm.sbatch,
            "--gres",
            "gpu",
            f"the script has {gpus}: use --set slurm.gpus_per_node, or set it to 0",
        )
        options.append((gpus, "the GPUs of a node, which are a GRES"))
    if slurm.exclusive:
        _refuse(
            slurm.sbatch,
            "--oversubscribe",
            "",
            "the script has --exclusive: use --set slurm.exclusive=false",
        )
        options.append(("--exclusive", "use whole nodes: devices and network are not shared"))
    early_s = slurm.stop_before_s
    if (limit := spec.time_min.get("train")) is not None:
        early_s = min(early_s, limit * 60 // 5)  # at most a fifth of a short limit
    if phase == "train" and early_s:
        options.append(
            (f"--signal=B:USR1@{early_s}", "save and requeue this long before the time limit")
        )
    if phase == "train" and spec.no_kill:
        options.append(("--no-kill", "the training continues without a node that fails"))
    again = "from the newest checkpoint" if phase == "train" else "and compile what is missing"
    return options + _common(spec.config, again=again, expedite=slurm.expedite)


def memory_option(slurm: Slurm) -> str:
    """Return the option for a node's memory; empty for Slurm's default."""
    return "" if slurm.mem_per_node_mib is None else f"--mem={slurm.mem_per_node_mib}"


def gpu_option(slurm: Slurm, instance: InstanceType) -> str:
    """Return the option for a node's GPUs, or "" if it has none."""
    gpus = instance.gpus if slurm.gpus_per_node is None else slurm.gpus_per_node
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    return f"--gpus-per-node={kind}{gpus}" if gpus else ""


def _refuse(given: Sequence[str], name: str, value: str, why: str) -> None:
    """Reject a user's option that contradicts an option of the script."""
    for option in given:
        word, _, argument = option.partition("=")
        if len(word) > 4 and name.startswith(word) and value in argument:  # or abbreviated
            raise RenderError(f"--sbatch {option}: {why}")


def _data_options(job: DataJob) -> list[tuple[str, str]]:
    slurm = job.config.cluster.slurm
    names = ["data_partition", "account", "qos"]
    if slurm.data_partition is None:
        names = ["partition", *names[1:], "constraint", "reservation"]  # as training's nodes
    return _named(job.config, *names) + _common(job.config, again="and resume")


def _named(config: Config, *names: str) -> list[tuple[str, str]]:
    """Return the options that keys of `slurm` set, with the origin of each."""
    whose = set_by(config)
    return [
        (f"--{name.removeprefix('data_')}={value}", whose[f"slurm.{name}"])
        for name in names
        if (value := getattr(config.cluster.slurm, name)) is not None
    ]


def _common(config: Config, *, again: str, expedite: bool = False) -> list[tuple[str, str]]:
    slurm = config.cluster.slurm
    requeue = ("--requeue", f"restart after a node failure, {again}")
    if expedite:
        requeue = (
            "--requeue=expedite",
            f"restart after a node failure before all other jobs, {again}",
        )
    if not slurm.requeue:
        requeue = ("--no-requeue", "do not restart after a node failure")
    whose = set_by(config)
    return [requeue, *((passed_through(word), whose["slurm.sbatch"]) for word in slurm.sbatch)]


def set_by(config: Config) -> dict[str, str]:
    """Return who set each option of the cluster, as words for a script.

    A path is named only if it is the same for all users of a host.
    """
    words = {
        "default": "trnslurm's default",
        "cluster profile": f"from {config.cluster_name}'s profile",
        "recipe": f"from the recipe {config.recipe_name}",
        "preset": f"from the preset {config.preset}",
        "command line": "from the command line",
        "run": "from the run that this one continues",
    }
    found = {}
    for key in _OF_THE_SITE:
        if not getattr(config.cluster.slurm, key.partition(".")[2]):
            continue
        origin = config.origins[key]
        found[key] = words.get(origin.layer, origin.source)
        if origin.layer == "site lock":
            file = Path(origin.source)
            found[key] = f"locked by {file if file.is_relative_to('/etc') else file.name}"
        if (key, origin.source) == ("slurm.sbatch", "--sbatch"):  # which adds to the profile's
            found[key] = f"from {config.cluster_name}'s profile or the command line"
    return found


def _for_srun(option: str) -> str:
    """Return an option for srun, or reject it."""
    if not re.fullmatch(_OPTION, option):
        raise RenderError(f"slurm.srun: {option!r}: expected one long option, such as --mpi=none")
    name = option.partition("=")[0]
    if _RESUMES.startswith(name):
        raise RenderError(
            f"slurm.srun: {option}: trnslurm restarts the workers itself, and HyperPod would start "
            "them a second time. HyperPod replaces faulty nodes without this option, so remove it"
        )
    if any(own.startswith(name) for own in _OWN_OF_SRUN):  # srun accepts --nodeli for --nodelist
        raise RenderError(f"slurm.srun: {option}: the template sets this option itself")
    return option


def passed_through(option: str) -> str:
    """Return an sbatch option from the profile or command line, or reject it."""
    if not re.fullmatch(_OPTION, option):
        raise RenderError(
            f"--sbatch {option!r}: expected one long option, such as --sbatch=--mail-type=FAIL"
        )
    return _not_own("--sbatch", option, _OWN_OPTIONS)


def _for_component(key: str, option: str) -> str:
    """Return an sbatch option for a role's own nodes, or reject it."""
    if not re.fullmatch(_OPTION, option):
        raise RenderError(f"{key}: {option!r}: expected one long option, such as --gres=gpu:2")
    role = key.removesuffix(".sbatch")
    own = {name: way for name, way in _OWN_OPTIONS.items() if name not in _OF_COMPONENT}
    own |= {"--nodes": f"{role}.nodes", "--partition": f"{role}.partition"}
    return _not_own(key, option, own)


def _not_own(key: str, option: str, own_options: Mapping[str, str]) -> str:
    """Return an option unless the template or a key sets it."""
    name = option.partition("=")[0]
    for own, instead in own_options.items():
        if own.startswith(name):  # sbatch accepts --parti for --partition
            what = f"use {instead}" if instead else "the template sets this option itself"
            raise RenderError(f"{key} {option}: {what}")
    return option
