"""Changes the files of a run that continues on other nodes, to another step, or with new --notify.

For another node count, everything except the code is rendered again from the run's config.yaml. The
code stays the same byte for byte. The templates may have changed since the submission, so they must
first reproduce the run's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from trnslurm import __version__
from trnslurm.config.catalog import catalog, find
from trnslurm.config.continuing import is_of_hydra, quoted_for_hydra, text_of
from trnslurm.config.load import read_cluster, read_config, refuse_locked, set_layer
from trnslurm.config.schema import Config, Notify
from trnslurm.config.search import parse_yaml
from trnslurm.config.tree import merge, plain
from trnslurm.config.values import parse_notify
from trnslurm.contract.checkpoints import newest_step
from trnslurm.contract.files import make_directory
from trnslurm.contract.rundir import CAPS, CONFIG, INGREDIENTS, NOTIFIERS, NOTIFY, OF_COUNT, PLAN
from trnslurm.errors import ConfigError, PlanError, RunError
from trnslurm.plan.spec import JobSpec, caps_of, fewer_nodes, has_own_batch, make_spec
from trnslurm.records.run import RunDir
from trnslurm.render.bundle import Bundle
from trnslurm.render.job import caps_file, notify_file, render_job, to_config_yaml, to_json
from trnslurm.render.package import sources
from trnslurm.render.plugins import notifier_files
from trnslurm.submission.job import Job, make_job

_READER = "trnslurm/node/caps.py"
_SENDER = "trnslurm/node/notify.py"
CAP_KEYS = ("slurm.max_node_hours", "slurm.max_cost", "slurm.max_attempts")
_QUEUE_KEYS = ("slurm.account", "slurm.qos", "slurm.reservation", "slurm.time_min")
_VARIABLES = "env."
_SEARCHED_NODES = 64  # counts to try, if the requested count does not fit


def resize(
    run: RunDir, job: Job, nodes: int, least: int | None, template_dirs: Sequence[Path]
) -> Job:
    """Return a run's job for another node count, or for a range of `least` to `nodes`.

    Refuse if the run would train differently.
    """
    head, source = parse_yaml(job.bundle.files[CONFIG]), _source(run, job)
    code = _code(job)
    if other := _differs(run, job, template_dirs):
        raise RunError(
            f"{other}: resuming on {nodes} nodes would change more than the node count. Resume on "
            f"{job.nodes}, or run trnslurm submit {job.recipe} --from {run.name} --nodes {nodes}"
        )
    was = _spec(read_config(head, recipe_dir=source, where=str(run.config_file)), job, job.nodes)
    head["config"] = merge(head["config"], {"slurm": {"min_nodes": least}})
    config = read_config(head, recipe_dir=source, where=str(run.config_file))
    try:
        spec = _spec(config, job, nodes)
        fewer_nodes(spec)
    except (PlanError, ConfigError) as error:
        why = str(error).partition("; nearest")[0]
        fit = [n for n in range(1, max(_SEARCHED_NODES, 2 * nodes) + 1) if _fits(config, job, n)]
        near = [n for n in fit if n < nodes][-1:] + [n for n in fit if n > nodes][:1]
        if near:
            why += f"; nearest: {' or '.join(map(str, near))} nodes"
        raise RunError(f"{run.name} cannot continue with --nodes {nodes}: {why}") from None
    if spec.batch.global_batch != was.batch.global_batch and not has_own_batch(config.recipe):
        raise RunError(
            f"{run.name} grows its global batch with the number of nodes (batch.mode per_worker): "
            f"{was.batch.global_batch} on {job.nodes}, {spec.batch.global_batch} on {nodes}. To "
            f"train with another batch, run trnslurm submit {job.recipe} --from {run.name}"
        )
    return make_job(spec, template_dirs, code=code)


def add_arguments(
    run: RunDir, job: Job, words: Sequence[str], template_dirs: Sequence[Path]
) -> Job:
    """Return a custom script's job with these arguments added to its own.

    They replace those that an earlier resume added, and an empty string removes them. An argument
    with {resume} passes the newest checkpoint to a script that was submitted without it.
    """
    if not run.project_file.exists():
        raise ConfigError(f"{run.name}: {words[0]}: only a custom script accepts arguments")
    if other := _differs(run, job, template_dirs):
        raise RunError(
            f"{other}: adding arguments would change more than the arguments. Submit the script "
            "again with them"
        )
    head = parse_yaml(job.bundle.files[CONFIG])
    source = text_of(run.code / "project" / head["config"]["entry"])
    if is_of_hydra(source, [*head["config"].get("arguments", ()), *words]):
        words = quoted_for_hydra(words)
    head["config"]["resume_arguments"] = [] if [*words] == [""] else [*words]
    config = read_config(head, recipe_dir=_source(run, job), where=f"{run.name}: arguments")
    return make_job(_spec(config, job, job.nodes), template_dirs, code=_code(job))


def set_stop_at(run: RunDir, job: Job, step: int) -> Job:
    """Return a run's job that ends after another step (0: the last), or reject the step.

    Nothing is rendered, so runs from other versions of trnslurm can continue too.
    """
    plan, head = json.loads(job.bundle.files[PLAN]), parse_yaml(job.bundle.files[CONFIG])
    option = f"{run.name} cannot continue with --stop-at {step}"
    if "stop_at" not in plan["train"]:
        raise RunError(f"{option}: the recipe has no train.stop_at")
    if step > plan["steps"]:
        raise RunError(
            f"{option}: the run has {plan['steps']} steps. To continue to the last one, omit the "
            "option"
        )
    if 0 < step <= (done := newest_step(run)):
        raise RunError(
            f"{option}: the run already has a checkpoint of step {done}: choose a later step"
        )
    if plan["train"]["stop_at"] == step:
        return job
    head["config"]["train"]["stop_at"] = step
    changed = {CONFIG: to_config_yaml(head)}
    for name, data in job.bundle.files.items():
        place, _, file = name.rpartition("/")
        if file not in (PLAN, INGREDIENTS) or place.startswith("code"):
            continue
        tree = json.loads(data)
        if "stop_at" in tree.get("train", {}):  # in ingredients only if no graphs are declared
            tree["train"]["stop_at"] = step
            changed[name] = to_json(tree)
    return replace(job, bundle=Bundle(files={**job.bundle.files, **changed}))


def set_keys(run: RunDir, job: Job, words: Sequence[str], template_dirs: Sequence[Path]) -> Job:
    """Return a run's job with the values of --set: caps, variables, and how Slurm queues it.

    Caps are in a file of their own, so runs from other versions of trnslurm can change them too.
    """
    option = f"{run.name} cannot continue with --set"
    for word in words:
        key = word.partition("=")[0]
        if key not in (*CAP_KEYS, *_QUEUE_KEYS) and not key.startswith(_VARIABLES):
            raise RunError(
                f"{option} {word}: only {', '.join((*CAP_KEYS, *_QUEUE_KEYS))} and "
                f"{_VARIABLES}NAME can change. For other keys, run trnslurm submit {job.recipe} "
                f"--from {run.name} --set {word}"
            )
    rendered = [word for word in words if word.partition("=")[0] not in CAP_KEYS]
    if not rendered and f"code/{_READER}" not in sources(job.bundle.files):
        raise RunError(f"{option}: the run was submitted with a version of trnslurm without caps")
    if rendered and (other := _differs(run, job, template_dirs)):
        raise RunError(
            f"{other}: {rendered[0]} would change more than that. Run trnslurm submit "
            f"{job.recipe} --from {run.name} --set {rendered[0]}"
        )
    head = parse_yaml(job.bundle.files[CONFIG])
    for word in words:
        head["config"] = merge(head["config"], set_layer(word, head["config"]).tree)
    config = read_config(head, recipe_dir=_source(run, job), where=f"{run.name}: --set")
    refuse_locked(head["config"], f"{run.name}: --set")
    if rendered:
        return make_job(_spec(config, job, job.nodes), template_dirs, code=_code(job))
    profile = config.cluster
    instance = find(catalog(profile.instance_types), profile.instance_type)
    files = {n: data for n, data in job.bundle.files.items() if n != CAPS}
    files |= caps_file(caps_of(profile, instance, job.roles)) | {CONFIG: to_config_yaml(head)}
    return replace(job, profile=profile, bundle=Bundle(files=files))


def set_notify(run: RunDir, job: Job, words: Sequence[str]) -> Job:
    """Return a run's job with the notifications of --notify."""
    if f"code/{_SENDER}" not in sources(job.bundle.files):
        raise RunError(
            f"{run.name} was submitted with a version of trnslurm without notifications: omit "
            "--notify"
        )
    head = parse_yaml(job.bundle.files[CONFIG])
    notify = asdict(job.profile.notify) | parse_notify(words)
    if notify["plugin"] and b"plug-in" not in sources(job.bundle.files)[f"code/{_SENDER}"]:
        raise RunError(
            f"{run.name} was submitted by a version of trnslurm without plug-ins: pass a command "
            "to --notify"
        )
    if "" not in words and not notify["events"]:
        notify["events"] = Notify().events
    head["config"]["notify"] = plain(notify)
    profile = read_cluster(head["config"], f"{run.name}: --notify")
    old = (NOTIFY, f"{NOTIFIERS}/")
    files = {n: data for n, data in job.bundle.files.items() if not n.startswith(old)}
    files |= notifier_files(profile.notify) | notify_file(profile.notify)
    files[CONFIG] = to_config_yaml(head)
    return replace(job, profile=profile, bundle=Bundle(files=files))


def lay_aside(run: RunDir, bundle: Bundle) -> None:
    """Write the files that differ from the run's files into a directory next to them."""
    changed = {
        name: data
        for name, data in bundle.files.items()
        if not (run.path / name).is_file() or (run.path / name).read_bytes() != data
    }
    if not changed:
        return
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(run.files_aside)
    run.files_aside.mkdir()
    Bundle(files=changed).write(run.files_aside)


def adopt_files(run: RunDir) -> None:
    """Move the files of lay_aside into place if the record names them, or else delete them.

    The move may be interrupted anywhere and repeated: the record names the right files, and files
    that are not yet in place are still in the directory.
    """
    if not run.files_aside.is_dir():
        return
    wanted = run.record().sha256
    for file in sorted(f for f in run.files_aside.rglob("*") if f.is_file()):
        name = str(file.relative_to(run.files_aside))
        if wanted.get(name) == hashlib.sha256(file.read_bytes()).hexdigest():
            make_directory((run.path / name).parent)
            file.replace(run.path / name)
    # Of node counts that the range no longer has.
    for place in run.path.glob(OF_COUNT.format("*")):
        if not any(name.startswith(f"{place.name}/") for name in wanted):
            shutil.rmtree(place)
    shutil.rmtree(run.files_aside)


def _differs(run: RunDir, job: Job, template_dirs: Sequence[Path]) -> str:
    """Return which file this trnslurm would render differently, or empty if there is none."""
    head = parse_yaml(job.bundle.files[CONFIG])
    config = read_config(head, recipe_dir=_source(run, job), where=str(run.config_file))
    again = render_job(_spec(config, job, job.nodes), template_dirs, code=_code(job)).files
    for name, data in job.bundle.files.items():
        if not _same(name, data, again.get(name)):
            by = f"(rendered by trnslurm {head['trnslurm']})"
            return f"{run.path / name} {by} differs from what trnslurm {__version__} renders"
    return ""


def _source(run: RunDir, job: Job) -> str:
    return str(run.code / "jobs" / job.recipe)


def _code(job: Job) -> dict[str, bytes]:
    return {name: data for name, data in job.bundle.files.items() if name.startswith("code/")}


def _spec(config: Config, job: Job, nodes: int) -> JobSpec:
    """Make the spec the way the submission did, with the phases of the job."""
    spec = make_spec(config, nodes, name=job.name)
    time_min = {phase: t for phase, t in spec.time_min.items() if phase in job.phases}
    return replace(spec, phases=job.phases, time_min=time_min)


def _fits(config: Config, job: Job, nodes: int) -> bool:
    try:
        _spec(config, job, nodes)
    except (PlanError, ConfigError):
        return False
    return True


def _same(name: str, stored: bytes, rendered: bytes | None) -> bool:
    if rendered is None or stored == rendered or not name.endswith(".json"):
        return stored == rendered
    try:  # config.yaml does not keep the order of the keys
        return bool(json.loads(stored) == json.loads(rendered))
    except ValueError:  # a file of the project
        return False
