"""Creates a new run that continues a run from its mirror in S3, on any cluster.

The mirror contains the run's configuration and its own code. The cluster's values come from the
profile here, and trnslurm's code from this installation. The first node fetches the newest
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from trnslurm import __version__
from trnslurm.cluster.cache import CompileCache
from trnslurm.config.entry import Entry
from trnslurm.config.load import resolve_again
from trnslurm.config.search import Workspace, parse_yaml
from trnslurm.config.values import parse_notify
from trnslurm.console import Console
from trnslurm.contract.checkpoints import CHECKPOINT_FORMAT
from trnslurm.contract.files import newer_format
from trnslurm.contract.rundir import CONFIG, PLAN, RECORD, RUN_FORMAT
from trnslurm.errors import ConfigError, RunError
from trnslurm.mirror.copies import CODE, MOST_BYTES, known_copies, name_of, unpacked
from trnslurm.mirror.store import MirrorError, Store
from trnslurm.plan.spec import JobSpec, has_own_batch, make_spec
from trnslurm.plan.values import check_plan
from trnslurm.render.package import ON_NODES, package_files, sources
from trnslurm.render.plugins import plugin_files
from trnslurm.submission.choice import choose_to_submit
from trnslurm.submission.job import Job, make_job
from trnslurm.submission.options import JobOptions
from trnslurm.submission.propose import checked
from trnslurm.submission.resume import Continuation
from trnslurm.submission.submission import PlannedRun, Submission

_MANIFEST = "manifest.json"


def propose_moved(
    place: str, how: Continuation, cluster: str | None, workspace: Workspace, console: Console
) -> Submission:
    """Return a run that continues the run whose mirror is at s3://BUCKET/PREFIX/RUN."""
    how.check()
    try:
        copy = _Copy(place)
    except MirrorError as error:
        raise RunError(f"{place}: {error}") from None
    head, step = copy.head, copy.step
    options = JobOptions(
        workspace=workspace, recipe=copy.recipe, cluster=cluster, preset=head["preset"] or ""
    )
    known = cluster or workspace.cluster
    if not known and head["cluster_name"] in workspace.clusters():
        options = replace(options, cluster=head["cluster_name"])
    chosen = choose_to_submit(options, console).cluster or ""
    stop_at = [f"train.stop_at={how.stop_at}"] if how.stop_at is not None else []
    given: dict[str, Any] = {f"notify.{k}": v for k, v in parse_notify(how.notify).items()}
    if how.least_nodes is not None:
        given["slurm.min_nodes"] = how.least_nodes
    config = resolve_again(
        workspace,
        head,
        copy.origins,
        cluster=chosen,
        settings=[*how.settings, *stop_at],
        given=given,
        prefix=place.rstrip("/").rpartition("/")[0],
        where=f"{place}/{CONFIG}",
    )
    spec = make_spec(config, how.nodes or int(head["nodes"]), name=str(head["name"]))
    _refuse_other_batch(spec, copy)
    if (version := head.get("trnslurm")) != __version__:
        console.warn(
            f"{copy.name} was submitted with trnslurm {version}, but this is {__version__}"
        )
    code = copy.code | package_files(ON_NODES) | plugin_files(config.cluster)
    job = make_job(spec, workspace.template_dirs(), code=code)
    _check(job, spec, place)
    console.say(f"{copy.name} continues after step {step} from {place} ({copy.size})")
    job = replace(job, source_dir=None, git=copy.git)
    planned = PlannedRun(job=job, fetches=copy.place)
    submission = Submission(runs=[planned], cache=CompileCache(job.profile))
    return checked(submission, options.host, console)


class _Copy:
    """The contents of a run's mirror in S3."""

    def __init__(self, place: str) -> None:
        store = Store(place)
        self.place, self.name = store.place, store.place.rpartition("/")[2]
        copies = known_copies(store)
        if not copies:
            raise MirrorError(
                "there is no complete checkpoint of a run: pass s3://BUCKET/PREFIX/RUN, as "
                "listed by `aws s3 ls s3://BUCKET/PREFIX/`"
            )
        self.step = max(copies)
        num_bytes = sum(file["bytes"] for file in copies[self.step]["files"].values())
        self.size = f"{num_bytes / 1e6:,.1f} MB"
        config, record, code = (store.read(name, MOST_BYTES) for name in (CONFIG, RECORD, CODE))
        manifest = store.read(f"{name_of(self.step)}/{_MANIFEST}", MOST_BYTES)
        if config is None or code is None:
            raise MirrorError(f"{CONFIG} or {CODE} is missing")
        try:
            self.head: dict[str, Any] = parse_yaml(config)
            self.recipe = str(self.head["recipe_name"])
            told, saved = json.loads(record or b"{}"), json.loads(manifest or b"{}")
            known = ((told, RUN_FORMAT), (saved, CHECKPOINT_FORMAT))
            if words := next(filter(None, (newer_format(*each) for each in known)), ""):
                raise MirrorError(f"it was {words}")
            self.origins: dict[str, str] = dict(told.get("origins") or {})
            self.git: dict[str, Any] = dict(told.get("git") or {})
            self.facts: dict[str, Any] = saved.get("facts") or {}
            whole = isinstance(self.head["config"], Mapping) and bool(self.head["cluster_name"])
            whole = whole and int(self.head["nodes"]) > 0 and bool(self.head["name"])
        except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError):
            whole = False
        if not whole:
            raise MirrorError(f"its {CONFIG} or {RECORD} is damaged")
        self.code = {f"code/{name}": data for name, data in unpacked(code).items()}


def _refuse_other_batch(spec: JobSpec, copy: _Copy) -> None:
    """Reject a node count with which the run would train with another global batch."""
    then, now = copy.facts.get("global_batch"), spec.batch.global_batch
    if then not in (None, now) and not has_own_batch(spec.config.recipe):
        raise ConfigError(
            f"{copy.name} was trained with a global batch of {then}, but on {spec.nodes} x "
            f"{spec.batch.workers_per_node} workers it would be {now}: choose --nodes or --set "
            "workers_per_node so that it stays the same"
        )


def _check(job: Job, spec: JobSpec, place: str) -> None:
    """Check the job's values against what its code declares."""
    recipe, files = spec.config.recipe, job.bundle.files
    entry = f"{spec.config.code_name}/{recipe.entry}"
    if Entry(recipe.entry).is_file and f"code/{entry}" not in files:
        raise RunError(f"{place}: {CODE} has no {entry}")
    if entry.endswith(".py"):
        code = sources(files)
        check_plan(
            json.loads(files[PLAN]), entry, lambda path: code.get(f"code/{path}"), f"{place}"
        )
